"""The commands of a trainer: the parameters of its methods.

A command runs as a sequence of stages: work, which runs on the engine's thread like a job's work,
and asides, which run on other threads, such as data checks, the caller's functions, and file
access. Commands can cross processes, except those with a loss function of the caller.

A saved state is a directory with the files of a checkpoint. It is written under a temporary name
and renamed, so that a path never holds a partial state.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from pcg.errors import AdapterError, FinetuneError
from pcg.files import SUMS, expanded, is_directory, is_file, shown_path, sync_names
from pcg.runtime.training.checkpoints import STATE, Checkpoint, CheckpointStore, write_checkpoint
from pcg.runtime.training.loss_graph import GraphLoss, LossGraph
from pcg.runtime.training.losses import CROSS_ENTROPY, OF_A_FUNCTION, loss_of
from pcg.runtime.training.options import check_betas, check_number
from pcg.runtime.training.trainer.datum import (
    Datum,
    Saved,
    Scored,
    ScoredBatch,
    Snapshot,
    Stepped,
    checked,
)
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter
from pcg.runtime.training.work_units import Work
from pcg.units import shown

# -------------------------------------------------------------------------------------- state files


_OPTIMIZER = "optimizer"


def write_state(path: str | Path, checkpoint: Checkpoint, *, overwrite: bool) -> Path:
    """Write a state; return its directory.

    Raises:
        FinetuneError: the state cannot be written, or the path exists; an existing path stays
            unchanged.
    """
    place = expanded(path)
    beside = place.parent / f".{place.name}-{secrets.token_hex(4)}"
    old = beside.with_name(f"{beside.name}-old")
    try:
        if place.exists() and not (overwrite and (place / STATE).is_file()):
            fix = "give overwrite=True, or another path" if not overwrite else "give another path"
            what = "a state" if (place / STATE).is_file() else "something other than a state"
            raise FinetuneError(f"there is {what} at {place} already; {fix}")
        inside = (
            [entry.name for entry in place.iterdir() if entry.is_dir()] if place.exists() else []
        )
        if inside:  # such as another state
            raise FinetuneError(
                f"the state at {place} has the directory {shown(inside[0])} in it, which would "
                "be lost; move it, or give another path"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, beside)
        if place.exists():
            place.rename(old)
        beside.rename(place)
        sync_names(place.parent)
    except (OSError, SafetensorError, AdapterError) as error:
        if is_directory(old) and not place.exists():
            old.rename(place)
        raise FinetuneError(f"the state cannot be saved at {place}: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return place


def read_state(
    path: str | Path, name: str, facts: Mapping[str, Any], optimizer: bool
) -> tuple[Path, Checkpoint]:
    """Return the directory and contents of a state of the same base.

    Args:
        name: the new name of the adapter.
        facts: values of the base, and the optimizer's name, that must be equal in the state.
        optimizer: True if the optimizer's name must be equal, too.
    Raises:
        FinetuneError: no state, a damaged state, or a state of another base or optimizer.
    """
    place = expanded(path)
    if not is_file(place / STATE) and not is_file(place / SUMS):
        raise FinetuneError(f"there is no state at {place}; give the path of a saved one")
    store = CheckpointStore(place.parent)
    try:
        checkpoint = store.load(place, name)
    except FinetuneError as error:
        what, good = str(error).partition(";")[0], store.good_beside(place)
        other = "another state" if good is None else f"the last good one, {shown_path(good)}"
        raise FinetuneError(f"{what}; load {other}") from error
    for key, expected in facts.items():
        saved = checkpoint.trajectory.get(key)
        if saved != expected and (optimizer or key != _OPTIMIZER):
            is_optimizer = key == _OPTIMIZER
            fix = "load it with optimizer=False" if is_optimizer else "load a state of this base"
            raise FinetuneError(
                f"the state {place} has {key} {shown(saved)}, and the trainer {shown(expected)}; "
                f"{fix}"
            )
    return place, checkpoint


# ----------------------------------------------------------------------------------------- commands


Result = TypeVar("Result", covariant=True)
CustomLoss: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""A differentiable loss function of each datum's log-probabilities, shaped as its targets."""


