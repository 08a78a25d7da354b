"""Pipeline of all passes, in order.

    trace → fold → raise → attach → parallelize
          → differentiate → prune → place → compress → rematerialize → fuse → emit

Only the list in `pipeline` orders passes, for serving and for training. After each pass, its graphs
and their interfaces are verified (`pcg.passes.graphs.pass_base`).

`BaseSpecialiser` recompiles a program's base for adapters at other sites and for larger steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcg.ir.program.program import ModelGraph, Program, Serving, Training
from pcg.kernels import attention_libraries
from pcg.kernels.attention_libraries import AttentionLibrary
from pcg.options import (
    PLAIN_LOSS,
    CompileOptions,
    LossForm,
    MemoryBudget,
    PlanOptions,
    dtype_name,
    format_name,
)
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import CostModel, RankCosts
from pcg.parallel.costs.layer_costs import CONTEXT_TOKENS, SERVING_TOKENS, DeviceCosts
from pcg.passes.attach import Bypasses, bypasses_of
from pcg.passes.fusion.defer_sums import DeferLora, DeferResidualAdd, SplitCacheAppend
from pcg.passes.fusion.fuse_gradients import FuseGradients
from pcg.passes.fusion.fuse_products import FuseLinears, FuseLora, FuseLoss
from pcg.passes.fusion.fuse_rope import FuseRope
from pcg.passes.fusion.group_kernels import GroupKernels, OrderKernels, SideBySide
from pcg.passes.fusion.join_lora import JoinLora
from pcg.passes.graphs.collectives import (
    CoalesceCollectives,
    CoalesceLayer,
    MarkLogits,
    Overlap,
    OverlapLayer,
)
from pcg.passes.graphs.gradients import Compress, Prune, WindowAttention
from pcg.passes.graphs.latent_cache import CacheLatents, CacheWindowLatents
from pcg.passes.graphs.localize import Localize
from pcg.passes.graphs.lossy import Quantize
from pcg.passes.graphs.pass_base import LayerPass, Observer, On, Pass, Stage
from pcg.passes.graphs.raise_operators import RaiseOperators
from pcg.passes.graphs.split_fused_projections import SplitFusedProjections
from pcg.passes.memory.plan import MemoryPlan
from pcg.passes.model_passes import (
    AddLoss,
    Attach,
    ChooseAttention,
    DifferentiateModel,
    Emit,
    FoldTrace,
    ListFunctions,
    Rematerialize,
    Trace,
)
from pcg.passes.place import CallPieces
from pcg.passes.quantize_weights import QuantizeWeights
from pcg.passes.repeat_heads import RepeatHeadsOfModels
from pcg.passes.shard import PlanBase, Shard
from pcg.passes.stages import (
    Attached,
    Base,
    Emitted,
    Gradients,
    Traced,
    Trained,
)
from pcg.peft.recipe import Recipe
from pcg.trace import ToTrace


@dataclass(frozen=True)
class Settings:
    """The settings of a pipeline.

    Attributes:
        options: the user's options; above tp=1, the graphs after `parallelize` are those of a rank.
        model: the model's name, for the emitted source.
        bypasses: the bypass networks of a base; none by default.
        costs: the device and links that bypass networks are parallelized for, if known.
        backend: the backend of the emitted source: "torch" or "triton".
        libraries: libraries that may compute attention.
        trains: True to build a training model, if bypass networks exist.
        windows: True if finetuning reads sequences window by window, through the KV cache.
        whole: True to trace every layer instead of one layer of each kind.
        step: (sequences, tokens of a sequence) of the memory budget; by default the options'.
        place: cuts the layers between a base and a client; None for a single process.
        parts: ranks that share the tokens of sequences; the options then count a rank's tokens.
        form: the form of the loss.
    """

    options: PlanOptions = field(default_factory=PlanOptions)
    model: str = "model"
    bypasses: Callable[[ModelGraph], Bypasses] = lambda base: Bypasses()
    costs: CostModel | None = None
    backend: str = "torch"
    libraries: tuple[AttentionLibrary, ...] = ()
    trains: bool = True
    windows: bool = False
    whole: bool = False
    step: tuple[int, int] | None = None
    place: CallPieces | None = None
    parts: int = 1
    form: LossForm = PLAIN_LOSS

    @property
    def budget(self) -> MemoryBudget:
        budget = dataclasses.replace(self.options.budget, parts=self.parts)
        if self.step is None:
            return budget
        batch, seq = self.step
        return dataclasses.replace(budget, batch=batch, seq=seq)

    @property
    def device_costs(self) -> DeviceCosts | None:
        if self.costs is None:
            return None
        batch, seq = self.options.batch, self.options.seq
        return self.device_costs_at(self.costs, batch * seq, self.parts * seq)

    @property
    def serving_costs(self) -> tuple[DeviceCosts, ...]:
        """The costs of a serving program's steps; empty if unknown."""
        if self.costs is None:
            return ()
        return tuple(self.device_costs_at(self.costs, n, CONTEXT_TOKENS) for n in SERVING_TOKENS)

    @property
    def rank_costs(self) -> RankCosts | None:
        return None if self.costs is None else RankCosts(self.costs, self.options.tp)

    def device_costs_at(self, costs: CostModel, tokens: int, context: int) -> DeviceCosts:
        steps = self.options.gradient_accumulation_steps
        return DeviceCosts(costs, self.options.tp, tokens, context, steps)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a compilation, in order; a stage's name also labels its result for users."""

    trace: Stage[ToTrace, Traced]
    fold: Stage[Traced, Base]
    raise_operators: Stage[Base, Base]
    attach: Stage[Base, Attached]
    parallelize: Stage[Attached, Attached]
    differentiate: Stage[Attached, Gradients]
    prune: Stage[Gradients, Gradients]
    place: Stage[Gradients, Gradients]
    compress: Stage[Gradients, Gradients]
    rematerialize: Stage[Gradients, Trained]
    fuse: Stage[Trained, Trained]
    emit: Stage[Trained, Emitted]

    @property
    def stages(self) -> tuple[Stage[Any, Any], ...]:
        return tuple(getattr(self, stage_field.name) for stage_field in dataclasses.fields(self))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the compilation's states for users, in order."""
        labels = (names for stage in self.stages for _, names in stage.flat())
        return tuple(dict.fromkeys(name for names in labels for name in names))

    def base(self, model: ToTrace, observe: Observer | None = None) -> Base:
        folded = self.fold.run(self.trace.run(model, observe), observe)
        return self.raise_operators.run(folded, observe)

    def trained(self, attached: Attached, observe: Observer | None = None) -> Trained:
        """Return a program's graphs before fusion, from models with bypass networks."""
        sharded = self.parallelize.run(attached, observe)
        pruned = self.prune.run(self.differentiate.run(sharded, observe), observe)
        placed = self.place.run(pruned, observe)
        return self.rematerialize.run(self.compress.run(placed, observe), observe)

    def emitted(self, base: Base, observe: Observer | None = None) -> Emitted:
        trained = self.trained(self.attach.run(base, observe), observe)
        return self.emit.run(self.fuse.run(trained, observe), observe)


