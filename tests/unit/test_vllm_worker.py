"""The file that weights take to the workers of one vLLM engine."""

import pytest
import torch

from asyncrl.generator import vllm_worker
from asyncrl.generator.vllm_worker import FileReload, as_arguments, shared_file

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.tensor(7.5),
    "c": torch.empty(0, 4),
    "d": torch.arange(12).reshape(3, 4).T,  # not contiguous
}


class Worker(FileReload):
    """What vLLM's worker does with the iterator, but for the model."""

    def get_model(self):
        return torch.nn.Module()

    def reload_weights(self, *, weights_iterator):
        self.loaded = {name: values.clone() for name, values in weights_iterator}


def test_workers_read_what_was_written_and_the_file_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_worker, "SHM_DIR", tmp_path)
    workers = [Worker(), Worker()]
    with shared_file(TENSORS) as file:
        for worker in workers:
            worker.load_from_file(*as_arguments(file), False)
    assert list(tmp_path.iterdir()) == []
    for worker in workers:
        assert list(worker.loaded) == list(TENSORS)
        for name, values in TENSORS.items():
            assert worker.loaded[name].dtype == values.dtype
            assert torch.equal(worker.loaded[name], values)


def test_the_file_is_gone_after_an_error_too(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_worker, "SHM_DIR", tmp_path)
    seen = []

    def fail():
        with shared_file(TENSORS) as file:
            seen.append(file.path)
            raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError, match="a worker died"):
        fail()
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []
