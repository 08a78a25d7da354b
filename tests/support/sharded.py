"""Run a graph whole and in parts on ranks that are threads, with gradients, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph, Parameter
from pcg.ir.layouts import Layout, State
from pcg.ir.types import TOKENS
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search, SearchResult
from pcg.passes.graphs.collectives import CoalesceCollectives
from pcg.passes.graphs.differentiate import Differentiate, LayerKind
from pcg.passes.graphs.gradients import Prune
from pcg.passes.graphs.localize import Localize
from pcg.passes.memory.recompute import plan_layer
from pcg.passes.memory.save_problem import SaveProblem
from pcg.passes.pipeline import LAYER_ORDER
from pcg.passes.shard import shard
from pcg.runtime.model.batch import whole_sequences
from tests.support.evaluate import evaluate, random_values
from tests.support.threads import ThreadRanks, run_ranks

LENGTHS = (7, 5)


def held(tensor: Tensor, layout: Layout, ranks: ThreadRanks) -> Tensor:
    """What a rank holds of a parameter."""
    if layout.state is State.PARTITIONED:
        return tensor.chunk(ranks.size, layout.dim)[ranks.rank].contiguous()
    if layout.state is State.PRE_REDUCE and ranks.rank:
        return torch.zeros_like(tensor)
    return tensor


def whole_gradient(parts: Sequence[Tensor], parameter: Parameter | None) -> Tensor:
    """The gradient of the whole tensor, from those of the ranks."""
    if parameter is None or parameter.part.state is State.WHOLE:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if parameter.part.dim:
        pairs = [
            sum(parts[i : i + parameter.copies]) for i in range(0, len(parts), parameter.copies)
        ]
        return torch.cat(pairs, parameter.part.dim)
    return torch.stack(list(parts)).sum(0)


def run(
    graph: Graph,
    values: Mapping[str, Tensor],
    ranks: ThreadRanks | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of the carried input and of adapters' parameters by name.

    Where ranks hold parts of the tokens, backward gathers them again, as in training.
    """
    batch = whole_sequences(
        [[1] * length for length in lengths], torch.device("cpu"), [0] * len(lengths), keeps=True
    )
    if ranks is not None:
        batch.ranks = ranks  # type: ignore[attr-defined]
    carried = [value.name for value in graph.inputs[: len(graph.outputs)]]
    found = Prune().run(Differentiate(wrt=tuple(carried)).run(graph))
    forward, backward = graph.replace(outputs=(*graph.outputs, *found.needed)), found.backward
    count = len(graph.outputs)
    if is_sequence_parallel(graph):
        shared = tuple(value.name for value in graph.inputs[count:])
        kind = LayerKind("layer", 0, (0,), shared, found)
        problem = SaveProblem(graph, found.needed, shared, len(lengths), max(lengths))
        layer = plan_layer(kind, problem.frontier()[0].saved, "layer")
        for one in LAYER_ORDER:
            layer = one.run(layer)
        assert layer.backward is not None
        forward, backward = layer.forward, layer.backward
    else:
        forward, backward = CoalesceCollectives().run(forward), CoalesceCollectives().run(backward)
    verify(forward)
    verify(backward)
    results = evaluate(forward, values, batch)
    outputs, kept = results[:count], dict(zip(forward.outputs, results, strict=True))
    upstream = {
        f"d_{name}": rows_held(
            torch.randn(
                (sum(lengths), *out.shape[1:]),
                generator=torch.Generator().manual_seed(5),
                dtype=out.dtype,
            ),
            is_sequence_parallel(graph),
            ranks,
        )
        for name, out in zip(graph.outputs, outputs, strict=True)
    }
    gradients = evaluate(backward, {**values, **kept, **upstream}, batch)
    names = [*found.wrt, *found.trained]
    return list(outputs), dict(zip(names, gradients, strict=True))


def is_sequence_parallel(graph: Graph) -> bool:
    """Whether a layer is handed, and hands on, a rank's part of the tokens."""
    return graph.inputs[0].type.shape[0] != TOKENS


