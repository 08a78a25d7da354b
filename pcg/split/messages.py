"""Messages between a client and a base: a header in JSON, and tensors as the bytes they have.

    frame 0    {"op": …, "seq": …, fields of the operation, "tensors": [[dtype, shape], …]}
    frame 1…   the tensors, row by row, the lowest byte of a number first

Nothing is pickled, and a header is checked before it is believed.

    hello    client's version, key, model → the base's: configuration, dtype, digest, pieces
    run      a piece and its inputs → its outputs
    define   a graph's text → its digest, by which this client may call it
    echo     tensors → the same, by which a client measures its link
    fetch    a tensor of the base that clients need, such as an embedding → the tensor
    lengths  a piece's weights → the sum of the squares of each output's weights, fp32
    rows     a weight, and its rows from `begin` to `end`, the first being 1 → these
    stats    → counts of the base's work
    bye      the client ends

A reply has the request's `seq`, and "op": "reply", or "error" with the error's text. Any number of
messages of the same `seq` with "op": "busy" may precede it, while a request waits or runs.

A base executor runs pieces of its graph for its clients, which they name:

    linear:WEIGHT+WEIGHT…      x [T, in] to x Wᵀ of the weights, side by side: [T, outs]
    gradient:WEIGHT            dy [T, out] to dx = dy W, [T, in]
    graph:DIGEST@LAYER         a graph that the client has defined, by the weights of a layer

A piece maps tensors of T tokens to tensors of T tokens, row by row, so that requests of any clients
are joined, row after row. It keeps nothing between calls, as the gradient of a linear operator
needs only its weight (Symbiosis §3.6), and a graph computes again the values that it needs.
A client writes a graph as text (`pcg.passes.placement.piece`), so that graphs of several
clients have the same digest where they compute the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.ir.types import DTYPE_BYTES

VERSION = 5
"""The version of this format; a base and its clients have the same."""
Buffer: TypeAlias = bytes | bytearray | memoryview
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_TENSORS = 16
MOST_DIMS = 4


@dataclass
class Message:
    """A message.

    Attributes:
        op: the operation, or `reply` or `error`.
        seq: the request's number, which its reply has, too.
        fields: further fields of the header.
        sender: the sender of a hello, as the transport knows it.
    """

    op: str
    seq: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    sender: str = ""

    def text(self, name: str, most: int = 4096) -> str:
        """Return a field that is a text. SplitError: it is none."""
        value = self.fields.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise SplitError(f"{self.op} needs {name!r}, a text of {most} characters at most")
        return value

    def number(self, name: str, most: int) -> int:
        """Return a field that is a number from 1 on. SplitError: it is none."""
        value = self.fields.get(name)
        if type(value) is not int or not 0 < value <= most:
            raise SplitError(f"{self.op} needs {name!r}, a number from 1 to {most}")
        return value

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def header_of(message: Message) -> bytes:
    """Return the first frame of a message."""
    tensors = [[_NAMES[tensor.dtype], list(tensor.shape)] for tensor in message.tensors]
    header = {**message.fields, "op": message.op, "seq": message.seq, "tensors": tensors}
    return json.dumps(header, separators=(",", ":")).encode()


def frames_of(message: Message) -> list[Buffer]:
    """Return a message as frames; those of tensors are views of their memory."""
    return [header_of(message), *map(bytes_of, message.tensors)]


def read_message(frames: Sequence[Buffer], placed: Callable[..., Tensor] | None = None) -> Message:
    """Read a message; its tensors are copies. SplitError: it is damaged.

    Args:
        frames: the header, and the tensors' bytes unless they are in shared memory.
        placed: returns a tensor of a place in shared memory, a dtype and a shape.
    """
    message, kinds = _read_header(frames[0] if frames else b"")
    places = message.fields.get("places")
    if placed is not None and places is not None:
        if not isinstance(places, list) or len(places) != len(kinds):
            raise SplitError("places of tensors in the shared memory are a list, one for each")
        message.tensors = [placed(at, *kind) for at, kind in zip(places, kinds, strict=True)]
        return message
    if len(kinds) != len(frames) - 1:
        raise SplitError(f"the header names {len(kinds)} tensors, and {len(frames) - 1} came")
    tensors = []
    for (dtype, shape), frame in zip(kinds, frames[1:], strict=True):
        # Before anything is allocated: the header may say more than the machine has.
        if memoryview(frame).nbytes != math.prod(shape) * dtype.itemsize:
            raise SplitError(
                f"{memoryview(frame).nbytes} bytes are no tensor {list(shape)} of {_NAMES[dtype]}"
            )
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.nbytes:
            bytes_of(tensor)[:] = memoryview(frame).cast("B")
        tensors.append(tensor)
    message.tensors = tensors
    return message


def _read_header(frame: Buffer) -> tuple[Message, list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Read a first frame: the message without its tensors, and their dtypes and shapes."""
    try:
        header = json.loads(bytes(frame))
        op, seq, tensors = header.pop("op"), header.pop("seq"), header.pop("tensors")
        kinds = [_kind(*kind) for kind in tensors]
    except SplitError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SplitError(f"this is no message of version {VERSION}: {error!r}") from None
    if not isinstance(op, str) or type(seq) is not int or len(kinds) > _MOST_TENSORS:
        raise SplitError(f"this is no message of version {VERSION}: op={op!r}, seq={seq!r}")
    return Message(op, seq, header), kinds


