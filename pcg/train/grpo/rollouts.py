"""Rollouts: prompts, sampled completions, and rewards of completions.

Prompts are rows of data: text, messages or tokens, with columns for the rewards. The engine that
trains also samples the completions. Rewards are functions with TRL's signature:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

A function receives all completions of a generation, and each further column of the data as a list
with a value for each completion. None means that the function does not score a completion.
Coroutine functions run concurrently.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.errors import DataError, FinetuneError
from pcg.peft.adapter import Adapter
from pcg.runtime.data.dataset import converted
from pcg.runtime.data.example import IGNORED
from pcg.runtime.data.formats import MEDIA, FormattingFunc
from pcg.runtime.data.sources import gather, read_rows
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.requests.request import Completion
from pcg.runtime.requests.stream import Stream
from pcg.runtime.text.chat import check_messages, check_variables
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.trainer.datum import Datum
from pcg.train.grpo.options import GrpoOptions
from pcg.units import is_finite, shown

RewardFunction: TypeAlias = Callable[..., Any]
OWN_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra")
"""Reserved names of columns, which are arguments of all reward functions."""
_VARIABLES = "chat_template_kwargs"
_MOST = 1e50
"""The limit of rewards and weights, so that squares of their products do not overflow."""


@dataclass(frozen=True)
class Scored:
    """Completions in the form for reward functions.

    Attributes:
        prompts: the prompt of each completion, in the data's form.
        completions: for each completion, the text, or a list with an assistant's message.
        completion_ids: the tokens of each completion.
        columns: the values of the data's other columns, for each completion.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def arguments(self) -> dict[str, Any]:
        """Return copies of the lists, which a function may change."""
        return {
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "completion_ids": [list(ids) for ids in self.completion_ids],
            **{name: list(values) for name, values in self.columns.items()},
        }


class Rewards:
    """Reward functions with their weights.

    Attributes:
        weights: the weight of each function, [functions], fp64.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
    ) -> None:
        """Check functions and weights. FinetuneError: no functions, or unsuitable weights."""
        listed = [functions] if callable(functions) else functions
        if not isinstance(listed, list | tuple) or not listed or not all(map(callable, listed)):
            raise FinetuneError(f"rewards={shown(functions)}; give a function, or a list of them")
        scales = [1.0] * len(listed) if weights is None else weights
        if not (
            isinstance(scales, list | tuple)
            and len(scales) == len(listed)
            and all(map(_is_moderate, scales))
        ):
            raise FinetuneError(
                f"reward_weights={shown(weights)}; give a number, from "
                f"-{_MOST:g} to {_MOST:g}, for each of the {len(listed)} reward functions"
            )
        self._functions = list(listed)
        self.names = _names(self._functions)
        self.weights = torch.tensor(list(map(float, scales)), dtype=torch.float64)

    def score(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        """Return the reward of each completion by each function, [completions, functions].

        Args:
            state: the value of the keyword `trainer_state`, for rewards that depend on the step.
        Raises:
            FinetuneError: a function failed, or returned a wrong type or number of values.
        """
        returned = asyncio.run(self._all(scored, state))
        columns = [
            _numbers(result_of, name, len(scored.prompts))
            for result_of, name in zip(returned, self.names, strict=True)
        ]
        return torch.tensor(columns, dtype=torch.float64).T.contiguous()

    async def _all(self, scored: Scored, state: Mapping[str, Any]) -> list[Any]:
        def called(function: RewardFunction, name: str) -> Any:
            try:
                return function(**scored.arguments(), trainer_state=dict(state))
            except Exception as error:
                raise FinetuneError(
                    f"reward function {name!r} failed: {type(error).__name__}: {error}"
                ) from error

        async def waited(result: Any, name: str) -> Any:
            try:
                return await result if inspect.isawaitable(result) else result
            except Exception as error:
                raise FinetuneError(
                    f"reward function {name!r} failed: {type(error).__name__}: {error}"
                ) from error

        results = [
            called(*result_of) for result_of in zip(self._functions, self.names, strict=True)
        ]
        return await asyncio.gather(*map(waited, results, self.names))


def _is_moderate(value: Any) -> bool:
    return is_finite(value) and abs(value) <= _MOST


def _names(functions: Sequence[RewardFunction]) -> list[str]:
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def _numbers(returned: Any, name: str, count: int) -> list[float]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != count:
        length = f"{len(values)} values" if isinstance(values, list | tuple) else shown(values)
        raise FinetuneError(
            f"reward function {name!r} returned {length} for {count} completions; return a list "
            "with a number, or None for no score, for each"
        )
    numbers = []
    for place, entry in enumerate(values):
        value = entry.item() if hasattr(entry, "item") else entry
        if isinstance(value, bool):
            value = float(value)
        is_none = value is None or (isinstance(value, float) and math.isnan(value))
        if not is_none and not _is_moderate(value):
            raise FinetuneError(
                f"reward function {name!r} returned {shown(value)} for completion {place}; return "
                f"a number from -{_MOST:g} to {_MOST:g}, or None"
            )
        numbers.append(math.nan if is_none else float(value))
    return numbers


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data.

    Attributes:
        content: the prompt in the data's form: a text, a list of messages, or tokens.
    """

    content: Any
    ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(compare=False)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], Mapping)

    @property
    def shown(self) -> str:
        return shown(self.content)

    def completion(self, text: str) -> Any:
        """Return a completion in the form for reward functions."""
        return [{"role": "assistant", "content": text}] if self.is_chat else text


