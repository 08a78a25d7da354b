"""Each rule of the IR, broken once; and graphs that break none."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import sympy
from hypothesis import given, settings

from pcg.errors import VerifyError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.operators import OPERATORS
from pcg.ir.parser import parse_graph
from pcg.ir.printer import print_graph
from pcg.ir.types import TOKENS, Dim, State, TensorType, tensor
from tests.support.well_typed import graphs

GOOD = """graph @mlp(%x: bf16[T, 64], %ids: i64[T]) {
  frozen %w: bf16[128, 64] = "layers.{layer}.up.weight" transposed
  adapter %scale: f32[128] = "ia3"
  %up: bf16[T, 128] = linear(%x, %w)  @mlp.up
  %act: bf16[T, 128] = silu(%up)
  %split: bf16[T, 2, 64] = reshape(%act) {shape=(-1, 2, 64)}
  %half: bf16[T, 2, 32] = slice(%split) {dim=-1, start=0, stop=32}
  %out: bf16[T, 2, 64], %lse: f32[T, 2] = attention(%split, %split, %split) {scale=0.1, softcap=0.0, window=0}
  return %out, %half
}"""  # noqa: E501


class Reads(Mapping[str, Any]):
    """Attributes that note which of them are read."""

    def __init__(self, attributes: Mapping[str, Any], read: set[str]) -> None:
        self.attributes, self.read = attributes, read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.attributes)

    def __len__(self) -> int:
        return len(self.attributes)


FREE = {
    *(("slice", 0), ("take_along", 0), ("topk", 0), ("vera_down", 0)),  # more than is taken
    *(("mean", 0), ("sum", 0)),  # the dim that is reduced
    *(("cross_entropy", 0), ("cross_entropy_part", 0)),  # the vocabulary
    ("expand", 0),  # what has the wanted size already stays
    *(("embedding_shrink", 1), ("embedding_outer", 2)),  # the vocabulary
    ("base_piece", 2),  # the weight that names the base
    ("latent_window_backward", 4),  # the latents
    *(("short_convolution", 1), ("short_convolution_backward", 1)),  # the taps
    *(("collected", 1), ("dispatched", 1)),  # the experts of a token
}
"""Inputs whose last size is not given by the others, nor gives the outputs'."""


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator(op: str) -> None:
    """Its graphs verify, print and parse; wrong operands are refused; all attributes are read."""
    entry, read, count = OPERATORS[op], set[str](), itertools.count()

    @settings(max_examples=24)
    @given(graphs(op))
    def check(graph: Graph) -> None:
        if next(count) < 8:
            verify(graph)
            parsed = parse_graph(print_graph(graph))
            assert parsed == graph
            # Equality that tells 1 from 1.0 and True, and 0.0 from -0.0.
            assert list(map(repr, parsed.nodes)) == list(map(repr, graph.nodes))
            check_operands(next(node for node in graph.nodes if node.op == op), graph)
        for node in graph.nodes:
            if node.op == op and entry.executable:
                attributes = Reads(dict(node.attributes), read)
                entry.infer(tuple(graph.types[name] for name in node.inputs), attributes)
                entry.source(node.inputs, attributes)

    check()
    assert not entry.executable or read == entry.attributes.keys()


def check_operands(node: Node, graph: Graph) -> None:
    """Any operand with another last size, or with one dim more, is refused."""
    types = [graph.types[name] for name in node.inputs]
    for place, type_ in enumerate(types):
        changed = [(*type_.shape, 97)]
        if type_.dims and isinstance(type_.shape[-1], int) and (node.op, place) not in FREE:
            changed.append((*type_.shape[:-1], type_.shape[-1] + 97))
        for shape in changed:
            given_types = [*types[:place], type_.with_shape(shape), *types[place + 1 :]]
            inputs = tuple(Value(f"i{n}", one) for n, one in enumerate(given_types))
            other = dataclasses.replace(node, inputs=tuple(value.name for value in inputs))
            with pytest.raises(VerifyError):
                verify(Graph("g", inputs, (), (other,), (node.name,)))


