"""Passes through a model: bodies of forward_backward as orders to the engine, and results back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import zstandard
from pydantic import Field, ValidationError

from pcg.errors import DataError
from pcg.runtime.training.loss_graph import LossGraph
from pcg.serve.engine.trainer_orders import ArrayData, DatumData, TrainerReply, TrainPass
from pcg.serve.http.limits import check_elements
from pcg.serve.tinker.proto import (
    ForwardBackwardCall,
    ForwardBackwardResult,
    TinkerDatum,
    decode_forward_backward,
    encode_forward_backward,
)
from pcg.serve.tinker.wire import Id, TinkerBody

CUSTOM = "custom"
"""The name of losses that a session made."""
_MOST_DATA = 4096
_DTYPES = {"int64": "<i8", "float32": "<f4"}


class _Chunk(TinkerBody):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class _Input(TinkerBody):
    chunks: Annotated[list[_Chunk], Field(max_length=_MOST_DATA)]


class _Tensor(TinkerBody):
    data: list[float]
    dtype: Literal["int64", "float32"]
    shape: Annotated[list[int], Field(max_length=2)] | None = None


class _Datum(TinkerBody):
    model_input: _Input
    loss_fn_inputs: Annotated[dict[str, _Tensor], Field(max_length=16)]


class _PassInput(TinkerBody):
    data: Annotated[list[_Datum], Field(max_length=_MOST_DATA)]
    loss_fn: Annotated[str, Field(max_length=256)]
    loss_fn_config: Annotated[dict[str, float], Field(max_length=64)] | None = None


class JsonPass(TinkerBody):
    """A body of forward_backward or forward as clients before 0.25 send it."""

    forward_backward_input: _PassInput | None = None
    forward_input: _PassInput | None = None
    model_id: Id
    seq_id: int | None = None
    type: Literal["forward_backward", "forward"] | None = None


def decompressed(body: bytes, most: int) -> bytes:
    """Return a body that zstd has compressed. DataError: it is none, or has more than `most`."""
    try:
        size = zstandard.frame_content_size(body)
        if not 0 <= size <= most:
            raise DataError(
                f"the body's frame of zstd says {size} bytes, and at most {most} may be there; say "
                "how many there are, and send less data at a time"
            )
        found: bytes = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError(f"the body cannot be decompressed by zstd: {error}") from None
    return found


def call_of(body: bytes, *, is_json: bool) -> ForwardBackwardCall:
    """Return what a body asks for, in protobuf or in JSON.

    Raises:
        ApiError: it has too many elements.
        DataError: it is no such body.
    """
    if not is_json:
        return decode_forward_backward(body)
    check_elements(body)
    try:
        read = JsonPass.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"the body is not as it has to be: {place}: {first['msg']}") from error
    given, is_forward = read.forward_backward_input, False
    if given is None:
        given, is_forward = read.forward_input, True
    if given is None:
        raise DataError("the body has no forward_backward_input; give one")
    data = [_datum(one, f"data[{index}]") for index, one in enumerate(given.data)]
    config: Mapping[str, float | str] = dict(given.loss_fn_config or {})
    seq = -1 if read.seq_id is None else read.seq_id
    return ForwardBackwardCall(read.model_id, seq, data, given.loss_fn, config, is_forward)


def _datum(given: _Datum, place: str) -> TinkerDatum:
    tokens = [token for chunk in given.model_input.chunks for token in chunk.tokens]
    inputs = {}
    for name, one in given.loss_fn_inputs.items():
        try:
            numbers = np.asarray(one.data, float)
            if one.dtype == "int64" and not (np.abs(numbers) < 2**53).all():
                raise ValueError("integers have at most 53 bits")
            array = numbers.astype(_DTYPES[one.dtype])
            if one.dtype == "int64" and (array != numbers).any():
                raise ValueError("not all are integers")
            inputs[name] = array if one.shape is None else array.reshape(one.shape)
        except (ValueError, OverflowError) as error:
            raise DataError(f"{place}.{name} has {len(one.data)} numbers: {error}") from error
    try:
        return TinkerDatum(np.asarray(tokens, "<i8"), inputs)
    except OverflowError as error:
        raise DataError(f"{place} has a token beyond 64 bits") from error


def loss_id_of(call: ForwardBackwardCall) -> str | None:
    """Return the id of a call's custom loss, None of others. DataError: it has none alone."""
    if call.loss_fn != CUSTOM:
        return None
    found = call.loss_fn_config.get("loss_id")
    if not isinstance(found, str) or len(call.loss_fn_config) > 1:
        raise DataError(f"the loss {CUSTOM!r} has loss_id in its config, and nothing else")
    return found


def order_of(
    call: ForwardBackwardCall, graph: LossGraph | None = None, *, trains: bool
) -> TrainPass:
    """Return a call as the engine is told of it.

    Args:
        graph: its custom loss.
    Raises:
        DataError: an option of the loss is a text.
    """
    if graph is not None:
        return TrainPass(_data_of(call), call.loss_fn, {}, trains, graph)
    for name, value in call.loss_fn_config.items():
        if isinstance(value, str):
            raise DataError(f"loss_fn_config.{name} is a text, and loss {call.loss_fn!r} has none")
    options = {name: float(value) for name, value in call.loss_fn_config.items()}
    return TrainPass(_data_of(call), call.loss_fn, options, trains)


def _data_of(call: ForwardBackwardCall) -> list[DatumData]:
    return [
        DatumData(_data(one.tokens), {name: _data(array) for name, array in one.inputs.items()})
        for one in call.data
    ]


def _data(array: Any) -> ArrayData:
    kind = "f4" if array.dtype.kind == "f" else "i8"
    return ArrayData(kind, array.shape, np.ascontiguousarray(array, f"<{kind}").tobytes())


def _logprobs(call: ForwardBackwardCall, reply: TrainerReply) -> list[Any]:
    """Return the log-probabilities of each datum, in the shape of its targets."""
    found = zip(call.data, reply.logprobs, strict=True)
    return [
        np.frombuffer(one, "<f4").reshape(datum.inputs["target_tokens"].shape)
        for datum, one in found
    ]


def proto_result(call: ForwardBackwardCall, reply: TrainerReply) -> bytes:
    """Return a result as clients read it from 0.25 on."""
    outputs: Sequence[Mapping[str, Any]] = [{"logprobs": one} for one in _logprobs(call, reply)]
    return encode_forward_backward(ForwardBackwardResult(outputs, reply.metrics))


def json_result(call: ForwardBackwardCall, reply: TrainerReply) -> bytes:
    """Return a result as clients before that read it."""
    outputs = [
        {"logprobs": {"data": one.ravel().tolist(), "dtype": "float32", "shape": list(one.shape)}}
        for one in _logprobs(call, reply)
    ]
    told = {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": outputs,
        "metrics": reply.metrics,
    }
    return json.dumps(told).encode()
