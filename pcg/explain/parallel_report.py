"""Report of a model over ranks: the base's plan, each site's candidates, and the best by tokens.

Costs and bytes of sites and of `communication` are per layer and rank, for one batch: forward,
backward, and a share of the all-reduce of replicated weights' gradients. That all-reduce runs once
an optimizer step; `step_bytes` are all of its bytes. Coalesced messages count as one message.
`total` is the traffic of a rank for the whole model, including operations that backward repeats.

With context parallelism, bytes and messages are those of a rank for one step of a batch: keys and
values of the tokens, their gradients, and the sum of the adapters' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pcg.explain.planned_model import ContextStep, PlannedModel
from pcg.explain.report.report_data import IN_PARTS, LAYOUTS
from pcg.explain.step_memory import bytes_at, step_memory
from pcg.ir.layouts import REPLICATED, layout_of
from pcg.parallel.costs.layer_costs import DeviceCosts, Exchange, ring_bytes
from pcg.parallel.costs.step_costs import host_seconds
from pcg.parallel.costs.work import size_bytes
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Candidate, Search, SiteChoice
from pcg.parallel.strategy_names import algorithm
from pcg.passes.memory.joint import Joint
from pcg.passes.stages import Sharded, TrainedModel

_TOKENS = tuple(4**power for power in range(9))
"""Numbers of tokens for the search of the best strategies: 1 to 65,536."""


def parallel_rows(
    sharded: Sharded, costs: DeviceCosts, trained: TrainedModel | None, device: str
) -> dict[str, Any]:
    """Return the `parallel` object of a report, without regions.

    Args:
        device: the type of the device; a GPU waits for kernel launches of the host.
        trained: a rank's training graphs; None if pcg cannot train the model.
    """
    base, bypass, sent = [], [], []
    for place, (search, best) in enumerate(zip(sharded.searches, sharded.plans, strict=True)):
        block = sharded.typed.blocks[place]
        for parameter in block.parameters:
            if parameter.role == "frozen":
                layout = str(layout_of(parameter.type))
                is_matrix = len(parameter.type.dims) > 1 or not layout.startswith("|")
                held = LAYOUTS.get(layout, IN_PARTS) if is_matrix else IN_PARTS
                row = {"weight": parameter.name, "layout": layout, "held": held}
                base.append({"block": block.name, **row})
        solution = search.find(best)
        bypass += [_site(choice, block.name) for choice in solution.sites]
        nodes = [name for site in search.sites for name in site.nodes]
        added = search.costs.of(best) - search.costs.without(best, nodes)
        whole = search.costs.of(best)
        sent.append(
            {
                "block": block.name,
                "layers": sharded.typed.layers.count(place),
                "forward_bytes": whole.forward_bytes,
                "backward_bytes": whole.backward_bytes,
                "forward_messages": whole.forward_messages,
                "backward_messages": whole.backward_messages,
                "bypass_forward_bytes": added.forward_bytes,
                "bypass_backward_bytes": added.backward_bytes,
                "bypass_messages": added.forward_messages + added.backward_messages,
                "step_bytes": whole.step_bytes,
            }
        )
    return {
        "costs": costs.model.name,
        "tokens": costs.tokens,
        "context": costs.context,
        "gradient_accumulation_steps": costs.gradient_accumulation_steps,
        "sequence_parallel": sharded.is_sequence_parallel,
        "base": base,
        "bypass": bypass,
        "communication": sent,
        "total": _total(sharded, costs, trained),
        "host_ms": 1e3 * host_seconds(len(sharded.typed.layers)) if device == "cuda" else None,
        "joint": None if sharded.joint is None else _joint(sharded.joint),
    }


def _total(
    sharded: Sharded, costs: DeviceCosts, trained: TrainedModel | None
) -> dict[str, int] | None:
    """Return the bytes that a rank sends for a batch; None for a model that pcg cannot train."""
    if trained is None:
        return None
    of = partial(Exchange.of, tokens=costs.tokens, degree=costs.degree)
    model, plan = trained.model, trained.plan
    forward = of(model.prologue)
    backward = of(trained.epilogue)  # the loss with its gradient, in one graph
    repeated = Exchange()
    for layer, index in enumerate(plan.layers):
        graphs = plan.plans[index]
        forward += of(graphs.forward)
        if graphs.backward is not None:
            backward += of(graphs.backward)
            kind = trained.frontiers.kinds[trained.frontiers.layers[layer]]
            repeated += of(graphs.backward, among=kind.gradients.graph.producers.keys())
    if trained.prologue is not None:
        backward += of(trained.prologue)
        repeated += of(trained.prologue, among=model.prologue.producers.keys())
    for layer in plan.restored:
        again = of(plan.plans[plan.layers[layer - 1]].forward)
        backward, repeated = backward + again, repeated + again
    blocks = [sharded.typed.blocks[index] for index in sharded.typed.layers]
    copies = sum(
        size_bytes(parameter.type, costs.tokens)
        for graph in (sharded.typed.prologue, *blocks, sharded.typed.epilogue)
        for parameter in graph.parameters
        if parameter.role == "adapter" and layout_of(parameter.type) == REPLICATED
    )
    return {
        "layers": len(plan.layers),
        "forward_bytes": forward.size_bytes,
        "backward_bytes": backward.size_bytes,
        "repeated_bytes": repeated.size_bytes,
        "forward_messages": forward.messages,
        "backward_messages": backward.messages,
        "repeated_messages": repeated.messages,
        "step_bytes": ring_bytes("all_reduce", copies, costs.degree),
    }


def serving_rows(sharded: Sharded, steps: Sequence[DeviceCosts]) -> list[dict[str, Any]]:
    """Return the `serving` object of a report over ranks: each block's sites and step costs.

    The step costs are a layer's time and messages on a rank, at each planned step.
    """
    rows = []
    for search, plan in zip(sharded.serving_searches, sharded.serving_plans, strict=True):
        sites = {site.name: search.strategy(plan, site) for site in search.sites}
        blocks = []
        for costs in steps:
            bill = search.at(costs, plan)
            blocks.append(
                {
                    "tokens": costs.tokens,
                    "layer_us": round(bill.value * 1e6, 3),
                    "messages": bill.forward_messages,
                    "bytes": bill.forward_bytes,
                }
            )
        rows.append({"block": search.graph.name, "sites": sites, "steps": blocks})
    return rows


def _joint(joint: Joint) -> dict[str, Any]:
    """Report the joint choice of layouts and saved tensors, of all layers on a rank."""
    best = joint.best
    bound = min(joint.bound_seconds / best.apart_seconds, 1.0)
    return {
        "limit_bytes": joint.limit_bytes,
        "kept_bytes": best.kept_bytes,
        "layers_ms": round(best.seconds * 1e3, 3),
        "recomputed_ms": round(best.again_seconds * 1e3, 3),
        "sequential_ms": round(joint.sequential_seconds * 1e3, 3),
        "sequential_layouts": best is joint.sequential,
        "bound": round(bound, 5),
    }


def _site(choice: SiteChoice, block: str) -> dict[str, Any]:
    return {
        "block": block,
        "site": choice.site.name,
        "chosen": choice.chosen.strategy,
        "why": _why(choice),
        "candidates": [_candidate(candidate) for candidate in choice.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    bill = candidate.added
    return {
        "strategy": candidate.strategy,
        "layouts": {
            name: f"{'gathered ' if name in candidate.gathered else ''}{layout}"
            for name, layout in candidate.layouts.items()
        },
        "cost_us": round(bill.value * 1e6, 3),
        "communication_bytes": bill.forward_bytes + bill.backward_bytes,
        "forward_bytes": bill.forward_bytes,
        "backward_bytes": bill.backward_bytes,
        "step_bytes": bill.step_bytes,
        "messages": bill.forward_messages + bill.backward_messages,
        "kept_bytes": candidate.kept_bytes,
    }


def _why(choice: SiteChoice) -> str:
    """Return the reason for the chosen candidate, against the next best."""
    bill = choice.chosen.added
    sends = bill.forward_bytes + bill.backward_bytes
    text = "sends nothing beside the base" if not sends else f"sends {sends:,} bytes"
    if bill.step_bytes:
        text += f", {bill.step_bytes:,} of gradients once an optimizer step"
    text += f", keeps {choice.chosen.kept_bytes:,}"
    others = [c for c in choice.candidates if c.key != choice.chosen.key]
    if not others:
        return text
    more = (others[0].added.value - bill.value) * 1e6
    next_best = f"{text}; {algorithm(others[0].strategy)} takes"
    return f"{next_best} {abs(more):,.1f} µs {'more' if more >= 0 else 'less, where it is the one'}"


def strategies(searches: Sequence[Search], plans: Iterable[ParallelPlan]) -> dict[str, str]:
    """Return each site's strategy, keyed by its name, and by its block if blocks differ."""
    by_site: dict[str, dict[str, str]] = {}
    for search, plan in zip(searches, plans, strict=True):
        for site in search.sites:
            name = algorithm(search.strategy(plan, site))
            by_site.setdefault(site.name, {})[search.graph.name] = name
    return {
        site if len(set(blocks.values())) == 1 else f"{block}/{site}": strategy
        for site, blocks in by_site.items()
        for block, strategy in blocks.items()
    }


