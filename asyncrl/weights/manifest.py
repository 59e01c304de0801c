"""What one published version consists of: names, types, shapes, places and digests.

Invariant: a `Manifest` that exists is consistent. Tensors lie in order, each at the next multiple
of ALIGNMENT after the one before; sizes follow from shapes; there is one digest a chunk. So a
reader may allocate `total_bytes` and map views without any further check; a lying manifest never
becomes one.

    offset_0 = 0,   offset_(i+1) = ceil64(offset_i + num_bytes_i),   total = max(64, offset_n)
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self

import msgpack
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.digests import Buffer, DigestKind, digest_chunks

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every item size."""

MAX_CHUNK_BYTES = 64 * 2**20
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_PROBE_TOKENS = 4096

DtypeName = Literal[
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    dtype: name  # type: ignore[misc]  # the keys of DTYPES are exactly DtypeName
    for name, dtype in DTYPES.items()
}

Size = Annotated[int, Field(ge=0, lt=2**48)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorSpec(_Closed):
    """One tensor's place in the snapshot."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    """Its name in the learner's state dict."""

    dtype: DtypeName
    shape: Annotated[tuple[Size, ...], Field(strict=False, max_length=16)]
    offset: Size
    num_bytes: Size


Logprob = Annotated[float, Field(allow_inf_nan=False)]


class Probe(_Closed):
    """A fixed sequence of tokens and the learner's log-probs of it, to compare engines with."""

    tokens: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
        Field(strict=False, min_length=2, max_length=MAX_PROBE_TOKENS),
    ]
    first_logprobs: Annotated[tuple[Logprob, ...], Field(strict=False)]
    """Of tokens 1 .. T - 1, each given those before it, under the weights of model.path; nats."""

    logprobs: Annotated[tuple[Logprob, ...], Field(strict=False)] | None = None
    """The same under the manifest's version; None where it was not computed."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for name, values in (("first_logprobs", self.first_logprobs), ("logprobs", self.logprobs)):
            if values is not None and len(values) != len(self.tokens) - 1:
                raise ValueError(f"{len(values)} {name} for {len(self.tokens)} tokens")
        return self


class Manifest(_Closed):
    """Everything a reader must know of (run, epoch, version) before it takes a byte."""

    run_id: str
    epoch: Size
    version: Size
    tensors: Annotated[tuple[TensorSpec, ...], Field(strict=False, min_length=1)]
    total_bytes: Size
    chunk_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    digest_kind: DigestKind
    chunk_digests: Annotated[
        tuple[Annotated[bytes, Field(min_length=32, max_length=32)], ...], Field(strict=False)
    ]
    """`digest` of every chunk_bytes of the snapshot; the last chunk may be shorter."""

    probe: Probe | None = None

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor name occurs twice")
        end = 0
        for spec in self.tensors:
            num_bytes = _size(spec.dtype, spec.shape)
            if (spec.num_bytes, spec.offset) != (num_bytes, end):
                raise ValueError(
                    f"{spec.name} {spec.dtype}{list(spec.shape)} claims {spec.num_bytes} bytes at "
                    f"{spec.offset}, its shape and place give {num_bytes} at {end}"
                )
            end = _align(end + num_bytes)
        total_bytes = max(ALIGNMENT, end)
        if self.total_bytes != total_bytes:
            raise ValueError(f"total_bytes is {self.total_bytes}, the tensors take {total_bytes}")
        if len(self.chunk_digests) != self.num_chunks:
            raise ValueError(f"{len(self.chunk_digests)} digests for {self.num_chunks} chunks")
        return self

    @property
    def num_chunks(self) -> int:
        """Chunks that hold total_bytes."""
        return -(-self.total_bytes // self.chunk_bytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First byte of chunk `index` and the byte after its last."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.total_bytes)

    def corruption(self, chunk: int, where: str) -> str:
        """What is said of a chunk in `where` that does not have its digest."""
        return (
            f"version {self.version}: chunk {chunk} of {self.num_chunks} in {where} does not have the "
            "digest that its manifest gives"
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes: MessagePack, fields in the order of declaration."""
        return msgpack.packb(self.model_dump())

    @staticmethod
    def from_bytes(data: Buffer, *, expected_digest: str, max_total_bytes: int) -> "Manifest":
        """Read a manifest that came from elsewhere; nothing of the claimed size is allocated.

        Raises:
            WeightMismatchError: longer than MAX_MANIFEST_BYTES, not the announced digest, not a
                consistent manifest, or claiming more than `max_total_bytes`.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise WeightMismatchError(
                f"manifest of {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are read"
            )
        if manifest_digest(data) != expected_digest:
            raise WeightMismatchError(
                f"manifest digest is {manifest_digest(data)}, announced was {expected_digest}"
            )
        try:
            manifest = Manifest.model_validate(msgpack.unpackb(data))
        except (ValidationError, msgpack.UnpackException, ValueError) as error:
            raise WeightMismatchError(f"the manifest is not consistent: {error}") from error
        if manifest.total_bytes > max_total_bytes:
            raise WeightMismatchError(
                f"the manifest claims {manifest.total_bytes} bytes, "
                f"this generator takes at most {max_total_bytes}"
            )
        return manifest


def manifest_digest(data: Buffer) -> str:
    """SHA-256 over a manifest's bytes, in hex: what an Announcement carries."""
    return hashlib.sha256(data).hexdigest()


def lay_out(
    entries: Iterable[tuple[str, DtypeName, tuple[int, ...]]],
) -> tuple[tuple[TensorSpec, ...], int]:
    """Place (name, dtype, shape) one after the other; the specs, and the bytes of the whole."""
    specs = []
    offset = 0
    for name, dtype, shape in entries:
        num_bytes = _size(dtype, shape)
        specs.append(
            TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=num_bytes)
        )
        offset = _align(offset + num_bytes)
    return tuple(specs), max(ALIGNMENT, offset)


def _size(dtype: DtypeName, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def _align(end: int) -> int:
    """Where the next tensor begins."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def tensor_views(
    buffer: Buffer, tensors: Iterable[TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as a view of `buffer`, no byte copied; a view keeps the buffer's memory alive.

    Raises:
        WeightMismatchError: a tensor reaches past the end of the buffer.
    """
    size = memoryview(buffer).nbytes
    for spec in tensors:
        if spec.offset + spec.num_bytes > size:
            raise WeightMismatchError(
                f"{spec.name} ends at byte {spec.offset + spec.num_bytes}, the buffer has {size}"
            )
        dtype = DTYPES[spec.dtype]
        if spec.num_bytes == 0:
            yield spec.name, torch.empty(spec.shape, dtype=dtype)
            continue
        count = spec.num_bytes // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=spec.offset)
        yield spec.name, flat.view(spec.shape)


def find_corrupt_chunk(buffer: memoryview, manifest: Manifest) -> int | None:
    """Index of the first chunk whose digest is not the manifest's; None if all are right."""
    whole = buffer[: manifest.total_bytes]
    return first_difference(
        digest_chunks(whole, manifest.chunk_bytes, manifest.digest_kind), manifest
    )


def first_difference(found: Iterable[bytes], manifest: Manifest) -> int | None:
    """Index of the first digest in `found`, one for each chunk, that is not the manifest's."""
    for index, (got, expected) in enumerate(zip(found, manifest.chunk_digests, strict=True)):
        if got != expected:
            return index
    return None
