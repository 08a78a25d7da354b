"""Stages of a compilation: the state of a model after some of the passes.

    Traced → Base → Attached → Sharded → Gradients → Trained → Functions → Emitted

All fields of a stage are set; without training, its training fields are None. The pass `On` changes
parts of a stage by the names of their fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pcg.codegen.program_functions import Function, serving_functions, training_functions
from pcg.formats.registry import StoredFormat
from pcg.ir.graph import Graph
from pcg.ir.layouts import Layout, layout_of
from pcg.ir.program.interfaces import (
    check_logits,
    check_loss,
    check_model,
    check_signature,
    check_training,
)
from pcg.ir.program.program import ModelGraph, Serving, Training
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.search import Search
from pcg.passes.graphs.differentiate import Differentiated, LayerKind
from pcg.passes.graphs.pass_base import Named
from pcg.passes.memory.joint import Joint
from pcg.passes.memory.plan import Frontiers, MemoryPlan
from pcg.trace import TracedModel


@dataclass(frozen=True)
class Traced:
    """A model as transformers runs it, as a single graph."""

    trace: TracedModel

    @property
    def graphs(self) -> Named:
        return {self.trace.graph.name: self.trace.graph}

    def check(self) -> None:
        """Check nothing: a single graph has no interfaces."""


@dataclass(frozen=True)
class Base:
    """A model without bypass networks, folded.

    Attributes:
        stored: the format of a quantized checkpoint; None for a float checkpoint.
    """

    model: ModelGraph
    stored: StoredFormat | None = None

    @property
    def graphs(self) -> Named:
        return _named("", self.model.graphs)

    def check(self) -> None:
        check_model(self.model)


@dataclass(frozen=True)
class Attached:
    """A model with bypass networks.

    Attributes:
        base: the model without bypass networks.
        serving: the model that serves adapters of any rank.
        training: the model that trains an adapter; None without training.
    """

    base: ModelGraph
    serving: ModelGraph
    training: ModelGraph | None

    @property
    def graphs(self) -> Named:
        training = self.training.graphs if self.training else ()
        return {**_named("serving.", self.serving.graphs), **_named("training.", training)}

    def check(self) -> None:
        for model in (self.base, self.serving, self.training):
            if model is not None:
                check_model(model)
        check_logits((self.base, self.serving, self.training))

    def base_blocks(self, model: ModelGraph) -> tuple[int, ...]:
        """Return the index of the base's block for each block of a model."""
        base_of = dict(zip(model.layers, self.base.layers, strict=True))
        return tuple(base_of[block] for block in range(len(model.blocks)))


@dataclass(frozen=True)
class Prepared(Attached):
    """Models with the base planned over ranks, and with products and heads that ranks divide.

    `layouts` has the layouts of the weights, by name, for each block of the base.
    """

    layouts: tuple[Mapping[str, Layout], ...]

    @property
    def graphs(self) -> Named:
        return {**_named("base.", self.base.graphs), **super().graphs}


@dataclass(frozen=True)
class Sharded(Prepared):
    """Models over ranks: with layouts in their types, and as the graphs of a rank.

    `typed` is the training model with layouts, or the serving model without training; `searches`
    and `plans` belong to its blocks. `joint` has the plans chosen with the saved values; None
    unless a number of bytes binds. `serving_searches` and `serving_plans` belong to the serving
    model.
    """

    typed: ModelGraph
    searches: tuple[Search, ...]
    plans: tuple[ParallelPlan, ...]
    joint: Joint | None
    serving_searches: tuple[Search, ...]
    serving_plans: tuple[ParallelPlan, ...]

    @property
    def is_sequence_parallel(self) -> bool:
        """True if ranks hold parts of the tokens between the base's products."""
        return layout_of(self.typed.epilogue.inputs[0].type).dim != 0


@dataclass(frozen=True)
class WithLoss(Attached):
    """Models before differentiation; `loss` is the epilogue with the loss."""

    loss: Graph | None

    @property
    def graphs(self) -> Named:
        loss = {} if self.loss is None else {"training.epilogue_loss": self.loss}
        return {**super().graphs, **loss}

    def check(self) -> None:
        super().check()
        if self.training is not None and self.loss is not None:
            check_loss(self.training.epilogue, self.loss)


