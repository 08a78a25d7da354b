"""A loss that is a graph, run on data: its sum, its gradients, its metrics.

A datum's loss is differentiated before the next one's is computed, so that one's values are all
that is kept. With the loss C and its gradient g at the log-probabilities l, what is returned is

    C + Σ g (l - stop_gradient(l)),

which has C's value and C's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.runtime.training.losses.graph_operators import NUMBERS, function_of, method_of
from pcg.runtime.training.losses.loss_graph import LossGraph, LossNode, decoded, keywords
from pcg.units import shown

MOST_NUMBERS = 2**23
"""The most numbers of all results for one datum."""
MOST_OF_CALL = 2**28
"""The most numbers of all results for the data of one call."""
MOST_RUNS = 2**18
"""The most runs of nodes for the data of one call."""
_LARGEST = 2**53
_MOST_RESULTS = 64
_MOST_DIMS = 8
_BAD = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What torch and Python raise of bad arguments."""


class GraphLoss:
    """A loss of the log-probabilities of some data, as trainers take a function.

    Attributes:
        metrics: what the loss tells of the data that it was computed for last, by names.
    """

    def __init__(self, graph: LossGraph, data: Sequence[Mapping[str, Tensor]]) -> None:
        """Take a graph and what it reads of data.

        Args:
            data: the arrays of each datum by their names.
        Raises:
            FinetuneError: the graph may not run, is too much for so many data, or reads what a
                datum does not have, or has in another rank.
        """
        graph.check()
        runs = len(graph.nodes) * len(data)
        if runs > MOST_RUNS:
            raise FinetuneError(
                f"loss {shown(graph.name)} of {len(graph.nodes)} nodes for {len(data)} data are "
                f"{runs} runs; at most {MOST_RUNS} are of one call: send less data at a time"
            )
        self.metrics: dict[str, float] = {}
        self._graph = graph
        self._loss, self._metrics = graph.output
        self._inputs = [self._inputs_of(one, f"data[{i}]") for i, one in enumerate(data)]
        self._left = 0

    def _inputs_of(self, datum: Mapping[str, Tensor], place: str) -> list[Tensor]:
        found = []
        for one in self._graph.inputs[1:]:
            if one.name not in datum:
                raise self._refused(place, f"it has no {one.name!r}, which the loss reads")
            value = datum[one.name]
            if not one.rank and value.numel() == 1:
                value = value.reshape(())
            if value.dim() != one.rank:
                raise self._refused(
                    place, f"{one.name!r} has rank {value.dim()}, and was declared of {one.rank}"
                )
            found.append(value)
        return found

    def __call__(self, logprobs: Sequence[Tensor]) -> Tensor:
        """Return the sum of the losses. FinetuneError: names the node that cannot be computed."""
        self._left = MOST_OF_CALL
        sums = dict.fromkeys(self._metrics, 0.0)
        total = torch.zeros(())
        for index, (leaf, inputs) in enumerate(zip(logprobs, self._inputs, strict=True)):
            place = f"data[{index}]"
            x = leaf.detach().requires_grad_()
            values = self._run(x, inputs, place)
            loss = self._scalar(values[self._loss], "its loss", place)
            if not loss.requires_grad:
                raise self._refused(place, "its loss does not depend on the log-probabilities")
            slope = self._slope(loss, x, place)
            if not (loss.isfinite() and slope.isfinite().all()):
                raise self._refused(place, "its loss, or the gradient of it, is not finite")
            total = total + loss.detach() + (slope * (leaf - leaf.detach())).sum()
            for name, node in self._metrics.items():
                sums[name] += float(self._scalar(values[node], name, place).detach())
        count = len(logprobs)
        self.metrics = {
            name: found / count if name.endswith(":mean") else found for name, found in sums.items()
        }
        return total

    def _slope(self, loss: Tensor, logprobs: Tensor, place: str) -> Tensor:
        try:
            (found,) = torch.autograd.grad(loss, logprobs, materialize_grads=True)
        except RuntimeError as error:  # some losses have no derivative, as of integers
            said = str(error).partition("\n")[0][:200]
            raise self._refused(place, f"it cannot be differentiated: {said}") from None
        return found

    def _run(self, logprobs: Tensor, inputs: Sequence[Tensor], place: str) -> dict[str, Any]:
        """Return the results of all nodes, by their names."""
        graph = self._graph
        if logprobs.dim() != graph.inputs[0].rank:
            rank = graph.inputs[0].rank
            raise self._refused(
                place,
                f"its targets have rank {logprobs.dim()}, and logprobs was declared of {rank}",
            )
        given = zip(graph.nodes, (logprobs, *inputs), strict=False)
        values: dict[str, Any] = {node.name: value for node, value in given}
        most = min(MOST_NUMBERS, self._left)
        used = 0
        for node in graph.calls:
            used += self._call(node, values, most - used, place)
        self._left -= used
        return values

    def _call(self, node: LossNode, values: dict[str, Any], left: int, place: str) -> int:
        """Compute a node; returns the numbers of its result."""
        found = (method_of if node.op == "call_method" else function_of)(node.target)
        assert found is not None
        try:
            args = [decoded(one, values) for one in node.args]
            kwargs = keywords(node.kwargs, values)
            planned = found.planned(args, kwargs)
            if planned > left:
                raise self._refused(
                    place,
                    f"{node.target!r} makes {shown(planned)} numbers, and {left} are left of the "
                    f"{MOST_NUMBERS} for a datum and {MOST_OF_CALL} for a call",
                )
            result = found.function(*args, **kwargs)
            made = _numbers_of(result)
        except _BAD as error:
            said = str(error).partition("\n")[0][:200]
            raise self._refused(place, f"{node.target!r} cannot be computed: {said}") from None
        values[node.name] = result
        return max(planned, made)

    def _scalar(self, value: Any, what: str, place: str) -> Tensor:
        if not isinstance(value, Tensor) or value.dim() or value.is_complex():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise self._refused(place, f"{what} is {shape}; return a scalar tensor")
        return value

    def _refused(self, place: str, said: str) -> FinetuneError:
        return FinetuneError(f"loss {shown(self._graph.name)}, {place}: {said}")


def _numbers_of(result: Any) -> int:
    """Count the numbers of a result. TypeError, ValueError: it is nothing that a loss has."""
    if isinstance(result, Tensor):
        if result.dim() > _MOST_DIMS:
            raise ValueError(f"its result has {result.dim()} dims; use {_MOST_DIMS} at most")
        return result.numel()
    if isinstance(result, tuple):
        if len(result) > _MOST_RESULTS:
            raise ValueError(f"it has {len(result)} results")
        return sum(map(_numbers_of, result))
    if isinstance(result, NUMBERS):
        if abs(result) > _LARGEST and result not in (float("inf"), float("-inf")):
            raise ValueError("its result is too large")
        return 0
    if isinstance(result, torch.dtype | torch.device):
        return 0
    raise TypeError(f"its result is a {type(result).__name__}")
