"""The copies by which a loader brings tensors to where they belong, recorded once and repeated.

A loader (a model's `load_weights`, an adapter's way to its slot) finds out anew for every tensor where
it belongs: 250 tensors take it 10 ms of Python and more. All that is left in the end are copies `part of
a parameter <- part of a tensor`. `record_copies` notes them while the loader runs; a `CopyPlan` starts
all of them with one call.

A plan knows copies from offered tensors only. What else a loader does (fills, computes) is not in it:
whoever carries a plan out must know that it leaves the right values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Part:
    """A strided part of an offered tensor."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the tensor's first."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part's view of another tensor of the same layout; all of it is the tensor itself."""
        if not self.offset and (tensor.shape, tensor.stride()) == (self.size, self.stride):
            return tensor  # nearly always so, and a view takes five times as long
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class CopyPlan:
    """Copies from parts of offered tensors into a model's memory."""

    def __init__(
        self, copies: list[tuple[torch.Tensor, Part]], layouts: dict[str, tuple[object, ...]]
    ) -> None:
        """`copies` in their order; `layouts` are `layout_of` the tensors that they were recorded with."""
        self.targets = [target for target, _ in copies]
        """Parts of the model's memory."""

        self.parts = [part for _, part in copies]
        """What is copied to each."""

        self._layouts = layouts

    def sources(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The parts of `tensors`, as views.

        Raises:
            ValueError: a tensor is missing, or does not lie in memory as the recorded one did.
        """
        for name, layout in self._layouts.items():
            if name not in tensors or layout_of(tensors[name]) != layout:
                raise ValueError(f"tensor {name!r} is missing or has another layout than {layout}")
        return [part.of(tensors[part.name]) for part in self.parts]

    @torch.no_grad()
    def carry_out(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy from `tensors`.

        Raises:
            ValueError: see `sources`.
        """
        self.carry_out_from(self.sources(tensors))

    @torch.no_grad()
    def carry_out_from(self, sources: list[torch.Tensor]) -> None:
        """Copy from one tensor for each of `parts`, wherever it lies."""
        torch._foreach_copy_(self.targets, sources, non_blocking=True)

    @torch.no_grad()
    def carry_out_one(self, name: str, tensor: torch.Tensor) -> None:
        """Make the copies from one tensor only; slower than all at once."""
        for target, part in zip(self.targets, self.parts, strict=True):
            if part.name == name:
                target.copy_(part.of(tensor))


def layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What must not change between recording and carrying out."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def record_copies(tensors: Mapping[str, torch.Tensor], load: Callable[[], object]) -> CopyPlan:
    """Call `load`, which loads `tensors`, and note its copies.

    Raises:
        ValueError: it copied from memory that is not an offered tensor's.
        Exception: whatever `load` raises.
    """
    recorder = _Recorder(tensors)
    with recorder:
        load()
    return CopyPlan(recorder.copies, {name: layout_of(t) for name, t in tensors.items()})


class _Recorder(TorchDispatchMode):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self.copies: list[tuple[torch.Tensor, Part]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            part = self._locate(source)
            self.copies.append((target.detach(), part))
        return func(*args, **(kwargs or {}))

    def _locate(self, source: torch.Tensor) -> Part:
        address = source.data_ptr()
        for name, tensor in self._tensors.items():
            start = tensor.data_ptr()
            if source.device == tensor.device and start <= address < start + tensor.nbytes:
                if source.dtype != tensor.dtype:
                    raise ValueError(f"{name} was copied as {source.dtype}, not as {tensor.dtype}")
                offset = (address - start) // source.element_size()
                return Part(name, tuple(source.shape), source.stride(), offset)
        raise ValueError(f"a copy of {list(source.shape)} came from no offered tensor")
