"""One vLLM engine cut over two worker processes: the same log-probs, before and after adoptions."""

import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.errors import PeerLostError
from asyncrl.generator import vllm_worker
from asyncrl.generator.engines import NCCL_ENVIRONMENT, make_engine, prepare_vllm
from asyncrl.generator.vllm_worker import SHM_DIR
from asyncrl.learner.lora import attach
from tests.engines import reference_logprobs, request, run, run_side_by_side
from tests.models import make_tiny_model
from tests.unit.weight_peers import TRANSPORTS, fetch, generating, learning

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_two_workers_adopt_weights_and_sample_under_them(tmp_path, monkeypatch):
    """Offered as they come from a learner, and out of nowhere; vLLM's own all-reduce is switched off."""
    for name in NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    (tmp_path / "shm").mkdir()
    paths = [make_tiny_model(tmp_path / str(seed), seed=seed, hidden=128) for seed in range(4)]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]
    config = VllmEngineConfig(
        dtype="float32", enforce_eager=True, tensor_parallel_size=2, max_concurrent_completions=16,
        custom_all_reduce=False,
    )  # fmt: skip
    engine = make_engine(str(paths[0]), config)
    assert [os.environ[name] for name in NCCL_ENVIRONMENT] == ["0", "0"]
    found = engine._core.llm.vllm_config
    assert found.parallel_config.disable_custom_all_reduce
    assert found.compilation_config.pass_config.fuse_allreduce_rms is False
    try:
        asks = [request(i, 5 + 40 * i, num_completions=3, max_tokens=12) for i in range(3)]
        for version, model in enumerate(models):
            published = dict(model.state_dict())
            del published["lm_head.weight"]  # tied
            if version == 1:
                engine.adopt(version, published.items())
            elif version:
                transport = TRANSPORTS[version % 2]
                with (
                    learning(list(published.items()), tmp_path / "shm", transport) as learner,
                    generating(tmp_path / "shm") as subscriber,
                    monkeypatch.context() as without,
                ):
                    staged = fetch(subscriber, learner.publish(version))
                    without.setattr(vllm_worker, "SHM_DIR", tmp_path / "none")  # for no copy
                    engine.adopt(version, staged.tensors(), file=staged.file)
                    staged.release()
            completions = run(engine, [asks])
            assert len(completions) == 9
            for (request_id, _), completion in completions.items():
                expected = reference_logprobs(model, asks[request_id], completion.tokens)
                np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-3)
    finally:
        engine.close()
    assert list(SHM_DIR.glob("asyncrl-reload-*")) == []