LAYER_ORDER: tuple[LayerPass, ...] = (CoalesceLayer(), OverlapLayer())
"""Passes that order the layers of a memory plan for execution."""


def pipeline(settings: Settings) -> Pipeline:
    """Return the pipeline for these settings."""
    options, triton = settings.options, settings.backend == "triton"
    tp, sequence_parallel = options.tp, options.sequence_parallel
    is_lossy = options.lossy_activations == "fp8"
    layers, functions = "training.kinds.gradients", "serving.graph training.graph"
    return Pipeline(
        trace=_stage("trace", Trace(dtype_name(options.dtype), settings.whole)),
        fold=_stage("fold", FoldTrace(), QuantizeWeights(format_name(options.quantization))),
        raise_operators=_stage("raise", On("model", RaiseOperators())),
        attach=_stage("attach", Attach(settings.bypasses, settings.trains)),
        parallelize=_stage(
            "parallelize",
            *when(
                tp > 1,
                On(
                    "base.blocks serving.blocks training.blocks",
                    SplitFusedProjections(options.ep == tp),
                ),
                PlanBase(tp, options.styles, options.ep, settings.device_costs),
                RepeatHeadsOfModels(tp, not options.styles),
                Shard(
                    tp,
                    settings.device_costs,
                    sequence_parallel,
                    options.budget,
                    settings.rank_costs,
                    is_lossy,
                    settings.serving_costs,
                ),
                On("base serving training", Localize(tp)),
            ),
            *when(options.latent_cache, On("serving", CacheLatents())),
        ),
        differentiate=_stage("differentiate", AddLoss(settings.form), DifferentiateModel()),
        prune=_stage("prune", On(f"{layers} training.prologue training.loss", Prune())),
        place=_stage("place", *(() if settings.place is None else (settings.place,))),
        compress=_stage(
            "compress",
            *when(settings.windows, On(layers, WindowAttention())),
            *when(settings.windows and options.latent_cache, On(layers, CacheWindowLatents())),
            *when(is_lossy, On(layers, Quantize())),
            On(layers, Compress()),
        ),
        rematerialize=_stage(
            "rematerialize",
            Rematerialize(settings.budget, settings.rank_costs),
            *(On("training.plan.plans", layer_pass) for layer_pass in LAYER_ORDER),
        ),
        fuse=_stage(
            "fuse",
            _stage(
                "fuse_serving",
                On("serving", FuseLinears()),
                On("serving", FuseLora()),
                On("serving", CoalesceCollectives()),
                On("serving.prologue", Overlap()),
                *when(tp > 1, On("serving.epilogue", MarkLogits())),
                *when(
                    triton,
                    On("serving", DeferResidualAdd()),
                    On("serving", DeferLora()),
                ),
            ),
            _stage(
                "fuse_training",
                On("training.plan.plans.forward", FuseLinears()),
                *when(
                    triton,
                    On("training.plan.plans.forward", JoinLora()),
                    On("training.plan.plans.backward", FuseGradients()),
                    On("training.plan.plans.backward", JoinLora()),
                    On("training.epilogue training.loss", FuseLoss()),
                ),
            ),
        ),
        emit=_stage(
            "emit",
            ListFunctions(),
            *when(
                triton,
                On(functions, SplitCacheAppend()),
                On(functions, GroupKernels()),
                On(functions, SideBySide()),
                On(functions, OrderKernels()),
            ),
            *when(not triton, On("serving.graph", FuseRope())),
            *when(bool(settings.libraries), ChooseAttention(settings.libraries)),
            Emit(settings.model, settings.backend),
        ),
    )