@dataclass(frozen=True)
class ModelGradients:
    """A differentiated training model.

    Attributes:
        kinds: the model's layers, grouped by equal gradients.
        prologue: the prologue and its backward; None if it has no trained parameters.
        loss: the epilogue with the loss, and its backward.
    """

    model: ModelGraph
    kinds: tuple[LayerKind, ...]
    prologue: Differentiated | None
    loss: Differentiated

    @property
    def graphs(self) -> Named:
        pairs = {kind.name: kind.gradients for kind in self.kinds}
        pairs["epilogue_loss"] = self.loss
        named = {"training.prologue": self.model.prologue}
        if self.prologue is not None:
            named["training.prologue_backward"] = self.prologue.backward
        for name, pair in pairs.items():
            named[f"training.{name}"] = pair.graph
            named[f"training.{name}_backward"] = pair.backward
        return named

    def check(self) -> None:
        check_model(self.model)
        check_loss(self.model.epilogue, self.loss.graph)
        self.loss.check()
        if self.prologue is not None:
            self.prologue.check()
        for kind in self.kinds:
            block, gradients = self.model.blocks[kind.block], kind.gradients
            check_signature(block, gradients.graph)
            gradients.check()


@dataclass(frozen=True)
class TrainedModel:
    """A training model, with the values that its forward saves.

    Attributes:
        frontiers: the possible save and recompute plans of its layers.
        plan: the chosen plan, with its graphs.
        prologue: backward of the prologue, from its inputs and the gradients of the first layer's
            inputs; None if it has no trained parameters.
        prologue_trained: the parameters that the prologue trains.
        epilogue: hidden states and targets to loss and gradients, as a single graph.
        epilogue_trained: the parameters that the epilogue trains.
        loss: hidden states and targets to the loss only.
    """

    model: ModelGraph
    frontiers: Frontiers
    plan: MemoryPlan
    prologue: Graph | None
    prologue_trained: tuple[str, ...]
    epilogue: Graph
    epilogue_trained: tuple[str, ...]
    loss: Graph

    @property
    def graphs(self) -> Named:
        layers = [g for plan in self.plan.plans for g in (plan.forward, plan.backward)]
        graphs = [g for g in (self.model.prologue, self.prologue, *layers) if g is not None]
        losses = {"training.epilogue_train": self.epilogue, "training.epilogue_loss": self.loss}
        return {**_named("training.", graphs), **losses}

    def check(self) -> None:
        check_training(self.with_source(""))
        check_loss(self.model.epilogue, self.loss)

    def with_source(self, source: str) -> Training:
        return Training(
            self.model,
            self.plan.plans,
            self.plan.layers,
            self.epilogue,
            self.epilogue_trained,
            source,
            self.prologue,
            self.prologue_trained,
            self.plan.restored,
        )


TrainingPart = TypeVar("TrainingPart", ModelGradients, TrainedModel)


@dataclass(frozen=True)
class ServedAndTrained(Generic[TrainingPart]):
    """A serving model and a training model; the latter is None without training."""

    serving: ModelGraph
    training: TrainingPart | None

    @property
    def graphs(self) -> Named:
        training = self.training.graphs if self.training else {}
        return {**_named("serving.", self.serving.graphs), **training}

    def check(self) -> None:
        check_model(self.serving)
        if self.training is not None:
            self.training.check()
            check_logits((self.serving, self.training.model))


class Gradients(ServedAndTrained[ModelGradients]):
    """Models with the training model's backward."""


class Trained(ServedAndTrained[TrainedModel]):
    """The graphs of a program."""


@dataclass(frozen=True)
class Functions:
    """The serving and training functions; `trained` has the graphs that the program keeps."""

    trained: Trained
    serving: tuple[Function, ...]
    training: tuple[Function, ...]

    @property
    def graphs(self) -> Named:
        serving = {f"serving.{function.name}": function.graph for function in self.serving}
        training = {f"training.{function.name}": function.graph for function in self.training}
        return {**serving, **training}

    def check(self) -> None:
        """Check that each function keeps the signature of its graph."""
        self.trained.check()
        serving, training = functions_of(self.trained)
        pairs = zip((*serving, *training), (*self.serving, *self.training), strict=True)
        for expected, function in pairs:
            check_signature(expected.graph, function.graph)


@dataclass(frozen=True)
class Emitted:
    """The result of a compilation: serving and training programs, and their functions."""

    functions: Functions
    serving: Serving
    training: Training | None

    @property
    def graphs(self) -> Named:
        return self.functions.graphs

    def check(self) -> None:
        self.functions.check()


def functions_of(trained: Trained) -> tuple[tuple[Function, ...], tuple[Function, ...]]:
    """Return the serving functions and the training functions of a program's graphs."""
    training: tuple[Function, ...] = ()
    if (trained_model := trained.training) is not None:
        plans, layers = trained_model.plan.plans, trained_model.plan.layers
        ends = (trained_model.epilogue, trained_model.loss, trained_model.prologue)
        training = tuple(training_functions(trained_model.model, plans, layers, *ends))
    return serving_functions(trained.serving), training


def _named(prefix: str, graphs: Iterable[Graph]) -> Named:
    return {f"{prefix}{graph.name}": graph for graph in graphs}