class GraphOfData(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A loss graph, and the arrays of each datum by name, which the graph reads."""

    graph: LossGraph
    data: list[dict[str, Tensor]]


if TYPE_CHECKING:
    DataOfPass: TypeAlias = Iterable[Datum]
    LossOfPass: TypeAlias = str | CustomLoss | GraphOfData
    StatePath: TypeAlias = str | Path
else:  # the types that messages hold
    DataOfPass, LossOfPass, StatePath = list[Datum], str | GraphOfData, Path


@dataclass(frozen=True)
class Aside:
    """A stage that does not use the model, and runs outside the engine's thread."""

    act: Callable[[], Any]
    compiles: bool = False


Stages: TypeAlias = Generator[Aside | Work[Any], Any, Result]


class TrainerCommand(msgspec.Struct, Generic[Result], frozen=True, tag=True, eq=False):
    """A command of a trainer."""

    def stages(self, trained: TrainedAdapter) -> Stages[Result]:
        """Yield stages, and receive the result of each; return the command's result."""
        raise NotImplementedError


class _Pass(TrainerCommand[Scored], frozen=True):
    data: DataOfPass
    loss: LossOfPass = "cross_entropy"


class Forward(_Pass, frozen=True, kw_only=True):
    """Computes a loss without gradients and without dropout.

    Attributes:
        data: a list of `pcg.Datum`.
        loss: cross_entropy, importance_sampling, ppo, cispo, dro, gspo, dpo, kto or preference;
            or a differentiable function of the log-probabilities of each datum's targets, [N] each.
        loss_options: the loss's options by name: clip_low_threshold and clip_high_threshold of ppo,
            cispo and gspo, beta of dro and dpo; of preference beta, label_smoothing and the weights
            of its terms.
    """

    loss_options: Mapping[str, float] | None = None

    def stages(self, trained: TrainedAdapter) -> Stages[Scored]:
        loss, batches = yield Aside(lambda: self._begin(trained))
        scored: Scored = yield trained.forward(batches)
        if isinstance(loss, str):
            return scored
        total, _ = yield Aside(lambda: _evaluate(loss, scored))
        return dataclasses.replace(scored, loss=total, metrics=_metrics(loss))

    def _begin(self, trained: TrainedAdapter) -> tuple[str | CustomLoss, list[ScoredBatch]]:
        """Return the loss, with a graph as a function, and the data as batches."""
        loss = self.loss
        if isinstance(loss, GraphOfData):
            loss = GraphLoss(loss.graph, loss.data)
        known = OF_A_FUNCTION if callable(loss) else loss_of(loss)
        options = known.with_options(self.loss_options)
        data = checked(self.data, known, trained.sizes, trained.virtual_tokens)
        return loss, trained.batches(data, known, options)


class ForwardBackward(Forward, frozen=True):
    """Computes a loss and accumulates its gradients."""

    def stages(self, trained: TrainedAdapter) -> Stages[Scored]:
        loss, batches = yield Aside(lambda: self._begin(trained))
        if isinstance(loss, str):
            result: Scored = yield trained.forward_backward(batches)
            return result
        scored: Scored = yield trained.forward(batches)
        total, slopes = yield Aside(lambda: _evaluate(loss, scored))
        weighted = yield Aside(lambda: _weighted(trained, batches, slopes))
        result = yield trained.forward_backward(weighted)
        return dataclasses.replace(
            result, loss=total, logprobs=scored.logprobs, metrics=_metrics(loss)
        )


def _evaluate(function: CustomLoss, scored: Scored) -> tuple[float, list[Tensor]]:
    """Return the loss of the caller's function, and its gradients by the log-probabilities."""
    leaves = [logprob.detach().clone().requires_grad_() for logprob in scored.logprobs]
    total = function([*leaves])  # a copy, as the function may change the list
    if not (
        isinstance(total, Tensor)
        and total.numel() == 1
        and total.is_floating_point()
        and total.requires_grad
    ):
        raise FinetuneError(
            f"the loss function returned {shown(total)}; return a scalar tensor that torch "
            "can differentiate by the log-probabilities"
        )
    slopes = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
    gradients = [
        torch.zeros_like(leaf) if slope is None else slope
        for leaf, slope in zip(leaves, slopes, strict=True)
    ]
    if not all(value.isfinite().all() for value in (total, *gradients)):
        raise FinetuneError(
            "the loss function, or its gradient, is not finite; check its computation"
        )
    return float(total.detach()), gradients


def _metrics(loss: CustomLoss) -> Mapping[str, float]:
    return loss.metrics if isinstance(loss, GraphLoss) else {}


def _weighted(
    trained: TrainedAdapter, batches: Sequence[ScoredBatch], slopes: Sequence[Tensor]
) -> list[ScoredBatch]:
    """Return batches with weights for which cross entropy has the function's gradients."""
    read = [datum for batch in batches for datum in batch.data]
    data = [datum.weighted(-slope) for datum, slope in zip(read, slopes, strict=True)]
    return trained.batches(data, CROSS_ENTROPY, {})


class OptimStep(TrainerCommand[Stepped], frozen=True, kw_only=True):
    """Updates the adapter by the accumulated gradients, and drops the gradients.

    Defaults of betas, eps and weight_decay: the trainer's `optimizer_options`, then the optimizer's
    defaults, with a weight_decay of 0.

    Attributes:
        learning_rate: the learning rate of this update.
        betas: the two betas of optimizers of the Adam family.
        eps: the optimizer's epsilon.
        weight_decay: decay of the weights; trained biases and norms do not decay.
        grad_clip_norm: maximum norm, to which gradients are clipped; None for no clipping.
    """

    learning_rate: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None

    def __post_init__(self) -> None:
        # An eps of 0 divides 0 by 0.
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if value is not None or name == "learning_rate":
                check_number(name, value, 0.0, name in ("eps", "grad_clip_norm"))
        check_betas(self.betas)

    def stages(self, trained: TrainedAdapter) -> Stages[Stepped]:
        fields = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        fields_given = {name: value for name, value in fields.items() if value is not None}
        stepped: Stepped = yield trained.optim_step(
            self.learning_rate, fields_given, self.grad_clip_norm
        )
        return stepped


class _OfState(TrainerCommand[Saved], frozen=True):
    path: StatePath

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path) or not str(self.path).strip():
            raise FinetuneError(f"path={shown(self.path)}; give the path of a directory")


