"""Rows of preferences: a prompt and two outputs, of which one is preferred.

    TRL      {"prompt", "chosen", "rejected", "tools"?}: texts or message lists
             {"chosen", "rejected"}: what both begin with is the prompt
    OpenAI   {"input": {"messages", "tools"?}, "preferred_output", "non_preferred_output"}

Of chats the assistant's messages behind the prompt are compared, of texts all of it. Outputs that
begin with the prompt's messages have it once. Other columns are read, refused or ignored as in
other formats, and a prompt of another name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pcg.errors import DataError
from pcg.runtime.data.formats import (
    OF_CHATS,
    PROMPTS,
    Sample,
    TextSample,
    chat_sample,
    check_columns,
)
from pcg.runtime.text.chat_messages import check_messages, kind_of
from pcg.units import shown

Pair = tuple[Sample, Sample]
"""The preferred sample, and the other one."""
_OPENAI = ("preferred_output", "non_preferred_output")
_TRL = ("chosen", "rejected")

_KNOWN = (
    "'chosen' and 'rejected' with or without 'prompt', or 'input', 'preferred_output' and "
    "'non_preferred_output'"
)


def parse_pair(value: Any, where: str) -> Pair:
    """Return the two samples of a row.

    Raises:
        DataError: the row has another form, a wrong type, or outputs that do not differ.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: the row is {kind_of(value)}; expected an object with {_KNOWN}")
    by_openai = any(value.get(key) is not None for key in _OPENAI)
    if by_openai and value.get("chosen") is None:
        return _openai(value, where)
    for key in _TRL:
        if key not in value:
            have = ", ".join(map(repr, value)) or "no keys"
            raise DataError(f"{where}: missing key {key!r} (has {have}); use {_KNOWN}")
    return _trl(value, where)


def _openai(row: Mapping[str, Any], where: str) -> Pair:
    check_columns(row, _OPENAI, where, "preference")
    for key in ("input", *_OPENAI):
        if key not in row:
            raise DataError(f"{where}: missing key {key!r}; use {_KNOWN}")
    given = row["input"]
    if not isinstance(given, Mapping) or "messages" not in given:
        raise DataError(f"{where}: 'input' is {kind_of(given)}; expected an object with 'messages'")
    before = _messages(given["messages"], "'input.messages'", where)
    outputs = []
    for key in _OPENAI:
        output = _messages(row[key], repr(key), where)
        for index, message in enumerate(output):
            if message["role"] not in ("assistant", "tool"):
                raise DataError(
                    f"{where}: {key!r}[{index}] is from {message['role']!r}; an output has "
                    "messages from assistant and tool"
                )
        outputs.append(output)
    return _chats(before, outputs, given, where)


def _trl(row: Mapping[str, Any], where: str) -> Pair:
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        # As of UltraFeedback: the outputs are whole chats, which ask the prompt.
        both = chosen[: _alike(chosen, rejected)]
        if any(isinstance(one, Mapping) and one.get("content") == prompt for one in both):
            prompt = None
    kinds = {type(one) for one in (chosen, rejected, *(() if prompt is None else (prompt,)))}
    if kinds not in ({str}, {list}):
        named = ", ".join(
            f"{key!r} is {kind_of(row[key])}" for key in ("prompt", "chosen", "rejected")
            if row.get(key) is not None
        )  # fmt: skip
        raise DataError(f"{where}: {named}; give texts, or lists of messages")
    of_chats = () if isinstance(chosen, str) else OF_CHATS
    check_columns(row, (*_TRL, *of_chats), where, "preference")
    if isinstance(chosen, str):
        if prompt is None:
            start = _alike(chosen, rejected)
            start -= start > 0 and chosen[start - 1] == " "  # which tokens begin with
            prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
            _check_prompt(row, prompt, where)
        _check_differ(chosen, rejected, where)
        return TextSample(prompt, chosen), TextSample(prompt, rejected)
    before = [] if prompt is None else _messages(prompt, "'prompt'", where)
    outputs = [
        _messages(one, repr(key), where) for key, one in zip(_TRL, (chosen, rejected), strict=True)
    ]
    if prompt is None:
        before = outputs[0][: _alike(*outputs)]
        _check_prompt(row, before, where)
    if before and all(output[: len(before)] == before for output in outputs):
        outputs = [output[len(before) :] for output in outputs]
    return _chats(before, outputs, row, where)


def _check_prompt(row: Mapping[str, Any], prompt: Any, where: str) -> None:
    """Refuse a row whose outputs do not begin with the prompt that another column has."""
    for name in PROMPTS:
        given = row.get(name)
        has_it = bool(prompt) if not isinstance(prompt, str) else str(given) in prompt
        if given and given != row["chosen"] and not has_it:
            raise DataError(
                f"{where} has {name!r} ({shown(given)}), which its outputs do not begin with, and "
                "no 'prompt'; give the whole prompt as 'prompt'"
            )


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} is {kind_of(value)}; expected a list of messages")
    return check_messages(value, name, where)


def _chats(
    before: list[dict[str, Any]],
    outputs: list[list[dict[str, Any]]],
    row: Mapping[str, Any],
    where: str,
) -> Pair:
    _check_differ(outputs[0], outputs[1], where)
    # Each has messages of its own, as a sample takes weights out of them.
    made = [
        chat_sample([dict(one) for one in (*before, *output)], len(before), row, where)
        for output in outputs
    ]
    return made[0], made[1]


def _check_differ(chosen: Any, rejected: Any, where: str) -> None:
    if chosen == rejected:
        raise DataError(f"{where}: both outputs are alike, so neither is preferred; remove the row")


def _alike(one: Any, other: Any) -> int:
    """Return the number of elements that two sequences begin with alike."""
    most = min(len(one), len(other))
    return next((i for i in range(most) if one[i] != other[i]), most)