def read_prompts(
    source: object,
    tokenizer: Tokenizer | None,
    options: GrpoOptions,
    formatting_func: FormattingFunc | None = None,
) -> list[Prompt]:
    """Return the prompts of a source: texts, tokens, or mappings with a "prompt" and columns.

    Args:
        source: files or rows; see `pcg.runtime.data.sources`.
        formatting_func: converts each row.
    Raises:
        DataError: a row has another type, or other columns than the first; names its place.
    """
    prompts, variables, first = list[Prompt](), options.variables(), ""
    if tokenizer is not None and (template := options.template()) is not None:
        tokenizer = replace(tokenizer, chat_template=template)
    for row in read_rows(gather(source, columns=options.columns)):
        value = converted(row.value, row.where, options.columns, formatting_func)
        prompts.append(_prompt(value, row.where, tokenizer, variables))
        first = first or row.where
        names, columns = sorted(prompts[0].columns), sorted(prompts[-1].columns)
        if columns != names:
            raise DataError(
                f"{row.where} has the columns {columns}, and {first} {names}; use the same"
            )
    if not prompts:
        raise DataError("the data has no rows; give at least one with a 'prompt'")
    return prompts


def _prompt(
    row: object, place: str, tokenizer: Tokenizer | None, variables: Mapping[str, Any]
) -> Prompt:
    columns = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    if "prompt" not in columns:
        have = shown(sorted(map(str, columns)))
        raise DataError(f"{place} has no 'prompt', but {have}; give columns prompt=NAME")
    prompt = columns.pop("prompt")
    columns = {str(name): value for name, value in columns.items()}
    columns = {name: token for name, token in columns.items() if name not in _DROPPED}
    for name in columns:
        if name in OWN_COLUMNS:
            raise DataError(f"{place} has a column {name!r}, a reserved name; rename it")
        if name in MEDIA and columns[name]:
            raise DataError(
                f"{place} has {name!r}, but prompts can only contain text; leave "
                "such rows out, or rename a column that only rewards use"
            )
    of_row = check_variables(columns.get(_VARIABLES) or {}, f"{place}: {_VARIABLES!r}")
    return Prompt(prompt, _ids(prompt, place, tokenizer, {**variables, **of_row}), columns)


def _ids(
    prompt: object, place: str, tokenizer: Tokenizer | None, variables: Mapping[str, Any]
) -> tuple[int, ...]:
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and prompt:
        if all(isinstance(value, int) and not isinstance(value, bool) for value in prompt):
            return tuple(prompt)
        messages = check_messages(prompt, "'prompt'", place)
        if tokenizer is None or tokenizer.chat_template is None:
            raise DataError(f"{place} is a chat, and the model has no chat template; give texts")
        return tuple(tokenizer.encode_chat(messages, **variables))
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{place}: the prompt is {shown(prompt)}; give a text, messages or tokens")
    if tokenizer is None:
        raise DataError(f"{place} is a text, and the model has no tokenizer; give tokens")
    return tuple(tokenizer.encode(prompt))


_DROPPED = ("completion", "completion_ids")
"""Ignored columns: rewards receive the values of rollouts instead, as in TRL."""