def rows_held(tensor: Tensor, is_parted: bool, ranks: ThreadRanks | None) -> Tensor:
    """What a rank holds of a value [T, …]."""
    if not is_parted or ranks is None:
        return tensor
    count = -(-len(tensor) // ranks.size)
    rows = tensor[ranks.rank * count :][:count]
    return torch.cat([rows, torch.zeros(count - len(rows), *tensor.shape[1:], dtype=rows.dtype)])


def errors(
    graph: Graph,
    degree: int,
    plan: ParallelPlan,
    sent: dict[str, int] | None = None,
    messages: dict[str, int] | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, float]:
    """Relative errors of outputs and gradients on ranks, by name.

    Into `sent` goes what rank 0 sends, by kind of collective, and into `messages` in how many.
    """
    tokens = sum(lengths)
    values = random_values(graph, tokens)
    outputs, gradients = run(graph, values, lengths=lengths)
    local = Localize(degree).run(shard(graph, degree, plan))
    verify(local)
    parted = {value.name for value in local.inputs if value.type.shape[0] != TOKENS}

    def on_rank(ranks: ThreadRanks) -> tuple[list[Tensor], dict[str, Tensor]]:
        own = {
            value.name: rows_held(values[value.name], value.name in parted, ranks)
            for value in local.inputs
        }
        own |= {p.name: held(values[_same(p, graph)], p.part, ranks) for p in local.parameters}
        result = run(local, own, ranks, lengths)
        if sent is not None and ranks.rank == 0:
            sent.update(ranks.moved_bytes)
        if messages is not None and ranks.rank == 0:
            messages.update(ranks.messages)
        return result

    found = run_ranks(degree, on_rank)
    result = {}
    for i, (name, expected) in enumerate(zip(graph.outputs, outputs, strict=True)):
        parts = [own[i] for own, _ in found]
        if is_sequence_parallel(local):
            parts = [torch.cat(parts)[:tokens]]
        for rank, part in enumerate(parts):
            result[f"{name} on rank {rank}"] = _error(part, expected)
    for name, expected in gradients.items():
        parts = [own[name] for _, own in found]
        if name in parted:
            whole = torch.cat(parts)[:tokens]
        else:
            whole = whole_gradient(parts, local.parameters_by_name.get(name))
        result[f"gradient of {name}"] = _error(whole, expected)
    return result


def _same(parameter: Parameter, graph: Graph) -> str:
    """The parameter that it is a part of, of a graph whose fused weights are split."""
    wanted = (parameter.source, parameter.rows)
    (name,) = (p.name for p in graph.parameters if (p.source, p.rows) == wanted)
    return name


def _of(parameter: Parameter, graph: Graph) -> str:
    (name,) = (p.name for p in graph.parameters if p.source == parameter.source)
    return name


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def layer_errors(whole: Graph, local: Graph, degree: int) -> dict[str, float]:
    """Relative errors of a rank's graph against the whole layer's, by name."""
    values = random_values(whole, sum(LENGTHS))
    outputs, gradients = run(whole, values)

    def on_rank(ranks: ThreadRanks) -> tuple[list[Tensor], dict[str, Tensor]]:
        own = {value.name: values[value.name] for value in local.inputs}
        own |= {p.name: _own(values[_of(p, whole)], p, ranks) for p in local.parameters}
        return run(local, own, ranks)

    found = run_ranks(degree, on_rank)
    result = {
        f"output on rank {rank}": _error(found[rank][0][0], outputs[0]) for rank in range(degree)
    }
    sources = {p.name: p.source for p in whole.parameters}
    for name, expected in gradients.items():
        pieces = [p for p in local.parameters if p.source == sources.get(name)]
        if not pieces:
            result[name] = _error(found[0][1][name], expected)
            continue
        pieces.sort(key=lambda piece: piece.rows or (0, 0))
        parts = [whole_gradient([own[p.name] for _, own in found], p) for p in pieces]
        whole_one = torch.cat(parts) if pieces[0].rows else sum(parts, torch.zeros(()))
        result[name] = _error(whole_one, expected)
    return result


def _own(tensor: Tensor, parameter: Parameter, ranks: ThreadRanks) -> Tensor:
    if parameter.rows:
        tensor = tensor[parameter.rows[0] : parameter.rows[1]]
    if parameter.copies > 1:  # ranks that hold the same part, one after the other
        parts = tensor.chunk(ranks.size // parameter.copies, parameter.part.dim)
        return parts[ranks.rank // parameter.copies]
    return held(tensor, parameter.part, ranks)


def check_candidates(
    search: Search, found: SearchResult, site: str, lengths: Sequence[int] = LENGTHS
) -> None:
    """Every candidate of a site is right on ranks, and sends the bytes and messages it says."""
    choices = [choice for choice in found.sites if choice.site.name.endswith(site)]
    assert choices
    for choice in choices:
        for candidate in choice.candidates:
            plan = search.force(found.plan, choice.site, candidate.layouts, candidate.gathered)
            sent: dict[str, int] = {}
            messages: dict[str, int] = {}
            degree = search.planner.degree
            worst = errors(search.graph, degree, plan, sent, messages, lengths)
            assert max(worst.values()) < 1e-5, (candidate.strategy, worst)
            said = search.costs.of(plan)
            assert sum(sent.values()) == said.forward_bytes + said.backward_bytes, (
                candidate.strategy,
                sent,
            )
            assert sum(messages.values()) == said.forward_messages + said.backward_messages, (
                candidate.strategy,
                messages,
            )
            extra, bill = said - search.costs.of(found.plan), candidate.added - choice.chosen.added
            assert extra.forward_bytes + extra.backward_bytes == (
                bill.forward_bytes + bill.backward_bytes
            )
