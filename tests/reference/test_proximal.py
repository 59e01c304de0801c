"""The interpolated proximal policy: how the whole ratio is divided between clip and cap."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.proximal import interpolated


@given(
    staleness=st.integers(0, 50), current=st.floats(-30, 0), behaviour=st.floats(-30, 0),
)  # fmt: skip
def test_ratio_and_weight_share_the_log_ratio_by_staleness(staleness, current, behaviour):
    logprobs = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([behaviour], dtype=torch.float64)
    proximal = interpolated(logprobs, mu, torch.tensor([staleness], dtype=torch.int32))
    assert not proximal.requires_grad
    z = current - behaviour
    # v_prox = V, v_theta = V + 1, v_t = V - d: a = d / (d + 1).
    share = (5 - (5 - staleness)) / (6 - (5 - staleness))
    assert (proximal - mu).item() == pytest.approx(share * z, rel=1e-12, abs=1e-12)
    assert (logprobs - proximal).item() == pytest.approx((1 - share) * z, rel=1e-9, abs=1e-12)


def test_a_fresh_token_is_anchored_on_mu_and_an_unknown_mu_on_the_current_policy():
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    mu = torch.tensor([-2.0, math.nan, -math.inf])
    proximal = interpolated(logprobs, mu, torch.tensor([0, 3, 3], dtype=torch.int32))
    assert proximal.tolist() == [-2.0, -1.0, -1.0]
