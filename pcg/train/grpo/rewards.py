"""Rewards: functions with TRL's signature that score completions, and their weights.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

A function gets all completions of a generation at once, and each further column of the data as a
list with a value for each completion. None says that it does not score a completion. A coroutine
function runs together with the others of its kind.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.units import is_finite, shown

RewardFunction: TypeAlias = Callable[..., Any]
OWN_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra")
"""Names that a column of the data cannot have, as functions get them anyway."""
_MOST = 1e50
"""The greatest reward and weight: floats hold the squares of their products."""


@dataclass(frozen=True)
class Scored:
    """Completions as reward functions see them.

    Attributes:
        prompts: the prompt of each completion, as the data has it.
        completions: its text, or a list with one message of the assistant.
        completion_ids: its tokens.
        columns: the values of the data's other columns, for each completion.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]

    def arguments(self) -> dict[str, Any]:
        """Return new lists, which a function may change."""
        return {
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "completion_ids": [list(ids) for ids in self.completion_ids],
            **{name: list(values) for name, values in self.columns.items()},
        }


class Rewards:
    """Reward functions with their weights.

    Attributes:
        names: the name of each function; equal ones are numbered.
        weights: the weight of each, [functions], fp64.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
    ) -> None:
        """Check functions and weights. FinetuneError: there are none, or they do not fit."""
        found = [functions] if callable(functions) else functions
        if not isinstance(found, list | tuple) or not found or not all(map(callable, found)):
            raise FinetuneError(f"rewards={shown(functions)}; give a function, or a list of them")
        given = [1.0] * len(found) if weights is None else weights
        if not (
            isinstance(given, list | tuple)
            and len(given) == len(found)
            and all(map(_is_moderate, given))
        ):
            raise FinetuneError(
                f"reward_weights={shown(weights)}; give a number, from "
                f"-{_MOST:g} to {_MOST:g}, for each of the {len(found)} reward functions"
            )
        self._functions = list(found)
        self.names = _names(self._functions)
        self.weights = torch.tensor([float(one) for one in given], dtype=torch.float64)

    def score(self, scored: Scored, state: Mapping[str, Any]) -> Tensor:
        """Return the reward of each completion by each function, [completions, functions].

        Args:
            state: the keyword `trainer_state`, for rewards that change with the step.
        Raises:
            FinetuneError: a function failed, or returned something else.
        """
        found = asyncio.run(self._all(scored, state))
        columns = [
            _numbers(one, name, len(scored.prompts))
            for one, name in zip(found, self.names, strict=True)
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

        results = [called(*one) for one in zip(self._functions, self.names, strict=True)]
        return await asyncio.gather(*map(waited, results, self.names))


def _is_moderate(value: Any) -> bool:
    return is_finite(value) and abs(value) <= _MOST


def _names(functions: Sequence[RewardFunction]) -> list[str]:
    names = [getattr(one, "__name__", type(one).__name__) for one in functions]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def _numbers(found: Any, name: str, count: int) -> list[float]:
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != count:
        length = f"{len(values)} values" if isinstance(values, list | tuple) else shown(values)
        raise FinetuneError(
            f"reward function {name!r} returned {length} for {count} completions; return a list "
            "with a number for each, or None for one that it does not score"
        )
    numbers = []
    for place, one in enumerate(values):
        value = one.item() if hasattr(one, "item") else one
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
