"""Every sharding rule of the operator table by brute force: on concrete parts, against the whole.

Each rank runs the operator, and its gradient's rule, on what the layouts say that it holds; what
the ranks have then is put together and compared with the operator on the whole tensors. For the
operators of bypass networks every other assignment of layouts is tried, too: what is right by its
numbers must be a rule of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.layouts import (
    PRE_REDUCE,
    REPLICATED,
    ROUTED,
    WHOLE,
    Layout,
    Sharding,
    dual,
    local_type,
    partitioned,
)
from pcg.ir.operators import operator
from pcg.ir.types import State
from tests.support.held import held, joined, same, seeded
from tests.support.operator_cases import (
    CASES,
    EXPERTS,
    Case,
    OneStep,
    backward_graph,
    evaluate,
    forward_graph,
)

TOKENS_OF_CASE = 6
SKIPPED = {"virtual_tokens", "without_virtual", "cross_entropy"}
"""The first two see which rows of a batch are virtual; the loss is whole or parted by tokens."""


@pytest.fixture(autouse=True)
def _batch_of_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneStep, "tokens", TOKENS_OF_CASE)


def values_of(case: Case, graph: Graph) -> list[Tensor]:
    """Random inputs of the operator, in fp64 where they are floats."""
    found = []
    for i, (name, operand) in enumerate(zip(graph.nodes[0].inputs, case.operands, strict=True)):
        type_ = graph.types[name]
        shape = [TOKENS_OF_CASE] * type_.is_token_wise + list(type_.features)
        if not type_.is_float:
            found.append(torch.randint(0, 5, shape, generator=seeded(i)))
            continue
        value = torch.randn(shape, generator=seeded(case.op, i), dtype=torch.float64)
        found.append(value.abs() + 0.5 if operand.positive else value)
    return found


def run(
    case: Case, values: Sequence[Tensor], upstream: Tensor | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and input gradients of the operator as it is emitted."""
    graph = forward_graph(case, "f64")
    (node,) = graph.nodes
    known = dict(zip(node.inputs, values, strict=True))
    known = evaluate(graph, known, check_types=False)
    outputs = [known[value.name] for value in node.outputs]
    gradients: list[Tensor | None] = [None] * len(values)
    if upstream is not None and any(operand.needs for operand in case.operands):
        backward, names = backward_graph(case, graph)
        plain = dict(zip(node.inputs, values, strict=True))
        plain |= {value.name: known[value.name] for value in node.outputs}
        found = evaluate(backward, plain | {"incoming": upstream}, check_types=False)
        gradients = [None if name is None else found[name] for name in names]
    return outputs, gradients


def local_case(case: Case, rule: Sharding, degree: int) -> Case:
    """The operator as one rank runs it."""
    graph = forward_graph(case, "f64")
    (node,) = graph.nodes
    types = [
        local_type(value.type, layout, degree)
        for value, layout in zip(node.outputs, rule.outputs, strict=True)
    ]
    operands = []
    for operand, name, layout in zip(case.operands, node.inputs, rule.inputs, strict=True):
        shape = local_type(graph.types[name], layout, degree).shape
        operands.append(dataclasses.replace(operand, shape=shape))
    parts = degree if any(at.state is State.ROUTED and at.dim for at in rule.inputs) else 1
    attributes = operator(case.op).local_attributes(dict(node.attributes), tuple(types), parts)
    return dataclasses.replace(case, operands=tuple(operands), attributes=attributes)


def owners_of(
    case: Case, values: Sequence[Tensor], outputs: Sequence[Tensor], degree: int
) -> Tensor:
    """The rank of each row [T, k]: that of its expert where the operator reads indices."""
    if case.op.startswith("expert_"):
        return next(v for v in values if not v.is_floating_point()) // (EXPERTS // degree)
    return torch.randint(degree, outputs[0].shape[:2], generator=seeded("owners"))