def test_good_graphs() -> None:
    verify(parse_graph(GOOD))
    verify(Graph("empty", (), (), (), ()))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("silu(%up)", "silu(%down)", "%down is not defined; define it"),
        ("silu(%up)", "silu(%half)", "%half is read before it is defined; order the nodes"),
        ("silu(%up)", "silu(%act)", "%act is read before it is defined"),
        ("%act: ", "%x: ", "%x is defined twice; give one of the two another name"),
        ("%act: ", "%w: ", "%w is defined twice"),
        ("%lse: ", "%out: ", "%out is defined twice"),
        ("%ids: ", "%x: ", "%x is defined twice"),
        ("return %out", "return %none", "output %none is not defined"),
        ("silu(%up)", "swish(%up)", "the operator table has no operator 'swish'"),
        ("silu(%up)", "silu(%up, %up)", "silu takes 1 inputs, not 2"),
        ("silu(%up)", "silu()", "silu takes 1 inputs, not 0"),
        ("silu(%up)", "mul(%up)", "mul takes two tensors, or one and the attribute scalar"),
        (
            "%up: bf16[T, 128]",
            "%up: bf16[T, 64]",
            r"%up is declared bf16\[T, 64\], but linear of bf16\[T, 64\], bf16\[128, 64\] gives "
            r"bf16\[T, 128\]; declare that, or change what the node reads",
        ),
        ("%act: bf16", "%act: f32", r"%act is declared f32\[T, 128\], but silu .* bf16\[T, 128\]"),
        (", %lse: f32[T, 2]", "", r"attention has 2 outputs \(bf16\[T, 2, 64\], f32.*\), not 1"),
        ("linear(%x, %w)", "linear(%w, %x)", r"linear of bf16\[128, 64\] by a weight"),
        ("(-1, 2, 64)", "(-1, 2, 65)", "cannot reshape"),
        ("(-1, 2, 64)", "True", "reshape takes shape as a tuple of ints of 64 bits, not True"),
        ("(-1, 2, 64)", '"T, 2, 64"', "reshape takes shape as a tuple of ints"),
        ("(-1, 2, 64)", "(2, 64)", "shape .* -1 first if and only if tokens lead"),
        ("{dim=-1, start=0, stop=32}", "{dim=-1, start=0}", "slice needs the attribute stop, an"),
        ("{dim=-1, start=0, stop=32}", "{dim=0, start=0, stop=32}", "dim as a negative int"),
        ("{dim=-1, start=0, stop=32}", "{dim=-3, start=0, stop=32}", "dim -3 is no feature dim"),
        ("{dim=-1, start=0, stop=32}", '{dim="a", start=0, stop=32}', "dim as .*, not 'a'"),
        ("start=0, stop=32}", "start=0, step=0, stop=32}", "step as an int of at least 1, not 0"),
        ("scale=0.1", "scale=inf", "attention takes scale as a finite float, not inf"),
        (", window=0", "", "attention needs the attribute window, an int of at least 0"),
        (", window=0", ", window=-1", "window as an int of at least 0, not -1"),
        (", window=0", ", window=0, windows=1", r"no attribute windows; .* \(it has scale, window"),
        ("silu(%up)", "silu(%up) {beta=1.0}", "silu has no attribute beta; remove it\n"),
        ("linear(%x, %w)", "linear(%x, %w) {alpha=2.0}", "linear has no attribute alpha; remove"),
        ("{dim=-1, start=0,", "{start=0, dim=-1,", "attributes start, dim, stop are not sorted"),
        (
            "%x: bf16[T, 64]",
            "%x: bf16[64, T]",
            "dim 1 of %x has size T; the token dim is the first",
        ),
        ("%x: bf16[T, 64]", "%x: bf16[2*T, 64]", r"dim 0 of %x has size 2\*T; the token dim"),
        ("%x: bf16[T, 64]", "%x: bf16[T, T/4]", "dim 1 of %x has size T/4"),
        ("%x: bf16[T, 64]", "%x: bf16[T, 0]", "dim 1 of %x has size 0; a size is positive"),
        ("%x: bf16[T, 64]", "%x: bf16[T, -64]", "dim 1 of %x has size -64"),
        ("%scale: f32[128]", "%scale: f32[T]", "%scale has a token dim; make it an input"),
        ('= "ia3"', '= ""', "%scale has no source; name its tensor in the checkpoint"),
        ('= "ia3"', '= "ia3" transposed', "%scale is transposed, and has no two dims"),
    ],
)
def test_broken_rules(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    graph = parse_graph(GOOD.replace(old, new))
    with pytest.raises(VerifyError, match=message) as caught:
        verify(graph)
    assert str(caught.value).startswith("graph @mlp: ")


def test_error_shows_the_line() -> None:
    graph = parse_graph(GOOD.replace("silu(%up)", "silu(%down)  @mlp.act"))
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    assert str(caught.value).splitlines() == [
        "graph @mlp: %down is not defined; define it as an input, parameter or output",
        "  %act: bf16[T, 128] = silu(%down)  @mlp.act",
    ]


def test_parallel_states_are_not_compared() -> None:
    graph = parse_graph(
        GOOD.replace("%up: bf16[T, 128]", "%up: bf16[T, 128|4]").replace("[128, 64]", "[128|4, 64]")
    )
    assert graph.types["up"].dims[1] == Dim(128, State.PARTITIONED, 4)
    verify(graph)


def one_node(**attributes: object) -> Graph:
    """y = clamp(x), with any attributes."""
    x = Value("x", tensor("f32", TOKENS))
    node = Node("clamp", ("x",), (Value("y", x.type),), tuple(attributes.items()))  # type: ignore[arg-type]
    return Graph("g", (x,), (), (node,), ("y",))


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**63, None, [1], (1.0,), (True,), 1j])
def test_attribute_kinds(value: object) -> None:
    """What does not print is shown as Python shows it."""
    message = r"clamp takes min as an int of 64 bits or a finite float, not (.|\n)*clamp"
    with pytest.raises(VerifyError, match=message):
        verify(one_node(min=value))


