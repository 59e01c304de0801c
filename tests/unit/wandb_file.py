"""Reads back what an offline W&B client wrote: a file of records in the log format of LevelDB.

Blocks of 32 KiB; in them chunks of checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle,
4: last) and data; a rest of a block too short for a chunk's head is padding. The file begins with 7 bytes
of its own: ":W&B", and a version.
"""

import json
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2

_BLOCK = 32 * 1024
_HEAD = struct.Struct("<IHB")


def read_records(path: Path):
    """Every record that is whole, as the client's protobuf message."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", data[:7]
    at, parts, found = 7, [], []
    while at + _HEAD.size <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        if kind == 0 or at + _HEAD.size + length > len(data):
            break
        parts.append(data[at + _HEAD.size : at + _HEAD.size + length])
        at += _HEAD.size + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
    return found


def rows(records):
    """The rows of the run's history, as the client would upload them."""
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]


def config(records):
    """The run's configuration: its own keys, and what was set in updates."""
    found = {}
    for record in records:
        for update in (record.run.config, record.config):
            for item in update.update:
                found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found
