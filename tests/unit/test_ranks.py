"""Two real ranks over gloo do what one does; one rank needs no process group."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.learner.ranks import Ranks
from tests.models import make_tiny_model
from tests.reference import two_ranks
from tests.reference.stepping import assert_near

ROOT = Path(__file__).parents[2]


def start_two(mode, model, out):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "tests.reference.two_ranks", mode, str(model), str(out),
    ]  # fmt: skip
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "stored"), [("train", "model.safetensors"), ("lora", "adapter_model.safetensors")]
)
def test_two_ranks_train_as_one_and_their_checkpoint_is_the_same(tmp_path, mode, stored):
    # With an adapter the frozen weights are sharded too, and the same model is the KL reference.
    model = make_tiny_model(tmp_path / "tiny", seed=1)
    start_two(mode, model, tmp_path)

    policy = two_ranks.load(mode, model)
    optimizer = two_ranks.decaying(policy)
    alone = two_ranks.train(policy, optimizer, Ranks())
    assert [result.skipped for result in alone] == ["", "not finite", ""]
    assert -1 <= alone[2].values["optimizer/grad_cosine"] <= 1
    by_rank = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in (0, 1)]
    for results in by_rank:
        for found, wanted in zip(results, alone, strict=True):
            assert found["skipped"] == wanted.skipped
            assert found["measured"] == wanted.num_measured
            assert found["sums"] == pytest.approx(wanted.sums, rel=1e-4, abs=1e-5)
            assert found["values"] == pytest.approx(wanted.values, rel=1e-4, abs=1e-6)

    saved = tmp_path / "saved" / "version-000003"
    weights = load_file(saved / stored)
    moments = load_file(saved / "optimizer.safetensors")
    for name, parameter in policy.named_weights():
        state = optimizer.adam.state[parameter]
        # Adam divides by the root of tiny second moments: the weights agree less than those.
        scale = float(state["exp_avg"].abs().max())
        assert float((moments[f"exp_avg/{name}"] - state["exp_avg"]).abs().max()) <= 1e-4 * scale
        assert moments[f"step/{name}"] == state["step"] == 2
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-4)

    # Loaded by two ranks and saved again, nothing moved.
    again = tmp_path / "resaved" / "version-000003"
    for file in (stored, "optimizer.safetensors"):
        left, right = load_file(saved / file), load_file(again / file)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    for rank in (0, 1):
        assert (tmp_path / f"bytes{rank}").read_bytes() == b"\x00batch"


@pytest.mark.process
def test_two_ranks_compute_the_gradient_of_one_for_every_kind_of_denominator(tmp_path):
    # F001.
    model = make_tiny_model(tmp_path / "tiny", seed=1)
    start_two("losses", model, tmp_path)
    for index, case in enumerate(two_ranks.CASES):
        alone = two_ranks.moments(model, case, Ranks())
        # A second update starts from weights that Adam made differ by rounding.
        tolerance = 1e-3 if "2 updates" in case else 1e-5
        for rank in (0, 1):
            found = load_file(tmp_path / f"moments{index}-{rank}")
            assert found.keys() == alone.keys()
            for name, wanted in alone.items():
                assert float(wanted.abs().max()) > 0
                assert_near(found[name], wanted, tolerance=tolerance)


@pytest.mark.process
def test_a_rank_whose_peer_died_gets_a_named_error(tmp_path):
    start_two("lost", "unused", tmp_path)
    assert "a rank died or missed the deadline" in (tmp_path / "lost.txt").read_text()


def test_one_rank_needs_nobody():
    ranks = Ranks.join(rank=0, world=1, device_type="cpu", timeout_s=0.0)
    assert not torch.distributed.is_initialized()
    assert ranks.broadcast_bytes(b"same") == b"same"
    sums = {"b": torch.tensor(2), "a": torch.tensor(0.5)}
    assert ranks.all_reduce_sums(sums) == {"a": 0.5, "b": 2.0}
    assert ranks.all_reduce_maxima({}) == {}
    tables = ranks.all_reduce_tables({"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3])})
    assert {name: table.tolist() for name, table in tables.items()} == {"a": [3.0], "b": [[1, 2]]}
    ranks.barrier()
    ranks.leave()


def test_broadcasting_nothing_from_rank_0_is_refused():
    with pytest.raises(ValueError, match="rank 0"):
        Ranks().broadcast_bytes(None)