def test_attribute_names() -> None:
    with pytest.raises(VerifyError, match=r"clamp has no attribute a b; remove it \(it has"):
        verify(one_node(**{"a b": 1}))
    graph = one_node(min=1.0)
    twice = dataclasses.replace(graph.nodes[0], attributes=(("min", 1.0), ("min", 2.0)))
    with pytest.raises(VerifyError, match="min, min are not sorted, or not distinct"):
        verify(graph.replace(nodes=(twice,)))


@pytest.mark.parametrize("name", ["", "a b", "é", "a-b", "%x", "x\n"])
def test_names(name: str) -> None:
    value = Value(name, tensor("f32", TOKENS))
    with pytest.raises(VerifyError, match="is not of letters, digits, '_'"):
        verify(Graph("g", (value,), (), (), ()))
    with pytest.raises(VerifyError, match=r"the graph's name .* is not of letters"):
        verify(Graph(name, (), (), (), ()))


def test_roles() -> None:
    parameter = Parameter(Value("w", tensor("f32", 1)), "trained", "w")
    with pytest.raises(VerifyError, match="role 'trained' is none of frozen, constant, adapter"):
        verify(Graph("g", (), (parameter,), (), ()))


@pytest.mark.parametrize(
    "size",
    [
        sympy.Symbol("S"),
        sympy.Symbol("S", integer=True),
        sympy.sqrt(sympy.Symbol("S", integer=True, positive=True)),
        sympy.Float(1.5),
        sympy.Symbol("a b", integer=True, positive=True),
        sympy.Symbol("S", integer=True, positive=True) ** sympy.Symbol("r"),
        sympy.Integer(2) ** 80,
        sympy.pi,
    ],
)
def test_sizes_that_do_not_read_back(size: sympy.Expr) -> None:
    value = Value("x", TensorType("f32", (Dim(size),)))
    with pytest.raises(VerifyError, match="of %x does not read back; build it of ints, symbols"):
        verify(Graph("g", (value,), (), (), ()))


def test_symbolic_sizes() -> None:
    size = sympy.ceiling(sympy.Symbol("S", integer=True, positive=True) / 4)
    verify(Graph("g", (Value("x", tensor("f32", TOKENS, size)),), (), (), ("x",)))
