"""Sampling parameters: how a request's tokens are chosen, and when they end."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pcg.errors import GenerationError
from pcg.keywords import check_names


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords: a value, or a list with one for each prompt."""

    temperature: float | list[float]
    top_k: int | list[int | None] | None
    top_p: float | list[float | None] | None
    min_p: float | list[float | None] | None
    repetition_penalty: float | list[float]
    seed: int | list[int | None] | None
    max_new_tokens: int | list[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool | list[bool]
    logprobs: int | list[int | None] | None
    prompt_logprobs: int | list[int | None] | None
    echo: bool | list[bool]


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one request's tokens: how they are chosen, and when they end.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the most likely tokens up to this probability, in (0, 1]; None keeps all.
        min_p: keep tokens at least this likely relative to the most likely one; None keeps all.
        repetition_penalty: above 1 discourages the tokens of the prompt and of the output so far;
            from 0.01 to 100.
        seed: seed of the request's generator; None takes one from the system.
        max_new_tokens: the most tokens to generate; 0 to compute the prompt alone.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: return the log-probability of each generated token, and so many of the likeliest
            ones in its place; 0 for the token's alone, None for none. An engine's limits bound it.
        prompt_logprobs: return the same of each token of the prompt but the first.
        echo: begin the text with the prompt's; with `logprobs`, prompt_logprobs is as many by
            default.
    Raises:
        GenerationError: a value is out of its range or of the wrong type.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.top_k is not None:
            _require_int("top_k", self.top_k, 1, hint="; None keeps all tokens")
        if self.top_p is not None:
            _require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.min_p is not None:
            _require_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**63 - 1)
        _require_int("max_new_tokens", self.max_new_tokens, 0)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise GenerationError(
                f"stop={self.stop!r}; use a tuple of strings that are not empty, as in ('\\n\\n',)"
            )
        if not isinstance(self.stop_token_ids, tuple):
            raise GenerationError(f"stop_token_ids={self.stop_token_ids!r}; use a tuple of ints")
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0)
        for name in ("ignore_eos", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise GenerationError(f"{name}={getattr(self, name)!r}; use True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 0, hint="; None returns none")

    @classmethod
    def of(cls, options: Mapping[str, Any], index: int = 0, count: int = 1) -> "SamplingParams":
        """Return the parameters of one prompt of several.

        Args:
            options: fields by name; a list with a value for each prompt gives each its own, and
                prompt i of several samples with seed + i.
        Raises:
            GenerationError: there is no such field, or a value is out of its range.
        """
        check_names(options, [field.name for field in dataclasses.fields(cls)], GenerationError)
        mine = {}
        for name, value in options.items():
            per_prompt = isinstance(value, list) and len(value) == count and name not in _LISTS
            mine[name] = value[index] if per_prompt else value
        if isinstance(mine.get("stop"), str):
            mine["stop"] = (mine["stop"],)
        for name in _LISTS:
            if isinstance(mine.get(name), list):
                mine[name] = tuple(mine[name])
        if mine.get("seed") is not None and not isinstance(options["seed"], list):
            mine["seed"] += index
        return cls(**mine)

    @property
    def of_prompt(self) -> int | None:
        """How many of the likeliest tokens to return for each of the prompt; None for nothing."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_LISTS = ("stop", "stop_token_ids")


def _require_number(
    name: str, value: object, low: float, high: float, open_low: bool = False
) -> None:
    """Refuse a value that is not a finite number in [low, high], or (low, high] with `open_low`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        above = low < value if open_low else low <= value
        if above and value <= high and math.isfinite(value):
            return
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    raise GenerationError(f"{name}={value!r}; use a finite number in {interval}")


def _require_int(
    name: str, value: object, low: int, high: int | None = None, hint: str = ""
) -> None:
    """Refuse a value that is not an int from `low` to `high`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and value >= low and (high is None or value <= high):  # type: ignore[operator]
        return
    most = "" if high is None else f" and at most {high}"
    raise GenerationError(f"{name}={value!r}; use an int of at least {low}{most}{hint}")
