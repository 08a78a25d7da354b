"""Messages come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
import torch

from pcg.errors import SplitError
from pcg.split.messages import Message, Piece, frames_of, read_message

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_message_comes_back_as_it_was(dtype: torch.dtype) -> None:
    tensors = (torch.randn(3, 4).to(dtype), torch.randn(4, 3).to(dtype).t(), torch.empty(0, 2))
    frames = frames_of(Message("run", 7, {"piece": "linear:ü"}, tensors))
    found = read_message([bytes(frame) for frame in frames])
    assert (found.op, found.seq, found.fields) == ("run", 7, {"piece": "linear:ü"})
    for one, other in zip(tensors, found.tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x80\x04.",
        b"[]",
        b"{}",
        b'{"op": 3, "seq": 1, "tensors": []}',
        b'{"op": "run", "seq": true, "tensors": []}',
        b'{"op": "run", "seq": 1, "tensors": [["float32", [-1]]]}',
        b'{"op": "run", "seq": 1, "tensors": [["float32", [1099511627776, 4]]]}',
        b'{"op": "run", "seq": 1, "tensors": [["float64", [1099511627776]]]}',
        b'{"op": "run", "seq": 1, "tensors": [["float32", [1180591620717411303424, 0]]]}',
        b'{"op": "run", "seq": 1, "tensors": [["object", [1]]]}',
        b'{"op": "run", "seq": 1, "tensors": [["float32", 1]]}',
        b'{"op": "run", "seq": 1, "tensors": {"a": 1}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(header: bytes) -> None:
    with pytest.raises(SplitError):
        read_message([header, b"1234"])


def test_a_tensor_has_the_bytes_that_the_header_says() -> None:
    header = json.dumps({"op": "run", "seq": 1, "tensors": [["float32", [2]]]}).encode()
    with pytest.raises(SplitError, match="7 bytes are no tensor"):
        read_message([header, b"1234567"])
    with pytest.raises(SplitError, match="1 tensors, and 0 came"):
        read_message([header])


@pytest.mark.parametrize("text", ["", "linear", "linear:", "linear:a++b", "run:a", "gradient:a+b"])
def test_what_names_no_piece_is_refused(text: str) -> None:
    with pytest.raises(SplitError):
        Piece.parse(text)


def test_a_piece_is_written_as_it_is_read() -> None:
    for text in ("linear:a.weight+b.weight", "gradient:a.weight"):
        assert str(Piece.parse(text)) == text
