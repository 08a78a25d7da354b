"""Model of a report: folded, with bypass networks, and planned for training.

The module also counts the tensors that recipes train, and the costs of the model's steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch

from pcg.errors import UnsupportedError
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.ir.program.saved_memory import SavedMemory, saved_memory
from pcg.ir.shapes import Shape, Shapes, elements
from pcg.ir.types import CONTEXT, TORCH_NAMES
from pcg.options import CompileOptions, PlanOptions
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.step_costs import GraphCosts
from pcg.passes.attach import Bypasses, bypasses_of
from pcg.passes.fusion.fuse_products import FuseLinears, FuseLora
from pcg.passes.graphs.differentiate import LayerKind
from pcg.passes.memory.plan import Frontiers, MemoryPlan
from pcg.passes.pipeline import Pipeline, Settings, in_order, pipeline
from pcg.passes.stages import Attached, Base, Sharded, Traced, TrainedModel
from pcg.peft.adapter import Adapter, new_adapter
from pcg.peft.recipe import Recipe
from pcg.runtime.adapters.served_bytes import served_bytes
from pcg.runtime.training.torch_optimizers import Optimizer


@dataclass(frozen=True)
class AdapterUse:
    """The networks and the trained tensors of some recipes.

    Attributes:
        bypasses: the bypass networks to attach.
        trained: shapes of the trained tensors, of all adapters.
    """

    bypasses: Bypasses
    trained: Shapes

    @property
    def trainable(self) -> int:
        """The number of trained parameters."""
        return elements(self.trained)


def adapter_use(
    model: ModelGraph, recipes: Mapping[str, Recipe], model_type: str, dtype: str
) -> AdapterUse:
    """Return the networks and tensors that recipes, by adapter name, train of a folded model.

    Raises:
        AdapterError: a recipe fits no module of the model.
        UnsupportedError: names a recipe's feature that pcg does not support.
    """
    bypasses = bypasses_of(model, recipes.values(), model_type, dtype)
    shapes = model.module_shapes()
    trained: list[Shape] = []
    for recipe in recipes.values():
        networks = recipe.bypasses_in(model, model_type)
        replaced = recipe.replaced_in(model, networks).values()
        trained += [parameter.type.features for _, parameter in replaced]
        trained += recipe.trained_shapes(networks, shapes)
    return AdapterUse(bypasses, tuple(trained))


def shaped_adapters(
    model: ModelGraph, recipes: Mapping[str, Recipe], model_type: str
) -> list[Adapter]:
    """Return adapters of some recipes over a model without bypass networks, on the meta device."""
    shapes = model.module_shapes()
    dtype = getattr(torch, TORCH_NAMES[model.adapter_dtype])
    adapters = []
    with torch.device("meta"):
        base = {path: torch.empty(shape) for path, shape in shapes.items()}
        for name, recipe in recipes.items():
            fresh = new_adapter(
                name,
                recipe,
                shapes,
                dtype,
                output_layer=model.output_module,
                model_type=model_type,
                base_weights=base,
            )
            replaced = {
                name: torch.empty(parameter.type.features, dtype=dtype)
                for name, (_, parameter) in recipe.replaced_in(model, fresh.weights).items()
            }
            adapters.append(replace(fresh, replaced=replaced))
    return adapters


@dataclass(frozen=True)
class ContextStep:
    """A step where `cp` ranks share the `seq` tokens of each sequence."""

    cp: int
    seq: int


@dataclass(frozen=True)
class PipelineStep:
    """A step of `batch` sequences over `pp` stages, in `micro_batches` micro-batches."""

    pp: int
    batch: int
    micro_batches: int


@dataclass(frozen=True)
class Setup:
    """A model, recipes and a step; `settings` and `folded` are without bypass networks.

    Attributes:
        source: the traced configuration or module.
        served_tokens: tokens of concurrent requests, whose keys and values count in the total; a
            formula in B and S.
        device: the base's device: cuda or cpu.
        serves: options of the program that also serves the adapters; None without serving.
        context: the context parallelism; `options.seq` then counts a rank's tokens. None without.
        pipeline: the pipeline parallelism; `options.batch` then counts a micro-batch's sequences.
            None without.
        parts: the number of replicas that shard the layers; 1 for whole layers.
    """

    config: Mapping[str, Any]
    source: Any
    settings: Settings
    traced: Traced
    folded: Base
    recipes: Mapping[str, Recipe]
    optimizer: Optimizer
    served_tokens: sympy.Expr = sympy.S.Zero
    device: str = "cuda"
    serves: CompileOptions | None = None
    context: ContextStep | None = None
    parts: int = 1
    pipeline: PipelineStep | None = None

    @property
    def cp(self) -> int:
        """The number of ranks that share the tokens of a sequence."""
        return 1 if self.context is None else self.context.cp

    @property
    def batch(self) -> int:
        """The sequences of a step, of all micro-batches."""
        return self.options.batch if self.pipeline is None else self.pipeline.batch

    @property
    def seq(self) -> int:
        """The tokens of a sequence, of all ranks."""
        return self.options.seq if self.context is None else self.context.seq

    @property
    def options(self) -> PlanOptions:
        return self.settings.options

    @property
    def positions(self) -> int | None:
        """The number of positions of the model; None if unbounded."""
        return self.traced.trace.positions

    @property
    def at(self) -> dict[sympy.Symbol, int]:
        """The values of the symbols of formulas."""
        return {SEQUENCES: self.options.batch, CONTEXT: self.options.seq}

    def having(self, **options: object) -> Setup:
        """Return the setup with other `PlanOptions`, which are checked."""
        changed = dataclasses.replace(self.options, **options)  # type: ignore[arg-type]
        settings = dataclasses.replace(self.settings, options=changed)
        return dataclasses.replace(self, settings=settings)

    def use(self, base: ModelGraph) -> AdapterUse:
        """Return the networks and tensors that the recipes train of a base."""
        return adapter_use(base, self.recipes, str(self.config["model_type"]), base.adapter_dtype)

    def shaped_adapters(self) -> list[Adapter]:
        """Return the recipes' adapters over the model, on the meta device."""
        return shaped_adapters(self.folded.model, self.recipes, str(self.config["model_type"]))

    def attached(self) -> tuple[Pipeline, Base, Attached]:
        """Return the recipes' pipeline, and the model without and with bypass networks."""
        settings = dataclasses.replace(self.settings, bypasses=lambda base: self.use(base).bypasses)
        passes = pipeline(settings)
        base = passes.raise_operators.run(self.folded)
        return passes, base, passes.attach.run(base)


