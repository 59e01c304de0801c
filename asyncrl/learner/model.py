"""The policy being trained: a Hugging Face causal language model that scores given tokens.

Parameters are float32; products run in the compute type by autocast; log-probs are float32. The
decoder runs once over packed rows; the head only where a trained token is predicted, and never over
the whole vocabulary at once (logprobs.py). A query may attend to key j of its row iff

    j <= query  and  segment[j] in (0, segment[query])        padding (-1): to itself alone

so several completions share one computed prompt and do not see each other. Dropout is off whatever
the checkpoint says, because a log-prob must not depend on when it is computed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.logprobs import chunked_logprobs
from asyncrl.learner.lora import Adapter, attach

MAX_CHUNK_LOGITS = 2**24
"""Logits held at once by the head: 64 MiB in float32."""

Scores = Callable[..., tuple[Tensor, Tensor]]
"""Takes and gives what `Policy.forward` does."""


class Policy(nn.Module):
    """Log-probs and entropies of completion tokens under a causal language model."""

    def __init__(
        self, model: PreTrainedModel, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        """Wrap a loaded model; see `load`.

        Raises:
            ConfigError: the model's logits or attention are not what this module computes.
        """
        super().__init__()
        _refuse_unsupported(model)
        self.model: Any = model
        self.compute_dtype = compute_dtype
        self.adapter: Adapter | None = None
        """What alone is trained, if lora.rank > 0."""

        self.train(False)

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device, compute_dtype: torch.dtype) -> Self:
        """Load a directory or hub id in float32.

        Raises:
            ConfigError: it cannot be loaded, or is of a kind this module does not compute.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="sdpa"
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={str(path)!r} cannot be loaded: {error}") from error
        return cls(model, compute_dtype=compute_dtype).to(device)

    def adapt(self, lora: LoraConfig, *, seed: int, path: str) -> None:
        """Freeze the model and train an adapter in it instead; before `shard`. See lora.attach.

        Raises:
            ConfigError: peft is not installed, or lora.target_modules does not fit the model.
        """
        self.adapter = attach(self.model, lora, seed=seed, path=path)
        self.train(False)

    def train(self, mode: bool = True) -> Self:
        """Always evaluation mode: gradients flow, dropout does not act."""
        return super().train(False)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        segments: Tensor | None,
        predictor_index: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Score the targets of one micro-batch.

        Args:
            tokens: [B, L] int64.
            position_ids: [B, L] int64.
            segments: [B, L]; None if every row is one sequence with padding at its end.
            predictor_index: [T] int64 into the flattened [B * L].
            targets: [T] int64.
            temperature: > 0; divides the logits.
            entropy_gradient: make the entropies differentiable, too.

        Returns:
            logprobs [T], differentiable, and entropies [T], both float32 nats.
        """
        with self._autocast(tokens.device):
            hidden: Tensor = self.model.base_model(
                input_ids=tokens,
                position_ids=position_ids,
                attention_mask=None if segments is None else attention_mask(segments),
                use_cache=False,
            ).last_hidden_state
        chosen = hidden.flatten(0, 1)[predictor_index]
        head = self.model.get_output_embeddings()
        return chunked_logprobs(
            chosen.to(self.compute_dtype),
            head.weight,
            head.bias,
            targets,
            temperature=temperature,
            vocab_chunk=max(1024, MAX_CHUNK_LOGITS // max(1, len(targets))),
            entropy_gradient=entropy_gradient,
        )

    @property
    def vocabulary(self) -> int:
        """Token ids are in 0 .. vocabulary - 1."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def num_positions(self) -> int:
        """Tokens that a sequence may have."""
        config = self.model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained: the parameters under the model's own names, tied ones once, or those of
        the adapter under the names that it is published by.
        """
        if self.adapter is not None:
            yield from self.adapter.named_weights()
        else:
            yield from self.model.named_parameters()

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write gathered weights so that transformers (an adapter: PEFT) loads the folder."""
        if self.adapter is not None:
            self.adapter.save(folder, weights)
        else:
            self.model.save_pretrained(folder, state_dict=weights)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.compute_dtype != torch.bfloat16:
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


def attention_mask(segments: Tensor) -> Tensor:
    """[B, 1, L, L] bool, True where a query (row) may attend to a key (column)."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    allowed = causal & ((key == 0) | (key == query)) & (query >= 0) & (key >= 0)
    # A query without any key would be 0/0; padding looks at itself and is read by nobody.
    itself = torch.eye(length, dtype=torch.bool, device=segments.device)
    return (allowed | itself)[:, None]


def choose_dtype(name: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """The compute type; auto is bfloat16 on a GPU or a CPU with bf16 instructions, else float32."""
    if name == "auto":
        read = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.9
        features = read() if read is not None else {}
        fast = device.type == "cuda" or any(
            features.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16")
        )
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    """Split parameters, gradients and optimizer state over the ranks of `mesh` (FSDP2), in place.

    Gradients come out averaged over the ranks. The root group (embedding, last norm, head) stays
    gathered between forward and backward, since the head is read outside its own module.
    """
    for layer in _decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh, reshard_after_forward=False)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, which FSDP gathers one at a time."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _refuse_unsupported(model: PreTrainedModel) -> None:
    config = model.config
    name = type(model).__name__
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"model.path={config._name_or_path!r} is an adapter and not a model: merge it first (peft: "
            "merge_and_unload), or the policy without its adapter would be taken for the initial one"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} or window is not None:
        raise ConfigError(
            f"model.path: {name} has attention other than full (layer types {sorted(kinds)}, "
            f"sliding window {window}); packed rows are computed with full attention only"
        )
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"model.path: {name} has no output embedding to read log-probs from")
    probe = torch.arange(4, device=head.weight.device)[None]
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=probe, use_cache=False).logits
        hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
        expected = nn.functional.linear(hidden, head.weight, head.bias)
    if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"model.path: the logits of {name} are not its output embedding applied to its "
            "decoder's output (they are scaled or capped); log-probs would be wrong"
        )
