"""Graphs whose nodes would give something else than their types say are refused."""

from __future__ import annotations

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import SplitError
from pcg.ir.types import TORCH_NAMES
from pcg.split.base.base_executor import GraphPieces
from pcg.split.base.piece_rules import read_piece
from pcg.split.messages import GRAPH, VERSION, Message, Piece, graph_digest
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.live_memory import peak_of
from tests.support.split_base import KEY, make_base

WIDEST = 256
MATRIX = 'frozen %p0: f32[64, 64] = "model.layers.{layer}.q"'
RMS = "{eps=1e-06, offset=0.0, round_first=True}"


def graph(inputs: str, parameters: list[str], nodes: list[str], outputs: str) -> str:
    lines = [f"graph @piece({inputs}) {{"]
    lines += [f"  {one}" for one in (*parameters, *nodes)]
    return "\n".join([*lines, f"  return {outputs}", "}"])


def chain(sources: list[str]) -> str:
    """A product by each of some weights, one after the other."""
    parameters = [f'frozen %p{n}: f32[64, 64] = "{one}"' for n, one in enumerate(sources)]
    nodes = [f"%v{n + 1}: f32[T, 64] = linear(%v{n}, %p{n})" for n in range(len(sources))]
    return graph("%v0: f32[T, 64]", parameters, nodes, f"%v{len(sources)}")


def unary(node: str, type_: str = "f32[T, 64]", parameters: tuple[str, ...] = ()) -> str:
    return graph(f"%v0: {type_}", list(parameters), [f"%v1: {type_} = {node}"], "%v1")


def pair(first: str, second: str, node: str) -> str:
    inputs = f"%v0: {first}, %v1: {second}"
    return graph(inputs, [], [f"%v2: {first} = {node}"], "%v2")


