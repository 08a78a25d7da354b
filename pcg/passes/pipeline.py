"""The pipeline: the passes that make a program of a model's configuration and PEFT recipes.

    trace → fold → raise → attach → parallelize
          → differentiate → prune → compress → rematerialize → fuse → emit

The order stands in `PIPELINE` and nowhere else. Each pass takes the compilation so far and returns
it with its own result filled in; the verifier runs on every graph after every pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pcg.codegen.emit import emit_serving, emit_training
from pcg.errors import (
    PassError,
    PcgError,
)
from pcg.ir.graph import Graph
from pcg.ir.printer import print_graphs
from pcg.ir.program.program import ModelGraph, Serving, Training, TrainingGraph
from pcg.ir.verifier import verify
from pcg.options import MemoryBudget
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.layer_costs import DeviceCosts
from pcg.passes.attach import attach
from pcg.passes.bypasses import Bypasses
from pcg.passes.compress import compress
from pcg.passes.differentiate import Differentiated
from pcg.passes.fold import fold
from pcg.passes.fusion.defer_residual_add import defer_residual_add
from pcg.passes.fusion.fuse import fuse, fuse_linears
from pcg.passes.fusion.fuse_gradients import fuse_gradients
from pcg.passes.fusion.fuse_loss import fuse_loss
from pcg.passes.fusion.group_kernels import GroupKernels
from pcg.passes.fusion.order_kernels import OrderKernels
from pcg.passes.fusion.side_by_side import SideBySide
from pcg.passes.fusion.split_cache_append import SplitCacheAppend
from pcg.passes.memory.plan import Frontiers, MemoryPlan, frontiers
from pcg.passes.pass_base import GraphPass
from pcg.passes.prune import prune
from pcg.passes.raise_operators import raise_operators
from pcg.passes.sharding.coalesce_collectives import coalesce_collectives
from pcg.passes.sharding.overlap import overlap
from pcg.passes.sharding.parallelize import Sharded, parallelize
from pcg.passes.training_graphs import LayerKind, layer_kinds, train_epilogue, train_prologue
from pcg.passes.window_attention import window_attention
from pcg.trace import Trace, trace_once


@dataclass(frozen=True)
class Compilation:
    """What the passes have made so far.

    Attributes:
        name: of the model.
        config: its config.json.
        bypasses: where bypass networks attach, by a function of the model's linear sites.
        dtype: asked for; None for the configuration's own.
        trains: whether to build what finetunes.
        budget: what that may keep for backward.
        whole: trace every layer, not one of each kind.
        tp: tensor-parallel degree. Above 1, the graphs after `parallelize` are those of one rank.
        costs: of the device and links that bypass networks are parallelized for.
        tp_plan: the base's plan over ranks, by module; empty to read it off the graph.
        windows: whether what finetunes takes sequences window by window, through the KV cache.
        sequence_parallel: whether ranks hold parts of the tokens between the base's products.
        gradient_accumulation_steps: batches an optimizer step that `costs` are of.
        backend: that source is emitted for: `torch` or `triton`.
        traced: what `trace` makes.
        base: what `fold` makes, and `raise` of that: the model without bypass networks.
        serving_model: what `attach` makes to serve, of one rank once parallelized.
        training_model: the same to finetune; None where there is nothing to train.
        local_base: the base of one rank.
        sharded: what `parallelize` makes of what is trained, else of what serves; None at tp 1.
        kinds: what `differentiate` makes of the layers, then `prune` and `compress` of that.
        frontiers: what the layers can keep and make again.
        plan: what `rematerialize` chooses of it.
        training_prologue: the prologue's backward, and what it trains.
        training_epilogue: the epilogue with its loss and backward, the loss, and what it trains.
        serving: what `emit` makes to serve.
        training: the same to finetune.
    """

    name: str
    config: Mapping[str, Any]
    bypasses: Callable[[ModelGraph], Bypasses]
    dtype: str | None = None
    trains: bool = True
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    whole: bool = False
    tp: int = 1
    costs: CostModel | None = None
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    windows: bool = False
    sequence_parallel: bool = False
    gradient_accumulation_steps: int = 1
    backend: str = "torch"
    traced: Trace | None = None
    base: ModelGraph | None = None
    serving_model: ModelGraph | None = None
    training_model: ModelGraph | None = None
    local_base: ModelGraph | None = None
    sharded: Sharded | None = None
    kinds: tuple[LayerKind, ...] = ()
    frontiers: Frontiers | None = None
    plan: MemoryPlan | None = None
    fused_plans: tuple[TrainingGraph, ...] | None = None
    training_prologue: tuple[Graph | None, tuple[str, ...]] = (None, ())
    training_epilogue: tuple[Graph, Graph, tuple[str, ...]] | None = None
    serving: Serving | None = None
    training: Training | None = None

    def device_costs(self) -> DeviceCosts | None:
        """What a batch costs on the device; None where that is not known."""
        if self.costs is None:
            return None
        tokens = self.budget.batch * self.budget.seq
        return self.device_costs_at(self.costs, tokens, self.budget.seq)

    def device_costs_at(self, costs: CostModel, tokens: int, context: int) -> DeviceCosts:
        """The same of so many tokens that attend to so many, by some device's costs."""
        return DeviceCosts(costs, self.tp, tokens, context, self.gradient_accumulation_steps)

    def fused(self, plan: TrainingGraph) -> TrainingGraph:
        """A plan grouped as serving's graphs are, so that both can run a product together."""
        backward = plan.backward
        if self.backend == "triton" and backward is not None:
            backward = fuse_gradients(backward)
        return dataclasses.replace(plan, forward=fuse_linears(plan.forward), backward=backward)

    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that the last pass made, for printing and verifying."""
        if self.training_epilogue is not None and self.training_model is not None:
            found: list[Graph | None] = [self.training_prologue[0]]
            for kind in () if self.plan else self.kinds:
                found += [kind.gradients.graph, kind.gradients.backward]
            for plan in self.fused_plans or (self.plan.plans if self.plan else ()):
                found += [plan.forward, plan.backward]
            layers = [graph for graph in found if graph is not None]
            return (self.training_model.prologue, *layers, self.training_epilogue[0])
        model = self.serving_model or self.base
        if model is not None:
            return model.graphs
        return (self.traced.graph,) if self.traced else ()


def _trace(state: Compilation) -> Compilation:
    return dataclasses.replace(state, traced=trace_once(state.config, state.dtype, state.whole))


def _fold(state: Compilation) -> Compilation:
    traced = made(state.traced)
    return dataclasses.replace(state, base=fold(traced.graph, traced.layers_path, traced.schedule))


def _raise(state: Compilation) -> Compilation:
    return dataclasses.replace(state, base=raise_operators(made(state.base)))


def _attach(state: Compilation) -> Compilation:
    base = made(state.base)
    bypasses = state.bypasses(base)
    serving = attach(base, bypasses.for_serving())
    training = attach(base, bypasses) if state.trains and bypasses else None
    return dataclasses.replace(state, serving_model=serving, training_model=training)


def _parallelize(state: Compilation) -> Compilation:
    base = made(state.base)
    if state.tp == 1:
        return dataclasses.replace(state, local_base=base)

    base_options = (state.tp_plan, state.sequence_parallel)

    def over_ranks(model: ModelGraph | None, trains: bool) -> Sharded | None:
        if model is None:
            return None
        return parallelize(model, base, state.tp, state.device_costs(), trains, *base_options)

    serving, training = (
        over_ranks(state.serving_model, False),
        over_ranks(state.training_model, True),
    )
    plain = parallelize(base, base, state.tp, None, True, *base_options)
    return dataclasses.replace(
        state,
        local_base=plain.local,
        serving_model=serving.local if serving else None,
        training_model=training.local if training else None,
        sharded=training or serving,
    )


def _differentiate(state: Compilation) -> Compilation:
    model = state.training_model
    if model is None:
        return state
    return dataclasses.replace(
        state,
        kinds=layer_kinds(model),
        training_prologue=train_prologue(model),
        training_epilogue=train_epilogue(model),
    )


def _prune(state: Compilation) -> Compilation:
    kinds = tuple(
        dataclasses.replace(kind, gradients=prune(kind.gradients, kind.wrt)) for kind in state.kinds
    )
    return dataclasses.replace(state, kinds=kinds)


def _compress(state: Compilation) -> Compilation:
    def less(gradients: Differentiated) -> Differentiated:
        gradients = window_attention(gradients) if state.windows else gradients
        return compress(gradients)

    kinds = tuple(dataclasses.replace(kind, gradients=less(kind.gradients)) for kind in state.kinds)
    return dataclasses.replace(state, kinds=kinds)


def _rematerialize(state: Compilation) -> Compilation:
    if state.training_model is None:
        return state
    budget = state.budget
    found = frontiers(state.training_model, state.kinds, budget.batch, budget.seq)
    return dataclasses.replace(state, frontiers=found, plan=found.plan(budget))


def _fuse(state: Compilation) -> Compilation:
    model = fuse(made(state.serving_model)).map(coalesce_collectives)
    model = dataclasses.replace(model, prologue=overlap(model.prologue))
    epilogue = state.training_epilogue
    if state.backend == "triton":
        model = defer_residual_add(model)
        if epilogue is not None:
            whole, loss, trained = epilogue
            epilogue = fuse_loss(whole), fuse_loss(loss), trained
    plans = None if state.plan is None else tuple(map(state.fused, state.plan.plans))
    return dataclasses.replace(
        state, serving_model=model, training_epilogue=epilogue, fused_plans=plans
    )


KERNELS: tuple[GraphPass, ...] = (
    SplitCacheAppend(),
    GroupKernels(),
    SideBySide(),
    OrderKernels(),
)


def _emit(state: Compilation) -> Compilation:
    passes = KERNELS if state.backend == "triton" else ()

    def lowered(graph: Graph) -> Graph:
        for one in passes:
            graph = one.run(graph)
        return graph

    def lowered_plan(plan: TrainingGraph) -> TrainingGraph:
        backward = None if plan.backward is None else lowered(plan.backward)
        return dataclasses.replace(plan, forward=lowered(plan.forward), backward=backward)

    model = made(state.serving_model)
    serving = Serving(model, emit_serving(state.name, model.map(lowered), state.backend))
    training = None
    if state.training_model is not None:
        epilogue, loss, trained = made(state.training_epilogue)
        model, plan = state.training_model, made(state.plan)
        plans = made(state.fused_plans)
        prologue, prologue_trained = state.training_prologue
        source = emit_training(
            state.name,
            dataclasses.replace(model, prologue=lowered(model.prologue)),
            tuple(map(lowered_plan, plans)),
            plan.layers,
            lowered(epilogue),
            lowered(loss),
            None if prologue is None else lowered(prologue),
            state.backend,
        )
        training = Training(
            model,
            plans,
            plan.layers,
            epilogue,
            trained,
            source,
            prologue,
            prologue_trained,
            plan.restored,
        )
    return dataclasses.replace(state, serving=serving, training=training)


PIPELINE: tuple[tuple[str, Callable[[Compilation], Compilation]], ...] = (
    ("trace", _trace),
    ("fold", _fold),
    ("raise", _raise),
    ("attach", _attach),
    ("parallelize", _parallelize),
    ("differentiate", _differentiate),
    ("prune", _prune),
    ("compress", _compress),
    ("rematerialize", _rematerialize),
    ("fuse", _fuse),
    ("emit", _emit),
)


def made(value: Any) -> Any:
    """What a pass has made. PassError: it has not run yet."""
    if value is None:
        raise PassError("a pass ran before the one whose result it needs")
    return value


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its time, and how many nodes its graphs have."""

    name: str
    seconds: float
    nodes: int
    graphs: tuple[Graph, ...]

    def text(self) -> str:
        """Its graphs as text IR."""
        return print_graphs(self.graphs)


