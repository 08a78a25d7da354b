"""The messages that Tinker's client sends and reads, as tables for the library `protobuf`.

A line is a field: its number, its name and its type. `*` is repeated and `?` optional, so that it
can be told whether it was sent. Names and numbers are those of the package `tinker_public` of the
client's wheel, as far as this server reads or writes them. Three things are told otherwise than
there, with the same bytes:

- A map is its entries, so that names that come twice are seen.
- Messages of which a client sends as many as it likes are bytes. They are counted before one of
  them becomes an object, and only one is one at a time: an empty message has two bytes on the wire
  and a hundred in memory.
- Enumerations are int32.

The descriptors are in a pool of their own, beside those of the client in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tinker_public"

_MESSAGES: Mapping[str, str] = {
    "ForwardBackwardRequest": """
        1 model_id string
        2 seq_id int32
        3 data bytes*
        4 loss_fn string
        5 loss_fn_config bytes*
        6 forward_only bool
        7 loss_fn_config_v2 bytes*
    """,
    "NumberEntry": """
        1 key string
        2 value double
    """,
    "ConfigEntry": """
        1 key string
        2 value ConfigValue
    """,
    "ConfigValue": """
        1 number double?
        2 text string?
    """,
    "Datum": """
        1 model_input bytes*
        2 loss_fn_inputs bytes*
        3 model_input_spans bytes*
        4 loss_fn_input_spans bytes*
    """,
    "Chunk": """
        1 encoded_text EncodedText
        2 image bytes?
        3 dmel bytes?
    """,
    "EncodedText": """
        1 tokens bytes
    """,
    "TensorEntry": """
        1 key string
        2 value Tensor
    """,
    "Tensor": """
        1 dense bytes?
        2 sparse_csr SparseCsr
        3 dtype int32
        4 shape int64*
    """,
    "SparseCsr": """
        1 values bytes
        2 crow_indices bytes
        3 col_indices bytes
    """,
    "ForwardBackwardOutput": """
        1 loss_fn_output_type string
        2 loss_fn_outputs ArrayRecord*
        3 metrics NumberEntry*
    """,
    "ArrayRecord": """
        1 type_tag string
        2 fields BatchedTensorEntry*
        3 num_datums int64
    """,
    "BatchedTensorEntry": """
        1 key string
        2 value BatchedTensor
    """,
    "BatchedTensor": """
        1 data bytes
        2 offsets bytes
        3 dtype int32
        4 trailing_shape int64*
    """,
    "SampleResponse": """
        1 sequences SampledSequence*
        2 prompt_logprobs bytes?
        3 topk_prompt_logprobs TopkLogprobs
        4 prompt_cache_hit_tokens int32
        5 target_prompt_logprobs Tensor
        6 prompt_alt_tokens PromptAltTokens
    """,
    "PromptAltTokens": """
        1 tokens Tensor
        2 logprobs Tensor
    """,
    "SampledSequence": """
        1 stop_reason int32
        2 tokens bytes
        3 logprobs bytes?
        4 topk_sampled_logprobs TopkLogprobs
    """,
    "TopkLogprobs": """
        1 token_ids bytes
        2 logprobs bytes
        3 k uint32
        4 length uint32
    """,
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
    """Return the class of each message by its name."""
    file = descriptor_pb2.FileDescriptorProto(
        name="pcg_tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines.split("\n"):
            if line.strip():
                _add_field(message, *line.split())
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
    if kind.endswith("?"):  # in proto3 such a field is the only one of a `oneof`
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
"""The class of each message by its name; `CLASSES["Tensor"]()` is an empty one."""
