"""Calls that all ranks of a group make alike, with the same arguments.

Ranks that are asked for different things wait for messages that nobody sends, or add up numbers
that do not belong together. So each call begins with one message of every rank: which call it is,
a SHA-256 of what was given, and an error if the rank could not begin. These are of one size for all
calls, so that two different calls meet, too. Where they differ, all ranks raise what differs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pcg.errors import ParallelError
from pcg.ranks.group import Ranks

Result = TypeVar("Result")

_FORM = struct.Struct("<32sq?160s280s")
_SHOWN = 48
"""Length of a text that an error shows, such as a number or the name of a device's sheet."""
_MOST = 8
"""The most differences of a rank that are named."""
FIX = "Give all ranks the same arguments, or make the calls of one rank on all of them"


@dataclass(frozen=True)
class _Word:
    """The message of a rank that begins a call.

    `size` is that of the record of its facts, which is sent only if their digests differ.
    """

    digest: bytes
    size: int
    has_failed: bool
    call: str
    error: str

    @property
    def record(self) -> bytes:
        call, error = (_cut(text, most) for text, most in ((self.call, 160), (self.error, 280)))
        return _FORM.pack(self.digest, self.size, self.has_failed, call, error)

    @classmethod
    def of(cls, record: bytes) -> _Word:
        digest, size, has_failed, call, error = _FORM.unpack(record)
        texts = (each.rstrip(b"\0").decode(errors="replace") for each in (call, error))
        return cls(digest, size, has_failed, *texts)


def _cut(text: str, most: int) -> bytes:
    encoded = text.encode("utf-8", "backslashreplace")
    return encoded if len(encoded) <= most else encoded[: most - 3] + b"..."


def check_same(ranks: Ranks, call: str, facts: Mapping[str, str], fix: str = FIX) -> None:
    """Refuse to go on where ranks make different calls, or differ in texts that have to be equal.

    Args:
        call: the call in words, as `logits`.
        facts: the texts, by the names of what they describe.
        fix: the end of the message.
    Raises:
        ParallelError: on every rank; names those that differ from the first, and in what.
    """
    agreed(ranks, call, lambda: None, lambda _: facts, fix)


def check_call(ranks: Ranks, call: str) -> None:
    """Refuse to go on where ranks make different calls.

    Raises:
        ParallelError: on every rank; says what each of them calls.
    """
    agreed(ranks, call, lambda: None)


def agreed(
    ranks: Ranks,
    call: str,
    act: Callable[[], Result],
    facts_of: Callable[[Result], Mapping[str, str]] = lambda _: {},
    fix: str = FIX,
) -> Result:
    """Do something on all ranks that gives all the same, such as reading a file; return it.

    Args:
        call: the call in words.
        act: what each rank does, without messages to others.
        facts_of: texts of the result that have to be equal, by the names of what they describe.
        fix: the end of the message.
    Raises:
        Exception: what `act` raised on this rank.
        ParallelError: on every rank: another one failed, makes another call, or has another
            result; it is named, and what differs.
    """
    if ranks.size == 1:
        return act()
    try:
        result = act()
        facts = _record(facts_of(result))
        own = _Word(hashlib.sha256(facts).digest(), len(facts), False, call, "")
    except Exception as error:
        failed = _Word(bytes(32), 0, True, call, f"{type(error).__name__}: {error}")
        _check_calls([_Word.of(one) for one in ranks.tell(failed.record)])
        raise
    words = [_Word.of(one) for one in ranks.tell(own.record)]
    _check_calls(words)
    _check_failures(words, call)
    if any(word.digest != words[0].digest for word in words):
        longest = max(word.size for word in words)
        told = ranks.tell(facts.ljust(longest))
        _refuse(call, [json.loads(each) for each in told], fix)
    return result


def _check_calls(words: Sequence[_Word]) -> None:
    if any(word.call != words[0].call for word in words):
        calls = ", ".join(f"rank {rank} {word.call}" for rank, word in enumerate(words))
        raise ParallelError(
            f"{len(words)} ranks have to make the same calls in the same order, and now call: "
            f"{calls}. {FIX}"
        )


def _check_failures(words: Sequence[_Word], call: str) -> None:
    for rank, word in enumerate(words):
        if word.has_failed:
            raise ParallelError(
                f"rank {rank} of {len(words)} could not do its part of {call}: {word.error}"
            )


def _record(facts: Mapping[str, str]) -> bytes:
    """The SHA-256 of each text by its name, and the text itself where it is short."""
    entries = {
        name: [hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest(), _shown(text)]
        for name, text in facts.items()
    }
    return json.dumps(entries).encode()


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN and text.isprintable() else ""


def compare(call: str, facts: Sequence[Mapping[str, str]], fix: str = FIX) -> None:
    """Refuse the facts of ranks that are known to all of them, unless they are equal.

    Raises:
        ParallelError: as of `check_same`.
    """
    if any(one != facts[0] for one in facts):
        _refuse(call, [json.loads(_record(one)) for one in facts], fix)


def _refuse(call: str, records: Sequence[Mapping[str, Sequence[str]]], fix: str) -> None:
    first = records[0]
    words = []
    for rank, other in enumerate(records):
        names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        if names:
            listed = ", ".join(_difference(n, first.get(n), other.get(n)) for n in names[:_MOST])
            more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
            words.append(f"rank {rank} in {listed}{more}")
    raise ParallelError(
        f"{len(records)} ranks have to agree on {call}, and some differ from rank 0: "
        f"{'; '.join(words)}. {fix}"
    )


def _difference(name: str, first: Sequence[str] | None, other: Sequence[str] | None) -> str:
    if first is None or other is None:
        return f"{name} ({'none' if other is None else 'which rank 0 has not'})"
    return f"{name} ({other[1]}, not {first[1]})" if first[1] and other[1] else name