class SaveState(_OfState, frozen=True, kw_only=True):
    """Writes the adapter, the optimizer's state and the number of updates.

    Attributes:
        path: the directory to create, in peft's format with additional files for the optimizer.
        overwrite: replace an existing state.
        notes: JSON values to store with the state, which `load_state` returns.
    """

    overwrite: bool = False
    notes: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.notes is not None and not isinstance(self.notes, Mapping):
            raise FinetuneError(f"notes={shown(self.notes)}; use a dict")

    def stages(self, trained: TrainedAdapter) -> Stages[Saved]:
        facts = yield Aside(trained.facts)
        checkpoint = yield trained.checkpoint(facts)
        checkpoint.state.position = dict(self.notes or {})
        written: Path = yield Aside(
            lambda: write_state(self.path, checkpoint, overwrite=self.overwrite)
        )
        return Saved(written, checkpoint.state.step, checkpoint.state.position)


class LoadState(_OfState, frozen=True, kw_only=True):
    """Loads a saved state and drops accumulated gradients.

    Attributes:
        path: the state's directory.
        optimizer: True to load the optimizer's state and the number of updates, too; False to load
            only the weights.
    """

    optimizer: bool = True

    def stages(self, trained: TrainedAdapter) -> Stages[Saved]:
        def load() -> Saved:
            path, checkpoint = read_state(self.path, trained.name, trained.facts(), self.optimizer)
            trained.load(checkpoint, optimizer=self.optimizer)
            return Saved(path, trained.steps, checkpoint.state.position)

        saved: Saved = yield Aside(load)
        return saved


class Publish(TrainerCommand[Snapshot], frozen=True):
    """Publishes the current adapter as the next version of its name.

    Attributes:
        name: another name for the published adapter, which nothing trains; None for the trainer's.
    """

    name: str | None = None

    def stages(self, trained: TrainedAdapter) -> Stages[Snapshot]:
        copy = yield trained.copied()
        if self.name is not None:
            copy = dataclasses.replace(copy, name=self.name)
        program = yield Aside(lambda: trained.program_for(copy), compiles=True)
        snapshot: Snapshot = yield trained.publish(copy, program)
        return snapshot


TrainerCommands: TypeAlias = Forward | ForwardBackward | OptimStep | SaveState | LoadState | Publish