def run_passes(
    state: Compilation,
    observe: Callable[[PassRecord], None] | None = None,
    *,
    first: str = "trace",
    last: str = "emit",
) -> Compilation:
    """Run the pipeline from one pass to another.

    Args:
        state: where to begin.
        observe: told of each pass as it ends.
        first: the first pass to run; what earlier ones make must be in the state.
        last: the last pass to run.
    Raises:
        PassError: a pass failed; it carries the graphs that the pass got.
    """
    names = [name for name, _ in PIPELINE]
    for name, run in PIPELINE[names.index(first) : names.index(last) + 1]:
        started = time.perf_counter()
        before = state.graphs()
        try:
            state = run(state)
            for graph in state.graphs():
                verify(graph)
        except PcgError:
            raise
        except Exception as error:
            text = print_graphs(before) if before else ""
            raise PassError(f"pass {name!r} failed on {state.name}: {error!r}", text) from error
        if observe is not None:
            graphs = state.graphs()
            nodes = sum(len(graph.nodes) for graph in graphs)
            observe(PassRecord(name, time.perf_counter() - started, nodes, graphs))
    return state


def dump_to(directory: str | Path) -> Callable[[PassRecord], None]:
    """An observer that writes each pass's text IR to `<n>-<pass>.pcg` in a directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in PIPELINE]

    def observe(record: PassRecord) -> None:
        path = folder / f"{names.index(record.name)}-{record.name}.pcg"
        path.write_text(record.text(), encoding="utf-8")

    return observe
