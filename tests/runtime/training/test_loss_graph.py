"""Losses that come as graphs: the numbers of the function that was traced, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from tinker.lib.public_interfaces import custom_loss
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.runtime.training import loss_graph
from pcg.runtime.training.loss_graph import GraphLoss, LossGraph, LossInput, LossNode

RANKS = {"logprobs": 1, "advantages": 1, "old": 1, "scale": 0}
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def traced(function: Loss, ranks: dict[str, Any]) -> tuple[custom_loss.LossHandle, LossGraph]:
    """A function as the client traces it, and as it sends it."""
    handle = custom_loss.trace_loss(function, ranks, "session")
    sent = json.loads(custom_loss.encode_graph(handle).model_dump_json())
    inputs = [LossInput(one.name, one.rank) for one in handle.inputs]
    nodes = [LossNode(**node) for node in sent["nodes"]]
    return handle, LossGraph(handle.name, inputs, nodes)


def clipped(
    logprobs: Tensor, advantages: Tensor, old: Tensor, scale: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A PPO that uses much of what losses use."""
    ratios = (logprobs - old).exp()
    near = torch.clamp(ratios, 1 - 0.2, max=1 + 0.2)
    counts = torch.ones_like(ratios)
    gained = torch.minimum(ratios * advantages, near * advantages)
    surprise = functional.logsigmoid(logprobs).masked_fill(advantages < 0, 0.0)
    count = logprobs.shape[0]
    kl = ((old - logprobs).exp() - 1 - (old - logprobs)).mean()
    best = logprobs.max(dim=0).values + logprobs[advantages > 0].sum() + logprobs[:-1].sum()
    entropy = (functional.softmax(logprobs, dim=-1) * torch.arange(count)).sum() / math.sqrt(count)
    tied = torch.stack([logprobs, old]).std(dim=0, correction=0).sum() - float("-inf") * 0.0
    first, second = torch.chunk(surprise[..., None].expand(-1, 2), 2, dim=1)
    loss = -(gained * counts).sum() + scale * kl + 0.1 * best + entropy
    loss = loss + functional.huber_loss(first, second * 0.5, reduction="sum", delta=2.0)
    loss = (
        loss
        + torch.where(ratios > 1, ratios, 0.0).sum()
        + logprobs.to(torch.float64).square().sum()
    )
    return loss.float(), {"custom/kl:mean": kl, "custom/tied:sum": tied.nan_to_num(0.0)}


