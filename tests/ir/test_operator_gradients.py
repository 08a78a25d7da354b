"""Every gradient rule of the operator table, in float64 against PyTorch's autograd.

A graph of one node is differentiated by its rule. Both graphs are evaluated as the torch emitter
writes them, and the gradients compared with autograd's of what the operator means: the same PyTorch
expression, or, where that is a kernel which autograd cannot see through, somebody else's code.

Long because it has cases for the whole operator table.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Attribute, Graph
from pcg.ir.operators import OPERATORS, Gradient, Operator, operator
from pcg.ir.types import TOKENS, TORCH_NAMES, tensor
from tests.support.operator_cases import (
    CASES,
    COUNT,
    EXPERTS,
    NAMESPACE,
    Case,
    Operand,
    backward_graph,
    evaluate,
    forward_graph,
    weight,
    x,
)

ELSEWHERE = {
    "attention",
    *("all_gather", "all_gathers", "all_reduce", "all_reduces", "cross_entropy_part"),
    *("column_norm_part", "expand_add_part", "gathered_copy", "own_part", "placed_part"),
    *("reduce_scatter", "replicate", "route", "taken_part", "collected", "dispatched"),
}
"""Operators whose rule is checked in a test of their own."""


# ------------------------------------------------------------------------------------ references


# ----------------------------------------------------------------------------------------- cases


# ------------------------------------------------------------------------------------ the machine


def random_values(case: Case, graph: Graph) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    values = {}
    names = graph.nodes[0].inputs
    for name, operand in zip(names, case.operands, strict=True):
        type_ = graph.types[name]
        shape = tuple(COUNT if size == TOKENS else int(size) for size in type_.shape)
        dtype = getattr(torch, TORCH_NAMES[type_.dtype])
        if not type_.is_float:
            # Targets: some are no tokens, by any negative number.
            values[name] = torch.tensor([3, -100, 0, 6, -1][:COUNT], dtype=dtype)
            if case.op.startswith("embedding"):
                values[name] = values[name].abs() % 7
            if len(shape) > 1:  # chosen experts, each token's own
                numbers = torch.rand((shape[0], EXPERTS), generator=generator)
                values[name] = numbers.argsort(1)[:, : shape[1]]
            continue
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if operand.positive:
            value = value.abs() + 0.5
        values[name] = value.to(dtype)
    return values


def expected_gradients(
    case: Case, graph: Graph, values: Mapping[str, Tensor], incoming: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """The result, and the gradient of each input that needs one, by PyTorch's autograd."""
    (node,) = graph.nodes
    leaves = [values[name].clone().requires_grad_(o.needs) for name, o in zip_operands(case, graph)]
    if case.reference is not None:
        result = case.reference(*leaves)
    else:
        names = [f"v{i}" for i in range(len(leaves))]
        expression = operator(node.op).source(names, dict(node.attributes))
        result = eval(expression, {**NAMESPACE, **dict(zip(names, leaves, strict=True))})
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(result, asked, incoming.to(result.dtype)) if asked else ())
    return result.detach(), [next(found) if leaf.requires_grad else None for leaf in leaves]


def zip_operands(case: Case, graph: Graph) -> Sequence[tuple[str, Operand]]:
    return list(zip(graph.nodes[0].inputs, case.operands, strict=True))


