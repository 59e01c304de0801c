"""The vLLM engine: samples completions inside vLLM's continuous batch, driven step by step.

Every completion is a vLLM request of its own; those of one prompt share its KV blocks through the
prefix cache. Requests wait here, not in vLLM, so that `first` and the version of a prompt's cache
are ours to decide. One `step`:

    start    waiting requests whose completions all fit
    poll     one scheduler step of vLLM: at most one token a completion, its log mu
    finish   rows that vLLM finished, or whose log mu is not finite

Invariant: a token's version is that of the weights that sampled it. (Adapters served as versions of
their own are in vllm_lora.py; what follows is of whole weights.) `adopt` pauses vLLM, has the new
weights loaded behind the batch in flight (async scheduling keeps one), takes that in under the old
version, and resumes. A completion without a token starts over, so that a prompt's cache has the version
of its first token; blocks are cached under a salt of their adoption, so no new request reads older ones.
"""

import math
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config import LoraConfig, VllmEngineConfig
from asyncrl.config.engine import MIN_VLLM_TEMPERATURE
from asyncrl.errors import WeightMismatchError
from asyncrl.generator.engine import Completion, NamedTensors, Precision, SampleRequest
from asyncrl.generator.intake import check_request, check_sequence
from asyncrl.generator.memory import NO_LORA
from asyncrl.generator.model_facts import describe_model
from asyncrl.generator.vllm_arguments import (
    engine_arguments,
    max_context_tokens,
    precision,
    sampling_params,
    scoring_params,
)
from asyncrl.generator.vllm_compat import Core, check_version
from asyncrl.generator.vllm_lora import LoraServing
from asyncrl.generator.vllm_rows import Row, completion_seed
from asyncrl.types import FinishReason
from asyncrl.weights.shared_file import SharedFile
from asyncrl.weights.staging import Staging, staging_on


