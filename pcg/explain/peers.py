"""Adds torch's partitioner to a report: `pcg explain --peers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pcg.errors import TraceError, UnsupportedError
from pcg.explain.baselines.peers import BUDGETS, MASKLESS, PartitionedModel, torch_partitioner
from pcg.explain.planned_model import Setup
from pcg.explain.report import Report
from pcg.explain.report_data import PeerPoint, Stage
from pcg.peft.recipe import Recipe

STAGE = "torch-partitioner"


def with_peers(report: Report, setup: Setup) -> Report:
    """Return the report with torch's partitioner under several budgets, or a note why not."""
    if not setup.recipes:
        return report
    try:
        recipe = _recipe(setup.recipes)
        adapter = recipe.config_fields(recipe.target_modules, "", {})
        step = (setup.config, report.dtype, adapter, report.batch, report.seq)
        points = tuple(map(peer_point, torch_partitioner(*step)))
        (maskless,) = map(
            peer_point, torch_partitioner(*step, budgets=BUDGETS[:1], attention=MASKLESS)
        )
    except (TraceError, UnsupportedError) as error:
        note = f"{STAGE}: not followed here ({error})"
        return dataclasses.replace(report, notes=(*report.notes, note))
    default = points[0]
    stage = Stage(STAGE, default.bytes, default.bytes_per_block, default.recompute_flops_ratio)
    return dataclasses.replace(
        report,
        activations=(*report.activations, stage),
        peers=points,
        notes=(*report.notes, _note(default, maskless)),
    )


def peer_point(model: PartitionedModel) -> PeerPoint:
    """Return the entry of a report for a model divided under one budget."""
    inner = model.layer_bytes[1:] or model.layer_bytes
    return PeerPoint(
        model.budget,
        sum(model.layer_bytes) + model.outside_bytes,
        model.outside_bytes,
        round(sum(inner) / len(inner)),
        model.recomputed_flops / (model.forward_flops or 1),
    )


def _recipe(recipes: Mapping[str, Recipe]) -> Recipe:
    """Return the one recipe; refuse what torch's run would not follow."""
    if len(recipes) > 1:
        raise UnsupportedError(f"{len(recipes)} adapters train at once; peft trains one")
    (recipe,) = recipes.values()
    if recipe.dropout:
        raise UnsupportedError(f"dropout={recipe.dropout}; it is run without dropout")
    if recipe.prompt_tokens:
        raise UnsupportedError(f"{recipe.method} trains what comes before the layers")
    return recipe


def _note(default: PeerPoint, maskless: PeerPoint) -> str:
    text = (
        f"{STAGE}: what torch.compile passes from forward to backward of transformers + peft, "
        "divided a layer at a time; logits and loss as by default"
    )
    more = default.bytes_per_block - maskless.bytes_per_block
    if not more:
        return text
    return (
        f"{text}; with the attention mask that transformers makes where it is traced, for which it "
        f"repeats keys and values: {more:,} bytes a layer"
    )
