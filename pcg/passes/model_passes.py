"""Passes between the stages of a model's compilation.

`Trace` and `FoldTrace` turn a configuration into a base, `Attach` adds bypass networks, `AddLoss`
and `DifferentiateModel` add gradients, and `Rematerialize` splits each graph into a forward that
saves values and a backward that recomputes the rest: layers within the memory budget of
`pcg.passes.memory.plan`; the prologue's backward recomputes all of its small inputs; the epilogue's
backward runs directly after its forward and needs no saved values. `ListFunctions`,
`ChooseAttention` and `Emit` write the source; attention without a library uses the program's own
kernels (`pcg.kernels.attention_libraries`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pcg.codegen.emit import emit_serving, emit_training
from pcg.codegen.program_functions import Function
from pcg.errors import UnsupportedError
from pcg.ir.analysis.builder import Builder
from pcg.ir.analysis.dataflow import trained
from pcg.ir.graph import Graph, Node
from pcg.ir.program.interfaces import TARGETS
from pcg.ir.program.program import ModelGraph, Serving
from pcg.kernels.attention_libraries import AttentionLibrary
from pcg.options import PLAIN_LOSS, LossForm, MemoryBudget
from pcg.parallel.costs.cost_model import RankCosts
from pcg.passes.attach import Bypasses, attach
from pcg.passes.graphs.differentiate import Differentiate, layer_kinds
from pcg.passes.graphs.fold import Fold
from pcg.passes.graphs.pass_base import Pass
from pcg.passes.memory.plan import frontiers
from pcg.passes.memory.recompute import loss_and_gradients, prologue_backward
from pcg.passes.stages import (
    Attached,
    Base,
    Emitted,
    Functions,
    Gradients,
    ModelGradients,
    Traced,
    Trained,
    TrainedModel,
    WithLoss,
    functions_of,
)
from pcg.trace import ToTrace, trace_once


@dataclass(frozen=True)
class Trace(Pass[ToTrace, Traced]):
    """Trace the model of a config.json, or a module.

    Attributes:
        dtype: torch's name of the dtype; None for the model's own.
        whole: True to trace every layer instead of one layer of each kind, plus one.
    """

    name = "trace"
    dtype: str | None = None
    whole: bool = False

    def run(self, before: ToTrace) -> Traced:
        return Traced(trace_once(before, self.dtype, self.whole))


class FoldTrace(Pass[Traced, Base]):
    """Fold a traced model."""

    name = Fold.name

    def run(self, before: Traced) -> Base:
        trace = before.trace
        model = Fold(trace.layers_path, tuple(trace.schedule)).run(trace.graph)
        return Base(model, trace.stored)


@dataclass(frozen=True)
class Attach(Pass[Base, Attached]):
    """Attach bypass networks to the serving and to the training model."""

    name = "attach"
    bypasses: Callable[[ModelGraph], Bypasses]
    trains: bool = True

    def run(self, before: Base) -> Attached:
        bypasses = self.bypasses(before.model)
        serving = attach(before.model, bypasses.for_serving())
        training = attach(before.model, bypasses) if self.trains and bypasses else None
        return Attached(before.model, serving, training)


# ------------------------------------------------------------------------------ differentiate model


@dataclass(frozen=True)
class AddLoss(Pass[Attached, WithLoss]):
    """Append the loss of each token to the training model's logits."""

    name = "add_loss"
    form: LossForm = PLAIN_LOSS

    def run(self, before: Attached) -> WithLoss:
        model = before.training
        loss = None if model is None else with_loss(model.epilogue, self.form)
        return WithLoss(before.base, before.serving, model, loss)


class DifferentiateModel(Pass[WithLoss, Gradients]):
    """Differentiate the layers, the prologue and the loss of the training model."""

    name = Differentiate.name

    def run(self, before: WithLoss) -> Gradients:
        model, loss = before.training, before.loss
        if model is None or loss is None:
            return Gradients(before.serving, None)
        _check_chain(model)
        prologue = None
        if trained(model.prologue):
            carried = model.prologue.outputs[: len(model.blocks[0].outputs)]
            prologue = Differentiate(wrt=(), outputs=carried).run(model.prologue)
        of_loss = Differentiate(wrt=(loss.inputs[0].name,)).run(loss)
        training = ModelGradients(model, layer_kinds(model), prologue, of_loss)
        return Gradients(before.serving, training)


