"""The learner's ranks and the few things they tell each other.

With one rank nothing is sent and no process group exists. With several (under torchrun: RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT) small facts travel as CPU tensors over gloo, and FSDP's
tensors over NCCL on GPUs. Every collective has the deadline given at the start; a breach, or a rank
that died, raises PeerLostError.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.errors import PeerLostError


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which learner process this is, of how many. Collectives must be entered by every rank."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    """None with one rank."""

    @classmethod
    def join(cls, *, rank: int, world: int, device_type: str, timeout_s: float) -> Self:
        """Meet the other ranks; returns at once when `world` is 1.

        Args:
            rank: 0 .. world - 1 (environment RANK).
            world: number of ranks (environment WORLD_SIZE).
            device_type: "cpu" or "cuda".
            timeout_s: deadline of every collective; more than the longest time that rank 0 waits
                for a batch while the others wait for rank 0.

        Raises:
            PeerLostError: not all ranks came in time.
        """
        if world == 1:
            return cls()
        backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
        with _deadline("join"):
            dist.init_process_group(
                backend, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
            mesh = init_device_mesh(device_type, (world,))
        return cls(rank, world, mesh)

    def all_reduce_sums(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Add scalars over all ranks, in float64; every rank passes the same names."""
        return self._scalars(sums, dist.ReduceOp.SUM)

    def all_reduce_tables(self, tables: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
        """Add tensors of any shape over all ranks, in float64; every rank passes the same."""
        names = sorted(tables)
        flat = self._reduce({n: tables[n].detach().double().flatten() for n in names})
        return {n: flat[n].numpy().reshape(tables[n].shape) for n in names}

    def all_reduce_maxima(self, maxima: Mapping[str, Tensor]) -> dict[str, float]:
        """Largest of each scalar over all ranks."""
        return self._scalars(maxima, dist.ReduceOp.MAX)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""
        if self.world == 1:
            return _present(data)
        with _deadline("broadcast"):
            size = torch.tensor([len(_present(data)) if self.rank == 0 else 0])
            dist.broadcast(size, src=0)
            buffer = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == 0:
                buffer = torch.frombuffer(bytearray(_present(data)), dtype=torch.uint8)
            dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world > 1:
            self.all_reduce_sums({"barrier": torch.zeros(())})

    def leave(self) -> None:
        """Give up the process group."""
        if self.world > 1:
            dist.destroy_process_group()

    def _scalars(
        self, values: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType
    ) -> dict[str, float]:
        parts = self._reduce({name: value[None] for name, value in values.items()}, op)
        return {name: float(part) for name, part in parts.items()}

    def _reduce(
        self,
        parts: Mapping[str, Tensor],
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> dict[str, Tensor]:
        """Vectors, packed: one transfer from the device and one collective for all of them."""
        if not parts:
            return {}
        names = sorted(parts)
        packed = torch.cat([parts[name].detach().double() for name in names]).cpu()
        if self.world > 1:
            with _deadline("all-reduce"):
                dist.all_reduce(packed, op=op)
        sizes = [len(parts[name]) for name in names]
        return dict(zip(names, packed.split(sizes), strict=True))


def _present(data: bytes | None) -> bytes:
    if data is None:
        raise ValueError("rank 0 must pass the bytes to broadcast, got None")
    return data


@contextmanager
def _deadline(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"{what} among the learner's ranks failed; a rank died or missed the deadline: {error}"
        ) from error
