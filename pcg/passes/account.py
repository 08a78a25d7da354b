"""Account for the memory of a finetuning step: the report of `pcg.explain`.

    total = weights + adapters + gradients + optimizer + KV cache + activations + workspace

`pcg.report.Report` says what each of them counts. Sizes are formulas in B and S; the numbers of a
report are those formulas at its batch and sequence length, so that they agree to the byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy

from pcg.errors import MemoryBudgetError
from pcg.ir.graph import Graph
from pcg.ir.memory_budget import MemoryBudget
from pcg.ir.operators.model import CONTEXT
from pcg.ir.program import ModelGraph
from pcg.ir.recipe import LoraRecipe
from pcg.ir.recipes import Recipe
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES
from pcg.ir.vera_recipe import VeraRecipe
from pcg.passes.adapter_use import AdapterUse
from pcg.passes.decided_graph import decided_graph
from pcg.passes.decisions import Decision, decisions
from pcg.passes.eager_memory import eager_memory
from pcg.passes.eager_walk import Eager
from pcg.passes.kept_memory import (
    KeptMemory,
    kept_memory,
    transient,
)
from pcg.passes.plan import Frontiers, MemoryPlan, frontiers, keep_all
from pcg.passes.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.passes.timeline import MomentSizes, timeline
from pcg.passes.train import LayerKind
from pcg.report import KINDS, GraphNode, Moment, ParetoPoint, Report, SavedTensor, Stage

MOMENT_BYTES = 2 * DTYPE_BYTES["f32"]
"""AdamW's two moments of one parameter."""


LOSS_CHUNK_BYTES = 16 * 2**20
"""Logits in fp32 of one chunk of the loss; `pcg.runtime.training_runner.CHUNK_BYTES`."""


@dataclass(frozen=True)
class Asked:
    """What a report is about.

    Attributes:
        model: its name.
        config: its config.json.
        recipes: of the adapters, by name.
        budget: what is kept for backward, and the batch of a step.
    """

    model: str
    config: Mapping[str, Any]
    recipes: Mapping[str, Recipe]
    budget: MemoryBudget

    @property
    def batch(self) -> int:
        return self.budget.batch

    @property
    def seq(self) -> int:
        return self.budget.seq

    @property
    def at(self) -> dict[sympy.Symbol, int]:
        """What the symbols of formulas stand for."""
        return {SEQUENCES: self.batch, CONTEXT: self.seq}


@dataclass(frozen=True)
class Account:
    """What is accounted for.

    Attributes:
        unraised: the folded model, one node an ATen operator.
        base: the same, raised.
        training: with bypass networks attached; None without adapters.
        kinds: its layers, differentiated; empty where pcg cannot train the model.
        frontiers: what they can keep, compressed; None likewise.
        plan: what they keep; None likewise.
        epilogue: the loss, forward and backward in one graph; None likewise.
        use: what the recipes train.
        adapter_dtype: of the adapters' parameters.
        attention: as `pcg.trace.Trace.attention`.
        refusal: why pcg cannot train the model; empty where it can.
    """

    unraised: ModelGraph
    base: ModelGraph
    training: ModelGraph | None
    kinds: Sequence[LayerKind]
    frontiers: Frontiers | None
    plan: MemoryPlan | None
    epilogue: Graph | None
    use: AdapterUse
    adapter_dtype: str
    attention: str
    refusal: str = ""


