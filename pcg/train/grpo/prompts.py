"""Prompts: rows of data, each a text, messages or tokens with columns for the rewards."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcg.errors import DataError
from pcg.runtime.data.formats import MEDIA
from pcg.runtime.text.chat import check_messages
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.train.grpo.rewards import OWN_COLUMNS
from pcg.units import shown


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data.

    Attributes:
        given: as the data has it: a text, a list of messages, or tokens.
        ids: its tokens.
        columns: the row's other values, by name.
    """

    given: Any
    ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(compare=False)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.given, list) and isinstance(self.given[0], Mapping)

    @property
    def shown(self) -> str:
        return shown(self.given)

    def completion(self, text: str) -> Any:
        """Return a completion as reward functions get it."""
        return [{"role": "assistant", "content": text}] if self.is_chat else text


def read_prompts(rows: object, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Return the prompts of rows, which are texts, or mappings with a "prompt" and columns.

    Raises:
        DataError: a row is something else, or has not the columns of the first; it is named by its
            place.
    """
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise DataError(f"the data is {shown(rows)}; give a list of rows with a 'prompt' each")
    found = [_prompt(row, f"row {place}", tokenizer) for place, row in enumerate(rows)]
    if not found:
        raise DataError("the data has no rows; give at least one with a 'prompt'")
    for place, one in enumerate(found):
        if set(one.columns) != set(found[0].columns):
            first, own = sorted(found[0].columns), sorted(one.columns)
            raise DataError(f"row {place} has the columns {own}, and row 0 {first}; use the same")
    return found


def _prompt(row: object, place: str, tokenizer: Tokenizer | None) -> Prompt:
    columns = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    if "prompt" not in columns:
        raise DataError(f"{place} has no 'prompt', but {shown(sorted(map(str, columns)))}")
    given = columns.pop("prompt")
    columns = {str(name): value for name, value in columns.items()}
    columns = {name: one for name, one in columns.items() if name not in _DROPPED}
    for name in columns:
        if name in OWN_COLUMNS:
            raise DataError(f"{place} has a column {name!r}, which rewards get anyway; rename it")
        if name in MEDIA and columns[name]:
            raise DataError(
                f"{place} has {name!r}, which would not be in the prompt, as only text is; leave "
                "such rows out, or rename a column that is for rewards alone"
            )
    return Prompt(given, _ids(given, place, tokenizer), columns)


def _ids(given: object, place: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(given, Sequence) and not isinstance(given, str | bytes) and given:
        if all(isinstance(one, int) and not isinstance(one, bool) for one in given):
            return tuple(given)
        messages = check_messages(given, "'prompt'", place)
        if tokenizer is None or tokenizer.chat_template is None:
            raise DataError(f"{place} is a chat, and the model has no chat template; give texts")
        return tuple(tokenizer.encode_chat(messages))
    if not isinstance(given, str) or not given:
        raise DataError(f"{place}: the prompt is {shown(given)}; give a text, messages or tokens")
    if tokenizer is None:
        raise DataError(f"{place} is a text, and the model has no tokenizer; give tokens")
    return tuple(tokenizer.encode(given))


_DROPPED = ("completion", "completion_ids")
"""Columns that rewards get of rollouts instead, as in TRL."""


def in_order(prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> Iterator[Prompt]:
    """Return the prompts again and again; with `shuffle` in a new order each time."""
    draw = random.Random(seed)
    while True:
        order = list(prompts)
        if shuffle:
            draw.shuffle(order)
        yield from order
