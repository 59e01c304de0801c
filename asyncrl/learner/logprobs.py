"""Log-probs of chosen tokens from hidden states, without ever holding all logits.

    logit_v  = (h . W_v + b_v) / temperature
    logprob  = logit_target - logsumexp_v logit_v
    entropy  = logsumexp_v logit_v - sum_v softmax_v logit_v

The vocabulary is walked in chunks with a running maximum (online softmax, arXiv:1805.02867),
forward and again backward; at most [T, vocab_chunk] logits exist at a time. Products run in the
type of `hidden`, everything after them in float32 (float64 when hidden is float64).

    d logprob / d logit_v = 1[v = target] - softmax_v
    d entropy / d logit_v = -softmax_v (log softmax_v + entropy)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    vocab_chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution.

    Args:
        hidden: [T, H]; its type is the type of the products.
        head_weight: [V, H], any floating type; cast chunk by chunk.
        head_bias: [V], or None.
        targets: [T] int64, 0 <= target < V.
        temperature: > 0; divides the logits, as the sampler does.
        vocab_chunk: >= 1, rows of the head at a time.
        entropy_gradient: whether the entropy is differentiable as well, for an entropy bonus.

    Returns:
        logprobs [T], nats, differentiable in hidden, head_weight and head_bias; entropy [T], nats,
        without a gradient unless asked for. Both float32 (float64 for float64 hidden).
    """
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, head_weight, head_bias, targets, temperature, vocab_chunk, entropy_gradient
    )
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        vocab_chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = _accumulation_type(hidden)
        num_tokens = hidden.shape[0]
        maximum = hidden.new_full((num_tokens,), -torch.inf, dtype=kind)
        total = torch.zeros_like(maximum)
        moment = torch.zeros_like(maximum)
        chosen = torch.zeros_like(maximum)
        for start in range(0, head_weight.shape[0], vocab_chunk):
            logits = _logits(hidden, head_weight, head_bias, start, vocab_chunk, temperature)
            inside, column = _locate(targets, start, logits.shape[1])
            chosen = torch.where(inside, logits.gather(1, column[:, None])[:, 0], chosen)
            higher = torch.maximum(maximum, logits.amax(dim=1))
            rescale = (maximum - higher).exp()
            weights = (logits - higher[:, None]).exp_()
            total = total * rescale + weights.sum(dim=1)
            moment = moment * rescale + torch.linalg.vecdot(weights, logits)
            maximum = higher
        logsumexp = maximum + total.log()
        entropy = logsumexp - moment / total
        ctx.temperature, ctx.vocab_chunk = temperature, vocab_chunk
        ctx.entropy_gradient = entropy_gradient
        ctx.save_for_backward(hidden, head_weight, head_bias, targets, logsumexp, entropy)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen - logsumexp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
        grad_entropy: Tensor,
    ) -> tuple[Tensor | None, ...]:
        hidden, head_weight, head_bias, targets, logsumexp, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad, grad_entropy = grad / ctx.temperature, grad_entropy / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(head_weight) if needs_weight else None
        grad_bias = torch.empty_like(head_bias) if needs_bias else None
        for start in range(0, head_weight.shape[0], ctx.vocab_chunk):
            chunk = slice(start, start + ctx.vocab_chunk)
            logits = _logits(
                hidden, head_weight, head_bias, start, ctx.vocab_chunk, ctx.temperature
            )
            pull = grad[:, None]
            logits.sub_(logsumexp[:, None])
            if ctx.entropy_gradient:
                pull = pull + grad_entropy[:, None] * (logits + entropy[:, None])
            grad_logits = logits.exp_().mul_(-pull)
            inside, column = _locate(targets, start, grad_logits.shape[1])
            grad_logits.scatter_add_(1, column[:, None], (grad * inside)[:, None])
            if grad_bias is not None:
                grad_bias[chunk] = grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ head_weight[chunk].to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[chunk] = grad_logits.T @ hidden
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _accumulation_type(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    start: int,
    vocab_chunk: int,
    temperature: float,
) -> Tensor:
    """[T, chunk] logits of the head's rows from `start`, after temperature."""
    chunk = slice(start, start + vocab_chunk)
    logits = (hidden @ head_weight[chunk].to(hidden.dtype).T).to(_accumulation_type(hidden))
    if head_bias is not None:
        logits = logits + head_bias[chunk]
    return logits / temperature if temperature != 1.0 else logits


def _locate(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in a chunk, and their column there (any column where they do not)."""
    column = targets - start
    inside = (column >= 0) & (column < size)
    return inside, column.clamp(0, size - 1)
