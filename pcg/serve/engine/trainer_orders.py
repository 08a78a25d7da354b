"""Trainers that a server orders from its engine, and what it has them do.

A trainer's commands are done in the order in which they are sent. They hold numbers, texts and
arrays as bytes; what they name are folders of the server's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch

from pcg.errors import DataError, FinetuneError
from pcg.ir.program.program import Program
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.trainers.async_trainer import AsyncTrainer
from pcg.runtime.executor import Executor
from pcg.runtime.training.loss_graph import GraphLoss, LossGraph
from pcg.runtime.training.trainer.commands import (
    Command,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Publish,
    SaveState,
)
from pcg.runtime.training.trainer.datum import Datum, Scored, Stepped
from pcg.serve.engine.engine_names import owned

Found = TypeVar("Found")
Result = TypeVar("Result")

ALPHA = 32
"""LoRA's alpha, which Tinker's protocol does not have."""
_KINDS = {"f4": torch.float32, "i8": torch.int64}
_COLUMNS = {
    "target_tokens": "targets",
    "weights": "weights",
    "advantages": "advantages",
    "logprobs": "logprobs",
}
"""The fields of a datum, by their names in the protocol."""
_TARGETS = {"target_tokens": "targets"}


class LoraOrder(msgspec.Struct, frozen=True):
    """A LoRA of a rank on the attention's modules, on all other ones in the blocks, on the head."""

    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class ArrayData(msgspec.Struct, frozen=True, array_like=True):
    """An array: `f4` or `i8`, its shape, and its bytes, the lowest first."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


class DatumData(msgspec.Struct, frozen=True, array_like=True):
    """A sequence and what a loss reads of it, by the protocol's names."""

    tokens: ArrayData
    inputs: dict[str, ArrayData]


class TrainPass(msgspec.Struct, frozen=True, tag="pass"):
    """Computes a loss, and its gradients if `trains`; that of a graph, if there is one."""

    data: list[DatumData]
    loss: str
    options: dict[str, float]
    trains: bool
    graph: LossGraph | None = None


