"""Rollouts: completions of prompts, sampled by the engine that trains, with their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pcg.errors import FinetuneError
from pcg.peft.adapter import Adapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.requests.request import Completion
from pcg.runtime.requests.stream import Stream
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.prompts import Prompt


@dataclass(frozen=True)
class Rollout:
    """A completion that was sampled.

    Attributes:
        prompt: the prompt, of which the group has several completions.
        prompt_ids: its tokens.
        tokens: the completion's, the end token included.
        text: its text.
        logprobs: the log-probability of each token when it was sampled.
        has_ended: False if it was cut off at the most tokens.
        counts: False if it is left out of the loss.
        advantage: its advantage; 0 before rewards are known.
        reference: the log-probability of each token by the reference; None without one.
    """

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    has_ended: bool
    counts: bool
    advantage: float = 0.0
    reference: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Generation:
    """Completions that are sampled together, as far as they have come.

    Attributes:
        number: its place among the generations.
        prompts: the prompts of its groups.
        streams: the request of each group.
        updates: the updates that the adapter had when they were submitted.
    """

    number: int
    prompts: Sequence[Prompt]
    streams: Sequence[Stream]
    updates: int

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    def wait(self, masks_truncated: bool) -> list[Rollout]:
        """Wait for all completions, those of a group one after the other."""
        found = []
        for prompt, stream in zip(self.prompts, self.streams, strict=True):
            found += [_rollout(prompt, one, masks_truncated) for one in stream.wait_all()]
        return found


def generate(
    running: AsyncEngine,
    adapter: Adapter | None,
    number: int,
    prompts: Sequence[Prompt],
    options: GrpoOptions,
    updates: int,
) -> Generation:
    """Submit a generation: a request for each prompt, which samples its group.

    Args:
        adapter: the version that samples; None for the base.
        number: its place among the generations, by which seeds differ.
        updates: the updates that the version has had.
    """
    fields = options.sampling()
    streams: list[Stream] = []
    first = (options.seed * _SEEDS + number * len(prompts)) * options.num_generations
    try:
        for place, prompt in enumerate(prompts):
            seed = (first + place * options.num_generations) % _MOST_SEED
            # A fresh adapter and the trained one are both `adapter`, a version of its own each.
            streams.append(running.submit(prompt.ids, adapter, seed=seed, **fields))  # type: ignore[arg-type]
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return Generation(number, prompts, streams, updates)


_SEEDS = 1_000_003
_MOST_SEED = 2**62


def _rollout(prompt: Prompt, done: Completion, masks_truncated: bool) -> Rollout:
    if done.finish_reason not in ("stop", "length") or not done.token_ids:
        raise FinetuneError(
            f"a completion of the prompt {prompt.shown} ended as {done.finish_reason!r} with "
            f"{len(done.token_ids)} tokens; rollouts need whole ones"
        )
    assert done.logprobs is not None
    has_ended = done.finish_reason == "stop"
    return Rollout(
        prompt,
        prompt.ids,
        done.token_ids,
        done.text,
        tuple(one.logprob for one in done.logprobs),
        has_ended,
        has_ended or not masks_truncated,
    )


def with_reference(
    running: AsyncEngine, adapter: Adapter | None, rollouts: Sequence[Rollout]
) -> list[Rollout]:
    """Have rollouts know the log-probabilities of their tokens by a reference.

    Args:
        adapter: the reference: a version of an adapter, or None for the base.
    """
    streams = [
        running.submit(
            [*one.prompt_ids, *one.tokens],
            adapter,  # type: ignore[arg-type]
            max_new_tokens=0,
            prompt_logprobs=0,
        )
        for one in rollouts
    ]
    found = []
    for one, stream in zip(rollouts, streams, strict=True):
        scores = stream.wait().prompt_logprobs
        assert scores is not None
        values = tuple(score.logprob for score in scores[-len(one.tokens) :] if score is not None)
        found.append(replace(one, reference=values))
    return found


def tokens_of(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens that count in the loss."""
    return sum(len(one.tokens) for one in rollouts if one.counts)


def columns_of(rollouts: Sequence[Rollout]) -> Mapping[str, list[object]]:
    """Return the columns of the data beside the prompts, a value for each rollout."""
    names = rollouts[0].prompt.columns
    return {name: [one.prompt.columns[name] for one in rollouts] for name in names}
