"""chunked_logprobs against log_softmax over all logits, values and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asyncrl.learner.logprobs import chunked_logprobs


def plain(hidden, weight, bias, targets, temperature):
    logits = nn.functional.linear(hidden, weight, bias) / temperature
    table = logits.log_softmax(dim=-1)
    entropy = -(table.exp() * table).sum(dim=-1)
    return table.gather(1, targets[:, None])[:, 0], entropy


def inputs(seed, num_tokens, hidden_size, vocab, with_bias, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = random(num_tokens, hidden_size).requires_grad_()
    weight = random(vocab, hidden_size).requires_grad_()
    bias = random(vocab).requires_grad_() if with_bias else None
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return hidden, weight, bias, targets


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 6),
    vocab=st.integers(1, 23),
    chunk=st.integers(1, 25),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    with_bias=st.booleans(),
)
def test_values_and_gradients_equal_log_softmax(
    seed, num_tokens, vocab, chunk, temperature, with_bias
):
    hidden, weight, bias, targets = inputs(seed, num_tokens, 5, vocab, with_bias)
    upstream = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    expected, expected_entropy = plain(hidden, weight, bias, targets, temperature)
    variables = [v for v in (hidden, weight, bias) if v is not None]
    slopes = torch.autograd.grad(expected @ upstream, variables)
    found, entropy = chunked_logprobs(
        hidden, weight, bias, targets, temperature=temperature, vocab_chunk=chunk
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-12)
    assert not entropy.requires_grad
    for slope, wanted in zip(torch.autograd.grad(found @ upstream, variables), slopes, strict=True):
        torch.testing.assert_close(slope, wanted, rtol=1e-9, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 6),
    vocab=st.integers(1, 23),
    chunk=st.integers(1, 25),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    with_bias=st.booleans(),
)
def test_the_entropy_has_the_gradient_of_the_full_distribution_when_asked(
    seed, num_tokens, vocab, chunk, temperature, with_bias
):
    hidden, weight, bias, targets = inputs(seed, num_tokens, 5, vocab, with_bias)
    left = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    right = torch.linspace(3, -1, num_tokens, dtype=torch.float64)
    expected, expected_entropy = plain(hidden, weight, bias, targets, temperature)
    variables = [v for v in (hidden, weight, bias) if v is not None]
    slopes = torch.autograd.grad(expected @ left + expected_entropy @ right, variables)
    found, entropy = chunked_logprobs(
        hidden, weight, bias, targets, temperature=temperature, vocab_chunk=chunk,
        entropy_gradient=True,
    )  # fmt: skip
    total = found @ left + entropy @ right
    for slope, wanted in zip(torch.autograd.grad(total, variables), slopes, strict=True):
        torch.testing.assert_close(slope, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_passes_gradcheck(output):
    hidden, weight, bias, targets = inputs(3, 4, 3, 7, True)

    def function(*variables):
        return chunked_logprobs(
            *variables, targets, temperature=0.7, vocab_chunk=3, entropy_gradient=True
        )[output]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[300.0]])
    weight = torch.tensor([[-1.0], [1.0], [0.999]])
    found, entropy = chunked_logprobs(
        hidden, weight, None, torch.tensor([2]), temperature=1.0, vocab_chunk=1
    )
    expected, expected_entropy = plain(
        hidden.double(), weight.double(), None, torch.tensor([2]), 1.0
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)


def test_a_tied_head_gets_both_gradients():
    torch.manual_seed(0)
    table = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    tokens, targets = torch.tensor([1, 5, 5]), torch.tensor([0, 8, 5])
    (wanted,) = torch.autograd.grad(
        plain(table[tokens] * 2, table, None, targets, 1.0)[0].sum(), table
    )
    logprobs, _ = chunked_logprobs(
        table[tokens] * 2, table, None, targets, temperature=1.0, vocab_chunk=4
    )
    logprobs.sum().backward()
    torch.testing.assert_close(table.grad, wanted)


def test_bfloat16_products_give_float32_logprobs_near_the_exact_ones():
    # F017.
    hidden, weight, _, targets = inputs(1, 8, 64, 200, False, dtype=torch.float32)
    with torch.no_grad():
        weight *= 0.1
    expected, _ = plain(hidden.double(), weight.double(), None, targets, 1.0)
    found, entropy = chunked_logprobs(
        hidden.bfloat16(), weight, None, targets, temperature=1.0, vocab_chunk=64
    )
    assert found.dtype == entropy.dtype == torch.float32
    # Logits of size about 1 carry a relative bf16 error of 2^-8 each.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.03)
    found.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_logits_of_the_whole_vocabulary_never_exist_at_once():
    hidden, weight, _, targets = inputs(1, 6, 4, 50, False)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[0] == 6:
                sizes.append(out.shape[1])
            return out

    with Watch():
        logprobs, _ = chunked_logprobs(
            hidden, weight, None, targets, temperature=1.0, vocab_chunk=8
        )
        logprobs.sum().backward()
    assert max(sizes) == 8


def test_unwanted_gradients_are_not_computed():
    hidden, weight, _, targets = inputs(1, 2, 4, 5, False)
    frozen = weight.detach()
    chunked_logprobs(hidden, frozen, None, targets, temperature=1.0, vocab_chunk=2)[
        0
    ].sum().backward()
    assert frozen.grad is None
    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunk_size_does_not_change_float32_results_beyond_rounding(chunk):
    hidden, weight, _, targets = inputs(5, 16, 32, 90, False, dtype=torch.float32)
    whole, _ = chunked_logprobs(hidden, weight, None, targets, temperature=1.0, vocab_chunk=90)
    cut, _ = chunked_logprobs(hidden, weight, None, targets, temperature=1.0, vocab_chunk=chunk)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)