@dataclass(frozen=True)
class PlannedModel:
    """A model that is planned for a setup.

    Attributes:
        use: the networks and tensors that the recipes train.
        whole: the model without bypass networks, raised.
        base: a rank's part of `whole`.
        attached: `base` with bypass networks; None without adapters.
        serving: `base` with bypass networks for adapters of any rank.
        kinds: its layers, differentiated and pruned; empty if pcg cannot train the model.
        trained: the model with its training graphs; None if pcg cannot train it.
        windowed: the plan for training window by window through the KV cache; None unless
            requested.
        refusal: the reason why pcg cannot train the model; empty if it can.
        sharded: the model over ranks; None for one rank.
        copies_bytes: bytes of a rank's copies from which the adapters are served; 0 without
            serving.
    """

    setup: Setup
    use: AdapterUse
    whole: ModelGraph
    base: ModelGraph
    attached: ModelGraph | None
    serving: ModelGraph
    kinds: tuple[LayerKind, ...]
    trained: TrainedModel | None
    windowed: MemoryPlan | None
    refusal: str
    sharded: Sharded | None
    copies_bytes: int

    @property
    def unraised(self) -> ModelGraph:
        """The folded model, with a node for each ATen operator."""
        return self.setup.folded.model

    @property
    def training(self) -> TrainedModel:
        """The model with its training graphs; pcg must be able to train it."""
        assert self.trained is not None
        return self.trained

    @cached_property
    def saved(self) -> SavedMemory | None:
        """The bytes saved for backward; None if pcg cannot train the model."""
        trained = self.trained
        return None if trained is None else saved_memory(trained.model, trained.plan)

    def replanned(self, setup: Setup, frontiers: Frontiers, plan: MemoryPlan) -> PlannedModel:
        """Return the model with another plan, for another step."""
        trained = dataclasses.replace(self.training, frontiers=frontiers, plan=in_order(plan))
        return dataclasses.replace(self, setup=setup, trained=trained)


