"""What generators and the learner's publisher say to each other; the weights themselves are frames."""

from typing import Literal

from asyncrl.wire.message import Count, WireMessage


class WantManifest(WireMessage):
    """A generator asks the publisher for the manifest of (epoch, version)."""

    kind: Literal["want_manifest"] = "want_manifest"
    run_id: str
    token: str = ""
    epoch: Count
    version: Count


class Manifest(WireMessage):
    """The manifest follows as one frame (weights/manifest.py)."""

    kind: Literal["manifest"] = "manifest"
    epoch: Count
    version: Count


class WantChunk(WireMessage):
    """A generator asks for chunk `index` of (epoch, version)."""

    kind: Literal["want_chunk"] = "want_chunk"
    run_id: str
    token: str = ""
    epoch: Count
    version: Count
    index: Count


class Chunk(WireMessage):
    """The chunk's bytes follow as one frame; the manifest holds its digest."""

    kind: Literal["chunk"] = "chunk"
    epoch: Count
    version: Count
    index: Count


class Gone(WireMessage):
    """The publisher does not hold this version any more (or refuses the asker)."""

    kind: Literal["gone"] = "gone"
    epoch: Count
    version: Count
    reason: str