def account(what: Account, asked: Asked) -> Report:
    """The report of one model, its recipes and a batch."""
    use, at = what.use, asked.at
    stages: list[Stage] = []
    notes: list[str] = []
    kept: KeptMemory | None = None
    activations = sympy.Integer(0)
    virtual = max((recipe.prompt_tokens for recipe in asked.recipes.values()), default=0)
    if virtual:
        notes.append(f"S counts the {virtual} virtual tokens that come before a sequence, too")
    checkpointing: tuple[Stage, ...] = ()
    if use.beside_lora:
        notes.append(
            f"eager: followed for plain LoRA alone; what eager keeps with "
            f"{', '.join(use.beside_lora)} is not listed"
        )
    elif use.trainable:
        eager = Eager(
            use.ranks,
            what.attention,
            asked.seq,
            use.bypasses.biases,
            what.adapter_dtype,
            use.bypasses.dropout,
        )
        found = eager_memory(what.unraised, eager)
        activations = found.total
        stages.append(_stage("eager", found.total, found.layers, at))
        inputs = _carried_bytes(what.unraised) * TOKENS_OF_BATCH
        layers = [inputs] * len(found.layers)
        total = sympy.Add(found.outside, *layers)
        checkpointing = (_stage("checkpointing", total, layers, at, 1.0),)
        notes += _eager_notes(what.unraised, eager)
    if what.training is not None and what.plan is not None:
        kept = kept_memory(what.training, what.plan)
        activations = kept.total
        stages += _own_stages(what, asked, kept)
    elif use.trainable:
        notes.append(
            f"compressed: pcg does not finetune this yet ({what.refusal}); activations are "
            "eager's, and workspace is of the forward alone"
        )
    stages += checkpointing
    formulas, moments = _memory(what, asked, kept, activations)
    elements, _ = _weights(what.base)
    return Report(
        model=asked.model,
        architecture=str((asked.config.get("architectures") or [asked.config["model_type"]])[0]),
        peft=_recipes_text(asked.recipes),
        tp=1,
        batch=asked.batch,
        seq=asked.seq,
        dtype=TORCH_NAMES[what.base.dtype],
        layers=len(what.base.layers),
        parameters={"base": elements, "trainable": use.trainable},
        memory_bytes={kind: _number(formula, at) for kind, formula in formulas.items()},
        activations=tuple(stages),
        formulas={name: _text(formula) for name, formula in formulas.items()},
        saved=_tensors(what, kept, at) if kept else (),
        pareto=tuple(ParetoPoint(*point) for point in what.frontiers.points())
        if what.frontiers
        else (),
        notes=tuple(notes),
        memory_budget=str(asked.budget),
        timeline=tuple(moments),
        graph=_graph(what) if kept else (),
    )


def memory_bytes(what: Account, asked: Asked) -> dict[str, int]:
    """The kinds of memory and their total; activations are pcg's, or none where it cannot train."""
    kept = None
    if what.training is not None and what.plan is not None:
        kept = kept_memory(what.training, what.plan)
    activations = kept.total if kept is not None else sympy.Integer(0)
    formulas, _ = _memory(what, asked, kept, activations)
    return {kind: _number(formula, asked.at) for kind, formula in formulas.items()}


def _memory(
    what: Account, asked: Asked, kept: KeptMemory | None, activations: sympy.Expr
) -> tuple[dict[str, sympy.Expr], list[Moment]]:
    """The formula of each kind of memory and of their total, and the moments of the step."""
    moments: list[Moment] = []
    if kept is None:
        workspace = _serving_workspace(what.training or what.base, asked)
    else:
        sizes = _moments(what, asked, kept)
        moments = [_moment(one, asked.at) for one in sizes]
        totals = [moment.kept_bytes + moment.workspace_bytes for moment in moments]
        fullest = sizes[totals.index(max(totals))]
        workspace = fullest.kept + fullest.workspace - activations
    _, weights = _weights(what.base)
    trained = sympy.Integer(DTYPE_BYTES[what.adapter_dtype] * what.use.trainable)
    kinds = (
        sympy.Integer(weights),
        trained,
        trained,
        sympy.Integer(MOMENT_BYTES * what.use.trainable),
        _kv_cache(what.base) * TOKENS_OF_BATCH,
        activations,
        workspace,
    )
    formulas = dict(zip(KINDS, kinds, strict=True))
    return formulas | {"total": sympy.Add(*kinds)}, moments


