"""The kernel that merges adapters, in Triton's interpreter; tests/gpu/test_staging.py has it on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCALE = 0.5

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with vllm"),
]

MERGE = f"""
import sys, torch
from asyncrl.weights.merge_kernel import merge
cases = torch.load(sys.argv[1])
torch.save([merge(base, a, b, {SCALE}) for base, a, b in cases], sys.argv[2])
"""


def test_every_tile_is_the_exact_sum_rounded_once(tmp_path):
    # A tile has 64 rows and 128 columns, a product is made of 32 ranks at a time: sizes below, at and
    # above these, and modules that must not be mixed up. (The interpreter does not do bfloat16.)
    shapes = [(1, 64, 128, 32), (3, 70, 130, 16), (2, 1, 64, 1), (2, 65, 300, 70)]
    types = [torch.float16, torch.float32]
    draw = torch.Generator().manual_seed(0)
    cases = [
        tuple(
            torch.randn(modules, *shape, generator=draw).to(kind)
            for shape, kind in (((out, into), whole), ((rank, into), low), ((out, rank), low))
        )
        for modules, out, into, rank in shapes
        for whole in types
        for low in types
    ]
    given, found = tmp_path / "given.pt", tmp_path / "found.pt"
    torch.save(cases, given)
    command = [sys.executable, "-c", MERGE, str(given), str(found)]
    interpreted = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=interpreted, check=True, timeout=120)
    for (base, a, b), merged in zip(cases, torch.load(found), strict=True):
        assert merged.dtype == base.dtype
        exact = base.double() + SCALE * b.double() @ a.double()
        # Half a step of the type it is rounded to, and float32's own error in sums of up to 70 terms.
        half = exact.abs() * torch.finfo(base.dtype).eps / 2
        assert ((merged.double() - exact).abs() <= half + 1e-5).all()
        if base.dtype == torch.float16:
            assert (merged == exact.half()).double().mean() > 0.998
