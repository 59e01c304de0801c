"""A vLLM worker on a CPU whose linear layers read their parameters, as they do on a GPU.

Importing it is enough, in a process that has no layers yet: vLLM packs none then.
"""

import importlib

from asyncrl.generator.vllm_worker import FileReload

importlib.import_module("vllm._custom_ops")._supports_onednn = False


class UnpackedReload(FileReload):
    """The same mix-in."""