def _kind(dtype: object, shape: object) -> tuple[torch.dtype, tuple[int, ...]]:
    known = isinstance(dtype, str) and dtype in DTYPES
    if not known or not isinstance(shape, list) or len(shape) > MOST_DIMS:
        raise SplitError(f"a tensor is [dtype, shape], with a dtype of {', '.join(DTYPES)}")
    # Sizes beside a 0 count, too: torch has strides of them.
    if not all(type(size) is int and size >= 0 for size in shape) or (
        math.prod(max(size, 1) for size in shape) > 2**40
    ):
        raise SplitError(f"{shape} is no shape")
    return DTYPES[dtype], tuple(shape)  # type: ignore[index]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a CPU tensor's memory, which is copied only if it is not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    numbers: Any = flat.numpy()
    return memoryview(numbers)


_Size: TypeAlias = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
_Shape: TypeAlias = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MOST_DIMS)]
_Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=1, le=1e18)]


class Rates(msgspec.Struct, frozen=True):
    """Measured rates of a base's CPU: FLOP/s of products by the IR's dtype, and bytes/s."""

    product_flops_per_s: dict[str, _Rate]
    memory_bytes_per_s: _Rate

    def __post_init__(self) -> None:
        names = self.product_flops_per_s.keys()
        if "f32" not in names or not names <= DTYPE_BYTES.keys():
            raise ValueError(f"rates of products in {', '.join(names)}")


class BaseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A base's description of itself, the reply to a hello.

    Attributes:
        device: name of the device's data sheet.
        rates: measured rates of a CPU.
        graphs: True if clients may define graphs.
        pieces: shapes of the weights [out, in] of linear pieces, by name.
        fetched: shapes of the tensors that clients may fetch, by name.
        absent: names of matrices that other bases hold.
        digests: SHA-256 of each weight, by name.
        files: texts of the tokenizer's files, by name.
        rows: True if clients may download weights.
        most_bytes: the largest tensor of a request, bytes.
        instance: identifies the process.
    """

    version: int = VERSION
    name: str
    config: dict[str, Any]
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    digest: str
    device: str
    rates: Rates | None
    graphs: bool
    pieces: dict[str, tuple[_Size, _Size]]
    fetched: dict[str, _Shape]
    absent: tuple[str, ...]
    digests: dict[str, str]
    files: dict[str, str]
    rows: bool
    most_bytes: Annotated[int, msgspec.Meta(gt=0)]
    instance: str


def failure(seq: int, error: Exception) -> Message:
    """Return the reply for an error of a request."""
    return Message("error", seq, {"error": str(error), "kind": type(error).__name__})


LINEAR, GRADIENT, GRAPH = "linear", "gradient", "graph"
UNKNOWN_GRAPH = "this graph was not defined"
"""The beginning of the refusal of a call whose graph the client has to define first."""
_GRAPH_NAME = re.compile(r"([0-9a-f]{64})@([0-9]{1,5})")


def graph_digest(text: str) -> str:
    """Return the name of a graph's text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """The name of a piece.

    Attributes:
        kind: `linear`, `gradient` or `graph`.
        weights: names of the weights in the base's checkpoint; of a graph, its digest.
        layer: a graph's layer.
    """

    kind: str
    weights: tuple[str, ...]
    layer: int = 0

    def __str__(self) -> str:
        if self.kind == GRAPH:
            return f"{GRAPH}:{self.weights[0]}@{self.layer}"
        return f"{self.kind}:{'+'.join(self.weights)}"

    @classmethod
    def parse(cls, text: str) -> Piece:
        """Read a name as `str` writes it. SplitError: it is invalid."""
        kind, colon, names = text.partition(":")
        if kind == GRAPH and (match := _GRAPH_NAME.fullmatch(names)):
            return cls(GRAPH, (match[1],), int(match[2]))
        weights = tuple(names.split("+"))
        if not colon or kind not in (LINEAR, GRADIENT) or not all(weights):
            raise SplitError(
                f"{text[:100]!r} names no piece; use {LINEAR}:WEIGHT+…, {GRADIENT}:WEIGHT "
                f"or {GRAPH}:DIGEST@LAYER"
            )
        if kind == GRADIENT and len(weights) > 1:
            raise SplitError(f"{GRADIENT} takes one weight, not {len(weights)}")
        return cls(kind, weights)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""Files of a model's directory that a tokenizer is read from."""
_NEUTRAL = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Fields of a configuration that do not change what a model computes."""


def weights_difference(ours: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the tensors by which two models' `weight_digests` differ, as text; or ""."""
    names = [name for name in ours if ours[name] != other.get(name)]
    if not names:
        return ""
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{rest} of {len(ours)} tensors"


def config_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as text, the same for equal ones."""
    return json.dumps(dict(config), sort_keys=True, separators=(",", ":"), default=str)


def config_difference(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the fields that make two configurations different models, as text; or ""."""
    keys = sorted(ours.keys() & other.keys() - set(_NEUTRAL))
    differing = [
        f"{key}={ours[key]!r}, not {other[key]!r}"
        for key in keys
        if json.dumps(ours[key], default=str) != json.dumps(other[key], default=str)
    ]
    return ", ".join(differing[:3])