def is_right(case: Case, rule: Sharding, degree: int) -> bool:
    """Whether ranks that hold the inputs so have the outputs so, and the gradients dually."""
    graph = forward_graph(case, "f64")
    values = values_of(case, graph)
    outputs, _ = run(case, values, None)
    out, owners = outputs[0], None
    if ROUTED in (*rule.inputs, *rule.outputs):
        owners = owners_of(case, values, outputs, degree)
    incoming = torch.randn(out.shape, generator=seeded("dy"), dtype=torch.float64)
    outputs, gradients = run(case, values, incoming if out.is_floating_point() else None)
    parts = [
        held(value, layout, degree, i, owners, elsewhere=0.5)
        for i, (value, layout) in enumerate(zip(values, rule.inputs, strict=True))
    ]
    upstream = held(incoming, dual(rule.outputs[0]), degree, "dy", owners)
    local = local_case(case, rule, degree)
    found = []
    for rank in range(degree):
        own = [part[rank] for part in parts]
        with on_rank(rank, degree):
            found.append(run(local, own, upstream[rank] if gradients else None))
    for i, (expected, layout) in enumerate(zip(outputs, rule.outputs, strict=True)):
        if not same(joined([own[i] for own, _ in found], layout, owners), expected):
            return False
    for i, (gradient, layout) in enumerate(zip(gradients, rule.inputs, strict=True)):
        if gradient is not None:
            own = [ranks_gradients[i] for _, ranks_gradients in found]
            if any(one is None for one in own):
                return False
            present = [g for g in own if g is not None]
            if not same(joined(present, dual(layout), owners), gradient):
                return False
            if layout == ROUTED and not same(torch.stack(present).sum(0), gradient):
                return False  # other rows have a gradient
    return True


@contextlib.contextmanager
def on_rank(rank: int, degree: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneStep, "ranks", SimpleNamespace(rank=rank, size=degree))
        yield


def rules_of(case: Case, degree: int) -> Iterator[Sharding]:
    """Rules by which all ranks run the operator itself; tests/parallel has the others."""
    graph = forward_graph(case, "f64")
    (node,) = graph.nodes
    types = tuple(graph.types[name] for name in node.inputs)
    for rule in operator(case.op).shardings(types, dict(node.attributes)):
        pairs = [
            *zip(rule.inputs, types, strict=True),
            *zip(rule.outputs, (value.type for value in node.outputs), strict=True),
        ]
        if not rule.op and all(layout.fits(type_, degree) for layout, type_ in pairs):
            yield rule


TESTED = [case for case in CASES if case.op not in SKIPPED]


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("case", TESTED, ids=str)
def test_every_rule_is_right_by_its_numbers(case: Case, degree: int) -> None:
    rules = list(rules_of(case, degree))
    assert len(rules) >= 2
    for rule in rules:
        assert is_right(case, rule, degree), str(rule)


def canonical(rule: Sharding, case: Case) -> Sharding:
    """An input without a gradient is whole and replicated at once."""
    inputs = [
        REPLICATED if layout == WHOLE and not operand.needs else layout
        for layout, operand in zip(rule.inputs, case.operands, strict=True)
    ]
    return Sharding(tuple(inputs), rule.outputs)


def layouts_of(case: Case, shape: Sequence[Any], degree: int) -> list[Layout]:
    found = [WHOLE, REPLICATED, PRE_REDUCE]
    for dim in range(-len(shape), 0):
        size = TOKENS_OF_CASE if not isinstance(shape[dim], int) else shape[dim]
        if size % degree == 0 and size > 1:
            found.append(partitioned(dim))
    return found


BYPASS_OPS = {
    "linear", "shrink", "expand_add", "scale", "activate", "add", "mul", "gelu", "singular_down",
    "khatri_rao",
}  # fmt: skip
BYPASS = [
    case
    for case in CASES
    if case.op in BYPASS_OPS
    and len(case.operands) <= 3
    and all(operand.needs or operand.role == "frozen" for operand in case.operands)
]
EVEN = {3: 4, 1: 1, 5: 4}
"""Sizes of cases by even ones, so that every dim can be partitioned."""


def evened(case: Case) -> Case:
    operands = [
        dataclasses.replace(
            o, shape=tuple(EVEN.get(s, s) if isinstance(s, int) else s for s in o.shape)
        )
        for o in case.operands
    ]
    return dataclasses.replace(case, operands=tuple(operands))


@pytest.mark.parametrize("case", BYPASS, ids=str)
def test_nothing_right_is_left_out(case: Case) -> None:
    case = evened(case)
    graph = forward_graph(case, "f64")
    claimed = {canonical(rule, case) for rule in rules_of(case, 2)}
    choices = [layouts_of(case, operand.shape, 2) for operand in case.operands]
    outputs = layouts_of(case, graph.nodes[0].output.type.shape, 2)
    missing = []
    for *inputs, output in itertools.product(*choices, outputs):
        rule = canonical(Sharding(tuple(inputs), (output,)), case)
        if rule not in claimed:
            try:
                right = is_right(case, rule, 2)
            except Exception:  # the shapes do not fit
                right = False
            if right:
                missing.append(str(rule))
    assert not missing
