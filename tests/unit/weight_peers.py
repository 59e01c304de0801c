"""Both ends of the weight path for its tests: friends, and a publisher that follows a script."""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import torch

from asyncrl.weights.manifest import DTYPES, manifest_digest
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshotter
from asyncrl.weights.subscriber import StagedWeights, Subscriber
from asyncrl.wire import messages
from asyncrl.wire.channel import Envelope, Listener

TRANSPORTS = ["shm", "tcp"]
WAIT_S = 20.0

Tensors = list[tuple[str, torch.Tensor]]


class Learner:
    """A publisher with its snapshotter, and the announcements it made."""

    def __init__(self, tensors: Tensors, shm_dir: Path, transport: str, **options) -> None:
        self._announced: queue.SimpleQueue[messages.Announcement] = queue.SimpleQueue()
        options = {"run_id": "run", "epoch": 1, "chunk_bytes": 1000} | options
        self.publisher = Publisher(
            transport=transport, shm_dir=shm_dir, on_published=self._announced.put, **options
        )
        buffers = self.publisher.buffers
        self._snapshotter = Snapshotter(tensors, dtype=None, buffers=buffers)

    def publish(self, version: int, **options) -> messages.Announcement:
        self.publish_only(version, **options)
        return self.announcement()

    def publish_only(self, version: int, **options) -> None:
        snapshot = self._snapshotter.take(version)
        assert snapshot is not None
        self.publisher.publish(snapshot, **options)

    def announcement(self) -> messages.Announcement:
        return self._announced.get(timeout=WAIT_S)


@contextmanager
def learning(tensors: Tensors, shm_dir: Path, transport: str, **options) -> Iterator[Learner]:
    learner = Learner(tensors, shm_dir, transport, **options)
    try:
        yield learner
    finally:
        learner.publisher.close()


@contextmanager
def generating(shm_dir: Path, **options) -> Iterator[Subscriber]:
    options = {"run_id": "run", "timeout_s": WAIT_S} | options
    subscriber = Subscriber(shm_dir=shm_dir, **options)
    try:
        yield subscriber
    finally:
        subscriber.close()


def fetch(subscriber: Subscriber, announcement: messages.Announcement) -> StagedWeights:
    subscriber.start(announcement)
    staged = subscriber.wait(WAIT_S)
    assert staged is not None
    assert (staged.epoch, staged.version) == (announcement.epoch, announcement.version)
    return staged


def fill(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """A pattern in which each version and each element differ (mod 2^24)."""
    return tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000.0 * version)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy()) if tensor.numel() else b""


def odd_tensors(seed: int) -> Tensors:
    """Every dtype in every odd shape, random bits (NaNs, denormals and infinities among them)."""
    draw = torch.Generator().manual_seed(seed)
    tensors = []
    for name, dtype in DTYPES.items():
        for shape in [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5), (1, 129), (311,)]:
            count = torch.Size(shape).numel()
            high = 2 if dtype == torch.bool else 256
            raw = torch.randint(high, (count * dtype.itemsize,), dtype=torch.uint8, generator=draw)
            tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
            tensors.append((f"{name}.{shape}", tensor))
    return tensors


def make_manifest(**changes) -> dict[str, object]:
    """Fields of a right manifest of 200 bytes (two tensors) in two chunks, and `changes`."""
    tensors = [
        {"name": "a", "dtype": "float32", "shape": [2, 3], "offset": 0, "num_bytes": 24},
        {"name": "b", "dtype": "bool", "shape": [100], "offset": 64, "num_bytes": 100},
    ]
    fields = {
        "run_id": "run",
        "epoch": 1,
        "version": 0,
        "tensors": tensors,
        "total_bytes": 192,  # 64 + ceil64(100)
        "chunk_bytes": 100,
        "digest_kind": "sha256",
        "chunk_digests": [hashlib.sha256(bytes(100)).digest(), hashlib.sha256(bytes(92)).digest()],
        "probe": None,
    }
    return fields | changes


def make_probe(**changes) -> dict[str, object]:
    """Fields of a right probe of three tokens, and `changes`."""
    return {"tokens": [5, 6, 7], "first_logprobs": [-1.0, -2.0], "logprobs": None} | changes


def huge_manifest() -> dict[str, object]:
    """Consistent, 1 TiB, in the fewest chunks that are allowed: 2^40 / 2^26 = 16,384."""
    tensor = {"name": "a", "dtype": "uint8", "shape": [2**40], "offset": 0, "num_bytes": 2**40}
    return make_manifest(
        tensors=[tensor],
        total_bytes=2**40,
        chunk_bytes=2**26,
        chunk_digests=[bytes(32)] * 2**14,
    )


Answer = tuple[messages.Message, list[bytes]]


@contextmanager
def scripted(script: Callable[[Envelope], list[Answer]]) -> Iterator[str]:
    """A Listener that answers each request with what `script` returns; yields its endpoint."""
    endpoints: queue.SimpleQueue[str] = queue.SimpleQueue()
    over = threading.Event()

    def serve() -> None:
        listener = Listener("tcp://127.0.0.1:*", max_message_bytes=2**20)
        endpoints.put(listener.endpoint)
        while not over.is_set():
            asked = listener.receive(0.05)
            if isinstance(asked, Envelope):
                for message, frames in script(asked):
                    listener.send(asked.sender, message, frames)
        listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield endpoints.get(timeout=WAIT_S)
    finally:
        over.set()
        thread.join()


class Script:
    """Serves 350 bytes in 4 chunks of 100 honestly, except where a test overrides `chunk`."""

    payload = bytes(range(256)) + bytes(94) + bytes(34)  # 350 and padding: 384

    def __init__(self, version: int = 0, **changes) -> None:
        chunks = [self.payload[at : at + 100] for at in range(0, 384, 100)]
        tensor = {"name": "a", "dtype": "uint8", "shape": [350], "offset": 0, "num_bytes": 350}
        fields = make_manifest(
            version=version,
            tensors=[tensor],
            total_bytes=384,
            chunk_digests=[hashlib.sha256(chunk).digest() for chunk in chunks],
        )
        self.manifest = msgpack.packb(fields | changes)
        self.version = version
        self.chunks = chunks
        self.asked: list[int] = []
        """Chunk indices in the order in which they were asked for."""

    def announcement(self, endpoint: str) -> messages.Announcement:
        return messages.Announcement(
            epoch=1,
            version=self.version,
            transport="tcp",
            endpoint=endpoint,
            manifest_digest=manifest_digest(self.manifest),
        )

    def __call__(self, asked: Envelope) -> list[Answer]:
        want = asked.message
        if isinstance(want, messages.WantManifest):
            answer = messages.Manifest(epoch=want.epoch, version=want.version)
            return [(answer, [self.manifest])]
        assert isinstance(want, messages.WantChunk)
        self.asked.append(want.index)
        return self.chunk(want.index)

    def chunk(self, index: int) -> list[Answer]:
        return [self.make_chunk(index, self.chunks[index])]

    def make_chunk(self, index: int, data: bytes) -> Answer:
        return messages.Chunk(epoch=1, version=self.version, index=index), [data]


def payload_of(staged: StagedWeights) -> bytes:
    ((_, tensor),) = staged.tensors()
    return bytes(tensor.numpy())
