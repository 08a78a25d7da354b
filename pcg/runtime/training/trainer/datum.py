"""Data of a trainer: tokens, and for each what it predicts and how much that counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from pcg.errors import DataError
from pcg.runtime.data.example import IGNORED, ModelSizes
from pcg.runtime.training.losses.columns import Columns
from pcg.runtime.training.losses.loss import Loss
from pcg.units import is_finite, shown

_NUMBERS = ("weights", "advantages", "logprobs")


@dataclass(frozen=True)
class Datum:
    """A sequence to train on, with numbers for each of its tokens. Nothing is shifted.

    Lists, tuples, arrays and tensors will do.

    Attributes:
        tokens: its tokens, [N].
        targets: what each token predicts, [N]: `targets[i]` is after `tokens[: i + 1]`; -100 for
            nothing. By default the next token, and after the last one nothing.
        weights: the weight of each target's loss, [N], of either sign; 1 by default.
        advantages: the advantage of each target, [N].
        logprobs: the log-probability that each target had when it was sampled, [N]; for dpo that of
            the reference.
    """

    tokens: Sequence[int]
    targets: Sequence[int] | None = None
    weights: Sequence[float] | None = None
    advantages: Sequence[float] | None = None
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True)
class CheckedDatum:
    """A datum that a model can learn; it goes through a pass as an example does.

    Attributes:
        ids: its tokens.
        targets: what each predicts, -100 for nothing.
        columns: weights, advantages and sampled log-probabilities; zeros where nothing counts.
    """

    ids: Sequence[int]
    targets: Sequence[int]
    columns: tuple[Sequence[float], Sequence[float], Sequence[float]]


def checked(data: object, loss: Loss, sizes: ModelSizes, virtual: int) -> list[CheckedDatum]:
    """Return data as lists, with the defaults of a loss.

    Args:
        virtual: the tokens that the adapter puts before each sequence.
    Raises:
        DataError: a datum that the model or the loss cannot take; it is named by its place.
    """
    if isinstance(data, Datum | str | bytes) or not hasattr(data, "__iter__"):
        raise DataError(f"the data is a {type(data).__name__}; give a list of pcg.Datum")
    found = [_checked(one, f"data[{i}]", loss, sizes, virtual) for i, one in enumerate(data)]
    if not found:
        raise DataError("there is no datum; give at least one")
    if len(found) % loss.together:
        raise DataError(
            f"loss {loss.name!r} takes {loss.together} data at a time, chosen and rejected in "
            f"turns, and there are {len(found)}; give pairs"
        )
    return found


def _checked(
    given: object, place: str, loss: Loss, sizes: ModelSizes, virtual: int
) -> CheckedDatum:
    if not isinstance(given, Datum):
        raise DataError(f"{place} is a {type(given).__name__}; give a pcg.Datum")
    read = {f.name: _listed(getattr(given, f.name), f"{place}.{f.name}") for f in _FIELDS}
    ids = read["tokens"]
    if not ids:
        raise DataError(f"{place} has no tokens; give at least one")
    most = sizes.max_positions
    if most is not None and len(ids) + virtual > most:
        beside = f" beside {virtual} virtual ones" if virtual else ""
        raise DataError(
            f"{place} has {len(ids)} tokens{beside}, more than the model's {most} positions; "
            "split it"
        )
    for name, values in read.items():
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"{place} has {len(ids)} tokens and {len(values)} {name}; give each token one"
            )
    targets = [*ids[1:], IGNORED] if read["targets"] is None else read["targets"]
    _check_ids(ids, place, sizes.vocabulary)
    _check_ids(targets, f"{place}.targets", sizes.vocabulary, IGNORED)
    if all(target == IGNORED for target in targets):
        raise DataError(f"{place} predicts nothing; give at least one of its tokens a target")
    for name in _NUMBERS:
        _check_numbers(read[name], name, place, loss)
    default = [1.0] * len(ids)
    if loss.skips_zero_advantages:
        default = [float(one != 0) for one in read["advantages"] or ()]
    weights = default if read["weights"] is None else read["weights"]
    columns = (weights, read["advantages"] or default, read["logprobs"] or default)
    counts = [target != IGNORED for target in targets]
    kept = [[float(x) if c else 0.0 for x, c in zip(one, counts, strict=True)] for one in columns]
    return CheckedDatum(ids, targets, (kept[0], kept[1], kept[2]))


def _listed(values: Any, place: str) -> list[Any] | None:
    if values is None:
        return None
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, str | bytes | dict) or not hasattr(listed, "__iter__"):
        raise DataError(f"{place} is a {type(values).__name__}; give a list of numbers")
    return [one.item() if hasattr(one, "item") else one for one in listed]  # numbers of numpy


def _check_ids(ids: Sequence[Any], place: str, vocabulary: int, ignored: int | None = None) -> None:
    for kind in set(map(type, ids)):
        if not issubclass(kind, Integral) or issubclass(kind, bool):
            raise DataError(f"{place} has a {kind.__name__} among its tokens; tokens are ints")
    wrong = [t for t in set(ids) if t != ignored and not 0 <= t < vocabulary]
    if wrong:
        raise DataError(
            f"{place} has the token {shown(wrong[0])}, which the model's vocabulary of "
            f"{vocabulary} does not; use the model's own tokenizer"
        )


def _check_numbers(values: Sequence[Any] | None, name: str, place: str, loss: Loss) -> None:
    if values is None:
        if name in loss.reads:
            raise DataError(f"{place} has no {name}, which loss {loss.name!r} reads; give [N]")
        return
    if name not in loss.reads and not (name == "weights" and loss.reads_weights):
        raise DataError(f"{place} has {name}, which loss {loss.name!r} does not read; leave it out")
    for index, value in enumerate(values):
        if not is_finite(value):
            raise DataError(f"{place}.{name}[{index}] is {shown(value)}; use finite numbers")


_FIELDS = dataclasses.fields(Datum)


def columns_of(data: Sequence[CheckedDatum], device: torch.device) -> Columns:
    """Return the columns of some data, one after the other, on a device."""
    weights, advantages, sampled = (
        torch.tensor([x for one in data for x in one.columns[i]], dtype=torch.float64)
        for i in range(3)
    )
    lengths = torch.tensor([len(one.ids) for one in data])
    places = torch.repeat_interleave(torch.arange(len(data)), lengths)
    read = [one.to(device) for one in (weights, advantages, sampled, places)]
    return Columns(read[0], read[1], read[2], read[3], len(data))
