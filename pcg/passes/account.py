"""Account for the memory of a finetuning step: the report of `pcg.explain`.

    total = weights + adapters + gradients + optimizer + KV cache + activations + workspace

`pcg.report.Report` says what each of them counts. Sizes are formulas in B and S; the numbers of a
report are those formulas at its batch and sequence length, so that they agree to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph
from pcg.ir.operators.model import CONTEXT
from pcg.ir.program import ModelGraph, TrainingGraph
from pcg.ir.recipe import LoraRecipe
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES
from pcg.passes.adapter_use import AdapterUse
from pcg.passes.eager_memory import eager_memory
from pcg.passes.eager_walk import Eager
from pcg.passes.kept_memory import (
    KeptMemory,
    KeptTensor,
    kept_memory,
    training_transients,
    transient,
)
from pcg.passes.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.report import KINDS, Report, SavedTensor, Stage

MOMENT_BYTES = 2 * DTYPE_BYTES["f32"]
"""AdamW's two moments of one parameter."""


LOSS_CHUNK_BYTES = 32 * 2**20
"""Logits in fp32 of one chunk of the loss; `pcg.runtime.training_runner.CHUNK_BYTES`."""


@dataclass(frozen=True)
class Asked:
    """What a report is about.

    Attributes:
        model: its name.
        config: its config.json.
        recipes: of the adapters, by name.
        batch: sequences of a step.
        seq: tokens of each.
    """

    model: str
    config: Mapping[str, Any]
    recipes: Mapping[str, LoraRecipe]
    batch: int
    seq: int

    def __post_init__(self) -> None:
        for name, number in (("batch", self.batch), ("seq", self.seq)):
            if type(number) is not int or number < 1:
                raise UnsupportedError(f"{name}={number!r}; use an int of at least 1")

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
        blocks: its differentiated blocks; empty where pcg cannot train the model.
        epilogue: the loss, forward and backward in one graph; None likewise.
        use: what the recipes train.
        adapter_dtype: of the adapters' parameters.
        attention: as `pcg.trace.Trace.attention`.
        refusal: why pcg cannot train the model; empty where it can.
    """

    unraised: ModelGraph
    base: ModelGraph
    training: ModelGraph | None
    blocks: Sequence[TrainingGraph]
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
    if use.trainable:
        eager = Eager(
            use.ranks, what.attention, asked.seq, use.biases, what.adapter_dtype, use.dropout
        )
        found = eager_memory(what.unraised, eager)
        activations = found.total
        stages.append(_stage("eager", found.total, found.layers, at))
        notes += _eager_notes(what.unraised, eager)
    if what.training is not None and what.blocks:
        kept = kept_memory(what.training, what.blocks)
        activations = kept.total
        stages.append(_stage("pruned", kept.total, kept.layers, at))
    elif use.trainable:
        notes.append(
            f"pruned: pcg does not finetune this yet ({what.refusal}); activations are eager's, "
            "and workspace is of the forward alone"
        )
    elements, weights = _weights(what.base)
    trained = sympy.Integer(DTYPE_BYTES[what.adapter_dtype] * use.trainable)
    sizes = (
        sympy.Integer(weights),
        trained,
        trained,
        sympy.Integer(MOMENT_BYTES * use.trainable),
        _kv_cache(what.base) * TOKENS_OF_BATCH,
        activations,
        _workspace(what, asked),
    )
    formulas = dict(zip(KINDS, sizes, strict=True)) | {"total": sympy.Add(*sizes)}
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
        formulas={name: _text(formulas[name]) for name in ("activations", "total")},
        saved=tuple(_saved(row, at) for row in kept.tensors) if kept else (),
        notes=tuple(notes),
    )


def _recipes_text(recipes: Mapping[str, LoraRecipe]) -> str | None:
    """The recipes in words; None for none."""
    texts = [_recipe_text(recipe) for recipe in recipes.values()]
    if len(texts) == 1:
        return texts[0]
    named = [f"{name} ({text})" for name, text in zip(recipes, texts, strict=True)]
    return f"{len(named)} adapters: {', '.join(named)}" if named else None


def _recipe_text(recipe: LoraRecipe) -> str:
    targets = recipe.target_modules
    where = "its family's modules" if targets is None else targets
    text = f"LoRA r{recipe.rank} on {where if isinstance(where, str) else ', '.join(where)}"
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
) -> Stage:
    inner = layers[1:] or layers
    sizes = {formula: _number(formula, at) for formula in set(inner)}
    mean = sum(sizes[formula] for formula in inner) / len(inner)
    return Stage(name, _number(total, at), round(mean))


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


def _workspace(what: Account, asked: Asked) -> sympy.Expr:
    """The most bytes of intermediate values at once, as a formula of the graph that needs them."""
    tokens = asked.batch * asked.seq
    found: list[sympy.Expr] = []
    if what.training is not None and what.blocks and what.epilogue is not None:
        transients = training_transients(what.training, what.blocks, tokens)
        found += [item.formula(TOKENS_OF_BATCH) for item in transients]
        vocabulary = int(what.base.epilogue.types[what.base.epilogue.outputs[0]].shape[-1])
        chunk = min(tokens, max(16, LOSS_CHUNK_BYTES // (4 * vocabulary)))
        symbol = TOKENS_OF_BATCH if chunk == tokens else sympy.Integer(chunk)
        carried = what.base.epilogue.inputs[: len(what.base.blocks[0].outputs)]
        gradients = sum(prod(v.type.features) * DTYPE_BYTES[v.type.dtype] for v in carried)
        loss = transient(what.epilogue, chunk)
        found.append(loss.formula(symbol) + gradients * TOKENS_OF_BATCH)
    else:
        model = what.training or what.base
        found += [transient(block, tokens).formula(TOKENS_OF_BATCH) for block in model.blocks]
        # Only the last token of each sequence gets logits.
        found.append(transient(model.epilogue, asked.batch).formula(SEQUENCES))
    return max(found, key=lambda formula: _number(formula, asked.at))


def _saved(row: KeptTensor, at: Mapping[sympy.Symbol, int]) -> SavedTensor:
    tokens = at[SEQUENCES] * at[CONTEXT]
    reason = "read by " + ", ".join(row.needed_by)
    if row.views:
        reason += f", through its view{'s' * (len(row.views) > 1)} {', '.join(row.views)}"
    return SavedTensor(
        row.tensor,
        row.op,
        (tokens,) * row.type.is_token_wise + row.type.features,
        TORCH_NAMES[row.type.dtype],
        _number(row.size_bytes, at),
        _text(row.size_bytes),
        row.needed_by,
        "save",
        reason,
        row.layers,
    )