def _check_chain(model: ModelGraph) -> None:
    """Refuse later layers that read the first layer's inputs, as gradients flow in a chain."""
    first = set(model.prologue.outputs[: len(model.blocks[0].outputs)])
    later = [model.blocks[index] for index in model.layers[1:]]
    for graph in (*later, model.epilogue):
        again = sorted(first.intersection(value.name for value in graph.inputs))
        if again:
            raise UnsupportedError(
                f"{graph.name} reads %{again[0]}, which the first layer is given; pcg finetunes "
                "models each of whose layers reads what the one before gives"
            )


def with_loss(epilogue: Graph, form: LossForm = PLAIN_LOSS) -> Graph:
    """Append each token's loss to the epilogue: hidden states and `targets` [T] to loss [T]."""
    builder = Builder.extending(epilogue)
    targets = builder.input(TARGETS.name, TARGETS.type)
    op, logits = "cross_entropy", epilogue.outputs[0]
    gathered = epilogue.producers.get(logits)
    if gathered is not None and gathered.op == "all_gather" and not gathered.get("tokens"):
        # The loss needs only a rank's part of the vocabulary.
        op, logits = "cross_entropy_part", gathered.inputs[0]
    if form.temperature != 1.0:
        logits = builder.add("div", [logits], scalar=form.temperature)
    attributes: dict[str, Any] = {"smoothing": form.smoothing} if form.smoothing else {}
    return builder.build([builder.add(op, [logits, targets], name="loss", **attributes)])


# ------------------------------------------------------------------------------------ rematerialize


@dataclass(frozen=True)
class Rematerialize(Pass[Gradients, Trained]):
    """Split graphs into forwards that save and backwards that recompute the rest, within a budget.

    Attributes:
        costs: the seconds of a rank's nodes; None to count operations.
    Raises:
        MemoryBudgetError: backward needs more than the budget.
    """

    name = "rematerialize"
    budget: MemoryBudget
    costs: RankCosts | None = None

    def run(self, before: Gradients) -> Trained:
        training = None if before.training is None else self._trained(before.training)
        return Trained(before.serving, training)

    def _trained(self, gradients: ModelGradients) -> TrainedModel:
        model = gradients.model
        budget = self.budget
        step = (budget.batch, budget.seq, self.costs, budget.parts)
        ways = frontiers(model, gradients.kinds, *step)
        prologue, trained = None, tuple[str, ...]()
        if gradients.prologue is not None:
            carried = model.prologue.outputs[: len(model.blocks[0].outputs)]
            prologue = prologue_backward(gradients.prologue, carried)
            trained = gradients.prologue.trained
        return TrainedModel(
            model,
            ways,
            ways.plan(self.budget),
            prologue=prologue,
            prologue_trained=trained,
            epilogue=loss_and_gradients(gradients.loss),
            epilogue_trained=gradients.loss.trained,
            loss=gradients.loss.graph,
        )


# --------------------------------------------------------------------------------- choose attention


@dataclass(frozen=True)
class ChooseAttention(Pass[Functions, Functions]):
    """Select a library for each attention that a library can compute."""

    name = "choose_attention"
    libraries: tuple[AttentionLibrary, ...] = ()

    def run(self, before: Functions) -> Functions:
        return dataclasses.replace(
            before,
            serving=self._changed(before.serving, "prompts"),
            training=self._changed(before.training, "training"),
        )

    def _changed(self, functions: Iterable[Function], use: str) -> tuple[Function, ...]:
        uses = (use, "recurrences", "convolutions")
        libraries = [each for each in self.libraries if each.use in uses]
        return tuple(
            dataclasses.replace(function, graph=_with_libraries(function.graph, libraries))
            for function in functions
        )


def _with_libraries(graph: Graph, libraries: Iterable[AttentionLibrary]) -> Graph:
    def changed(node: Node) -> Node:
        library = next(
            (candidate.name for candidate in libraries if candidate.knows(graph, node)), None
        )
        return node if library is None else node.changed(attributes={"library": library})

    return graph.replace(nodes=tuple(changed(node) for node in graph.nodes))


# --------------------------------------------------------------------------------------------- emit


class ListFunctions(Pass[Trained, Functions]):
    """List the functions of a program, each with its graph, arguments and results."""

    name = "functions"

    def run(self, before: Trained) -> Functions:
        return Functions(before, *functions_of(before))


@dataclass(frozen=True)
class Emit(Pass[Functions, Emitted]):
    """Write the functions of a model as Python, for a backend, "torch" or "triton"."""

    name = "emit"
    model: str
    backend: str

    def run(self, before: Functions) -> Emitted:
        source = emit_serving(self.model, before.serving, self.backend)
        serving = Serving(before.trained.serving, source)
        trained_model = before.trained.training
        if trained_model is None:
            return Emitted(before, serving, None)
        training = emit_training(self.model, before.training, self.backend)
        return Emitted(before, serving, trained_model.with_source(training))
