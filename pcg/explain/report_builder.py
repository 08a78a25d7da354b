"""Builder of the report of `pcg.explain` from a planned model.

Sizes are formulas in B and S. The numbers of a report evaluate these formulas at its batch and
sequence length, so that formulas and numbers agree to the byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import sympy

from pcg.errors import MemoryBudgetError
from pcg.explain.base_memory import formats_of, layer_bytes, parameter_count
from pcg.explain.baseline_stages import eager_account
from pcg.explain.decisions import decided_graph, decisions, sizes_at
from pcg.explain.planned_model import PlannedModel
from pcg.explain.report.report import Report
from pcg.explain.report.report_data import (
    GraphNode,
    LayerGroup,
    Moment,
    ParetoPoint,
    SavedTensor,
    Stage,
)
from pcg.explain.step_memory import (
    bytes_at,
    carried_bytes,
    formula_text,
    packed_copies,
    state_memory,
    step_memory,
    version_bytes,
)
from pcg.ir.operators.attention import BLOCK_BYTES
from pcg.ir.program.layer_order import gathers_of_step, layers_of_pass
from pcg.ir.program.saved_memory import balanced_memory, saved_memory, window_memory
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES
from pcg.kernels.triton.backend import backend_for
from pcg.passes.graphs.differentiate import LayerKind
from pcg.passes.graphs.gradients import Compress
from pcg.passes.memory.plan import MemoryPlan, save_all
from pcg.passes.pipeline import in_order
from pcg.passes.stages import TrainedModel
from pcg.peft.recipe import Recipe
from pcg.ranks.shards import part_bytes
from pcg.runtime.admission.limits import Limits
from pcg.runtime.memory.host_memory import SLACK
from pcg.runtime.memory.recurrent_states import bytes_of_states
from pcg.runtime.training.recorded.warm_job import why_not_recorded

_WINDOW = Limits().tokens
"""Tokens of a window that has an engine's step to itself."""


def build_report(planned: PlannedModel) -> Report:
    """Return the report of a planned model."""
    setup, use, at = planned.setup, planned.use, planned.setup.at
    notes: list[str] = []
    positions = setup.positions
    seq = setup.seq
    if positions is not None and seq > positions:
        notes.append(f"seq: {seq:,} tokens are beyond the {positions:,} positions of this model")
    virtual = max((recipe.prompt_tokens for recipe in setup.recipes.values()), default=0)
    if virtual:
        notes.append(f"S counts the {virtual} virtual tokens that come before a sequence, too")
    if setup.context is not None:
        notes.append(f"S counts the {setup.options.seq:,} tokens that a rank has of a sequence")
    if states := bytes_of_states(planned.base):
        notes.append(
            f"kv_cache counts {states:,} bytes of recurrent state for each sequence of S tokens; "
            f"token-level counts as many at {_ends_within_sequences(planned)} ends of windows, of "
            f"{_WINDOW:,} tokens, within a sequence"
        )
    backend = backend_for(setup.device, planned.base)
    if setup.device == "cuda" and backend.name == "torch":
        notes.append(
            "attention: where PyTorch's flash kernels do not support it, a GPU holds at most "
            f"{BLOCK_BYTES // 2**20} MiB of scores; workspace counts them for caps, sinks and masks"
        )
    stages: list[Stage] = []
    untrained: sympy.Expr = sympy.S.Zero
    # Other software with context parallelism is not measured.
    eager = eager_account(planned, notes) if setup.context is None else None
    if eager:
        stages.append(Stage("eager", eager.memory.total, eager.memory.bytes_per_layer))
    if planned.saved is not None:
        plain = _plan_of(planned, planned.kinds)
        stages += _own_stages(planned, plain)
        if plain is None:
            notes.append("rematerialized: without compression no plan is within the budget")
    elif use.trainable:
        untrained = eager.formula() if eager else untrained
        notes.append(
            f"compressed: pcg does not finetune this yet ({planned.refusal}); activations are "
            "eager's, and workspace is of the forward alone"
        )
    if eager and not eager.has_prefix:  # peft refuses prefixes with checkpointing
        carried = bytes_at(carried_bytes(planned.unraised), at)
        total = eager.memory.outside + carried * len(eager.memory.layers)
        stages.append(Stage("checkpointing", total, carried, 1.0))
    trained = planned.trained
    formulas, moments = step_memory(planned, untrained)
    memory = {kind: bytes_at(formula, at) for kind, formula in formulas.items()}
    return Report(
        model=setup.settings.model,
        architecture=str((setup.config.get("architectures") or [setup.config["model_type"]])[0]),
        peft=recipes_text(setup.recipes),
        tp=setup.options.tp,
        batch=setup.batch,
        cp=setup.cp,
        seq=seq,
        dtype=TORCH_NAMES[planned.base.dtype],
        layers=len(planned.base.layers),
        parameters={"base": parameter_count(planned.whole), "trainable": use.trainable},
        memory_bytes=memory,
        activations=tuple(stages),
        formulas={name: formula_text(formula) for name, formula in formulas.items()},
        saved=tuple(_tensors(planned)),
        pareto=tuple(ParetoPoint(*corner) for corner in trained.frontiers.points())
        if trained
        else (),
        notes=tuple(notes),
        memory_budget=str(setup.options.budget),
        optimizer=setup.optimizer.name,
        host_bytes=host_bytes(planned),
        packed_bytes=packed_copies(planned),
        allocator_bytes=_allocator_bytes(planned, memory),
        shard_base=setup.parts,
        gathered=_gathered(planned),
        kept_bytes=_kept_bytes(planned, backend.name, moments),
        backend=str(backend),
        quantization=formats_of(planned.base),
        timeline=tuple(moments),
        graph=_graph(trained, at) if trained else (),
        layer_groups=tuple(_layer_groups(planned)),
    )


