"""Agreement of all ranks of a group: the same calls, the same arguments, the same program.

Ranks with different calls wait for messages that nobody sends, or add up numbers
that do not belong together. So each call starts with a message of every rank: the call's name, a
SHA-256 of its arguments, and an error if the rank could not start. These have the same size for all
calls, so that two different calls meet, too. Where they differ, all ranks raise an error that names
the difference.

Each rank compiles by itself, from its device's sheet and its files, by its libraries. Where those
differ, so may the plans; `check_same_program` refuses that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from torch import Tensor

from pcg.errors import ParallelError
from pcg.ir.printer import print_graphs
from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.ranks.group import Ranks
from pcg.version import __version__


def described(value: object) -> str:
    """Return a text of a value: equal on two ranks if the values mean the same.

    Plain values have their repr, dataclasses their fields, tensors a digest. An object of another
    kind, such as a callback or a policy, is described by its type and its plain attributes.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} {tensor_digest(value)}"
    if isinstance(value, Mapping):
        pairs = sorted((described(key), described(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(described, value))}]"
    return _described_object(value)


def _described_object(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return f"{name}({described(fields_of(value))})"
    plain = (bool, int, float, str, Enum, type(None))
    kept: Mapping[str, object] = getattr(value, "__dict__", {})
    return f"{name}({described({k: each for k, each in kept.items() if isinstance(each, plain)})})"


def fields_of(value: Any, leave: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass by their names, without those of `leave`."""
    names = (each.name for each in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if name not in leave}


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def tokens_digest(sequences: Iterable[Sequence[int]]) -> str:
    """Return the SHA-256 of sequences of token ids, in hexadecimal."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.hexdigest()


Result = TypeVar("Result")

_FORM = struct.Struct("<32sq?160s280s")
_SHOWN = 48
"""Length of a text that an error shows, such as a number or the name of a device's sheet."""
_MOST = 8
"""The most differences of a rank that are named."""
FIX = "Give all ranks the same arguments, or make the calls of one rank on all of them"


@dataclass(frozen=True)
class _Word:
    """The message of a rank that starts a call.

    `size` is that of the record of its facts, which is sent only if digests differ.
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
    """Raise an error on all ranks if they make different calls, or differ in texts.

    Args:
        call: the call in words, as `logits`.
        facts: the texts, by the names of their subjects.
        fix: the end of the message.
    Raises:
        ParallelError: on every rank; names those that differ from the first, and the texts.
    """
    agreed(ranks, call, lambda: None, lambda _: facts, fix)


def check_call(ranks: Ranks, call: str) -> None:
    """Raise a ParallelError on all ranks if they make different calls."""
    agreed(ranks, call, lambda: None)


def agreed(
    ranks: Ranks,
    call: str,
    act: Callable[[], Result],
    facts_of: Callable[[Result], Mapping[str, str]] = lambda _: {},
    fix: str = FIX,
) -> Result:
    """Do something on all ranks with the same result, such as reading a file; return it.

    Args:
        call: the call in words.
        act: the work of each rank, without messages to others.
        facts_of: texts of the result that have to be equal, by the names of their subjects.
        fix: the end of the message.
    Raises:
        Exception: the error of `act` on this rank.
        ParallelError: on every rank: another rank failed, makes another call, or has another
            result.
    """
    if ranks.size == 1:
        return act()
    try:
        result = act()
        facts = _record(facts_of(result))
        word = _Word(hashlib.sha256(facts).digest(), len(facts), False, call, "")
    except Exception as error:
        failed = _Word(bytes(32), 0, True, call, f"{type(error).__name__}: {error}")
        _check_calls([_Word.of(record) for record in ranks.tell(failed.record)])
        raise
    words = [_Word.of(record) for record in ranks.tell(word.record)]
    _check_calls(words)
    for rank, each in enumerate(words):
        if each.has_failed:
            raise ParallelError(
                f"rank {rank} of {len(words)} could not do its part of {call}: {each.error}"
            )
    if any(word.digest != words[0].digest for word in words):
        longest = max(word.size for word in words)
        records = ranks.tell(facts.ljust(longest))
        _refuse(call, [json.loads(each) for each in records], fix)
    return result


def _check_calls(words: Sequence[_Word]) -> None:
    if any(word.call != words[0].call for word in words):
        calls = ", ".join(f"rank {rank} {word.call}" for rank, word in enumerate(words))
        raise ParallelError(
            f"{len(words)} ranks have to make the same calls in the same order, and now call: "
            f"{calls}. {FIX}"
        )


def _record(facts: Mapping[str, str]) -> bytes:
    """Return the SHA-256 of each text by its name, and the text itself if it is short."""
    entries = {
        name: [hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest(), _shown(text)]
        for name, text in facts.items()
    }
    return json.dumps(entries).encode()


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN and text.isprintable() else ""


def compare(call: str, facts: Sequence[Mapping[str, str]], fix: str = FIX) -> None:
    """Raise the ParallelError of `check_same` if facts of ranks, which all know, differ."""
    if any(of_rank != facts[0] for of_rank in facts):
        _refuse(call, [json.loads(_record(of_rank)) for of_rank in facts], fix)


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


PROGRAM_FIX = (
    "Give all ranks the same model, adapters, options and versions of libraries, costs=NAME or one "
    "profile among them, or compile once and load that program on all"
)
_SEEN_OTHERWISE = ("costs", "memory_budget", "tp_plan")
"""Options that are compared by what they name."""


def check_same_program(ranks: Ranks, program: Program) -> None:
    """Raise an error if ranks have compiled different programs; all ranks call this.

    Raises:
        ParallelError: on every rank; names those that differ from the first, and the parts.
    """
    if ranks.size == 1:
        return
    constants = hashlib.sha256()
    for name, tensor in program.constants.items():
        constants.update(name.encode())
        constants.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    options = fields_of(program.options, _SEEN_OTHERWISE)
    facts = {
        **{name: version(name) for name in ("torch", "transformers")},
        "pcg": __version__,
        "the precision of products": torch.get_float32_matmul_precision(),
        "the model": f"{program.dtype} {_model_text(program.base)} {constants.hexdigest()}",
        "the adapters": str(sorted(map(str, program.recipes.items()))),
        "costs": _costs_text(program.options.costs),
        "tp_plan": str(sorted(program.options.styles.items())),
        "the memory budget": str(program.options.budget),
        **{name: described(value) for name, value in options.items()},
        "the serving program": serving_text(program.serving),
        "the training program": training_text(program.training),
    }
    check_same(ranks, "the program", facts, PROGRAM_FIX)


def serving_text(serving: Serving) -> str:
    """Return the serving program as text."""
    return _model_text(serving.model)


def training_text(training: Training | None) -> str:
    """Return the training program as text; empty for None."""
    if training is None:
        return ""
    graphs = [graph for plan in training.plans for graph in (plan.forward, plan.backward)]
    kept = [(plan.block, plan.saved, plan.trained) for plan in training.plans]
    rest = (training.layers, training.epilogue_trained, training.prologue_trained)
    text = print_graphs(g for g in (*graphs, training.epilogue, training.prologue) if g is not None)
    return f"{_model_text(training.model)} {text} {kept} {rest} {training.restored}"


def _model_text(model: ModelGraph) -> str:
    return f"{print_graphs(model.graphs)} {model.layers}"


def _costs_text(costs: str | os.PathLike[str] | None) -> str:
    if costs is None:
        return ""
    path = Path(costs)
    return path.read_text(encoding="utf-8") if path.is_file() else os.fspath(costs).upper()