def plan_model(setup: Setup, windows: bool = False) -> PlannedModel:
    """Plan a model for a setup.

    Args:
        windows: also plan training in windows through the KV cache.
    """
    passes, base, attached = setup.attached()
    sharded = passes.parallelize.run(attached)
    refusal = ""
    kinds: tuple[LayerKind, ...] = ()
    windowed: MemoryPlan | None = None
    trained: TrainedModel | None = None
    try:
        pruned = passes.prune.run(passes.differentiate.run(sharded))
        kinds = () if pruned.training is None else pruned.training.kinds
        if windows:
            through_cache = pipeline(dataclasses.replace(setup.settings, windows=True))
            compressed = through_cache.compress.run(pruned)
            training = through_cache.rematerialize.run(compressed).training
            windowed = None if training is None else training.plan
        trained = passes.rematerialize.run(passes.compress.run(pruned)).training
    except UnsupportedError as error:
        refusal = str(error)
    return PlannedModel(
        setup,
        setup.use(setup.folded.model),
        base.model,
        sharded.base,
        sharded.training,
        sharded.serving,
        kinds,
        trained,
        windowed,
        refusal,
        sharded if isinstance(sharded, Sharded) else None,
        0 if setup.serves is None else _copies_bytes(setup, setup.serves, sharded.serving),
    )


def _copies_bytes(setup: Setup, serves: CompileOptions, serving: ModelGraph) -> int:
    return served_bytes(
        fused_serving(serving),
        setup.folded.model,
        setup.shaped_adapters(),
        serves,
        torch.device(setup.device),
    )


def fused_serving(serving: ModelGraph) -> ModelGraph:
    """Fuse a serving model's products as adapter tables require."""
    return serving.map(lambda graph: FuseLora().run(FuseLinears().run(graph)))


# -------------------------------------------------------------------------------------- graph costs


def graph_costs(
    model: CostModel,
    degree: int,
    serving: ModelGraph,
    training: TrainedModel | None = None,
    *,
    host_bytes_per_s: float,
) -> GraphCosts:
    """Return the costs of a rank's graphs, for a group of `degree` ranks.

    Args:
        training: the training graphs, with the plan's recomputation in backward; None for none.
        host_bytes_per_s: bandwidth of copies from the host's memory.
    Raises:
        CostModelError: an operator has no cost.
    """
    if training is None:
        return GraphCosts(model, degree, serving, host_bytes_per_s=host_bytes_per_s)
    plan = training.plan
    layers = [plan.plans[index] for index in plan.layers]
    ends = (
        (training.prologue, training.prologue_trained),
        (training.epilogue, training.epilogue_trained),
    )
    return GraphCosts(
        model,
        degree,
        serving,
        [layer.backward for layer in layers],
        training.epilogue,
        sum(_trained(*pair) for pair in (*ends, *((p.backward, p.trained) for p in layers))),
        prologue=training.prologue,
        host_bytes_per_s=host_bytes_per_s,
    )


def _trained(backward: Graph | None, names: Sequence[str]) -> int:
    """Return the count of numbers that a graph trains; their gradients are its last outputs."""
    if backward is None:
        return 0
    gradients = backward.outputs[len(backward.outputs) - len(names) :]
    return sum(int(backward.types[name].elements) for name in gradients)
