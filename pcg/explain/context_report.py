"""A report's account of ranks that share the tokens of sequences: their parts, what they send.

Bytes and messages are those of one rank for one step of one batch, counted in the graphs that run
(`pcg.parallel.costs.exchange`): keys and values of the tokens, their gradients, and once a step the
sum of the adapters' gradients.
"""

from __future__ import annotations

from typing import Any

from pcg.explain.planned_model import ContextStep, PlannedModel
from pcg.explain.step_memory import bytes_at, step_memory
from pcg.parallel.costs.exchange import Exchange
from pcg.parallel.costs.layer_costs import ring_bytes


def context_rows(planned: PlannedModel, context: ContextStep) -> dict[str, Any]:
    """Return the `context` object of a report."""
    setup, plan, cp = planned.setup, planned.training.plan, context.cp
    rows = setup.options.batch * setup.options.seq
    layers = []
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
    # Layers without an input of their own are run again from one before them.
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