def _gathered(planned: PlannedModel) -> dict[str, int]:
    """Return the number of layers that a step of one batch gathers, and the bytes a rank sends."""
    replicas = planned.setup.parts
    if replicas == 1:
        return {}
    order = list(range(len(planned.base.layers)))
    if planned.trained is not None:
        order = layers_of_pass(planned.trained.plan, trains=True)
    sizes = layer_bytes(planned.base)
    gathers = gathers_of_step([order])
    sent = sum(part_bytes(sizes[layer], replicas) * (replicas - 1) for layer in gathers)
    return {"layers": len(gathers), "sent_bytes": sent}


def host_bytes(planned: PlannedModel) -> dict[str, int]:
    """Return the bytes in host memory by kind; empty for a step on a CPU."""
    if planned.setup.device != "cuda":
        return {}
    sizes = {"adapters": version_bytes(planned), "optimizer": state_memory(planned).host_bytes}
    return {kind: size for kind, size in sizes.items() if size}


def _allocator_bytes(planned: PlannedModel, memory: Mapping[str, int]) -> int:
    """Return the bytes of the holes that a CPU's heap may have between a step's tensors.

    Under a budget below 1 each tensor has its own mapping, without holes.
    """
    is_in_heap = planned.setup.device == "cpu" and planned.setup.options.budget.share == 1.0
    if not is_in_heap or planned.trained is None:
        return 0
    return round(SLACK * sum(memory[kind] for kind in ("gradients", "activations", "workspace")))


def _kept_bytes(planned: PlannedModel, backend: str, moments: Sequence[Moment]) -> int:
    """Return the bytes that the recorded windows of an ended job may hold.

    Windows are recorded in an engine on a single GPU. Each window keeps memory for the values that
    a layer computes of its tokens; lists and the losses of a window are added.

    Args:
        moments: the moments of a step that is a single window.
    """
    setup, windowed = planned.setup, planned.windowed
    is_recorded = setup.device == "cuda" and backend == "triton" and setup.options.tp == 1
    if setup.serves is None or windowed is None or not is_recorded:
        return 0
    # A budget in bytes replans each step, which changes its windows.
    if setup.options.budget.size_bytes is not None:
        return 0
    model = planned.training.model
    virtual = max(recipe.prompt_tokens for recipe in setup.recipes.values())
    if why_not_recorded(model, windowed.restored, virtual) is not None:
        return 0
    saved = bytes_at(window_memory(model, windowed).total, setup.at)
    of_layers = [moment for moment in moments if moment.label.startswith(("forward", "backward"))]
    saved += max(moment.workspace_bytes for moment in of_layers)
    return saved + 2 * DTYPE_BYTES[planned.unraised.adapter_dtype] * planned.use.trainable


def _compressed(planned: PlannedModel) -> tuple[LayerKind, ...]:
    """Return the kinds of layers with packed values, and without lossy values."""
    return tuple(
        dataclasses.replace(kind, gradients=Compress().run(kind.gradients))
        for kind in planned.kinds
    )


def _plan_of(planned: PlannedModel, kinds: tuple[LayerKind, ...]) -> MemoryPlan | None:
    """Return the plan for other kinds of layers; None if it exceeds the budget."""
    setup = planned.setup
    frontiers = planned.training.frontiers.at(setup.options.batch, setup.options.seq, kinds)
    try:
        return in_order(frontiers.plan(setup.options.budget))
    except MemoryBudgetError:
        return None


