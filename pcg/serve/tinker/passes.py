"""Convert forward_backward bodies to engine commands, and results to replies."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import numpy as np
import torch
import zstandard
from pydantic import Field, ValidationError

from pcg.errors import DataError
from pcg.runtime.training.loss_graph import LossGraph
from pcg.runtime.training.trainer.commands import Forward, ForwardBackward, GraphOfData
from pcg.runtime.training.trainer.datum import Datum, Scored
from pcg.serve.http.limits import check_elements
from pcg.serve.tinker.proto import (
    MOST_DATA,
    ForwardBackwardCall,
    TinkerDatum,
    decode_forward_backward,
    encode_forward_backward,
)
from pcg.serve.tinker.wire import Id, TinkerBody

CUSTOM = "custom"
"""Loss name of a session's custom losses."""
_DTYPES = {"int64": "<i8", "float32": "<f4"}
_COLUMNS = {
    "target_tokens": "targets",
    "weights": "weights",
    "advantages": "advantages",
    "logprobs": "logprobs",
    "routed_experts": "routed_experts",
}
"""Fields of `Datum` by their names in the protocol."""


class _Chunk(TinkerBody):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class _Input(TinkerBody):
    chunks: Annotated[list[_Chunk], Field(max_length=MOST_DATA)]


class _Tensor(TinkerBody):
    data: list[float]
    dtype: Literal["int64", "float32"]
    shape: Annotated[list[int], Field(max_length=2)] | None = None


class _Datum(TinkerBody):
    model_input: _Input
    loss_fn_inputs: Annotated[dict[str, _Tensor], Field(max_length=16)]


class _PassInput(TinkerBody):
    data: Annotated[list[_Datum], Field(max_length=MOST_DATA)]
    loss_fn: Annotated[str, Field(max_length=256)]
    loss_fn_config: Annotated[dict[str, float], Field(max_length=64)] | None = None


class JsonPass(TinkerBody):
    """A body of forward_backward or forward from clients before 0.25."""

    forward_backward_input: _PassInput | None = None
    forward_input: _PassInput | None = None
    model_id: Id
    seq_id: int | None = None
    type: Literal["forward_backward", "forward"] | None = None


def decompressed(body: bytes, most: int) -> bytes:
    """Decompress a zstd body. DataError: it is not zstd, or has more than `most` bytes."""
    try:
        size = zstandard.frame_content_size(body)
        if not 0 <= size <= most:
            declared = "no size" if size < 0 else f"{size} bytes"
            raise DataError(
                f"the body's zstd frame declares {declared}; declare at most {most} bytes, and "
                "send less data at a time"
            )
        plain: bytes = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError(f"the body cannot be decompressed by zstd: {error}") from None
    return plain


def call_of(body: bytes, *, is_json: bool) -> ForwardBackwardCall:
    """Parse a body in protobuf or JSON.

    Raises:
        ApiError: it has too many elements.
        DataError: the body is invalid.
    """
    if not is_json:
        return decode_forward_backward(body)
    check_elements(body)
    try:
        read = JsonPass.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"the body is invalid: {place}: {first['msg']}") from error
    passed = read.forward_backward_input or read.forward_input
    if passed is None:
        raise DataError("the body has no forward_backward_input; give one")
    return ForwardBackwardCall(
        model_id=read.model_id,
        seq_id=-1 if read.seq_id is None else read.seq_id,
        data=[_datum(datum, f"data[{index}]") for index, datum in enumerate(passed.data)],
        loss_fn=passed.loss_fn,
        loss_fn_config=dict(passed.loss_fn_config or {}),
        forward_only=read.forward_backward_input is None,
    )


