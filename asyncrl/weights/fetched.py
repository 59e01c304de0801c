"""What either transport gives: the manifest that was announced, and the memory that it describes."""

from dataclasses import dataclass

from asyncrl.errors import WeightMismatchError
from asyncrl.weights.digests import Buffer
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.shared_file import MappedFile
from asyncrl.wire.messages import Announcement


@dataclass(frozen=True, slots=True)
class Fetched:
    """One version in host memory."""

    manifest: Manifest
    block: MappedFile


def read_manifest(
    data: Buffer, announcement: Announcement, *, run_id: str, max_total_bytes: int
) -> Manifest:
    """The manifest in `data`, which is that of the announced version of this run.

    Raises:
        WeightMismatchError: see Manifest.from_bytes; or it is of another run, epoch or version.
    """
    manifest = Manifest.from_bytes(
        data, expected_digest=announcement.manifest_digest, max_total_bytes=max_total_bytes
    )
    got = (manifest.run_id, manifest.epoch, manifest.version)
    expected = (run_id, announcement.epoch, announcement.version)
    if got != expected:
        raise WeightMismatchError(f"the manifest is of {got}, announced was {expected}")
    return manifest