ROPE = "rope(%v0, %v1, %v1) {rotary_dim=ROWS, style=STYLE}"
HOSTILE = {
    "a matrix as a norm's weight": (unary(f"rms_norm(%v0, %p0) {RMS}", parameters=(MATRIX,)), None),
    "a norm that is wider than its type": (
        unary(f"rms_norm(%v0, %p0) {RMS}", "f32[T, 1]", (MATRIX,)),
        None,
    ),
    "a norm over tokens": (unary(f"rms_norm(%v0) {RMS}", "f32[T]"), None),
    "a gradient of a norm over others": (
        pair("f32[T, 64]", "f32[T, 1]", "rms_norm_backward(%v1, %v0) {eps=1e-06, offset=0.0}"),
        "no piece|does not take",
    ),
    "tokens by tokens": (
        pair("f32[T]", "f32[T, 1]", "clamp_backward(%v0, %v1) {min=0.0}"),
        None,
    ),
    "a gradient that is wider than its type": (
        pair("f32[T, 1]", "f32[T, 64]", "silu_backward(%v0, %v1)"),
        None,
    ),
    "turned dims that there are not": (
        pair(
            "f32[T, 4, 2]",
            "f32[T, 64]",
            ROPE.replace("ROWS", "64").replace("STYLE", '"half"'),
        ),
        None,
    ),
    "a function of another name": (
        pair(
            "f32[T, 4, 64]",
            "f32[T, 64]",
            ROPE.replace("ROWS", "64").replace("STYLE", '"half_backward"'),
        ),
        "use numbers or words",
    ),
    "a value as a number": (
        pair("f32[T, 1]", "f32[T, 64]", 'clamp(%v0) {min="v1"}'),
        "use numbers or words",
    ),
    "an exponent that is a value": (unary('pow(%v0) {exponent="v0"}'), "use numbers or words"),
    "a type of 9 dims": (unary("silu(%v0)", "f32[T" + ", 1" * 8 + "]"), "types such as"),
    "one matrix by many names": (
        chain(["model.layers.{layer}.q"] * 3),
        "2 products of a kind by a matrix at most",
    ),
    "products by all layers": (
        chain([f"model.layers.{layer}.q" for layer in range(65)]),
        "64 products at most, not 65",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_node_that_its_type_says_nothing_true_of_is_refused(name: str) -> None:
    text, message = HOSTILE[name]
    with pytest.raises(
        SplitError, match=message or "this is no piece: .* (does not fit|norm of|takes)"
    ):
        read_piece(text, WIDEST)


def test_vectors_of_weights_are_counted_as_memory() -> None:
    scale = 'frozen %p0: f32[64] = "norm"'
    nodes = [
        '%v1: f64[64] = cast(%p0) {dtype="f64"}',
        "%v2: f64[T, 64] = mul(%v0, %v1)",
    ]
    found = read_piece(graph("%v0: f64[T, 64]", [scale], nodes, "%v2"), WIDEST)
    kernels = 4 * 64 * 8
    assert found.bytes_per_token == 3 * 64 * 8 + kernels


ROTATED = ("bf16[T, 4, 64]", "bf16[T, 64]", "rope_backward(%v0, %v1, %v1) ")
EAGER = {
    "a norm's gradient": pair(
        "bf16[T, 64]", "bf16[T, 64]", "layer_norm_backward(%v0, %v1) {eps=1e-06}"
    ),
    "a norm": unary(f"rms_norm(%v0) {RMS}", "bf16[T, 64]"),
    "a rotation": pair(ROTATED[0], ROTATED[1], ROTATED[2] + '{rotary_dim=64, style="half"}'),
    "a bound": pair("f16[T, 64]", "f16[T, 64]", "clamp_backward(%v0, %v1) {max=1.0, min=0.0}"),
}


@pytest.mark.parametrize("text", EAGER.values(), ids=EAGER)
def test_what_kernels_allocate_is_counted(text: str) -> None:
    graphs, tokens = GraphPieces({}, WIDEST, layers=1), 32
    piece = Piece(GRAPH, (graphs.define(b"a", text),))
    wanted = read_piece(text, WIDEST)
    inputs = [
        torch.rand(tokens, *one.type.features, dtype=getattr(torch, TORCH_NAMES[one.type.dtype]))
        for one in wanted.graph.inputs
    ]
    graphs.checked(b"a", piece, inputs)
    sent = sum(one.nbytes for one in inputs)
    peak = sent + peak_of(lambda: graphs.run(piece, inputs))
    assert peak <= tokens * wanted.bytes_per_token
    assert peak > tokens * wanted.bytes_per_token / 4


def found_bytes(text: str) -> int:
    return read_piece(text, WIDEST).bytes_per_token


def test_weights_of_no_layer_are_bound_once() -> None:
    tensors = {"model.layers.0.q": torch.randn(64, 64)}
    graphs = GraphPieces(tensors, WIDEST, layers=100)
    digest = graphs.define(b"a", chain(["model.layers.0.q"]))
    x = torch.randn(2, 64)
    for layer in range(100):
        piece = Piece(GRAPH, (digest,), layer)
        graphs.checked(b"a", piece, [x])
        (found,) = graphs.run(piece, [x])
        torch.testing.assert_close(found, x @ tensors["model.layers.0.q"].t())
    assert len(graphs._defined[digest].layers) == 1


def test_a_batch_of_a_graph_has_no_more_memory_than_a_request() -> None:
    whole = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(1)), verify=False)
    base = make_base(whole, max_piece_mib=1)
    text = unary("silu(%v0)")
    most = 2**20 // found_bytes(text)
    clients = [base.endpoint.join() for _ in range(3)]
    for client, _ in clients:
        base.endpoint.ask(client, Message("hello", 1, {"version": VERSION, "key": KEY}))
        base.endpoint.ask(client, Message("define", 2, {"text": text}))
    base.loop.step(0.0)
    digest = graph_digest(text)
    for client, _ in clients:
        x = torch.ones(most // 2, 64)
        base.endpoint.ask(client, Message("run", 3, {"piece": f"graph:{digest}@0"}, (x,)))
    while base.loop.counts.requests < 3:
        base.loop.step(0.0)
    assert base.loop.counts.batches == 2