def token_regions(
    searches_at: Callable[[int, int], Sequence[Search]], seq: int
) -> list[dict[str, Any]]:
    """Return the ranges of tokens, of 1, 4, 16, … 65,536, with the same best strategies.

    Args:
        searches_at: returns the blocks' searches for a number of tokens and a context length.
        seq: the length of a sequence; fewer tokens form a single sequence.
    """
    rows: list[dict[str, Any]] = []
    for tokens in _TOKENS:
        context = min(tokens, seq)
        searches = searches_at(tokens, context)
        now = strategies(searches, [search.plan() for search in searches])
        if not rows or rows[-1]["strategies"] != now:
            first = {"from_tokens": tokens, "from_context": context}
            rows.append({**first, "strategies": now})
        rows[-1] |= {"to_tokens": tokens, "to_context": context}
    return rows


def context_rows(planned: PlannedModel, context: ContextStep) -> dict[str, Any]:
    """Return the `context` object of a report."""
    setup, plan, cp = planned.setup, planned.training.plan, context.cp
    rows = setup.options.batch * setup.options.seq
    layers: list[dict[str, Any]] = []
    for index, graphs in enumerate(plan.plans):
        forward = Exchange.of_parts(graphs.forward, rows, cp)
        backward = Exchange()
        if graphs.backward is not None:
            backward = Exchange.of_parts(graphs.backward, rows, cp)
        layers.append(
            {
                "block": graphs.forward.name.removesuffix("_forward"),
                "layers": plan.layers.count(index),
                "forward_bytes": forward.size_bytes,
                "backward_bytes": backward.size_bytes,
                "forward_messages": forward.messages,
                "backward_messages": backward.messages,
            }
        )
    # A layer without a saved input recomputes it by the forward of the layer before.
    again = [layers[plan.layers[layer - 1]] for layer in plan.restored]
    total = {
        key: sum(row["layers"] * row[key] for row in layers)
        for key in ("forward_bytes", "backward_bytes", "forward_messages", "backward_messages")
    }
    for row in again:
        total["backward_bytes"] += row["forward_bytes"]
        total["backward_messages"] += row["forward_messages"]
    formulas, _ = step_memory(planned)
    gradients = bytes_at(formulas["gradients"], setup.at)
    return {
        "cp": cp,
        "rank_tokens": setup.options.seq,
        "layers": layers,
        "total": total,
        "step_bytes": ring_bytes("all_reduce", gradients, cp),
    }