class TrainStep(msgspec.Struct, frozen=True, tag="step"):
    """Updates the adapter by AdamW; a `grad_clip_norm` of None clips nothing."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float | None


class TrainSave(msgspec.Struct, frozen=True, tag="save"):
    """Writes the state to a folder that is not there yet."""

    path: str


class TrainLoad(msgspec.Struct, frozen=True, tag="load"):
    """Goes on from a state, with its optimizer or without."""

    path: str
    optimizer: bool


class TrainServe(msgspec.Struct, frozen=True, tag="serve"):
    """Serves the adapter as it is now by a name of its own."""

    name: str


TrainerOrder: TypeAlias = TrainPass | TrainStep | TrainSave | TrainLoad | TrainServe


class TrainerReply(msgspec.Struct, frozen=True):
    """The reply to a command.

    Attributes:
        metrics: numbers by their names.
        numbers: those of an update that its record has.
        logprobs: of each datum the log-probability of each target, float32, the lowest byte first.
    """

    metrics: dict[str, float]
    logprobs: list[bytes] = msgspec.field(default_factory=list)
    numbers: dict[str, float] = msgspec.field(default_factory=dict)


class OrderedTrainers:
    """The trainers of an engine that a server ordered."""

    def __init__(self, executor: Executor, engine: AsyncEngine) -> None:
        self._executor = executor
        self._engine = engine
        self._trainers: dict[str, AsyncTrainer] = {}

    def begin(self, name: str, order: LoraOrder) -> Future[None]:
        """Make a trainer; errors as of `AsyncEngine.trainer`, by the future or at once."""
        recipe = {
            "peft_type": "LORA",
            "r": order.rank,
            "lora_alpha": ALPHA,
            "target_modules": targets_of(self._executor.program, order),
        }
        trainer = self._engine.trainer(
            name,
            peft=recipe,
            seed=order.seed,
            optimizer="adamw",
            tenant=owned(name).tenant,
        )
        self._trainers[name] = trainer
        done = trainer.created.future
        done.add_done_callback(lambda made: self._forget(name) if made.exception() else None)
        return done

    def _forget(self, name: str) -> None:
        self._trainers.pop(name, None)

    def run(self, name: str, order: TrainerOrder) -> Future[TrainerReply]:
        """Have a trainer do something.

        Raises:
            FinetuneError: there is no such trainer.
        """
        trainer = self._trainers.get(name)
        if trainer is None:
            raise FinetuneError(f"there is no trainer {name!r}")
        if isinstance(order, TrainPass):
            graph = _graph_of(order)
            done = trainer.run(_pass_of(order, graph)).future
            return then(done, lambda scored: _scored(scored, graph))
        if isinstance(order, TrainStep):
            return then(trainer.run(_step_of(order)).future, _stepped)
        command: Command[Any]
        if isinstance(order, TrainSave):
            command = SaveState(order.path)
        elif isinstance(order, TrainLoad):
            command = LoadState(order.path, optimizer=order.optimizer)
        else:
            command = Publish(order.name)
        return then(trainer.run(command).future, lambda _: TrainerReply({}))

    def end(self, name: str) -> Future[None]:
        """Close a trainer; nothing happens if there is none."""
        trainer = self._trainers.pop(name, None)
        if trainer is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return trainer.close()


def targets_of(program: Program, order: LoraOrder) -> list[str]:
    """Return the paths of the linear modules that an order adapts.

    Modules with `attn` or `attention` in their paths are the attention's.

    Raises:
        FinetuneError: it adapts none.
    """
    base = program.base
    found = []
    for path in base.linear_modules():
        is_attention = "attn" in path or "attention" in path
        if path == base.output_module:
            wanted = order.train_unembed
        else:
            wanted = order.train_attn if is_attention else order.train_mlp
        if wanted:
            found.append(path)
    if not found:
        raise FinetuneError(
            "the LoRA would adapt no module of this model; set train_attn, train_mlp or "
            "train_unembed"
        )
    return found


def _graph_of(order: TrainPass) -> GraphLoss | None:
    if order.graph is None:
        return None
    data = [{name: _array(one) for name, one in datum.inputs.items()} for datum in order.data]
    return GraphLoss(order.graph, data)


def _pass_of(order: TrainPass, graph: GraphLoss | None) -> Forward:
    reads = _COLUMNS if graph is None else _TARGETS  # a graph has read what it wants
    data = [_datum(one, f"data[{index}]", reads) for index, one in enumerate(order.data)]
    kind = ForwardBackward if order.trains else Forward
    loss = order.loss if graph is None else graph
    return kind(data, loss, loss_options=order.options or None)


def _datum(given: DatumData, place: str, reads: Mapping[str, str]) -> Datum:
    unknown = sorted(given.inputs.keys() - reads.keys())
    if unknown and reads is _COLUMNS:
        raise DataError(
            f"{place}.loss_fn_inputs has {unknown[0]!r}, which no loss reads; use "
            f"{', '.join(_COLUMNS)}"
        )
    if "target_tokens" not in given.inputs:
        raise DataError(f"{place}.loss_fn_inputs has no target_tokens; give [N]")
    columns = {reads[name]: _array(one) for name, one in given.inputs.items() if name in reads}
    return Datum(_array(given.tokens), **columns)  # type: ignore[arg-type]


def _array(given: ArrayData) -> torch.Tensor:
    kind = _KINDS[given.kind]
    if not given.data:
        return torch.zeros(given.shape, dtype=kind)
    return torch.frombuffer(bytearray(given.data), dtype=kind).reshape(given.shape)


def _step_of(order: TrainStep) -> OptimStep:
    return OptimStep(
        learning_rate=order.learning_rate,
        betas=(order.beta1, order.beta2),
        eps=order.eps,
        weight_decay=order.weight_decay,
        grad_clip_norm=order.grad_clip_norm,
    )


def _scored(scored: Scored, graph: GraphLoss | None) -> TrainerReply:
    logprobs: Sequence[bytes] = [one.float().numpy().tobytes() for one in scored.logprobs]
    metrics: Mapping[str, float] = {
        "loss:sum": scored.loss,
        "tokens:sum": float(scored.tokens),
        **({} if graph is None else graph.metrics),
    }
    return TrainerReply(dict(metrics), list(logprobs))


def _stepped(stepped: Stepped) -> TrainerReply:
    metrics = {"grad_norm:mean": stepped.gradient_norm, "step:max": float(stepped.step)}
    numbers = {
        "step": float(stepped.step),
        "loss": stepped.loss,
        "gradient_norm": stepped.gradient_norm,
        "tokens": float(stepped.tokens),
    }
    return TrainerReply(metrics, numbers=numbers)


def then(future: Future[Found], act: Callable[[Found], Result]) -> Future[Result]:
    """Return the future of what a function makes of another one's result."""
    made: Future[Result] = Future()

    def go_on(done: Future[Found]) -> None:
        try:
            made.set_result(act(done.result()))
        except Exception as error:
            made.set_exception(error)

    future.add_done_callback(go_on)
    return made
