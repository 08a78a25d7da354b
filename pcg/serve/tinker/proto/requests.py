"""The body of Tinker's forward_backward, decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from pcg.errors import DataError
from pcg.serve.tinker.proto.schema import CLASSES
from pcg.serve.tinker.proto.tensors import Array, Room, array_of, tokens_of
from pcg.units import is_finite, shown

MOST_DATA = 4096
"""The data that one call may have; the client sends 1,024 at a time."""
_MOST_CHUNKS = 4096
_MOST_INPUTS = 16
_MOST_OPTIONS = 64
_MOST_SPANS = 4096
_LONGEST_NAME = 256


@dataclass(frozen=True, eq=False)
class TinkerDatum:
    """A sequence, and what a loss reads of it.

    Attributes:
        tokens: its tokens, int64 [N].
        inputs: arrays by their names, int64 or float32, [N] or [N, K].
    """

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class ForwardBackwardCall:
    """A call of forward_backward as a client asks for it.

    Attributes:
        model_id: the model, as `SESSION:train:NUMBER`.
        seq_id: the call's place among those of the model, from 1 on.
        data: its data.
        loss_fn: the name of the loss.
        loss_fn_config: options of the loss; texts are those of custom ones.
        forward_only: True for log-probabilities without gradients.
    """

    model_id: str
    seq_id: int
    data: Sequence[TinkerDatum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool


def decode_forward_backward(body: bytes) -> ForwardBackwardCall:
    """Return what a body of forward_backward asks for.

    Raises:
        DataError: the body is no such message, or something in it is not as it has to be; it is
            named by its place.
    """
    message = _parsed("ForwardBackwardRequest", body, "the body")
    _check_count(message.data, MOST_DATA, "data")
    for name in ("model_id", "loss_fn"):
        _check_name(getattr(message, name), name)
    room = Room()
    return ForwardBackwardCall(
        message.model_id,
        message.seq_id,
        [_datum(one, f"data[{i}]", room) for i, one in enumerate(message.data)],
        message.loss_fn,
        _config(message),
        message.forward_only,
    )


def place_of(body: bytes) -> tuple[str, int] | None:
    """Return the model and the number of a call, be the rest wrong; None if it is no message."""
    try:
        message = _parsed("ForwardBackwardRequest", body, "the body")
    except DataError:
        return None
    return message.model_id, message.seq_id


def _datum(body: bytes, place: str, room: Room) -> TinkerDatum:
    message = _parsed("Datum", body, place)
    _check_count(message.model_input, _MOST_CHUNKS, f"{place}.model_input")
    _check_count(message.loss_fn_inputs, _MOST_INPUTS, f"{place}.loss_fn_inputs")
    for name in ("model_input_spans", "loss_fn_input_spans"):  # no loss here reads them
        _check_count(getattr(message, name), _MOST_SPANS, f"{place}.{name}")
    chunks = [
        _chunk(one, f"{place}.model_input[{i}]", room) for i, one in enumerate(message.model_input)
    ]
    inputs: dict[str, Array] = {}
    for body_of_entry in message.loss_fn_inputs:
        entry = _parsed("TensorEntry", body_of_entry, f"{place}.loss_fn_inputs")
        _check_name(entry.key, f"{place}.loss_fn_inputs")
        if entry.key in inputs:
            raise DataError(f"{place} has {shown(entry.key)} twice")
        inputs[entry.key] = array_of(entry.value, f"{place}.{entry.key}", room)
    return TinkerDatum(np.concatenate(chunks) if chunks else np.zeros(0, "<i8"), inputs)


def _chunk(body: bytes, place: str, room: Room) -> Array:
    message = _parsed("Chunk", body, place)
    for name in ("image", "dmel"):
        if message.HasField(name):
            raise DataError(f"{place} is of the type {name}; this server takes encoded_text alone")
    if not message.HasField("encoded_text"):
        raise DataError(f"{place} has no encoded_text; give the tokens")
    return tokens_of(message.encoded_text.tokens, place, room)


def _config(message: Any) -> dict[str, float | str]:
    """Return the options of a loss: those of the second version, where there are any."""
    found: dict[str, float | str] = {}
    newer = bool(message.loss_fn_config_v2)
    given = message.loss_fn_config_v2 if newer else message.loss_fn_config
    _check_count(given, _MOST_OPTIONS, "loss_fn_config")
    for body in given:
        kind = "ConfigEntry" if newer else "NumberEntry"
        entry = _parsed(kind, body, "loss_fn_config")
        _check_name(entry.key, "loss_fn_config")
        if entry.key in found:
            raise DataError(f"loss_fn_config has {shown(entry.key)} twice")
        found[entry.key] = _option(entry) if newer else entry.value
        if not isinstance(found[entry.key], str) and not is_finite(found[entry.key]):
            raise DataError(f"loss_fn_config.{entry.key} is not finite")
    return found


def _option(entry: Any) -> float | str:
    has_text = entry.value.HasField("text")
    if has_text == entry.value.HasField("number"):
        raise DataError(f"loss_fn_config.{entry.key} has to be either a number or a text")
    _check_name(entry.value.text, f"loss_fn_config.{entry.key}")
    found: float | str = entry.value.text if has_text else entry.value.number
    return found


def _parsed(kind: str, body: bytes, place: str) -> Any:
    message = CLASSES[kind]()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{place} is no {kind} of protobuf") from error
    return message


def _check_count(given: Sequence[object], most: int, place: str) -> None:
    if len(given) > most:
        raise DataError(f"{place} has {len(given)} entries, and may have at most {most}")


def _check_name(name: str, place: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise DataError(f"{place} has a name of {len(name)} characters; use {_LONGEST_NAME}")