def _own_stages(planned: PlannedModel, plain: MemoryPlan | None) -> Iterable[Stage]:
    trained, at = planned.training, planned.setup.at
    plans = {"pruned": in_order(save_all(planned.kinds)), "rematerialized": plain}
    if planned.setup.options.lossy_activations:
        plans |= {"compressed": _plan_of(planned, _compressed(planned)), "fp8": trained.plan}
    else:
        plans |= {"compressed": trained.plan}
    for name, plan in plans.items():
        if plan is not None:
            memory = saved_memory(trained.model, plan)
            yield _stage(name, memory.total, memory.layers, at, plan.recompute_flops_ratio)
    balanced = balanced_memory(trained.model, trained.plan)
    if balanced != memory:
        ratio = trained.plan.recompute_flops_ratio
        yield _stage("even-routing", balanced.total, balanced.layers, at, ratio)
    if planned.windowed is not None:
        ends = _ends_within_sequences(planned)
        windows = window_memory(trained.model, planned.windowed, ends)
        ratio = planned.windowed.recompute_flops_ratio
        yield _stage("token-level", windows.total, windows.layers, at, ratio)


def _ends_within_sequences(planned: PlannedModel) -> int:
    """Return how many of a step's windows end within a sequence."""
    seq = planned.setup.seq
    last = planned.setup.batch * seq - 1
    return last // _WINDOW - last // math.lcm(_WINDOW, seq)


def recipes_text(recipes: Mapping[str, Recipe]) -> str | None:
    """Return the recipes in words; None without recipes."""
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


def _graph(trained: TrainedModel, at: Mapping[sympy.Symbol, int]) -> tuple[GraphNode, ...]:
    plan, frontiers = trained.plan, trained.frontiers
    back = [index for index in plan.layers if plan.plans[index].backward is not None]
    index, _ = Counter(back or plan.layers).most_common(1)[0]
    kind = frontiers.layers[plan.layers.index(index)]
    return decided_graph(frontiers.kinds[kind], plan.plans[index], at)


def _layer_groups(planned: PlannedModel) -> Iterable[LayerGroup]:
    if planned.saved is None:
        return
    model, plan, at = planned.training.model, planned.training.plan, planned.setup.at
    groups: dict[tuple[int, sympy.Expr], list[int]] = {}
    for layer, (index, size) in enumerate(zip(plan.layers, planned.saved.layers, strict=True)):
        groups.setdefault((index, size), []).append(layer)
    for (index, size), layers in groups.items():
        graphs = plan.plans[index]
        parameters = model.blocks[graphs.block].parameters
        trained = sum(prod(p.type.features) for p in parameters if p.name in graphs.trained)
        name = graphs.forward.name.removesuffix("_forward")
        has_backward = graphs.backward is not None
        yield LayerGroup(name, tuple(layers), trained, bytes_at(size, at), has_backward)


def _tensors(planned: PlannedModel) -> Iterable[SavedTensor]:
    """Yield the decisions on all tensors of layers, and the saved tensors outside layers."""
    if planned.saved is None:
        return
    plan, frontiers, at = planned.training.plan, planned.training.frontiers, planned.setup.at
    for index, graphs in enumerate(plan.plans):
        members = [layer for layer, of in enumerate(plan.layers) if of == index]
        kind = frontiers.kinds[frontiers.layers[members[0]]]
        shared = set(kind.shared)
        restored = len({*members} & {*plan.restored})
        for row in decisions(kind, graphs, len(members), at):
            if row.tensor.partition(".")[2] not in shared:
                is_input = row.op == "input" and row.decision == "save"
                yield from _split(row, restored) if is_input else [row]
    for tensor in planned.saved.outside:
        yield SavedTensor(
            tensor.tensor,
            "input",
            **sizes_at(tensor.type, tensor.size_bytes, at),
            needed_by=tensor.needed_by,
            decision="save",
            reason=tensor.reason,
            layers=1,
        )


def _split(row: SavedTensor, restored: int) -> Iterable[SavedTensor]:
    """Yield a row for the layers that save their input, and a row for those that recompute it."""
    if row.layers > restored:
        yield dataclasses.replace(row, layers=row.layers - restored)
    if restored:
        reason = "the layers share the saved input of one before: recomputed by its forward"
        yield dataclasses.replace(row, decision="recompute", reason=reason, layers=restored)
