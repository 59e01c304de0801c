"""Snapshots: what they hold, and that nothing changes them."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, distribute_tensor

from asyncrl.errors import ConfigError, NoProgressError, WeightMismatchError
from asyncrl.weights.buffers import (
    MAX_BUFFERS,
    HostBuffer,
    HostBuffers,
    ShmBuffer,
    choose_transport,
    remove_leftovers,
)
from asyncrl.weights.manifest import tensor_views
from asyncrl.weights.snapshot import Snapshot, Snapshotter, named_weights, snapshot_bytes


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def values(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    views = tensor_views(memoryview(snapshot.buffer.mapping), snapshot.tensors)
    return {name: view.clone() for name, view in views}


def take(
    tensors: list[tuple[str, torch.Tensor]], dtype: str | None = None
) -> dict[str, torch.Tensor]:
    snapshotter = Snapshotter(tensors, dtype=dtype, buffers=HostBuffers(HostBuffer))
    snapshot = snapshotter.take(0)
    assert snapshot is not None
    assert snapshot.buffer.num_bytes == snapshot_bytes(tensors, dtype=dtype)
    return values(snapshot)


def test_tied_parameters_come_once_and_only_persistent_buffers_come():
    # The first of two tied names in the order of the state dict; BatchNorm1d has two parameters
    # and three buffers, all persistent; "scratch" is not.
    assert list(take(named_weights(TiedModel()))) == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_ties_are_found_in_a_detached_state_dict_too():
    assert "head.weight" not in take(list(TiedModel().state_dict().items()))


def test_two_views_of_one_storage_are_not_ties():
    whole = torch.arange(6.0)
    assert list(take([("first", whole[:3]), ("second", whole[3:])])) == ["first", "second"]


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_floating_point_is_cast_and_everything_else_kept(dtype):
    tensors = [
        ("float", torch.tensor([1.0 + 2**-9, -0.0, float("nan"), 3e38])),
        ("half", torch.tensor([65504.0, 6e-8]).half()),
        ("count", torch.tensor(2**53 + 1)),
        ("mask", torch.tensor([True, False])),
        ("empty", torch.empty(0, 3)),
        ("transposed", torch.arange(6.0).reshape(2, 3).T),
    ]
    got = take(tensors, dtype)
    for name, tensor in tensors:
        is_cast = dtype is not None and tensor.dtype.is_floating_point
        expected = tensor.to(getattr(torch, dtype)) if is_cast else tensor
        assert got[name].dtype == expected.dtype
        assert torch.equal(got[name].isnan(), expected.isnan()), name
        assert torch.equal(got[name].nan_to_num(), expected.nan_to_num()), name


def test_a_snapshot_outlives_changes_of_the_source_and_later_snapshots():
    weight = torch.zeros(1000)
    buffers = HostBuffers(HostBuffer)
    snapshotter = Snapshotter([("weight", weight)], dtype=None, buffers=buffers)
    held = []
    for version in range(MAX_BUFFERS):
        weight.fill_(version)
        held.append(snapshotter.take(version))
    weight.fill_(99)
    for version, snapshot in enumerate(held):
        assert values(snapshot)["weight"].unique().tolist() == [version]
    with pytest.raises(NoProgressError, match="in use"):
        buffers.acquire(4096, timeout_s=0.01)
    buffers.give_back(held[1].buffer)
    assert snapshotter.take(3).buffer is held[1].buffer
    assert values(held[0])["weight"].unique().tolist() == [0]
    assert values(held[2])["weight"].unique().tolist() == [2]


def test_a_rank_without_buffers_keeps_nothing():
    assert Snapshotter([("weight", torch.ones(2))], dtype=None, buffers=None).take(0) is None


def test_a_dtype_that_cannot_travel_is_refused_by_name():
    with pytest.raises(WeightMismatchError, match="phase"):
        Snapshotter([("phase", torch.ones(2, dtype=torch.complex64))], dtype=None, buffers=None)


def test_a_sharded_parameter_is_published_whole():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Shard

        whole = torch.arange(10.0).reshape(5, 2)
        sharded = distribute_tensor(whole, DeviceMesh("cpu", [0]), [Shard(0)])
        got = take([("weight", sharded), ("tied", sharded)], "bfloat16")
    finally:
        dist.destroy_process_group()
    assert list(got) == ["weight"]
    assert torch.equal(got["weight"], whole.bfloat16())


def test_a_shared_file_is_private_to_the_user_and_never_replaces_another(tmp_path: Path):
    path = tmp_path / "asyncrl-run-1-1.free"
    ShmBuffer(path, 4096)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        ShmBuffer(path, 4096)
    target = tmp_path / "asyncrl-run-1-2"
    target.write_bytes(b"another run's")
    with pytest.raises(FileExistsError):
        ShmBuffer(tmp_path / "asyncrl-run-1-3.free", 4096).serve(target, b"manifest")
    assert target.read_bytes() == b"another run's"


def test_a_full_directory_is_an_error_and_leaves_no_file(tmp_path: Path):
    # Larger than a file can be on ext4, tmpfs and overlayfs here: posix_fallocate refuses.
    with pytest.raises(OSError, match=r"."):
        ShmBuffer(tmp_path / "asyncrl-run-1-1.free", 2**62)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_one_run_are_removed_and_nothing_else(tmp_path: Path):
    ours = ["asyncrl-a-0-1", "asyncrl-a-0-1.manifest", "asyncrl-a-12-3.free"]
    others = [
        "asyncrl-a-1-0-1",  # run "a-1"
        "asyncrl-ab-0-1",
        "asyncrl-a-0-1.txt",
        "asyncrl-a-x-1",
        "a-0-1",
    ]
    for name in ours + others:
        (tmp_path / name).touch()
    (tmp_path / "asyncrl-a-7-7").symlink_to(tmp_path / "asyncrl-ab-0-1")
    assert sorted(remove_leftovers("a", shm_dir=tmp_path)) == sorted(ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "asyncrl-a-7-7"])


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "a b", "a\n", "a" * 65, "*"])
def test_a_run_id_that_could_name_other_files_is_refused(run_id, tmp_path):
    with pytest.raises(ConfigError, match="run id"):
        remove_leftovers(run_id, shm_dir=tmp_path)


def test_shared_memory_is_chosen_only_where_it_works(tmp_path: Path):
    room = os.statvfs(tmp_path)
    too_big = room.f_bavail * room.f_frsize // MAX_BUFFERS * 2
    for setting, is_local, size, directory, expected in [
        ("tcp", True, 1, tmp_path, "tcp"),
        ("auto", True, 1, tmp_path, "shm"),
        ("auto", False, 1, tmp_path, "tcp"),
        ("auto", True, too_big, tmp_path, "tcp"),
        ("auto", True, 1, tmp_path / "missing", "tcp"),
        ("shm", True, 1, tmp_path, "shm"),
    ]:
        facts = {"is_local": is_local, "snapshot_bytes": size, "shm_dir": directory}
        assert choose_transport(setting, **facts) == expected, (setting, facts)
        if setting == "auto" and expected == "tcp":
            with pytest.raises(ConfigError, match=r"weights\.transport"):
                choose_transport("shm", **facts)
