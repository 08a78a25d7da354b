"""Decode and encode the protobuf messages of Tinker's protocol.

Names and numbers are those of the package `tinker_public` in the client's wheel, for the fields
that this server reads or writes. Three definitions differ, with the same bytes:

- A map is a list of entries, so that duplicate names are detected.
- Messages that a client may repeat without a limit are bytes. They are counted before they are
  parsed, and parsed one at a time: an empty message takes two bytes on the wire and a hundred in
  memory.
- Enumerations are int32.

Tensors are not trusted: the number of bytes must match the shape, and the offsets and columns of a
sparse tensor must be sorted and within its shape. A sparse tensor of a few bytes may declare any
shape, so the numbers of a call are limited before memory is allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from pcg.errors import DataError
from pcg.runtime.training.trainer.datum import MOST_TARGETS
from pcg.units import is_finite, shown

Array = NDArray[Any]

MOST_NUMBERS = 2**23
"""Maximum numbers in the tensors of a call together, including the zeros of sparse tensors."""
MOST_DATA = 4096
"""Maximum data of a call; the client sends 1,024."""
_MOST_CHUNKS = 4096
_MOST_INPUTS = 16
_MOST_OPTIONS = 64
_MOST_SPANS = 4096
_LONGEST_NAME = 256

# ---------------------------------------------------------------------------------------- messages

_PACKAGE = "tinker_public"
# A field is its number, name and type: `*` means repeated, `?` distinguishes absent from empty.
# Fields from 1000 on are pcg's own, and unknown to Tinker's client.
_MESSAGES: Mapping[str, str] = {
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data bytes*, 4 loss_fn string, "
    "5 loss_fn_config bytes*, 6 forward_only bool, 7 loss_fn_config_v2 bytes*",
    "NumberEntry": "1 key string, 2 value double",
    "ConfigEntry": "1 key string, 2 value ConfigValue",
    "ConfigValue": "1 number double?, 2 text string?",
    "Datum": "1 model_input bytes*, 2 loss_fn_inputs bytes*, 3 model_input_spans bytes*, "
    "4 loss_fn_input_spans bytes*",
    "Chunk": "1 encoded_text EncodedText, 2 image bytes?, 3 dmel bytes?",
    "EncodedText": "1 tokens bytes",
    "TensorEntry": "1 key string, 2 value Tensor",
    "Tensor": "1 dense bytes?, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, "
    "3 metrics NumberEntry*",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensorEntry*, 3 num_datums int64",
    "BatchedTensorEntry": "1 key string, 2 value BatchedTensor",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes?, "
    "3 topk_prompt_logprobs TopkLogprobs, 4 prompt_cache_hit_tokens int32, "
    "5 target_prompt_logprobs Tensor, 6 prompt_alt_tokens PromptAltTokens",
    "PromptAltTokens": "1 tokens Tensor, 2 logprobs Tensor",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes?, "
    "4 topk_sampled_logprobs TopkLogprobs, 1000 routed_experts Tensor",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
}

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
    "uint32": _FIELD.TYPE_UINT32,
}


def _classes() -> dict[str, Any]:
    """Create the message classes in a separate pool, as the process may also have the client's."""
    file = descriptor_pb2.FileDescriptorProto(
        name="pcg_tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            _add_field(message, *field.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def _add_field(message: Any, number: str, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    if kind.endswith("?"):  # proto3 puts an optional field into its own `oneof`
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    bare = kind.rstrip("*?")
    if bare in _SCALARS:
        field.type = _SCALARS[bare]
    else:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{bare}"


CLASSES: Mapping[str, Any] = _classes()
"""Message classes by name; `CLASSES["Tensor"]()` is an empty tensor."""

# ----------------------------------------------------------------------------------------- tensors

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_TYPES: dict[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    _INT64: np.dtype("<i8"),
    _INT32: np.dtype("<i4"),
    _BFLOAT16: np.dtype("<u2"),
}
_INDEX = _TYPES[_INT64]


class _Room:
    """The remaining numbers that a call may have."""

    def __init__(self) -> None:
        self._left = MOST_NUMBERS

    def take(self, count: int, place: str) -> None:
        if count > self._left:
            raise DataError(
                f"{place} has {shown(count)} numbers, and {self._left} of the {MOST_NUMBERS} that "
                "a call may have are left; send less at a time"
            )
        self._left -= count


def _array_of(message: Any, place: str, room: _Room) -> Array:
    """Convert a `Tensor` to a float32 or int64 array, [N] or [N, K]."""
    dtype = _TYPES.get(message.dtype)
    if dtype is None:
        raise DataError(f"{place} has the dtype {message.dtype}; use float32 or int64")
    is_sparse = message.HasField("sparse_csr")
    if is_sparse == message.HasField("dense"):
        raise DataError(f"{place} has to have either dense or sparse_csr")
    shape = [int(size) for size in message.shape[:3]]
    if is_sparse:
        return _widened(_of_csr(message, dtype, shape, place, room), message.dtype)
    numbers = _numbers(message.dense, dtype, place)
    room.take(len(numbers), place)
    shape = shape or [len(numbers)]
    rows, columns = (*shape, 1)[:2]
    if len(shape) > 2 or rows < 0 or columns < 1 or rows * columns != len(numbers):
        raise DataError(
            f"{place} has the shape {shown(list(message.shape))} and {len(numbers)} numbers; "
            "use [N] or [N, K] of them"
        )
    return _widened(numbers, message.dtype).reshape(shape)


def _of_csr(message: Any, dtype: np.dtype[Any], shape: list[int], place: str, room: _Room) -> Array:
    if len(shape) != 2 or shape[0] < 0 or shape[1] < 1:
        raise DataError(
            f"{place} is sparse and has the shape {shown(list(message.shape))}; use [N, K]"
        )
    if shape[1] > MOST_TARGETS:
        raise DataError(f"{place} has {shape[1]} columns, and may have at most {MOST_TARGETS}")
    room.take(shape[0] * shape[1], place)
    csr = message.sparse_csr
    values = _numbers(csr.values, dtype, place)
    starts = _numbers(csr.crow_indices, _INDEX, f"{place}.crow_indices")
    columns = _numbers(csr.col_indices, _INDEX, f"{place}.col_indices")
    if len(starts) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(
            f"{place} has {shape[0]} rows, {len(starts)} crow_indices, {len(values)} values and "
            f"{len(columns)} col_indices; use a row offset more than rows, and a column a value"
        )
    counts = np.diff(starts)  # may overflow, but not for offsets within the bounds below
    is_within = starts[0] == 0 and starts[-1] == len(values) == starts.max()
    if not is_within or starts.min() or (counts < 0).any():
        raise DataError(
            f"{place}.crow_indices do not rise from 0 to the number of its values, {len(values)}"
        )
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise DataError(f"{place}.col_indices are not all within its {shape[1]} columns")
    rows = np.repeat(np.arange(shape[0]), counts)
    if (np.diff(rows * shape[1] + columns) <= 0).any():
        raise DataError(f"{place}.col_indices do not rise within each row")
    dense = np.zeros(shape, dtype)
    dense[rows, columns] = values
    return dense


def _numbers(data: bytes, dtype: np.dtype[Any], place: str) -> Array:
    if len(data) % dtype.itemsize:
        raise DataError(
            f"{place} has {len(data)} bytes, which is not a multiple of {dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype)


def _widened(array: Array, kind: int) -> Array:
    if kind == _BFLOAT16:  # the upper half of a float32
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<i8") if kind == _INT32 else array


def _plain(array: Array) -> tuple[int, bytes]:
    """Return the dtype and the bytes of an array for Tinker's client."""
    kind = _FLOAT32 if np.issubdtype(array.dtype, np.floating) else _INT64
    return kind, array.astype(_TYPES[kind]).tobytes()


# ----------------------------------------------------------------------------------------- decoding


@dataclass(frozen=True, eq=False)
class TinkerDatum:
    """A sequence, int64 [N], and a loss's inputs, int64 or float32, [N] or [N, K]."""

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class ForwardBackwardCall:
    """A client's call of forward_backward.

    Attributes:
        model_id: the model, as `SESSION:train:NUMBER`.
        seq_id: position in the model's stream, from 1.
        loss_fn_config: options of the loss; only custom losses have texts.
        forward_only: True for log-probabilities without gradients.
    """

    model_id: str
    seq_id: int
    data: Sequence[TinkerDatum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool


def decode_forward_backward(body: bytes) -> ForwardBackwardCall:
    """Decode a body of forward_backward.

    Raises:
        DataError: the body or a part of it is invalid; the message names the part.
    """
    message = _parsed("ForwardBackwardRequest", body, "the body")
    _check_count(message.data, MOST_DATA, "data")
    for name in ("model_id", "loss_fn"):
        _check_name(getattr(message, name), name)
    room = _Room()
    return ForwardBackwardCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_datum(datum, f"data[{i}]", room) for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=_config(message),
        forward_only=message.forward_only,
    )


def place_of(body: bytes) -> tuple[str, int] | None:
    """Return the model and position of a call without validating the rest; None if not protobuf."""
    try:
        message = _parsed("ForwardBackwardRequest", body, "the body")
    except DataError:
        return None
    return message.model_id, message.seq_id


def _datum(body: bytes, place: str, room: _Room) -> TinkerDatum:
    message = _parsed("Datum", body, place)
    _check_count(message.model_input, _MOST_CHUNKS, f"{place}.model_input")
    _check_count(message.loss_fn_inputs, _MOST_INPUTS, f"{place}.loss_fn_inputs")
    for name in ("model_input_spans", "loss_fn_input_spans"):  # not used
        _check_count(getattr(message, name), _MOST_SPANS, f"{place}.{name}")
    chunks = [
        _chunk(chunk, f"{place}.model_input[{i}]", room)
        for i, chunk in enumerate(message.model_input)
    ]
    inputs: dict[str, Array] = {}
    for body_of_entry in message.loss_fn_inputs:
        entry = _parsed("TensorEntry", body_of_entry, f"{place}.loss_fn_inputs")
        _check_name(entry.key, f"{place}.loss_fn_inputs")
        if entry.key in inputs:
            raise DataError(f"{place} has {shown(entry.key)} twice")
        inputs[entry.key] = _array_of(entry.value, f"{place}.{entry.key}", room)
    return TinkerDatum(np.concatenate(chunks) if chunks else np.zeros(0, "<i8"), inputs)


def _chunk(body: bytes, place: str, room: _Room) -> Array:
    message = _parsed("Chunk", body, place)
    for name in ("image", "dmel"):
        if message.HasField(name):
            raise DataError(f"{place} is of the type {name}; this server accepts only encoded_text")
    if not message.HasField("encoded_text"):
        raise DataError(f"{place} has no encoded_text; give the tokens")
    tokens = _numbers(message.encoded_text.tokens, _TYPES[_INT32], place)
    room.take(len(tokens), place)
    return tokens.astype("<i8")


def _config(message: Any) -> dict[str, float | str]:
    """Return the options of a loss, preferring the second version of the field."""
    options: dict[str, float | str] = {}
    is_newer = bool(message.loss_fn_config_v2)
    entries = message.loss_fn_config_v2 if is_newer else message.loss_fn_config
    _check_count(entries, _MOST_OPTIONS, "loss_fn_config")
    for body in entries:
        entry = _parsed("ConfigEntry" if is_newer else "NumberEntry", body, "loss_fn_config")
        _check_name(entry.key, "loss_fn_config")
        if entry.key in options:
            raise DataError(f"loss_fn_config has {shown(entry.key)} twice")
        value = options[entry.key] = _option(entry) if is_newer else entry.value
        if not isinstance(value, str) and not is_finite(value):
            raise DataError(f"loss_fn_config.{entry.key} is not finite")
    return options


def _option(entry: Any) -> float | str:
    has_text = entry.value.HasField("text")
    if has_text == entry.value.HasField("number"):
        raise DataError(f"loss_fn_config.{entry.key} has to be either a number or a text")
    _check_name(entry.value.text, f"loss_fn_config.{entry.key}")
    option: float | str = entry.value.text if has_text else entry.value.number
    return option


def _parsed(kind: str, body: bytes, place: str) -> Any:
    message = CLASSES[kind]()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{place} is not a protobuf {kind}") from error
    return message


def _check_count(entries: Sequence[object], most: int, place: str) -> None:
    if len(entries) > most:
        raise DataError(f"{place} has {len(entries)} entries, and may have at most {most}")


def _check_name(name: str, place: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise DataError(f"{place} has a name of {len(name)} characters; use {_LONGEST_NAME}")


# ----------------------------------------------------------------------------------------- encoding


def encode_forward_backward(
    outputs: Sequence[Mapping[str, Array]], metrics: Mapping[str, float]
) -> bytes:
    """Encode a `ForwardBackwardOutput`.

    Consecutive data with the same number of columns share a record.

    Args:
        outputs: for each datum, arrays by name, float or int, [N] or [N, K]; all data have the same
            names.
        metrics: numbers by names such as `loss:sum`; the part after the colon tells the client how
            to combine the metrics of several calls.
    """
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="pcg:ArrayRecord")
    for name, value in metrics.items():
        message.metrics.add(key=name, value=value)
    for _, group in itertools.groupby(outputs, _columns):
        data = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(data))
        for name, first in data[0].items():
            parts = [_plain(datum[name]) for datum in data]
            batched = record.fields.add(key=name).value
            batched.data = b"".join(part for _, part in parts)
            batched.offsets = _offsets(len(part) for _, part in parts)
            batched.dtype = parts[0][0]
            batched.trailing_shape.extend(first.shape[1:])
    encoded: bytes = message.SerializeToString()
    return encoded


def _columns(datum: Mapping[str, Array]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, array.dtype.kind, array.shape[1:]) for name, array in datum.items()]


