"""Messages of Tinker's protocol, read and written by the real client's own module."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import DataError
from pcg.serve.tinker import proto
from pcg.serve.tinker.proto import (
    CLASSES,
    SampledTokens,
    decode_forward_backward,
    encode_forward_backward,
    encode_sample,
)

pytest.importorskip("tinker", reason="the client is installed for its tests alone")
from tinker import types
from tinker.proto import tinker_public_pb2 as wire
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest


def body_of(data, **fields):
    """Return what the client sends of some data."""
    config = fields.pop("config", None)
    given = ForwardBackwardInput(
        data=data, loss_fn=fields.pop("loss", "ppo"), loss_fn_config=config
    )
    request = ForwardBackwardRequest(
        forward_backward_input=given, model_id="s-1:train:0", seq_id=7, **fields
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def datum(tokens, **inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-9, 9, width=32)), max_size=5),
        max_size=4,
    )
)
def test_a_body_of_the_client_is_read(rows):
    data = [
        datum(
            [token for token, _ in row],
            target_tokens=np.array([token for token, _ in row], np.int64),
            advantages=np.array([x for _, x in row], np.float32),
        )
        for row in rows
    ]
    call = decode_forward_backward(body_of(data))
    assert (call.model_id, call.seq_id, call.loss_fn) == ("s-1:train:0", 7, "ppo")
    assert not call.forward_only
    assert len(call.data) == len(rows)
    for row, one in zip(rows, call.data, strict=True):
        assert one.tokens.tolist() == [token for token, _ in row]
        assert one.inputs["target_tokens"].tolist() == [token for token, _ in row]
        assert one.inputs["advantages"].tolist() == [x for _, x in row]
        assert one.inputs["advantages"].dtype == np.float32


def test_sparse_targets_become_rows_and_columns():
    targets = torch.zeros(6, 4, dtype=torch.int64)
    weights = torch.zeros(6, 4)
    targets[1, 2], targets[4, 0], targets[4, 3] = 9, 5, 7
    weights[1, 2], weights[4, 0], weights[4, 3] = 0.5, -1.0, 2.0
    body = body_of([datum([1] * 6, target_tokens=targets, weights=weights)], loss="cross_entropy")
    sent = wire.ForwardBackwardRequest.FromString(body).data[0].loss_fn_inputs
    assert sent["weights"].HasField("sparse_csr")  # or the test would say nothing
    found = decode_forward_backward(body).data[0].inputs
    assert found["target_tokens"].tolist() == targets.tolist()
    assert found["weights"].tolist() == weights.tolist()


def test_options_of_a_loss_are_numbers_and_texts():
    one = datum([1], target_tokens=np.array([2]))
    call = decode_forward_backward(body_of([one], config={"beta": 0.5, "loss_id": "abc"}))
    assert call.loss_fn_config == {"beta": 0.5, "loss_id": "abc"}
    older = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo", forward_only=True)
    older.loss_fn_config["beta"] = 0.25
    call = decode_forward_backward(older.SerializeToString())
    assert call.loss_fn_config == {"beta": 0.25}
    assert call.forward_only


def test_several_chunks_are_one_sequence():
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    one = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={})
    assert decode_forward_backward(body_of([one])).data[0].tokens.tolist() == [1, 2, 3]


def _hostile(**tensor):
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().loss_fn_inputs["weights"].CopyFrom(wire.Tensor(**tensor))
    return message.SerializeToString()


def _csr(values, starts, columns, shape):
    csr = wire.SparseCsr(
        values=np.array(values, np.float32).tobytes(),
        crow_indices=np.array(starts, np.int64).tobytes(),
        col_indices=np.array(columns, np.int64).tobytes(),
    )
    return _hostile(sparse_csr=csr, dtype=1, shape=shape)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\x1a\xff\xff\xff\xff\x0f", "not a protobuf ForwardBackwardRequest"),
        (b"not protobuf at all", "not a protobuf ForwardBackwardRequest"),
        (b"\x0a\x01\xff", "not a protobuf ForwardBackwardRequest"),  # no UTF-8
        (b"\x1a\x00" * 5000, "data has 5000 entries"),
        (_hostile(dense=b"123", dtype=1), "3 bytes"),
        (_hostile(dense=b"1234", dtype=0), "dtype 0"),
        (_hostile(dense=b"1234", dtype=99), "dtype 99"),
        (_hostile(dtype=1), "either dense or sparse_csr"),
        (_hostile(dense=b"1234", dtype=1, shape=[2]), "shape"),
        (_hostile(dense=b"1234", dtype=1, shape=[-1, -1]), "shape"),
        (_hostile(dense=b"1234", dtype=1, shape=[1, 1, 1]), "shape"),
        (_hostile(dense=b"", dtype=1, shape=[2**40, 0]), "shape"),
        (_csr([1.0], [0, 1], [0], [2**31, 2**9]), "numbers"),
        (_csr([1.0], [0, 1], [0], [2**62, 4]), "numbers"),
        (_csr([1.0], [0, 1], [0], [1, 2**23]), "8388608 columns"),
        (_csr([1.0], [0, 1], [0], [1]), r"\[N, K\]"),
        (_csr([1.0], [0, 1], [3], [1, 3]), "within its 3 columns"),
        (_csr([1.0], [0, 1], [-1], [1, 3]), "within its 3 columns"),
        (_csr([1.0], [0, 2], [0], [1, 3]), "crow_indices"),
        (_csr([1.0], [0, 1], [0], [2, 3]), "crow_indices"),
        (_csr([1.0], [0, 1, 0, 1], [0], [3, 3]), "do not rise"),
        (_csr([], [0, 2**63 - 1, -2, 0], [], [3, 3]), "do not rise"),
        (_csr([1.0, 2.0], [0, 2], [1, 1], [1, 3]), "within each row"),
        (_csr([1.0, 2.0], [0, 2], [1], [1, 3]), "col_indices"),
    ],
)
def test_hostile_bodies_are_refused_by_name(body, said):
    with pytest.raises(DataError, match=said):
        decode_forward_backward(body)


def test_sparse_tensors_of_a_call_share_their_bound(monkeypatch):
    monkeypatch.setattr(proto, "MOST_NUMBERS", 100)
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(2):
        message.MergeFromString(_csr([1.0], [0, 1], [0], [1, 60]))
    with pytest.raises(DataError, match="40 of the 100"):
        decode_forward_backward(message.SerializeToString())


def test_images_are_refused_by_name_and_provenance_is_not_read():
    image = types.ImageChunk(data=b"png", format="png", expected_tokens=4)
    one = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={})
    with pytest.raises(DataError, match="type image"):
        decode_forward_backward(body_of([one]))
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.data.add().model_input_spans.add().prompt_tokens.length = 3
    assert len(decode_forward_backward(message.SerializeToString()).data) == 1
    for _ in range(5000):
        message.data[0].model_input_spans.add()
    with pytest.raises(DataError, match="5001 entries"):
        decode_forward_backward(message.SerializeToString())


def test_options_are_finite():
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config["beta"] = float("nan")
    with pytest.raises(DataError, match="not finite"):
        decode_forward_backward(message.SerializeToString())


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_read_or_refused(body):
    try:
        decode_forward_backward(body)
    except DataError:
        return
    wire.ForwardBackwardRequest.FromString(body)  # what is read is such a message for the client


def test_the_client_reads_results_of_different_widths():
    outputs = [
        {"logprobs": np.array([-1.0, -2.5], np.float32), "ids": np.array([3, 4])},
        {"logprobs": np.array([-0.5], np.float32), "ids": np.array([5])},
        {"logprobs": np.arange(6, dtype=np.float32).reshape(2, 3), "ids": np.array([6, 7])},
        {"logprobs": np.zeros(0, np.float32), "ids": np.zeros(0, np.int64)},
    ]
    metrics = {"loss:sum": 4.5, "tokens:sum": 3.0}
    read = deserialize_forward_backward_output(encode_forward_backward(outputs, metrics))
    assert read.metrics == metrics
    assert read.loss_fn_output_type == "ArrayRecord"
    assert len(read.loss_fn_outputs) == 4
    for one, expected in zip(read.loss_fn_outputs, outputs, strict=True):
        assert one["logprobs"].shape == list(expected["logprobs"].shape)
        assert one["logprobs"].to_numpy().tolist() == expected["logprobs"].tolist()
        assert one["ids"].to_numpy().tolist() == expected["ids"].tolist()


def test_the_client_reads_a_result_without_data():
    read = deserialize_forward_backward_output(encode_forward_backward([], {"loss:sum": 0.0}))
    assert (read.loss_fn_outputs, read.metrics) == ([], {"loss:sum": 0.0})


def test_the_client_reads_samples():
    top = (np.array([[4, 2], [7, 0]]), np.array([[-0.1, -3.0], [-0.2, -99999.0]]))
    targets = np.array([[-1.0, -2.0], [np.nan, -4.0]])
    read = deserialize_sample_response(
        encode_sample(
            [SampledTokens([4, 7], [-0.1, -0.2], "stop", top), SampledTokens([], [], "length")],
            prompt_logprobs=[float("nan"), -1.5],
            top_prompt=top,
            targets=targets,
            cached_tokens=16,
        )
    )
    first, second = read.sequences
    assert (first.tokens, first.stop_reason) == ([4, 7], "stop")
    assert first.logprobs == pytest.approx([-0.1, -0.2])
    assert (second.tokens, second.stop_reason) == ([], "length")
    assert read.prompt_logprobs[0] is None
    assert read.prompt_logprobs[1] == -1.5
    assert read.prompt_cache_hit_tokens == 16
    assert read.topk_prompt_logprobs[0][0] == (4, pytest.approx(-0.1))
    assert read.target_prompt_logprobs.shape == [2, 2]
    assert np.array_equal(
        read.target_prompt_logprobs.to_numpy(), targets.astype(np.float32), equal_nan=True
    )


def test_our_messages_are_the_clients():
    """Every field has the number, the name, and on the wire the type that the client knows."""
    alike = {"bytes": {9, 11, 12}, "varint": {3, 5, 8, 13, 14}, "double": {1}}
    of_type = {number: kind for kind, numbers in alike.items() for number in numbers}
    names = {"EncodedText": "EncodedTextChunk", "ConfigValue": "LossConfigValue"}
    known = wire.DESCRIPTOR.message_types_by_name
    compared = 0
    for name, message in CLASSES.items():
        theirs = known.get(names.get(name, name))
        if theirs is None:
            assert name.endswith("Entry"), name
            continue
        for field in message.DESCRIPTOR.fields:
            if field.number >= 1000:  # pcg's own
                assert field.number not in theirs.fields_by_number
                continue
            other = theirs.fields_by_number[field.number]
            assert (field.name, of_type[field.type]) == (other.name, of_type[other.type])
            assert field.is_repeated == other.is_repeated
            compared += 1
    assert compared > 40