def test_two_workers_serve_versions_as_adapters_side_by_side(tmp_path, monkeypatch):
    # Matrices that are cut by rows and by columns, and of fused ones only a part.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    path = make_tiny_model(tmp_path / "tiny", hidden=128)
    chosen = ("q_proj", "o_proj", "gate_proj", "down_proj")
    lora = LoraConfig(rank=4, alpha=12.0, target_modules=chosen)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    own = dict(attach(model, lora, seed=0, path=str(path)).named_weights())
    generator = torch.Generator().manual_seed(0)
    versions = [
        {name: torch.randn(like.shape, generator=generator) * 0.2 * v for name, like in own.items()}
        for v in range(3)
    ]
    config = VllmEngineConfig(
        dtype="float32", enforce_eager=True, tensor_parallel_size=2, max_concurrent_completions=16
    )
    engine = make_engine(str(path), config, lora=lora, max_staleness=2)
    try:
        asks = [request(i, 45, num_completions=3, max_tokens=12) for i in range(3)]
        finished = run_side_by_side(engine, versions, asks)
    finally:
        engine.close()
    assert len(finished) == 9
    for completion in finished:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(versions[completion.request_id][name])
        expected = reference_logprobs(model, asks[completion.request_id], completion.tokens)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-5)
        assert {span.version for span in completion.version_spans} == {completion.request_id}
    assert list(SHM_DIR.glob("asyncrl-reload-*")) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_workers_stage_versions_beside_the_decode(tmp_path, monkeypatch, transport):
    """On a GPU linear layers read their parameters; only then a version can be copied into them."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    (tmp_path / "shm").mkdir()
    paths = [make_tiny_model(tmp_path / str(seed), seed=seed, hidden=128) for seed in range(4)]
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]
    config = VllmEngineConfig(
        dtype="float32", enforce_eager=True, tensor_parallel_size=2, max_concurrent_completions=16
    )
    prepare_vllm()
    engine = importlib.import_module("asyncrl.generator.vllm_engine").VllmEngine(
        str(paths[0]),
        config,
        more_arguments={"worker_extension_cls": "tests.process.unpacked_worker.UnpackedReload"},
    )
    own = [(n, v.clone()) for n, v in models[0].state_dict().items() if n != "lm_head.weight"]
    try:
        with (
            learning(own, tmp_path / "shm", transport) as learner,
            generating(tmp_path / "shm", staging=engine.staging()) as subscriber,
        ):
            for version, model in enumerate(models):
                if version:
                    for name, values in own:
                        values.copy_(model.state_dict()[name])
                    staged = fetch(subscriber, learner.publish(version))
                    # The first is adopted from its file; how the copies go is known from it.
                    assert (staged.file is None) == (version > 1)
                    engine.adopt(version, staged.tensors(), file=staged.file)
                    staged.release()
                ask = request(version, 45, num_completions=3, max_tokens=12)
                for completion in run(engine, [[ask]]).values():
                    expected = reference_logprobs(model, ask, completion.tokens)
                    np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=1e-3)
    finally:
        engine.close()
    assert not list(Path("/tmp").glob("asyncrl-shards-*"))


@pytest.mark.parametrize("during", ["decode", "adopt", "open", "stage"])
def test_a_killed_worker_is_named_and_nobody_waits_for_it(tmp_path, during):
    path = make_tiny_model(tmp_path / "tiny", hidden=128)
    command = [sys.executable, "-m", "tests.process.test_vllm_parallel", str(path), during]
    environment = os.environ | {"VLLM_CPU_CI_ENV": "1"}
    finished = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=150, check=False
    )
    assert finished.returncode == 0
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["message"].startswith(
        f"a worker process of the engine has died: VllmWorker-1 (pid {found['pid']}, "
    )
    if during != "stage":  # there vLLM's own thread may have taken the exit code
        assert "killed by SIGKILL)" in found["message"]
    assert found["alive"] == []
    assert found["folders"] == []


def kill_a_worker(path: str, during: str) -> None:
    """In a process of its own, because it must be left without the interpreter's own exit."""
    config = VllmEngineConfig(dtype="float32", enforce_eager=True, tensor_parallel_size=2)
    engine = make_engine(path, config)
    engine.submit(request(0, num_completions=2, max_tokens=400))
    for _ in range(3):
        engine.step()
    first, second = sorted(multiprocessing.active_children(), key=lambda process: process.name)
    state = dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
    del state["lm_head.weight"]  # tied
    message = ""
    try:
        if during == "stage":
            kill_while_it_stages(
                second.pid, engine.staging(), list(state.items()), Path(path).parent
            )
        os.kill(second.pid, signal.SIGKILL)
        if during == "open":
            engine.staging()
        elif during == "adopt":
            engine.adopt(1, state.items())
        while engine.num_unfinished:
            engine.step()
    except PeerLostError as error:
        message = str(error)
    engine.close()
    engine.close()
    first.join(30)
    alive = [process.name for process in (first, second) if process.is_alive()]
    folders = [str(found) for found in Path("/tmp").glob("asyncrl-shards-*")]
    found = {"message": message, "pid": second.pid, "alive": alive, "folders": folders}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


def kill_while_it_stages(pid, staging, own, shm) -> None:
    """Stopped, it has been asked and does not answer."""
    os.kill(pid, signal.SIGSTOP)
    with learning(own, shm, "shm") as learner, generating(shm, staging=staging) as subscriber:
        subscriber.start(learner.publish(1))
        while not staging.number:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        subscriber.wait(60)


if __name__ == "__main__":
    kill_a_worker(*sys.argv[1:])
