"""Builds the report of `pcg.explain` from a planned model.

Sizes are formulas in B and S; the numbers of a report are these formulas at its batch and sequence
length, so that they agree to the byte.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import sympy

from pcg.errors import MemoryBudgetError
from pcg.explain.decided_graph import decided_graph
from pcg.explain.decisions import Decision, decisions
from pcg.explain.eager.attention import FOLLOWED
from pcg.explain.eager.memory import eager_memory
from pcg.explain.eager.saved_storages import EagerRun
from pcg.explain.report import Report
from pcg.explain.report_data import GraphNode, ParetoPoint, SavedTensor, Stage
from pcg.explain.step_memory import (
    PlannedModel,
    Setup,
    base_weights,
    bytes_at,
    carried_bytes,
    step_memory,
)
from pcg.ir.analysis.saved_memory import SavedMemory, saved_memory, window_memory
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import CONTEXT, TORCH_NAMES, tokens_at
from pcg.passes.memory.plan import MemoryPlan, frontiers, save_all
from pcg.passes.pipeline import in_order
from pcg.peft.recipe import Recipe


def build_report(planned: PlannedModel, setup: Setup) -> Report:
    """Return the report of a planned model."""
    use, at = planned.use, setup.at
    stages: list[Stage] = []
    notes: list[str] = []
    kept: SavedMemory | None = None
    activations = sympy.Integer(0)
    virtual = max((recipe.prompt_tokens for recipe in setup.recipes.values()), default=0)
    if virtual:
        notes.append(f"S counts the {virtual} virtual tokens that come before a sequence, too")
    checkpointing: tuple[Stage, ...] = ()
    if use.not_followed:
        notes.append(
            f"eager: what eager code saves with {', '.join(use.not_followed)} is not followed"
        )
    elif use.trainable and setup.tp > 1:
        notes.append("eager and checkpointing are followed on one rank alone: --tp 1")
    elif use.trainable:
        eager = EagerRun(
            use.at,
            planned.attention,
            str(setup.config["model_type"]),
            setup.batch,
            setup.seq,
            use.bypasses.biases,
            planned.adapter_dtype,
            use.bypasses.dropout,
        )
        found = eager_memory(planned.unraised, eager)
        activations = found.total
        stages.append(_stage("eager", found.total, found.layers, at))
        if not eager.prefix:  # peft refuses the two together
            inputs = carried_bytes(planned.unraised)
            layers = [inputs] * len(found.layers)
            total = sympy.Add(found.outside, *layers)
            checkpointing = (_stage("checkpointing", total, layers, at, 1.0),)
        notes += _eager_notes(planned.unraised, eager, setup.recipes.values())
    if planned.training is not None and planned.plan is not None:
        kept = saved_memory(planned.training, planned.plan)
        activations = kept.total
        plain = _uncompressed_plan(planned, setup)
        stages += _own_stages(planned, setup, kept, plain)
        if plain is None:
            notes.append("rematerialized: without compression no plan is within the budget")
    elif use.trainable:
        notes.append(
            f"compressed: pcg does not finetune this yet ({planned.refusal}); activations are "
            "eager's, and workspace is of the forward alone"
        )
    stages += checkpointing
    formulas, moments = step_memory(planned, setup, kept, activations)
    elements, _ = base_weights(planned.whole)
    return Report(
        model=setup.model,
        architecture=str((setup.config.get("architectures") or [setup.config["model_type"]])[0]),
        peft=_recipes_text(setup.recipes),
        tp=setup.tp,
        batch=setup.batch,
        seq=setup.seq,
        dtype=TORCH_NAMES[planned.base.dtype],
        layers=len(planned.base.layers),
        parameters={"base": elements, "trainable": use.trainable},
        memory_bytes={kind: bytes_at(formula, at) for kind, formula in formulas.items()},
        activations=tuple(stages),
        formulas={name: formula_text(formula) for name, formula in formulas.items()},
        saved=_tensors(planned, kept, at) if kept else (),
        pareto=tuple(ParetoPoint(*point) for point in planned.frontiers.points())
        if planned.frontiers
        else (),
        notes=tuple(notes),
        memory_budget=str(setup.budget),
        optimizer=setup.optimizer.name,
        timeline=tuple(moments),
        graph=_graph(planned) if kept else (),
    )


def _uncompressed_plan(planned: PlannedModel, setup: Setup) -> MemoryPlan | None:
    """Return the plan without compression; None where it exceeds the budget."""
    assert planned.training is not None
    try:
        found = frontiers(planned.training, planned.kinds, setup.batch, setup.seq)
        return in_order(found.plan(setup.budget))
    except MemoryBudgetError:
        return None


def _own_stages(
    planned: PlannedModel, setup: Setup, kept: SavedMemory, plain: MemoryPlan | None
) -> Iterable[Stage]:
    """Yield pcg's stages: pruned, rematerialized, compressed, and by windows."""
    assert planned.training is not None
    assert planned.plan is not None
    every = in_order(save_all(planned.kinds))
    pruned = saved_memory(planned.training, every)
    yield _stage("pruned", pruned.total, pruned.layers, setup.at)
    if plain is not None:
        remade = saved_memory(planned.training, plain)
        ratio = plain.recompute_flops_ratio
        yield _stage("rematerialized", remade.total, remade.layers, setup.at, ratio)
    ratio = planned.plan.recompute_flops_ratio
    yield _stage("compressed", kept.total, kept.layers, setup.at, ratio)
    if planned.windowed is not None:
        windows = window_memory(planned.training, planned.windowed)
        ratio = planned.windowed.recompute_flops_ratio
        yield _stage("token-level", windows.total, windows.layers, setup.at, ratio)