def in_order(prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> Iterator[Prompt]:
    """Yield the prompts in endless epochs; `shuffle` changes the order in each epoch."""
    draw = random.Random(seed)
    while True:
        order = list(prompts)
        if shuffle:
            draw.shuffle(order)
        yield from order


@dataclass(frozen=True)
class Rollout:
    """A sampled completion.

    Attributes:
        prompt: the prompt, common to all completions of the group.
        prompt_ids: the prompt's tokens.
        tokens: the completion's tokens, including the end token.
        text: the completion's text.
        logprobs: the log-probability of each token at the time of sampling.
        has_ended: False for a completion truncated at the maximum length.
        counts: False for a completion excluded from the loss.
        advantage: the advantage; 0 before scoring.
        reference: the log-probability of each token by the reference, or None.
        routed_experts: the experts of each token but the last one, with a router replay.
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
    routed_experts: Tensor | None = field(default=None, compare=False)

    @property
    def datum(self) -> Datum:
        """The prompt with the completion, whose tokens are the targets."""
        ids = [*self.prompt_ids, *self.tokens]
        targets = [*[IGNORED] * (len(self.prompt_ids) - 1), *self.tokens]
        return Datum(ids[:-1], targets, routed_experts=self.routed_experts)


@dataclass(frozen=True)
class Generation:
    """Completions that are sampled together.

    Attributes:
        updates: the adapter's number of updates at the time of submission.
    """

    number: int
    prompts: Sequence[Prompt]
    streams: Sequence[Stream]
    updates: int

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    def wait(self, masks_truncated: bool) -> list[Rollout]:
        """Wait for all completions; completions of a group are adjacent."""
        rollouts = []
        for prompt, stream in zip(self.prompts, self.streams, strict=True):
            rollouts += [
                _rollout(prompt, completion, masks_truncated) for completion in stream.wait_all()
            ]
        return rollouts


def generate(
    running: AsyncEngine,
    adapter: Adapter | None,
    number: int,
    prompts: Sequence[Prompt],
    options: GrpoOptions,
    updates: int,
) -> Generation:
    """Submit a generation: for each prompt, a request that samples a group.

    Args:
        adapter: the version for sampling; None for the base.
    """
    fields = options.sampling()
    streams: list[Stream] = []
    first = (options.seed * _SEEDS + number * len(prompts)) * options.num_generations
    try:
        for place, prompt in enumerate(prompts):
            seed = (first + place * options.num_generations) % _MOST_SEED
            # Pass the adapter object: its name may refer to a later version.
            streams.append(running.submit(prompt.ids, adapter, seed=seed, **fields))  # type: ignore[arg-type]
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return Generation(number, prompts, streams, updates)


def greedy_rollouts(
    running: AsyncEngine, adapter: Adapter, prompts: Sequence[Prompt], options: GrpoOptions
) -> list[Rollout]:
    """Return the greedy completion of each prompt."""
    greedy = {"n": 1, "temperature": 0.0, "top_p": None, "top_k": None, "min_p": None}
    fields = options.sampling() | greedy | {"routed_experts": False}
    streams = [running.submit(prompt.ids, adapter, **fields) for prompt in prompts]  # type: ignore[arg-type]
    return Generation(0, prompts, streams, 0).wait(masks_truncated=False)


_SEEDS = 1_000_003
_MOST_SEED = 2**62


def _rollout(prompt: Prompt, completion: Completion, masks_truncated: bool) -> Rollout:
    if completion.finish_reason not in ("stop", "length") or not completion.token_ids:
        raise FinetuneError(
            f"a completion of the prompt {prompt.shown} ended as {completion.finish_reason!r} with "
            f"{len(completion.token_ids)} tokens; rollouts need whole ones"
        )
    assert completion.logprobs is not None
    has_ended = completion.finish_reason == "stop"
    return Rollout(
        prompt,
        prompt.ids,
        completion.token_ids,
        completion.text,
        tuple(logprob.logprob for logprob in completion.logprobs),
        has_ended,
        has_ended or not masks_truncated,
        routed_experts=completion.routed_experts,
    )


def with_reference(
    running: AsyncEngine, adapter: Adapter | None, rollouts: Sequence[Rollout]
) -> list[Rollout]:
    """Return rollouts with the log-probabilities of their tokens by a reference.

    Args:
        adapter: the reference: a version of an adapter, or None for the base.
    """
    streams = [
        running.submit(
            [*rollout.prompt_ids, *rollout.tokens],
            adapter,  # type: ignore[arg-type]
            max_new_tokens=0,
            prompt_logprobs=0,
        )
        for rollout in rollouts
    ]
    scored_rollouts = []
    for rollout, stream in zip(rollouts, streams, strict=True):
        scores = stream.wait().prompt_logprobs
        assert scores is not None
        values = tuple(
            score.logprob for score in scores[-len(rollout.tokens) :] if score is not None
        )
        scored_rollouts.append(replace(rollout, reference=values))
    return scored_rollouts


def tokens_of(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens that count in the loss."""
    return sum(len(rollout.tokens) for rollout in rollouts if rollout.counts)


def columns_of(rollouts: Sequence[Rollout]) -> Mapping[str, list[object]]:
    """Return the further columns of the data, with a value for each rollout."""
    names = rollouts[0].prompt.columns
    return {name: [rollout.prompt.columns[name] for rollout in rollouts] for name in names}