def check(case: Case) -> None:
    """The rule's gradients are autograd's."""
    forward = forward_graph(case, "f64")
    verify(forward)
    values = random_values(case, forward)
    made = evaluate(forward, values, check_types=False)
    outputs = {value.name: made[value.name] for value in forward.nodes[0].outputs}
    result = outputs[forward.nodes[0].name]
    generator = torch.Generator().manual_seed(1)
    incoming = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
    expected, gradients = expected_gradients(case, forward, values, incoming)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    if not any(operand.needs for operand in case.operands):
        return

    backward, names = backward_graph(case, forward)
    verify(backward)
    known = evaluate(
        backward,
        {**values, **outputs, "incoming": incoming},
        check_types=False,
    )
    for (operand_name, operand), name, gradient in zip(
        zip_operands(case, forward), names, gradients, strict=True
    ):
        if not operand.needs:
            continue
        assert name is not None, f"no gradient of {operand_name}"
        assert gradient is not None
        declared = backward.types[name]
        wanted = forward.types[operand_name]
        assert (declared.dtype, declared.shape) == (wanted.dtype, wanted.shape)
        tolerance = 1e-12 if gradient.dtype == torch.float64 else 1e-2
        torch.testing.assert_close(known[name], gradient, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------ tests


def test_every_gradient_rule_is_covered() -> None:
    with_rule = {
        op
        for op, entry in OPERATORS.items()
        if entry.adjoint or type(entry).gradient is not Operator.gradient
    }
    # An embedding reads frozen rows by number: it has no rule, and is here for its forward alone.
    assert {case.op for case in CASES} - {"embedding"} == with_rule - ELSEWHERE
    assert with_rule >= ELSEWHERE


def test_no_gradient_flows_to_constants() -> None:
    """`constant_in` says of each rule to which inputs it never gives a gradient."""
    checked = set()
    for case in CASES:
        constants = operator(case.op).constant_in
        if not constants:
            continue
        graph = forward_graph(case, "f64")
        (node,) = graph.nodes
        builder = Builder("backward")
        upstream = (builder.input("incoming", node.output.type),)
        needs = (True,) * len(node.inputs)
        gradients = operator(case.op).gradient(Gradient(builder, graph, node, upstream, needs))
        without = tuple(i for i, name in enumerate(gradients) if name is None)
        assert without == tuple(i for i in constants if i < len(gradients))
        checked.add(case.op)
    assert checked == {op for op, entry in OPERATORS.items() if entry.constant_in} - ELSEWHERE


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_autograds(case: Case) -> None:
    if case.op == "embedding":
        case = dataclasses.replace(
            case, operands=tuple(dataclasses.replace(o, needs=False) for o in case.operands)
        )
    check(case)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_types_are_as_inferred(case: Case, dtype: str) -> None:
    """What runs has the dtypes and shapes that the table says, forward and backward."""
    forward = forward_graph(case, dtype)
    values = random_values(case, forward)
    values = evaluate(forward, values, check_types=True)
    if case.op == "embedding":
        return
    backward, _ = backward_graph(case, forward)
    result = values[forward.nodes[0].name]
    evaluate(backward, {**values, "incoming": torch.ones_like(result)}, check_types=True)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_a_value_read_twice(op: str) -> None:
    """Each operand's gradient on its own; what reads a value twice adds them."""
    builder = Builder("forward")
    name = builder.input("x", tensor("f64", TOKENS, 4))
    graph = builder.build([builder.add(op, [name, name])])
    case = Case(op, (x(4, positive=True), x(4, positive=True)))
    backward, names = backward_graph(case, graph)
    values = torch.rand(COUNT, 4, dtype=torch.float64) + 0.5
    result = evaluate(graph, {"x": values}, check_types=True)[graph.nodes[0].name]
    known = evaluate(
        backward,
        {"x": values, graph.nodes[0].name: result, "incoming": torch.ones_like(values)},
        check_types=True,
    )
    leaf = values.clone().requires_grad_()
    getattr(torch, op)(leaf, leaf).sum().backward()
    torch.testing.assert_close(sum(known[n] for n in names if n), leaf.grad)


@pytest.mark.parametrize("op", ["add", "mul"])
def test_sums_over_tokens_are_refused(op: str) -> None:
    case = Case(op, (x(4), weight(4, role="adapter")))
    with pytest.raises(UnsupportedError, match=r"f64\[4\] %p1 in .* sums over tokens"):
        backward_graph(case, forward_graph(case, "f64"))


def test_pow_at_zero() -> None:
    """x ** 0 is flat everywhere, and x ** 1 has slope 1, at zero too."""
    for exponent, slope in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.0)):
        case = Case("pow", (x(4),), {"exponent": exponent})
        backward, (name,) = backward_graph(case, forward_graph(case, "f64"))
        zeros, ones = torch.zeros(COUNT, 4).double(), torch.ones(COUNT, 4).double()
        known = evaluate(backward, {"x0": zeros, "incoming": ones}, check_types=True)
        assert name is not None
        torch.testing.assert_close(known[name], ones * slope)


# ------------------------------------------------------------------------------------- properties

SIZES = st.integers(1, 5)


@given(st.data(), st.sampled_from(["add", "sub", "mul", "div"]))
@settings(max_examples=100)
def test_broadcasting(data: st.DataObject, op: str) -> None:
    sizes = data.draw(st.lists(SIZES, max_size=3))
    left = [data.draw(st.sampled_from([1, size])) for size in sizes]
    right = [data.draw(st.sampled_from([1, size])) for size in sizes]
    needs = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    check(Case(op, (x(*left, needs=needs[0]), x(*right, needs=needs[1], positive=True))))


@given(st.data())
def test_slices(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(sizes), -1))
    start = data.draw(st.integers(0, sizes[dim] - 1))
    stop = data.draw(st.integers(start + 1, sizes[dim]))
    step = data.draw(st.integers(1, 6))
    check(Case("slice", (x(*sizes),), {"dim": dim, "start": start, "stop": stop, "step": step}))


@given(st.data())
def test_concats(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(sizes), -1))
    parts = []
    for size in data.draw(st.lists(SIZES, min_size=1, max_size=4)):
        sizes[dim] = size
        dtype = data.draw(st.sampled_from(["f64", "f32"]))
        parts.append(x(*sizes, dtype=dtype, needs=data.draw(st.booleans())))
    check(Case("concat", tuple(parts), {"dim": dim}))


@given(st.data(), st.sampled_from(["mean", "sum", "softmax", "repeat_interleave"]))
@settings(max_examples=100)
def test_dims(data: st.DataObject, op: str) -> None:
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    attributes: dict[str, Attribute] = {"dim": data.draw(st.integers(-len(sizes), -1))}
    if op in ("mean", "sum"):
        attributes["keepdim"] = data.draw(st.booleans())
    elif op == "repeat_interleave":
        attributes["repeats"] = data.draw(SIZES)
    check(Case(op, (x(*sizes),), attributes))


@given(st.data())
def test_shapes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(SIZES, max_size=3))
    have = [data.draw(st.sampled_from([1, size])) for size in sizes]
    check(Case("expand", (x(*have),), {"shape": (-1, *sizes)}))
    order = data.draw(st.permutations(range(1, len(sizes) + 1)))
    check(Case("permute", (x(*sizes),), {"dims": (0, *order)}))
    check(Case("reshape", (x(*sizes),), {"shape": (-1, *reversed(sizes))}))