class VllmEngine:
    """The `Engine` protocol over vLLM."""

    def __init__(
        self,
        path: str,
        config: VllmEngineConfig,
        *,
        version: int = 0,
        lora: LoraConfig = NO_LORA,
        max_staleness: int = 0,
        more_arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Load the model in `path` (a directory or a hub id; the learner loads it too).

        Args:
            path: where the weights of `version` are.
            config: `engine.*`; prompt plus completion may have as many tokens as both limits allow.
            version: of the weights in `path`.
            lora: with rank > 0 adapters are adopted, pinned or merged (vllm_lora.py).
            max_staleness: k; of pinned versions k + 1 run in one batch.
            more_arguments: EngineArgs of vLLM, over those that asyncrl sets; for experiments.

        Raises:
            ConfigError: another version of vLLM, or it cannot start; the message names the cause.
        """
        check_version()
        self._model = describe_model(path)
        self._max_context = max_context_tokens(config, self._model)
        self._limit = config.max_concurrent_completions
        self._policy = config.cache_policy
        self._precision = precision(config)
        self._serving = LoraServing(path, config, self._model, lora, max_staleness=max_staleness)
        arguments = engine_arguments(
            path, config, self._model, lora=lora, max_staleness=max_staleness
        )
        arguments |= self._serving.arguments
        self._core = Core(arguments | dict(more_arguments))
        self._serving.start(self._core.llm, self._core.device, version)
        self._pinned = self._serving.pinned
        self._version = version
        self._num_adoptions = 0
        self._rows: dict[str, Row] = {}  # by vLLM's name
        self._waiting: deque[SampleRequest] = deque()
        self._finished: list[Completion] = []
        self._num_nonfinite = 0

    @property
    def version(self) -> int:
        """Version of the weights that the next step samples under."""
        return self._version

    def staging(self) -> Staging | None:
        """The way to the GPU, or to those of all workers; these take adapters from host memory."""
        if self._core.device.type == "cuda":
            return staging_on(self._core.device)
        return None if self._serving.adapts else self._core.sharded_staging()

    @property
    def precision(self) -> Precision:
        """What the model's products are computed in."""
        return self._precision

    @property
    def num_unfinished(self) -> int:
        """Completions running or waiting, and those that the next `step` returns."""
        waiting = sum(request.num_completions for request in self._waiting)
        return len(self._rows) + waiting + len(self._finished)

    @property
    def num_nonfinite(self) -> int:
        """Completions aborted because a log-prob was not finite."""
        return self._num_nonfinite

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus completion may not be longer."""
        return self._max_context

    def submit(self, request: SampleRequest, *, first: bool = False) -> None:
        """Queue a prompt; `first` puts it before all waiting ones.

        Raises:
            ValueError: a field is out of its range (see `check_request`; temperatures below
                MIN_VLLM_TEMPERATURE are too: greedy is top_k=1).
        """
        unfinished = {row.request.request_id for row in self._rows.values()}
        check_request(
            request,
            vocabulary=self._model.vocabulary,
            max_context_tokens=self._max_context,
            max_concurrent_completions=self._limit,
            unfinished=unfinished | {waiting.request_id for waiting in self._waiting},
        )
        if request.temperature < MIN_VLLM_TEMPERATURE:
            raise ValueError(
                f"request {request.request_id}: vLLM samples at temperature >= {MIN_VLLM_TEMPERATURE}, "
                f"got {request.temperature}; greedy is top_k=1"
            )
        if first:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Start what fits, run one step of vLLM, return the finished."""
        while self._waiting and self._waiting[0].num_completions <= self._limit - len(self._rows):
            request = self._waiting.popleft()
            for index in range(request.num_completions):
                self._add(Row(request, index))
        if self._rows:
            self._take(self._core.poll())
        finished, self._finished = self._finished, []
        return finished

    def adopt(self, version: int, tensors: NamedTensors, *, file: SharedFile | None = None) -> None:
        """Replace the weights; running completions go on under `version`.

        Their caches are kept or recomputed, as `cache_policy` says. Nothing of `tensors` is kept.
        The version may rise, stay (new weights of another epoch) or, as long as no running
        completion has tokens of a higher one, fall. With lora.serving="pinned" running completions
        end under the version that they began with, and it may be any.

        Raises:
            WeightMismatchError: a name or shape is not this model's, one is missing, or running
                completions have tokens of a higher version; the old weights and version stay.
        """
        if self._pinned is not None:
            in_use = {row.pinned for row in self._rows.values() if row.pinned is not None}
            self._pinned.adopt(version, tensors, in_use)
            self._version = version
            self._num_adoptions += 1
            return
        offered = self._serving.checked(tensors)
        self._core.pause()
        if version < self._version:
            self._refuse_descent(version)
        # From here on an error leaves half of the new weights: it must end this process.
        self._take(self._core.reload(offered, None if self._serving.merges else file))
        if self._policy == "recompute":
            self._core.recompute()
        self._version = version
        self._num_adoptions += 1
        self._restart({name: row for name, row in self._rows.items() if not row.tokens})
        self._core.resume()

    def abort(self, request_id: int) -> list[Completion]:
        """Finish a request's completions as "abort", with the tokens sampled so far (waiting: none)."""
        waiting = [request for request in self._waiting if request.request_id == request_id]
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        unstarted = [Row(request, i) for request in waiting for i in range(request.num_completions)]
        names = [n for n, row in self._rows.items() if row.request.request_id == request_id]
        self._core.abort(names)
        gone = [self._rows.pop(name) for name in names]
        done = [c for c in self._finished if c.request_id == request_id]
        self._finished = [c for c in self._finished if c.request_id != request_id]
        return done + [row.completion("abort") for row in (*gone, *unstarted)]

    def score(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probs [T - 1] of tokens 1 .. T - 1, each given those before it, at temperature 1.

        Running completions get a token or more meanwhile; the next `step` returns the finished.

        Raises:
            ValueError: T is not in 2 .. max_context_tokens - 1 (vLLM samples one more), or a token
                is outside the vocabulary.
        """
        check_sequence(tokens, vocabulary=self._model.vocabulary, max_tokens=self._max_context - 1)
        lora = self._pinned.newest.request if self._pinned is not None else None
        salt = str(self._num_adoptions)
        name = self._core.add(tokens.tolist(), scoring_params(), salt=salt, lora=lora)
        parts: list[torch.Tensor] = []
        while True:
            outputs = self._core.poll()
            self._take(outputs)
            for output in (o for o in outputs if o.request_id == name):
                if output.new_prompt_logprobs_tensors is not None:
                    parts.append(output.new_prompt_logprobs_tensors.logprobs[:, 0])
                if output.finish_reason is not None:
                    scores: NDArray[np.float32] = torch.cat(parts).float().cpu().numpy()
                    return scores

    def close(self) -> None:
        """Free the engine's memory; unfinished completions are lost."""
        self._rows.clear()
        self._waiting.clear()
        self._finished.clear()
        self._core.close()

    def _refuse_descent(self, version: int) -> None:
        """While paused: an error, and sampling goes on, if `version` breaks a span's ascent."""
        self._take(self._core.drain())
        higher = [v for row in self._rows.values() for v, _ in row.starts[-1:] if v > version]
        if higher:
            self._core.resume()
            raise WeightMismatchError(
                f"version {version} offered while {len(higher)} completions run that have tokens of "
                f"versions up to {max(higher)}; spans must ascend: abort them first"
            )

    def _add(self, row: Row) -> None:
        request = row.request
        params = sampling_params(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=completion_seed(request.seed, row.index),
            max_tokens=request.max_tokens,
            stop_tokens=self._model.stop_tokens,
        )
        row.pinned = self._pinned.newest if self._pinned is not None else None
        lora = row.pinned.request if row.pinned is not None else None
        salt = str(self._num_adoptions)
        name = self._core.add(request.prompt_tokens.tolist(), params, salt=salt, lora=lora)
        self._rows[name] = row

    def _restart(self, rows: dict[str, Row]) -> None:
        """Hand rows to vLLM once more, so that their prompts are prefilled by the new weights."""
        self._core.abort(list(rows))
        for name, row in rows.items():
            del self._rows[name]
            self._add(row)

    def _take(self, outputs: list[Any]) -> None:
        """Append what vLLM sampled to the rows; finished ones go to the next `step`'s result."""
        broken: list[str] = []
        for output in outputs:
            row = self._rows.get(output.request_id)
            if row is None:
                continue  # a score, or aborted while it was in flight
            if output.new_token_ids:
                logprobs = output.new_logprobs.logprobs[:, 0].tolist()
                if not all(map(math.isfinite, logprobs)):
                    broken.append(output.request_id)
                    continue
                version = self._version if row.pinned is None else row.pinned.version
                if not row.starts or row.starts[-1][0] != version:
                    row.starts.append((version, len(row.tokens)))
                row.tokens += output.new_token_ids
                row.logprobs += logprobs
            if output.finish_reason is not None:
                reason = _FINISH_REASONS.get(str(output.finish_reason), "abort")
                self._finished.append(self._rows.pop(output.request_id).completion(reason))
        if broken:
            self._num_nonfinite += len(broken)
            self._core.abort(broken)
            self._finished += [self._rows.pop(name).completion("abort") for name in broken]


_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""What vLLM calls otherwise (abort, error, repetition) cannot be trained on."""