def wide(logprobs: Tensor, shares: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A cross entropy with a distribution of several targets."""
    return -(shares * logprobs).sum(dim=-1).mean(), {"custom/most:sum": shares.amax()}


def data(function: Loss, count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(1)
    logprobs, inputs = [], []
    for size in range(3, 3 + count):
        shape = (size, 4) if function is wide else (size,)
        logprobs.append(-torch.rand(shape, generator=draw).clamp(0.01))
        found = {
            "advantages": torch.randn(size, generator=draw),
            "old": -torch.rand(size, generator=draw),
            "scale": torch.rand(1, generator=draw),
            "shares": torch.rand(shape, generator=draw),
            "unread": torch.zeros(2),
        }
        inputs.append(found)
    return logprobs, inputs


@pytest.mark.parametrize(
    ("function", "ranks"), [(clipped, RANKS), (wide, {"logprobs": 2, "shares": 2})]
)
def test_a_graph_has_the_numbers_of_its_function(function: Loss, ranks: dict[str, Any]) -> None:
    _, graph = traced(function, ranks)
    logprobs, inputs = data(function, 3)
    leaves = [one.clone().requires_grad_() for one in logprobs]
    total, metrics = torch.zeros(()), dict[str, float]()
    for leaf, given in zip(leaves, inputs, strict=True):
        read = [
            given[name].reshape(()) if name == "scale" else given[name] for name in [*ranks][1:]
        ]
        loss, told = function(leaf, *read)
        total = total + loss
        for name, value in told.items():
            share = 3 if name.endswith("mean") else 1
            metrics[name] = metrics.get(name, 0.0) + value.item() / share
    expected = torch.autograd.grad(total, leaves)
    run = GraphLoss(graph, inputs)
    mine = [one.clone().requires_grad_() for one in logprobs]
    found = run(mine)
    assert found.item() == pytest.approx(total.item(), rel=1e-6)
    for slope, wanted in zip(torch.autograd.grad(found, mine), expected, strict=True):
        torch.testing.assert_close(slope, wanted)
    assert run.metrics == pytest.approx(metrics)


def graph_of(*calls: tuple[str, str, list[Any]], **kwargs: Any) -> LossGraph:
    """A graph of hand-written calls, `n0`, `n1`, …; the last one's sum is the loss."""
    nodes = [LossNode("placeholder", "logprobs", "logprobs", [], {})]
    for place, (op, target, args) in enumerate(calls):
        nodes.append(LossNode(op, f"n{place}", target, args, kwargs if place == 0 else {}))
    last = {"ref": nodes[-1].name}
    nodes.append(LossNode("call_method", "loss", "sum", [last], {}))
    nodes.append(LossNode("output", "output", "output", [[{"ref": "loss"}, {"dict": {}}]], {}))
    return LossGraph("mine", [LossInput("logprobs", 1)], nodes)


X = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (graph_of(("call_function", "torch.load", ["a"])), "torch.load"),
        (graph_of(("call_function", "torch.matmul", [X, X])), "torch.matmul"),
        (graph_of(("call_function", "operator.attrgetter", [X])), "operator.attrgetter"),
        (graph_of(("call_function", "os.system", [X])), "os.system"),
        (graph_of(("call_method", "__reduce_ex__", [X, 2])), "__reduce_ex__"),
        (graph_of(("call_method", "add_", [X, 1])), "add_"),
        (graph_of(("call_method", "as_strided", [X, [9], [1]])), "as_strided"),
        (graph_of(("call_method", "new_empty", [X, [9]])), "new_empty"),
        (graph_of(("call_method", "item", [X])), "item"),
        (graph_of(("get_attr", "weight", [])), "get_attr"),
        (graph_of(("call_module", "weight", [X])), "call_module"),
        (graph_of(("call_function", "torch.exp", [X]), out=X), "'out'"),
        (graph_of(("call_function", "torch.exp", [{"ref": "n3"}])), "n3"),
        (graph_of(("call_function", "torch.exp", [{"ref": ["a"]}])), "ref"),
        (graph_of(("call_function", "torch.exp", [{"dtype": "complex64"}])), "complex64"),
        (graph_of(("call_function", "torch.exp", [{"device": "cuda"}])), "cuda"),
        (graph_of(("call_function", "torch.exp", [])), "no arguments"),
        (graph_of(("call_function", "operator.mul", [X, 2**60])), str(2**60)),
        (graph_of(("call_function", "operator.mul", [X, "%9999d"])), "%9999d"),
        (graph_of(("call_function", "torch.exp", [[[[[[[[[[[[X]]]]]]]]]]]])), "nested"),
        (graph_of(*[("call_function", "torch.exp", [X])] * 300), "256"),
        (graph_of(("call_function", "torch.cat", [[X] * 5000])), "4096"),
        (graph_of(("output", "output", [X])), "output"),
    ],
)
def test_what_may_not_run_is_refused_by_its_name(graph: LossGraph, said: str) -> None:
    with pytest.raises(FinetuneError, match="mine") as error:
        graph.check()
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (graph_of(("call_method", "expand", [X, 2**40, 4])), "expand.* numbers"),
        (graph_of(("call_method", "repeat", [X, 2**50])), "repeat"),
        (graph_of(("call_function", "torch.zeros", [2**50])), "zeros"),
        (graph_of(("call_function", "torch.arange", [2**50])), "arange"),
        (
            graph_of(
                ("call_method", "view", [X, 4, 1]), ("call_function", "torch.stack", [[X] * 9])
            ),
            "",
        ),
        (
            graph_of(
                ("call_function", "getattr", [X, "shape"]),
                ("call_function", "operator.mul", [{"ref": "n0"}, 2**50]),
            ),
            "operator.mul.*tensors and numbers",
        ),
        (
            graph_of(
                ("call_method", "size", [X, 0]),
                ("call_function", "operator.pow", [{"ref": "n0"}, 2**50]),
            ),
            "operator.pow.*power",
        ),
        (
            graph_of(
                ("call_method", "size", [X, 0]),
                ("call_function", "operator.mul", [{"ref": "n0"}, 2**53]),
            ),
            "too large",
        ),
        (graph_of(("call_function", "getattr", [X, "indices"])), "indices"),
        (graph_of(("call_function", "operator.getitem", [X, 9])), "getitem"),
        (graph_of(("call_method", "detach", [X])), "depend"),
        (graph_of(("call_function", "torch.log", [0.0])), "torch.log"),
        (graph_of(("call_method", "pow", [X, 0.5])), "finite"),
        (graph_of(("call_method", "size", [X])), "sum"),
    ],
)
def test_what_cannot_be_computed_is_told_by_its_name(graph: LossGraph, said: str) -> None:
    run = GraphLoss(graph, [{}])
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    if not said:  # all that it does may be done
        assert run([logprobs]).requires_grad
        return
    with pytest.raises(FinetuneError, match=rf"'mine', data\[0\]: .*{said}"):
        run([logprobs])


def test_what_a_call_computes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(("call_function", "torch.exp", [X]), ("call_method", "square", [X]))
    logprobs = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    with pytest.raises(FinetuneError, match="send less data"):
        GraphLoss(graph, [{}] * (loss_graph.MOST_RUNS // 4))
    monkeypatch.setattr(loss_graph, "MOST_OF_CALL", 24)
    with pytest.raises(FinetuneError, match=r"data\[2\]: .* of the 8388608 for a datum and 24"):
        GraphLoss(graph, [{}] * 3)(logprobs)
    assert GraphLoss(graph, [{}] * 2)(logprobs[:2]).item() == 0
