"""The output of `pcg run`: prompts and their continuations, whole or as they are made."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from .options.console import out

if TYPE_CHECKING:
    from pcg.runtime.requests.request import Chunk, Completion
    from pcg.runtime.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Prompt:
    """One prompt, and the adapter to continue it with; None is the base."""

    text: str
    adapter: str | None


def wait_completions(chunks: Iterator[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """Gather the completions."""
    done = {chunk.index: chunk.completion for chunk in chunks if chunk.completion is not None}
    return [done[index] for index in range(len(prompts))]


def print_completions(chunks: Iterator[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """Print the completions when all are done."""
    done = wait_completions(chunks, prompts)
    for index, completion in enumerate(done):
        _head(prompts, index)
        _text(f"{completion.text}\n")
    return done


def stream_completions(chunks: Iterator[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """Print the first completion that is not done as it is made; the others wait for their turn."""
    waiting: list[list[str]] = [[] for _ in prompts]
    done: dict[int, Completion] = {}
    current = 0
    for count, chunk in enumerate(chunks):
        if not count:  # not before it is known that the prompts can be continued
            _head(prompts, current)
        waiting[chunk.index].append(chunk.text)
        if chunk.completion is not None:
            done[chunk.index] = chunk.completion
        while current < len(prompts):
            _text("".join(waiting[current]))
            waiting[current].clear()
            if current not in done:
                break
            _text("\n")
            current += 1
            if current < len(prompts):
                _head(prompts, current)
    return [done[index] for index in range(len(prompts))]


def _head(prompts: Sequence[Prompt], index: int) -> None:
    """The prompt, dim, below a line that says whose it is where there are several."""
    prompt = prompts[index]
    console = out()
    if len(prompts) > 1:
        if index:
            console.print()
        console.print(f"── {index + 1} · {prompt.adapter or 'base'} ──", style="bold cyan")
    typer.secho(prompt.text, dim=True, nl=False)  # rich would expand tabs


def _text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _logprobs(name: str, found: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
    """The logprobs of tokens as JSON, if they were asked for; null for those that cannot come."""
    if found is None:
        return {}
    return {name: [None if one is None else _as_json(one) for one in found]}


def _as_json(one: TokenLogprobs) -> dict[str, Any]:
    top = [(token, None if math.isinf(logprob) else logprob) for token, logprob in one.top]
    return {**asdict(one), "top": top}


def summary_of(
    model: str, prompts: Sequence[Prompt], done: list[Completion], seconds: float
) -> dict[str, Any]:
    """The completions as JSON, in the order of the prompts."""
    tokens = sum(len(completion.token_ids) for completion in done)
    return {
        "model": model,
        "completions": [
            {
                "prompt": prompt.text,
                "adapter": prompt.adapter,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "prompt_tokens": completion.prompt_tokens,
                "index": completion.index,
                **_logprobs("logprobs", completion.logprobs),
                **_logprobs("prompt_logprobs", completion.prompt_logprobs),
            }
            for prompt, completion in zip(prompts, done, strict=True)
        ],
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
    }