def _datum(datum: _Datum, place: str) -> TinkerDatum:
    tokens = [token for chunk in datum.model_input.chunks for token in chunk.tokens]
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        try:
            numbers = np.asarray(tensor.data, float)
            if tensor.dtype == "int64" and not (np.abs(numbers) < 2**53).all():
                raise ValueError("integers have at most 53 bits")
            array = numbers.astype(_DTYPES[tensor.dtype])
            if tensor.dtype == "int64" and (array != numbers).any():
                raise ValueError("not all are integers")
            inputs[name] = array if tensor.shape is None else array.reshape(tensor.shape)
        except (ValueError, OverflowError) as error:
            raise DataError(f"{place}.{name} has {len(tensor.data)} numbers: {error}") from error
    try:
        return TinkerDatum(np.asarray(tokens, "<i8"), inputs)
    except OverflowError as error:
        raise DataError(f"{place} has a token beyond 64 bits") from error


def loss_id_of(call: ForwardBackwardCall) -> str | None:
    """Return the id of a call's custom loss, or None. DataError: it has other options."""
    if call.loss_fn != CUSTOM:
        return None
    loss_id = call.loss_fn_config.get("loss_id")
    if not isinstance(loss_id, str) or len(call.loss_fn_config) > 1:
        raise DataError(f"the loss {CUSTOM!r} has loss_id in its config, and nothing else")
    return loss_id


def order_of(call: ForwardBackwardCall, graph: LossGraph | None = None, *, trains: bool) -> Forward:
    """Return the engine's command of a call.

    Args:
        graph: its custom loss.
    Raises:
        DataError: an option of the loss is a text, a datum has no targets, or no loss reads an
            input.
    """
    command = ForwardBackward if trains else Forward
    data = [_sample(datum, f"data[{index}]", graph) for index, datum in enumerate(call.data)]
    if graph is not None:
        inputs = [{n: _tensor(array) for n, array in datum.inputs.items()} for datum in call.data]
        return command(data, GraphOfData(graph, inputs))
    options = {}
    for name, value in call.loss_fn_config.items():
        if isinstance(value, str):
            raise DataError(f"loss_fn_config.{name} is a text, and loss {call.loss_fn!r} has none")
        options[name] = float(value)
    return command(data, call.loss_fn, loss_options=options or None)


def _sample(datum: TinkerDatum, place: str, graph: LossGraph | None) -> Datum:
    """Convert a datum to the trainer's; with a graph, only tokens, targets and experts."""
    unknown = sorted(datum.inputs.keys() - _COLUMNS.keys())
    if unknown and graph is None:
        raise DataError(
            f"{place}.loss_fn_inputs has {unknown[0]!r}, which no loss reads; use "
            f"{', '.join(_COLUMNS)}"
        )
    if "target_tokens" not in datum.inputs:
        raise DataError(f"{place}.loss_fn_inputs has no target_tokens; give [N]")
    names = _COLUMNS
    if graph is not None:
        names = {"target_tokens": "targets", "routed_experts": "routed_experts"}
    columns: dict[str, Any] = {
        names[name]: _tensor(array) for name, array in datum.inputs.items() if name in names
    }
    return Datum(_tensor(datum.tokens), **columns)


def _tensor(array: Any) -> Any:
    kind = "f4" if array.dtype.kind == "f" else "i8"
    return torch.from_numpy(np.array(array, f"<{kind}"))  # torch needs a writable copy


def result_of(call: ForwardBackwardCall, scored: Scored, *, is_json: bool) -> bytes:
    """Encode a result: protobuf for clients from 0.25 on, else JSON."""
    metrics = {"loss:sum": scored.loss, "tokens:sum": float(scored.tokens), **scored.metrics}
    logprobs = [
        tensor.float().numpy().reshape(datum.inputs["target_tokens"].shape)
        for datum, tensor in zip(call.data, scored.logprobs, strict=True)
    ]
    if not is_json:
        return encode_forward_backward([{"logprobs": array} for array in logprobs], metrics)
    outputs = [
        {"logprobs": {"data": a.ravel().tolist(), "dtype": "float32", "shape": list(a.shape)}}
        for a in logprobs
    ]
    result = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs}
    return json.dumps({**result, "metrics": metrics}).encode()