def _offsets(sizes: Iterable[int]) -> bytes:
    return np.array([0, *itertools.accumulate(sizes)], "<i8").tobytes()


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """A sampled sequence.

    Attributes:
        tokens, logprobs: [N].
        stop_reason: `stop` for a stop sequence or the end of the text, else `length`.
        top: requested top tokens at each position: ids (0 if absent) and log-probabilities (-99999
            if absent), both [N, k].
        routes: requested experts of each token of prompt and output but the last, [n, layers · k].
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    top: tuple[Array, Array] | None = None
    routes: Array | None = None


def encode_sample(
    sequences: Sequence[SampledTokens],
    *,
    cached_tokens: int = 0,
    prompt_logprobs: Sequence[float] | None = None,
    top_prompt: tuple[Array, Array] | None = None,
    targets: Array | None = None,
    target_cells: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None,
    alternatives: tuple[Array, Array] | None = None,
) -> bytes:
    """Encode a `SampleResponse`.

    Args:
        cached_tokens: prompt tokens that were in the KV cache.
        prompt_logprobs: for each prompt token, NaN if absent.
        top_prompt: top tokens at each prompt position, as in `SampledTokens`.
        targets: log-probabilities of target tokens, float32 [len - 1, K]; of a sparse request,
            float32 [listed].
        target_cells: shape, row offsets and columns of a sparse request.
        alternatives: tokens drawn at each position, int64 [len - 1, k], and their
            log-probabilities, float32.
    """
    message = CLASSES["SampleResponse"](prompt_cache_hit_tokens=cached_tokens)
    for sampled in sequences:
        sequence = message.sequences.add(
            stop_reason={"stop": 0, "length": 1}[sampled.stop_reason],
            tokens=np.asarray(sampled.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sampled.logprobs, "<f4").tobytes(),
        )
        if sampled.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(*sampled.top))
        if sampled.routes is not None:
            sequence.routed_experts.CopyFrom(_tensor(sampled.routes))
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    if top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(*top_prompt))
    if targets is not None:
        message.target_prompt_logprobs.CopyFrom(_tensor(targets, target_cells))
    if alternatives is not None:
        tokens, logprobs = map(_tensor, alternatives)
        message.prompt_alt_tokens.tokens.CopyFrom(tokens)
        message.prompt_alt_tokens.logprobs.CopyFrom(logprobs)
    encoded: bytes = message.SerializeToString()
    return encoded


def _top(tokens: Array, logprobs: Array) -> Any:
    length, k = tokens.shape
    return CLASSES["TopkLogprobs"](
        token_ids=np.ascontiguousarray(tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )


def _tensor(
    array: Array, cells: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
) -> Any:
    """Encode a `Tensor`; `cells` are the shape, row offsets and columns of a sparse tensor."""
    kind, data = _plain(array)
    if cells is None:
        return CLASSES["Tensor"](dense=data, dtype=kind, shape=array.shape)
    shape, *indices = cells
    rows, columns = (np.asarray(index, _INDEX).tobytes() for index in indices)
    csr = CLASSES["SparseCsr"](values=data, crow_indices=rows, col_indices=columns)
    return CLASSES["Tensor"](sparse_csr=csr, dtype=kind, shape=shape)
