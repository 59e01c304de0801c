"""The same completions through vLLM's own front doors, to measure ours beside."""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from analysis.random_models import SMALLEST_VOCABULARY
from asyncrl.config import VllmEngineConfig
from asyncrl.generator.model_facts import describe_model

GROUP_SIZE = 8

Generate = Callable[..., float]
"""Seconds for (completions, tokens of each, seeded=True)."""


def prompts(num: int, options: argparse.Namespace) -> list[np.ndarray]:
    """One prompt for every GROUP_SIZE completions."""
    rng = np.random.default_rng(num)
    shape = (-(-num // GROUP_SIZE), options.prompt_tokens)
    return list(rng.integers(0, SMALLEST_VOCABULARY, shape).astype(np.int32))


def start_plain(
    path: str, config: VllmEngineConfig, more: dict[str, Any], options: argparse.Namespace
) -> Generate:
    """`LLM.generate` with the engine's own arguments."""
    from vllm import LLM

    from asyncrl.generator.vllm_arguments import engine_arguments

    llm = LLM(**engine_arguments(path, config, describe_model(path)) | more)

    def generate(num: int, tokens: int, seeded: bool = True) -> float:
        prompts, params = zip(*plain_requests(num, tokens, options, seeded=seeded), strict=True)
        began = time.perf_counter()
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(o.outputs[0].logprobs) for o in outputs) == num * tokens
        return seconds

    return generate


def plain_requests(
    num: int, tokens: int, options: argparse.Namespace, *, seeded: bool = True
) -> Iterator[tuple[Any, Any]]:
    """Prompt and sampling parameters of every completion, as vLLM takes them."""
    from vllm.inputs import tokens_input

    from asyncrl.generator.vllm_arguments import sampling_params

    for i, prompt in enumerate(np.repeat(prompts(num, options), GROUP_SIZE, axis=0)[:num]):
        params = sampling_params(
            temperature=1.0, top_p=1.0, top_k=0, seed=i, max_tokens=tokens, stop_tokens=()
        )
        params.seed = i if seeded else None
        yield tokens_input(prompt.tolist()), params


def drain_plain(engine: Any, num: int, tokens: int, options: argparse.Namespace) -> float:  # noqa: ANN401
    """`drain` without our loop: the requests and outputs of the LLMEngine inside `engine`."""
    llm = engine._core._llm
    requests = list(plain_requests(num, tokens, options))
    began = time.perf_counter()
    for i, (prompt, params) in enumerate(requests):
        llm.add_request(str(i), prompt, params)
    finished = []
    while llm.has_unfinished_requests():
        finished += llm.step()
    seconds = time.perf_counter() - began
    assert sum(len(o.outputs[0].logprobs) for o in finished) == num * tokens
    return seconds