def _stage(name: str, *passes: Pass[Any, Any] | Stage[Any, Any]) -> Stage[Any, Any]:
    return Stage(name, passes)


def when(condition: bool, *passes: Pass[Any, Any]) -> tuple[Pass[Any, Any], ...]:
    """Return the passes if the condition holds, else no passes."""
    return passes if condition else ()


def in_order(plan: MemoryPlan) -> MemoryPlan:
    """Order a memory plan's layers for execution, such that collectives overlap with compute."""
    for layer_pass in LAYER_ORDER:
        plan = plan.map(layer_pass.run)
    return plan


# ---------------------------------------------------------------------------- other sites and steps


def settings_of(
    name: str,
    config: Mapping[str, Any],
    recipes: Collection[Recipe],
    options: CompileOptions,
    place: CallPieces | None = None,
) -> Settings:
    """Return the pipeline settings for a program's options."""
    model_type = str(config["model_type"])

    def bypasses(base: ModelGraph) -> Bypasses:
        return bypasses_of(base, recipes, model_type, base.adapter_dtype)

    costs = None if options.costs is None else find_cost_model(options.costs)
    libraries = attention_libraries.libraries_of(options.attention)
    return Settings(options, name, bypasses, costs, options.backend, libraries, place=place)


@dataclasses.dataclass(frozen=True)
class BaseSpecialiser:
    """Recompiles a program's base; `place` cuts its layers between base and client."""

    place: CallPieces | None = None

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving:
        return self._emitted(program, recipes, trains=False).serving

    def training(
        self,
        program: Program,
        recipe: Recipe,
        windows: bool = False,
        step: tuple[int, int] | None = None,
        form: LossForm = PLAIN_LOSS,
    ) -> Training:
        changed = {"windows": windows, "step": step, "form": form}
        training = self._emitted(program, [recipe], **changed).training
        assert training is not None  # a recipe without a site is refused
        return training

    def _emitted(self, program: Program, recipes: Sequence[Recipe], **changed: Any) -> Emitted:
        settings = settings_of(program.name, program.config, recipes, program.options, self.place)
        return pipeline(dataclasses.replace(settings, **changed)).emitted(Base(program.base))
