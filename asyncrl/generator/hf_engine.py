"""The embedded engine: samples completions with any causal LM that transformers can load.

Continuous batching. A prompt is prefilled once and its cache row is copied `num_completions` times;
the copies join the running batch and leave it one by one. One `step`:

    decode   running rows: their last token -> logits                 [running, V]
    start    waiting requests whose completions all fit, at most
             MAX_PREFILL_TOKENS a step: their prompt -> logits         [new, V]
    sample   every row: one token, its log mu, the version of the weights
    finish   rows that stopped, reached max_tokens, or have no finite logits

Invariant: a token's version and log mu are those of the step that sampled it. Weights change only
between steps, all of them or none; the cache of running rows is kept then (design: `keep`).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config import LoraConfig
from asyncrl.errors import WeightMismatchError
from asyncrl.generator.engine import Completion, NamedTensors, Precision, SampleRequest
from asyncrl.generator.hf_batch import CachedModel, PaddedBatch
from asyncrl.generator.hf_model import choose_device, choose_dtype, load_model, load_state
from asyncrl.generator.intake import check_request, check_sequence
from asyncrl.generator.memory import NO_LORA
from asyncrl.generator.merge import Merger
from asyncrl.generator.sampling import CompletionStream, nonfinite_rows, sample
from asyncrl.types import FinishReason, VersionSpan
from asyncrl.weights.shared_file import SharedFile
from asyncrl.weights.staging import Staging, staging_on

MAX_PREFILL_TOKENS = 4096
"""Padded prompt tokens of one step; bounds its time and memory. A longer prompt goes alone."""


@dataclass(slots=True)
class _Row:
    """One running completion."""

    request: SampleRequest
    index: int
    stream: CompletionStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def completion(self) -> Completion:
        spans, position = [], 0
        for version, same in groupby(self.versions):
            end = position + len(list(same))
            spans.append(VersionSpan(version, position, end))
            position = end
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            tokens=np.array(self.tokens, dtype=np.int32),
            behaviour_logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=tuple(spans),
            finish_reason=self.finish_reason,
        )


def _rows_of(request: SampleRequest) -> list[_Row]:
    return [
        _Row(request, index, CompletionStream(request.seed, index))
        for index in range(request.num_completions)
    ]


class HFEngine:
    """The `Engine` protocol over transformers, on one CPU or GPU."""

    def __init__(
        self,
        path: str,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_concurrent_completions: int,
        version: int = 0,
        lora: LoraConfig = NO_LORA,
        on_prefill: Callable[[float, float], None] | None = None,
    ) -> None:
        """Load the model and tokenizer in `path` (a directory or a hub id) as `version`.

        With lora.rank > 0 adapters are adopted, merged into these weights. `on_prefill` gets start and
        end of each prefill, in seconds of time.monotonic(); on a GPU, where calls return before the
        work is done, it is never called.

        Raises:
            ConfigError: they cannot be loaded, the architecture's cache cannot be padded, or the
                adapter does not fit the model.
        """
        self._device = choose_device(device)
        self._model, self._eos_ids = load_model(
            path, self._device, choose_dtype(dtype, self._device)
        )
        self._merger = Merger(self._model, lora) if lora.rank else None
        self._cached = CachedModel(self._model)
        self._batch = PaddedBatch(self._cached, self._device)
        self._limit = max_concurrent_completions
        self._version = version
        self._rows: list[_Row] = []
        self._waiting: deque[SampleRequest] = deque()
        self._num_nonfinite = 0
        self._on_prefill = on_prefill if self._device.type == "cpu" else None

    @property
    def version(self) -> int:
        """Version of the weights that the next step samples under."""
        return self._version

    def staging(self) -> Staging | None:
        """The way to the model's device, if that is a GPU."""
        return staging_on(self._device)

    @property
    def precision(self) -> Precision:
        """What the model's products are computed in."""
        return "bfloat16" if self._model.dtype == torch.bfloat16 else "float32"

    @property
    def num_unfinished(self) -> int:
        """Completions running or waiting."""
        return len(self._rows) + sum(request.num_completions for request in self._waiting)

    @property
    def num_nonfinite(self) -> int:
        """Completions aborted because their logits were not finite."""
        return self._num_nonfinite

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion may not be longer: the model's number of positions."""
        config = self._model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)

    def submit(self, request: SampleRequest, *, first: bool = False) -> None:
        """Queue a prompt; `first` puts it before all waiting ones.

        Raises:
            ValueError: a field is out of its range, the id is taken, the prompt is empty or has
                tokens outside the vocabulary, prompt + max_tokens exceeds max_context_tokens, or
                the completions do not fit into max_concurrent_completions together.
        """
        unfinished = {row.request.request_id for row in self._rows}
        check_request(
            request,
            vocabulary=self._model.get_input_embeddings().num_embeddings,
            max_context_tokens=self.max_context_tokens,
            max_concurrent_completions=self._limit,
            unfinished=unfinished | {waiting.request_id for waiting in self._waiting},
        )
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Start what fits, sample one token for every running completion, return the finished."""
        with torch.inference_mode():
            logits = []
            if self._rows:
                logits.append(self._batch.decode([row.tokens[-1] for row in self._rows]))
            if requests := self._take_startable():
                logits.append(self._start(requests))
            if not self._rows:
                return []
            self._sample(torch.cat(logits))
            return self._remove_finished()

    def adopt(self, version: int, tensors: NamedTensors, *, file: SharedFile | None = None) -> None:
        """Replace the weights; running completions go on under `version` with their cache kept.

        Nothing of `tensors` is kept. The version may rise, stay (weights of another epoch) or fall.

        Raises:
            WeightMismatchError: a name or shape is not this model's, one is missing, or running
                completions have tokens of a higher version; the old weights and version stay.
        """
        higher = [row.versions[-1] for row in self._rows if row.versions[-1] > version]
        if higher:
            raise WeightMismatchError(
                f"version {version} offered while {len(higher)} completions run that have tokens of "
                f"versions up to {max(higher)}; spans must ascend: abort them first"
            )
        if self._merger is not None:
            self._merger.load(tensors)
        else:
            load_state(self._model, tensors)
        if self._device.type == "cuda":  # the offer may be overwritten now
            torch.cuda.current_stream(self._device).synchronize()
        self._version = version

    def abort(self, request_id: int) -> list[Completion]:
        """Finish a request's completions as "abort", with the tokens sampled so far.

        Waiting ones have none. An unknown or finished id gives an empty list.
        """
        waiting = [request for request in self._waiting if request.request_id == request_id]
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        unstarted = [row for request in waiting for row in _rows_of(request)]
        for row in (*unstarted, *self._rows):
            if row.request.request_id == request_id:
                row.finish_reason = "abort"
        return self._remove_finished() + [row.completion() for row in unstarted]

    def score(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probs [T - 1] of tokens 1 .. T - 1, each given those before it, at temperature 1.

        Raises:
            ValueError: T is not in 2 .. max_context_tokens, or a token is outside the vocabulary.
        """
        vocabulary = self._model.get_input_embeddings().num_embeddings
        check_sequence(tokens, vocabulary=vocabulary, max_tokens=self.max_context_tokens)
        given = torch.from_numpy(tokens).long().to(self._device)[None]
        with torch.inference_mode():
            logits = self._model(input_ids=given, use_cache=False).logits[0, :-1].float()
            table = torch.log_softmax(logits, dim=-1)
            scores: NDArray[np.float32] = table.gather(1, given[0, 1:, None])[:, 0].cpu().numpy()
        return scores

    def close(self) -> None:
        """Free the engine's memory; unfinished completions are lost."""
        self._rows.clear()
        self._waiting.clear()
        self._batch.select([])
        self._model.to("meta")

    def _take_startable(self) -> list[SampleRequest]:
        """Waiting requests, in order, that fit into the free slots and into one prefill."""
        taken: list[SampleRequest] = []
        free = self._limit - len(self._rows)
        longest = 0
        while self._waiting and self._waiting[0].num_completions <= free:
            longest = max(longest, self._waiting[0].prompt_tokens.shape[0])
            if taken and longest * (len(taken) + 1) > MAX_PREFILL_TOKENS:
                break
            request = self._waiting.popleft()
            free -= request.num_completions
            taken.append(request)
        return taken

    def _start(self, requests: Sequence[SampleRequest]) -> torch.Tensor:
        """Prefill each prompt once, give every completion a copy; logits of the new rows."""
        start_s = time.monotonic()
        started = PaddedBatch(self._cached, self._device)
        logits = started.prefill([request.prompt_tokens for request in requests])
        copies = [i for i, request in enumerate(requests) for _ in range(request.num_completions)]
        started.select(copies)
        self._batch.extend(started)
        self._rows += [row for request in requests for row in _rows_of(request)]
        if self._on_prefill is not None:
            self._on_prefill(start_s, time.monotonic())
        return logits[torch.tensor(copies, device=self._device)]

    def _sample(self, logits: torch.Tensor) -> None:
        broken = set(nonfinite_rows(logits))
        if broken:
            logits[list(broken)] = 0.0
        requests = [row.request for row in self._rows]
        tokens, logprobs = sample(
            logits,
            np.array([row.stream.next() for row in self._rows]),
            temperature=np.array([request.temperature for request in requests], np.float64),
            top_p=np.array([request.top_p for request in requests], np.float64),
            top_k=np.array([request.top_k for request in requests], np.int64),
        )
        drawn = zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True)
        for i, (row, token, logprob) in enumerate(drawn):
            if i in broken:
                row.finish_reason = "abort"
                self._num_nonfinite += 1
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
            if token in self._eos_ids:
                row.finish_reason = "stop"
            elif len(row.tokens) == row.request.max_tokens:
                row.finish_reason = "length"

    def _remove_finished(self) -> list[Completion]:
        kept = [i for i, row in enumerate(self._rows) if row.finish_reason is None]
        if len(kept) == len(self._rows):
            return []
        finished = [row.completion() for row in self._rows if row.finish_reason is not None]
        self._rows = [self._rows[i] for i in kept]
        self._batch.select(kept)
        return finished
