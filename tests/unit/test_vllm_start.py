"""Starts of the vLLM engine that must fail, really tried: each names its cause and the key to change."""

import importlib
import importlib.util
import json
import shutil

import pytest
import torch

from asyncrl.config import VllmEngineConfig
from asyncrl.errors import ConfigError, DeviceError
from asyncrl.generator.engines import make_engine
from asyncrl.generator.memory import divide
from asyncrl.generator.model_facts import describe_model
from asyncrl.generator.vllm_failures import is_device_fault, start_failure
from tests.models import make_tiny_model

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vllm is not installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=128)


def start(path, **options):
    settings = {
        "dtype": "float32", "enforce_eager": True, "max_concurrent_completions": 8,
        "max_prompt_tokens": 100, "max_completion_tokens": 20,
    }  # fmt: skip
    return make_engine(str(path), VllmEngineConfig(**(settings | options)))


def with_config(tiny, folder, **changes):
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_without_vllm_the_command_that_installs_it_is_named(tiny):
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[vllm\]'"):
        start(tiny)


@needs_vllm
@pytest.mark.vllm
def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path='.*absent' cannot be loaded"):
        start(tmp_path / "absent")


@needs_vllm
@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can")
def test_what_only_a_gpu_can_is_refused_on_a_cpu(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"engine.quantization='fp8': vLLM has it on GPUs only"):
        start(tiny, quantization="fp8")
    narrow = make_tiny_model(tmp_path / "narrow", hidden=64)  # four heads
    with pytest.raises(ConfigError, match=r"heads of 16 values; .* 32, 64,.*engine.kind='hf'"):
        start(narrow)


@needs_vllm
@pytest.mark.vllm
def test_missing_weights_are_named(tiny, tmp_path):
    path = shutil.copytree(tiny, tmp_path / "empty")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"any model weights .*check the files in model.path"):
        start(path)


@needs_vllm
@pytest.mark.vllm
def test_an_architecture_that_vllm_lacks_is_named(tiny, tmp_path):
    path = with_config(tiny, tmp_path / "odd", architectures=["OddForCausalLM"])
    with pytest.raises(
        ConfigError, match=r"OddForCausalLM.* \.\.\. .*set engine.kind='hf'"
    ) as caught:
        start(path)
    assert len(str(caught.value)) < 700


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, r"\(4\) must be divisible .*engine.tensor_parallel_size"),
        (
            {"max_concurrent_completions": 5000},
            r"max_num_seqs \(5001\).*lower engine.max_concurrent_completions",
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_named(tiny, options, message):
    with pytest.raises(ConfigError, match=message):
        start(tiny, **options)


@needs_vllm
@pytest.mark.vllm
def test_too_little_memory_is_named(tiny):
    vllm_engine = importlib.import_module("asyncrl.generator.vllm_engine")
    config = VllmEngineConfig(dtype="float32", enforce_eager=True, max_concurrent_completions=8)
    with pytest.raises(ConfigError, match=r"(?i)cache.*change engine.gpu_memory_utilization"):
        vllm_engine.VllmEngine(str(tiny), config, more_arguments={"kv_cache_memory_bytes": 1000})


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "0.1.dev3", ""])
def test_a_version_whose_interfaces_were_not_read_is_refused(version):
    compat = importlib.import_module("asyncrl.generator.vllm_compat")
    with pytest.raises(ConfigError, match=r"vllm 0\.26 to 0\.33, but .*installed; run: pip"):
        compat.check_version(version)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.2"])
def test_a_version_in_the_range_is_taken(version):
    importlib.import_module("asyncrl.generator.vllm_compat").check_version(version)


@needs_vllm
@pytest.mark.vllm
def test_one_of_several_engines_is_told_its_part_of_the_gpu_before_vllm_looks_at_it(tiny):
    arguments = importlib.import_module("asyncrl.generator.vllm_arguments")
    model = describe_model(str(tiny))
    config = VllmEngineConfig(engines_per_gpu=4, gpu_memory_utilization=0.8)
    total_bytes = 80 * 2**30
    found = arguments.shared_gpu_arguments(config, model, torch.bfloat16, total_bytes=total_bytes)
    split = divide(config, model, torch.bfloat16, total_bytes=total_bytes)
    assert found == {
        "gpu_memory_utilization": pytest.approx(0.2),  # 0.8 of it among 4
        "kv_cache_memory_bytes": split.cache,
    }
    with pytest.raises(ConfigError, match=r"engines_per_gpu=4: each engine has 0\.20 GiB"):
        arguments.shared_gpu_arguments(config, model, torch.bfloat16, total_bytes=2**30)


@needs_vllm
@pytest.mark.vllm
def test_a_kernel_that_fails_at_the_start_is_no_matter_of_settings(tiny, monkeypatch):
    compat = importlib.import_module("asyncrl.generator.vllm_compat")

    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for ...")

    monkeypatch.setattr(compat.LLMEngine, "from_engine_args", fail)
    with pytest.raises(DeviceError, match=r"illegal memory access .*need not happen again"):
        start(tiny)
    disturbed = AssertionError(
        "Error in memory profiling. Initial free memory 72.88 GiB, current ..."
    )
    assert is_device_fault(disturbed)
    assert "one after another" in str(start_failure("model", disturbed))
    recovering = "Error 807: MPS server is not ready to accept new MPS client requests"
    assert is_device_fault(
        RuntimeError(f"Unexpected error from cudaGetDeviceCount(). {recovering}")
    )
    triton = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert "enforce_eager=true" in str(start_failure("model", triton))
    assert "custom_all_reduce=false" in str(start_failure("model", triton, num_gpus=2))
    for lasting in ("out of memory", "no kernel image is available", "invalid device ordinal"):
        assert not is_device_fault(RuntimeError(f"CUDA error: {lasting}"))


def test_what_a_gpu_says_of_a_quantization_is_given_its_key():
    said = ValueError("torch.float32 is not supported for quantization method fp8_per_tensor.")
    error = start_failure("model", said)
    assert str(error).endswith("(change engine.quantization or engine.dtype)")
