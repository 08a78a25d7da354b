"""Graphs, and the builder that makes them."""

import pytest

from pcg.errors import IrError, TypeCheckError, VerifyError
from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.parser import parse_graph
from pcg.ir.types import TOKENS, tensor

X = tensor("bf16", TOKENS, 64)
W = Parameter(Value("w", tensor("bf16", 64, 64)), "frozen", "w.weight")


@pytest.fixture
def builder() -> Builder:
    builder = Builder("g")
    builder.input("x", X)
    return builder


@pytest.fixture
def graph() -> Graph:
    """Two heads that share a product; one value is dead."""
    return parse_graph("""
        graph @g(%x: bf16[T, 64], %unused: bf16[T, 64]) {
          frozen %w: bf16[64, 64] = "w.weight"
          %y: bf16[T, 64] = linear(%x, %w)  @up
          %z: bf16[T, 64] = mul(%y, %y)
          %top: bf16[T, 4], %top_indices: i64[T, 4] = topk(%z) {k=4}
          return %top, %z
        }""")


# ------------------------------------------------------------------------------------- builder


def test_types_are_inferred(builder: Builder) -> None:
    w = builder.parameter(W)
    builder.build([builder.add("linear", ["x", w])])
    assert builder.types["linear"] == tensor("bf16", TOKENS, 64)


def test_equal_nodes_are_made_once(builder: Builder) -> None:
    first = builder.add("mul", ["x"], scalar=2.0, name="a", scope="left")
    assert builder.add("mul", ["x"], scalar=2.0, name="b", scope="right") == first
    assert builder.add("mul", ["x"], scalar=3.0) != first
    assert len(builder.nodes) == 2


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (1, True), (0.0, -0.0), (2, 2.0)])
def test_constants_of_other_kinds_are_other_nodes(
    builder: Builder, left: float, right: float
) -> None:
    """Equal in Python, yet i64 + 1 is i64 and i64 + 1.0 is f32, and 1 / -0.0 is -inf."""
    ids = builder.input("ids", tensor("i64", TOKENS))
    first, second = builder.add("add", [ids], scalar=left), builder.add("add", [ids], scalar=right)
    assert first != second
    expected = ["f32" if isinstance(scalar, float) else "i64" for scalar in (left, right)]
    assert [builder.types[name].dtype for name in (first, second)] == expected


def test_equal_nodes_of_many_outputs_are_made_once(builder: Builder) -> None:
    names = builder.add_many("topk", ["x"], k=4)
    assert names == ("topk", "topk_indices")
    assert builder.add_many("topk", ["x"], k=4) == names
    assert builder.add_many("topk", ["x"], k=5) == ("topk_1", "topk_1_indices")


def test_a_value_is_defined_once(builder: Builder) -> None:
    with pytest.raises(VerifyError, match="%x is defined twice in graph @g"):
        builder.input("x", X)
    with pytest.raises(VerifyError, match="defined twice"):
        builder.append(Node("neg", ("x",), (Value("x", X),)))


def test_a_parameter_is_added_once(builder: Builder) -> None:
    assert builder.parameter(W) == builder.parameter(W) == "w"
    assert list(builder.parameters) == ["w"]
    with pytest.raises(VerifyError, match="graph @g has another parameter %w"):
        builder.parameter(Parameter(W.value, "adapter", "w.weight"))


def test_builder_refuses(builder: Builder) -> None:
    with pytest.raises(VerifyError, match="neg reads %y, which graph @g has not defined"):
        builder.add("neg", ["y"])
    with pytest.raises(TypeCheckError, match="neg takes 1 inputs, not 2"):
        builder.add("neg", ["x", "x"])
    with pytest.raises(TypeCheckError, match=r"linear of bf16\[T, 64\]"):
        builder.add("linear", ["x", "x"])
    with pytest.raises(IrError, match="no operator 'tan'; did you mean tanh"):
        builder.add("tan", ["x"])


def test_build_drops_dead_code(builder: Builder) -> None:
    w = builder.parameter(W)
    y = builder.add("neg", ["x"])
    builder.add("linear", [y, w])
    graph = builder.build([y])
    assert [node.op for node in graph.nodes] == ["neg"]
    assert graph.parameters == ()
    assert [value.name for value in graph.inputs] == ["x"]


def test_extending(graph: Graph) -> None:
    builder = Builder.extending(graph)
    assert builder.build(graph.outputs) == graph
    # What the graph has is found again.
    assert builder.add("mul", ["y", "y"]) == "z"
    assert builder.add_many("topk", ["z"], k=4) == ("top", "top_indices")
    extended = builder.build([*graph.outputs, builder.add("neg", ["z"])])
    verify(extended)
    assert extended.nodes[:-1] == graph.nodes


# -------------------------------------------------------------------------------------- graph


def test_without_dead_code(graph: Graph) -> None:
    assert graph.without_dead_code() == graph
    alive = graph.replace(outputs=("z",)).without_dead_code()
    assert [node.name for node in alive.nodes] == ["y", "z"]
    assert alive.inputs == graph.inputs
    # One live output keeps the node, and all of its outputs.
    indices = graph.replace(outputs=("top_indices",)).without_dead_code()
    assert indices.nodes == graph.nodes
    assert graph.replace(outputs=()).without_dead_code().nodes == ()
    assert graph.replace(outputs=("x",)).without_dead_code().parameters == ()
