"""The bytes of every message kind, pinned: they change only together with PROTOCOL.

`frames.json` maps PROTOCOL to {name: [hex of each frame]}. After a deliberate change raise PROTOCOL
and run `python tests/golden/test_frames.py`, which adds the bytes of the new number.
"""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from asyncrl.types import Rollout, RolloutGroup, Verdict, VersionSpan
from asyncrl.wire import messages as m
from asyncrl.wire.codec import decode, decode_group, encode, encode_group

FRAMES = Path(__file__).with_name("frames.json")

ANNOUNCEMENT = m.Announcement(
    epoch=2, version=7, transport="tcp", endpoint="tcp://10.0.0.5:4711", manifest_digest="ab12"
)
EVAL_DONE = m.EvalDone(
    version=4,
    mean_score=0.625,
    num_samples=64,
    num_unscored=1,
    mean_tokens=33.5,
    seconds=2.25,
)
EVAL_EMPTY = EVAL_DONE.model_copy(update={"mean_score": None, "num_samples": 0})
LEDGER = m.LedgerCounts(
    admitted=21, trained=8, dropped_stale=1, dropped_filtered=2, failed=3, queued=4, in_flight=3
)
EXAMPLES: list[tuple[m.Message, list[bytes]]] = [
    (
        m.Hello(
            protocol=1,
            role="learner",
            name="learner-0",
            run_id="r1",
            config_digest="0123456789abcdef",
            token="s",
            incarnation=3,
            epoch=2,
            version=40,
            cursor=1300,
        ),
        [],
    ),
    (m.Welcome(beat_s=2.0, silence_s=30.0, announcement=ANNOUNCEMENT), []),
    (m.Refuse(reason="protocol 1 != 2"), []),
    (m.Beat(), []),
    (m.Bye(reason="SIGTERM", failed=True), []),
    (m.Stop(reason="last step"), []),
    (m.WantWork(epoch=2, version=7, num_groups=4), []),
    (m.Work(starts=[m.GroupStart(group_id=300, ordinal=299, attempt=1, seed=2**62)]), []),
    (
        m.GroupDone(group_id=300, scores=[1.0, None, 0.5], num_tokens=70000, oldest_version=6),
        [b"head", b"", b"\x00\xff"],
    ),
    (m.GroupFailed(group_id=9, reason="all_unscored", retry=False), []),
    (m.Evaluate(version=4), []),
    (EVAL_DONE, []),
    (m.Counters(values={"engine/decode_s": 12.5, "tokens": 4096.0}), []),
    (m.WantBatch(step=7), []),
    (m.SetStaleness(max_staleness=2), []),
    (
        m.Batch(
            step=7,
            groups=[m.GroupRef(group_id=300, generator="g-ü", num_frames=2, queued_s=0.25)],
            max_staleness=3,
            cursor=301,
            ledger=LEDGER,
            counters={"tokens": 4096.0},
            evals=[EVAL_DONE],
        ),
        [b"one", b"two"],
    ),
    (ANNOUNCEMENT, []),
    (m.WantEval(version=8), []),
    (m.EvalResults(evals=[EVAL_DONE, EVAL_EMPTY]), []),
    (m.WantManifest(run_id="r1", token="s", epoch=2, version=7), []),
    (m.Manifest(epoch=2, version=7), [b"{}"]),
    (m.WantChunk(run_id="r1", token="s", epoch=2, version=7, index=3), []),
    (m.Chunk(epoch=2, version=7, index=3), [b"\x00\x01\x02"]),
    (m.Gone(epoch=2, version=6, reason="superseded"), []),
]

GROUP = RolloutGroup(
    group_id=300,
    ordinal=299,
    prompt_tokens=np.array([1, 2, 151643], np.int32),
    prompt_text="2 · 3 ü",
    answer="6",
    rollouts=(
        Rollout(
            completion_tokens=np.array([10, 20, 2], np.int32),
            behaviour_logprobs=np.array([-0.5, -2.0, 0.0], np.float32),
            version_spans=(VersionSpan(6, 0, 2), VersionSpan(7, 2, 3)),
            finish_reason="stop",
            text="6",
            verdict=Verdict(status="scored", score=1.0),
        ),
        Rollout(
            completion_tokens=np.array([30], np.int32),
            behaviour_logprobs=np.array([-np.inf], np.float32),
            version_spans=(VersionSpan(7, 0, 1),),
            finish_reason="length",
            text="",
            verdict=Verdict(status="timeout", detail="2 s"),
        ),
    ),
)


def frames_now() -> dict[str, list[str]]:
    frames = {message.kind: encode(message, payload) for message, payload in EXAMPLES}
    frames["group payload"] = encode_group(GROUP)
    return {name: [bytes(frame).hex() for frame in parts] for name, parts in frames.items()}


def pinned() -> dict[str, list[str]]:
    return json.loads(FRAMES.read_text())[str(m.PROTOCOL)]


def test_every_message_kind_has_a_golden_example():
    assert {type(message) for message, _ in EXAMPLES} == set(get_args(m.Message))
    assert set(pinned()) == {message.kind for message, _ in EXAMPLES} | {"group payload"}


@pytest.mark.parametrize("name", [message.kind for message, _ in EXAMPLES] + ["group payload"])
def test_bytes_change_only_with_the_protocol_number(name):
    assert frames_now()[name] == pinned()[name], "bytes changed: raise messages.PROTOCOL, then pin"


@pytest.mark.parametrize(("message", "payload"), EXAMPLES, ids=lambda x: getattr(x, "kind", ""))
def test_pinned_bytes_still_mean_the_example(message, payload):
    frames = [bytes.fromhex(frame) for frame in pinned()[message.kind]]

    decoded, views = decode(frames)

    assert decoded == message
    assert [bytes(view) for view in views] == payload


def test_pinned_group_bytes_still_mean_the_example():
    frames = [bytes.fromhex(frame) for frame in pinned()["group payload"]]

    group = decode_group(frames)

    assert group.prompt_tokens.tolist() == [1, 2, 151643]
    assert (group.group_id, group.ordinal, group.prompt_text, group.answer) == (
        300,
        299,
        "2 · 3 ü",
        "6",
    )
    assert [r.completion_tokens.tolist() for r in group.rollouts] == [[10, 20, 2], [30]]
    assert [r.behaviour_logprobs.tolist() for r in group.rollouts] == [[-0.5, -2.0, 0.0], [-np.inf]]
    assert [r.version_spans for r in group.rollouts] == [r.version_spans for r in GROUP.rollouts]
    assert [r.finish_reason for r in group.rollouts] == ["stop", "length"]
    assert [r.text for r in group.rollouts] == ["6", ""]
    assert [r.verdict for r in group.rollouts] == [r.verdict for r in GROUP.rollouts]


if __name__ == "__main__":
    history = json.loads(FRAMES.read_text()) if FRAMES.exists() else {}
    # setdefault: the bytes of a protocol number that is pinned already are never rewritten.
    history.setdefault(str(m.PROTOCOL), frames_now())
    FRAMES.write_text(json.dumps(history, indent=1) + "\n")
