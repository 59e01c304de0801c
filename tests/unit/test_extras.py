"""Packages of an extra that are not installed are named with the command that installs them."""

import importlib.util

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extras import check_peft, check_vllm


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", {"json": 1}.get)
    with pytest.raises(ConfigError, match=r"engine\.kind='vllm'.*pip install 'asyncrl\[vllm\]'"):
        check_vllm()
    with pytest.raises(ConfigError, match=r"lora\.rank=8.*pip install 'asyncrl\[lora\]'"):
        check_peft(8)