def _own_stages(what: Account, asked: Asked, kept: KeptMemory) -> Iterable[Stage]:
    """What pcg keeps: pruned alone, made again where that is cheap, and compressed too."""
    assert what.training is not None
    assert what.plan is not None
    pruned = kept_memory(what.training, keep_all(what.training, what.kinds))
    yield _stage("pruned", pruned.total, pruned.layers, asked.at)
    try:
        plain = frontiers(what.training, what.kinds, asked.batch, asked.seq).plan(asked.budget)
    except MemoryBudgetError:
        pass  # compressed, it is met
    else:
        remade = kept_memory(what.training, plain)
        ratio = plain.recompute_flops_ratio
        yield _stage("rematerialized", remade.total, remade.layers, asked.at, ratio)
    ratio = what.plan.recompute_flops_ratio
    yield _stage("compressed", kept.total, kept.layers, asked.at, ratio)


def _carried_bytes(model: ModelGraph) -> int:
    """Bytes of one token of what a layer hands the next."""
    carried = model.epilogue.inputs[: len(model.blocks[0].outputs)]
    return sum(prod(v.type.features) * DTYPE_BYTES[v.type.dtype] for v in carried)


def _recipes_text(recipes: Mapping[str, Recipe]) -> str | None:
    """The recipes in words; None for none."""
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
    method = "DoRA" if isinstance(recipe, LoraRecipe) and recipe.use_dora else recipe.method
    size = f" r{recipe.rank}" if isinstance(recipe, LoraRecipe | VeraRecipe) else ""
    text = f"{method}{size} on {where if isinstance(where, str) else ', '.join(where)}"
    return text if recipe.bias == "none" else f"{text}, bias {recipe.bias}"


def _number(formula: sympy.Expr, at: Mapping[sympy.Symbol, int]) -> int:
    return int(formula.subs(at))


def _text(formula: sympy.Expr) -> str:
    """A formula as a string that sympy reads back."""
    return str(sympy.expand(formula))


def _stage(
    name: str,
    total: sympy.Expr,
    layers: Sequence[sympy.Expr],
    at: Mapping[sympy.Symbol, int],
    recompute_flops_ratio: float = 0.0,
) -> Stage:
    inner = layers[1:] or layers
    sizes = {formula: _number(formula, at) for formula in set(inner)}
    mean = sum(sizes[formula] for formula in inner) / len(inner)
    return Stage(name, _number(total, at), round(mean), recompute_flops_ratio)


def _eager_notes(model: ModelGraph, eager: Eager) -> Iterable[str]:
    ops = {node.op for graph in model.graphs for node in graph.nodes}
    if "experts" in ops:
        yield (
            "eager: operator 'experts' as transformers' default implementation of it, grouped_mm; "
            "the experts' own weights get no adapters"
        )
    if eager.attention.endswith("eager"):
        yield "eager: transformers has no SDPA for this architecture; scores [S, S] are kept"
    if eager.attention == "own-eager":
        yield (
            "eager: read off the graph of the architecture's own modules; what they save by hand "
            "(a fused activation, queries widened to fp32, a shared mask) is not followed"
        )


def _weights(model: ModelGraph) -> tuple[int, int]:
    """Number and bytes of the base's parameters, a tied one once."""
    counts: dict[str, tuple[int, int]] = {}
    for index, graph in enumerate((*model.blocks, model.prologue, model.epilogue)):
        layers = model.layers.count(index) if index < len(model.blocks) else 1
        for parameter in graph.parameters:
            if parameter.role == "frozen":
                elements = prod(parameter.type.features)
                repeats = layers if "{layer}" in parameter.source else 1
                is_layers = "{layer}" in parameter.source
                key = f"{index}:{parameter.source}" if is_layers else parameter.source
                size = elements * DTYPE_BYTES[parameter.type.dtype]
                counts[key] = (elements * repeats, size * repeats)
    return sum(n for n, _ in counts.values()), sum(size for _, size in counts.values())