def _recipes_text(recipes: Mapping[str, Recipe]) -> str | None:
    """Return the recipes in words; None for none."""
    texts = [_recipe_text(recipe) for recipe in recipes.values()]
    if len(texts) == 1:
        return texts[0]
    named = [f"{name} ({text})" for name, text in zip(recipes, texts, strict=True)]
    return f"{len(named)} adapters: {', '.join(named)}" if named else None


def _recipe_text(recipe: Recipe) -> str:
    if recipe.prompt_tokens:
        return f"{recipe.method} with {recipe.prompt_tokens} virtual tokens"
    targets = recipe.target_modules
    where = "its family's modules" if targets is None else targets
    size = "" if recipe.rank is None else f" r{recipe.rank}"
    text = f"{recipe.title}{size} on {where if isinstance(where, str) else ', '.join(where)}"
    return text if recipe.bias == "none" else f"{text}, bias {recipe.bias}"


def formula_text(formula: sympy.Expr) -> str:
    """Return a formula as a string that sympy reads back."""
    return str(sympy.expand(formula))


def _stage(
    name: str,
    total: sympy.Expr,
    layers: Sequence[sympy.Expr],
    at: Mapping[sympy.Symbol, int],
    recompute_flops_ratio: float = 0.0,
) -> Stage:
    inner = layers[1:] or layers
    sizes = {formula: bytes_at(formula, at) for formula in set(inner)}
    mean = sum(sizes[formula] for formula in inner) / len(inner)
    return Stage(name, bytes_at(total, at), round(mean), recompute_flops_ratio)


def _eager_notes(model: ModelGraph, eager: EagerRun, recipes: Iterable[Recipe]) -> Iterable[str]:
    ops = {node.op for graph in model.graphs for node in graph.nodes}
    if "experts" in ops:
        yield (
            "eager: operator 'experts' as transformers' default implementation of it, grouped_mm; "
            "the experts' own weights get no adapters"
        )
    if eager.attention.endswith("eager"):
        yield "eager: transformers has no SDPA for this architecture; scores [S, S] are saved"
    if any(recipe.encoder is not None for recipe in recipes):
        yield "eager: what the encoder of a prompt saves is not counted"
    if eager.attention == "own-eager" and eager.model_type not in FOLLOWED:
        yield (
            "eager: read off the graph of the architecture's own modules; what their attention "
            "widens, and its masks, are not followed"
        )


def _graph(planned: PlannedModel) -> tuple[GraphNode, ...]:
    """Return the graph of the layer that most layers are like."""
    assert planned.plan is not None
    assert planned.frontiers is not None
    index, _ = Counter(planned.plan.layers).most_common(1)[0]
    kind = planned.frontiers.layers[planned.plan.layers.index(index)]
    return decided_graph(planned.frontiers.kinds[kind], planned.plan.plans[index])


def _tensors(
    planned: PlannedModel, kept: SavedMemory, at: Mapping[sympy.Symbol, int]
) -> tuple[SavedTensor, ...]:
    """Return the decisions on all tensors of the layers, and what is saved outside them."""
    assert planned.plan is not None
    assert planned.frontiers is not None
    rows: list[Decision] = []
    for index, plan in enumerate(planned.plan.plans):
        members = [layer for layer, of in enumerate(planned.plan.layers) if of == index]
        kind = planned.frontiers.kinds[planned.frontiers.layers[members[0]]]
        shared = set(kind.shared)
        restored = len({*members} & {*planned.plan.restored})
        for row in decisions(kind, plan, len(members)):
            if row.tensor.partition(".")[2] not in shared:
                is_input = row.op == "input" and row.decision == "save"
                rows += _split(row, restored) if is_input else [row]
    rows += [
        Decision(t.tensor, "input", t.type, t.size_bytes, t.needed_by, "save", t.reason, 1)
        for t in kept.outside
    ]
    return tuple(_saved(row, at) for row in rows)


def _split(row: Decision, restored: int) -> Iterable[Decision]:
    """Yield the rows of a layer's input: of layers that save it, and of those that do not."""
    if row.layers > restored:
        yield dataclasses.replace(row, layers=row.layers - restored)
    if restored:
        reason = "the layers share the saved input of one before: recomputed by its forward"
        yield dataclasses.replace(row, decision="recompute", reason=reason, layers=restored)


def _saved(row: Decision, at: Mapping[sympy.Symbol, int]) -> SavedTensor:
    leading: tuple[int, ...] = ()
    if row.type.is_token_wise:
        leading = (int(tokens_at(row.type.shape[0], at[SEQUENCES] * at[CONTEXT])),)
    return SavedTensor(
        row.tensor,
        row.op,
        leading + row.type.features,
        TORCH_NAMES[row.type.dtype],
        bytes_at(row.size_bytes, at),
        formula_text(row.size_bytes),
        row.needed_by,
        row.decision,
        row.reason,
        row.layers,
    )