def _kv_cache(model: ModelGraph) -> int:
    """Bytes of keys and values of one token, in all layers."""
    of_block = []
    for block in model.blocks:
        types = [
            block.types[name]
            for node in block.nodes
            if node.op == "attention"
            for name in node.inputs[1:3]
        ]
        of_block.append(sum(prod(t.features) * DTYPE_BYTES[t.dtype] for t in types))
    return sum(of_block[index] for index in model.layers)


def _moments(what: Account, asked: Asked, kept: KeptMemory) -> list[MomentSizes]:
    assert what.training is not None
    assert what.plan is not None
    assert what.epilogue is not None
    loss = _loss_workspace(what.base, what.epilogue, asked)
    return timeline(what.training, what.plan, kept, loss, asked.batch, asked.seq)


def _loss_workspace(base: ModelGraph, epilogue: Graph, asked: Asked) -> sympy.Expr:
    """What the loss needs at once: one chunk of tokens, beside the gradients of all."""
    tokens = asked.batch * asked.seq
    vocabulary = int(base.epilogue.types[base.epilogue.outputs[0]].shape[-1])
    chunk = min(tokens, max(16, LOSS_CHUNK_BYTES // (4 * vocabulary)))
    symbol = TOKENS_OF_BATCH if chunk == tokens else sympy.Integer(chunk)
    gradients = _carried_bytes(base) * TOKENS_OF_BATCH
    return transient(epilogue, chunk, asked.seq).formula(symbol) + gradients


def _serving_workspace(model: ModelGraph, asked: Asked) -> sympy.Expr:
    """The most that one layer's forward needs at once, or the logits, where nothing is trained."""
    tokens = asked.batch * asked.seq
    found = [transient(block, tokens, asked.seq).formula(TOKENS_OF_BATCH) for block in model.blocks]
    # Only the last token of each sequence gets logits.
    found.append(transient(model.epilogue, asked.batch, asked.seq).formula(SEQUENCES))
    return max(found, key=lambda formula: _number(formula, asked.at))


def _moment(sizes: MomentSizes, at: Mapping[sympy.Symbol, int]) -> Moment:
    return Moment(sizes.label, _number(sizes.kept, at), _number(sizes.workspace, at))


def _graph(what: Account) -> tuple[GraphNode, ...]:
    """The layer that most layers are like."""
    assert what.plan is not None
    assert what.frontiers is not None
    index, _ = Counter(what.plan.layers).most_common(1)[0]
    kind = what.frontiers.layers[what.plan.layers.index(index)]
    return decided_graph(what.frontiers.kinds[kind], what.plan.plans[index])


def _tensors(
    what: Account, kept: KeptMemory, at: Mapping[sympy.Symbol, int]
) -> tuple[SavedTensor, ...]:
    """What becomes of every tensor of the layers, and what is kept outside them."""
    assert what.plan is not None
    assert what.frontiers is not None
    rows: list[Decision] = []
    for index, plan in enumerate(what.plan.plans):
        members = [layer for layer, of in enumerate(what.plan.layers) if of == index]
        kind = what.frontiers.kinds[what.frontiers.layers[members[0]]]
        shared = set(kind.shared)
        rows += [
            row
            for row in decisions(kind, plan, len(members))
            if row.tensor.partition(".")[2] not in shared
        ]
    rows += [
        Decision(t.tensor, "input", t.type, t.size_bytes, t.needed_by, "save", t.reason, 1)
        for t in kept.outside
    ]
    return tuple(_saved(row, at) for row in rows)


def _saved(row: Decision, at: Mapping[sympy.Symbol, int]) -> SavedTensor:
    tokens = at[SEQUENCES] * at[CONTEXT]
    return SavedTensor(
        row.tensor,
        row.op,
        (tokens,) * row.type.is_token_wise + row.type.features,
        TORCH_NAMES[row.type.dtype],
        _number(row.size_bytes, at),
        _text(row.size_bytes),
        row.needed_by,
        row.decision,
        row.reason,
        row.layers,
    )
