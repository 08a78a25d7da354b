"""The commands of a trainer, each of which is the parameters of one method.

A command runs as a few stages in turn: work, which runs on the engine's thread as any job's does,
and asides, which run beside the engine: checks of data, functions of the caller, files.

Files of a trainer's state: those of a checkpoint, in one directory.

A state is written beside its place and renamed, so that a path holds a whole one or none.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from pcg.errors import AdapterError, FinetuneError
from pcg.files import SUMS, expanded, is_directory, is_file, shown_path, sync_names
from pcg.runtime.training.checkpoints import STATE, Checkpoint, CheckpointStore, write_checkpoint
from pcg.runtime.training.losses import CROSS_ENTROPY, OF_A_FUNCTION, loss_of
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
from pcg.units import is_finite, shown

# -------------------------------------------------------------------------------------- state files


_OPTIMIZER = "optimizer"


def write_state(path: str | Path, checkpoint: Checkpoint, *, overwrite: bool) -> Path:
    """Write a state; returns its directory.

    Raises:
        FinetuneError: it cannot be written, or something is there; that stays as it is.
    """
    place = expanded(path)
    beside = place.parent / f".{place.name}-{secrets.token_hex(4)}"
    old = beside.with_name(f"{beside.name}-old")
    try:
        if place.exists() and not (overwrite and (place / STATE).is_file()):
            fix = "give overwrite=True, or another path" if not overwrite else "give another path"
            what = "a state" if (place / STATE).is_file() else "something that is no state"
            raise FinetuneError(f"there is {what} at {place} already; {fix}")
        inside = [one.name for one in place.iterdir() if one.is_dir()] if place.exists() else []
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
    """Read a state that was written for the same base; returns its directory, too.

    Args:
        name: the adapter's name, whatever it was when it was saved.
        facts: what has to be as it was: of the base, and the optimizer's name.
        optimizer: the optimizer is wanted, and has to be the same.
    Raises:
        FinetuneError: there is none, it is damaged, or it is of another base or optimizer.
    """
    place = expanded(path)
    if not is_file(place / STATE) and not is_file(place / SUMS):
        raise FinetuneError(f"there is no state at {place}; give the path of a saved one")
    store = CheckpointStore(place.parent)
    try:
        found = store.load(place, name)
    except FinetuneError as error:
        what, good = str(error).partition(";")[0], store.good_beside(place)
        other = "another state" if good is None else f"the last good one, {shown_path(good)}"
        raise FinetuneError(f"{what}; load {other}") from error
    for key, own in facts.items():
        saved = found.trajectory.get(key)
        if saved != own and (optimizer or key != _OPTIMIZER):
            fix = "load it with optimizer=False" if key == _OPTIMIZER else "load one of this base"
            raise FinetuneError(
                f"the state {place} has {key} {shown(saved)}, and the trainer {shown(own)}; {fix}"
            )
    return place, found


# ----------------------------------------------------------------------------------------- commands


Result = TypeVar("Result", covariant=True)
CustomLoss: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Returns the loss of log-probabilities, of each datum as its targets; differentiable."""


@dataclass(frozen=True)
class Aside:
    """A stage that does not touch the model, and runs on another thread than the engine's.

    Attributes:
        compiles: it may compile a program, which one thread does.
    """

    act: Callable[[], Any]
    compiles: bool = False


Stages: TypeAlias = Generator[Aside | Work[Any], Any, Result]


class Command(ABC, Generic[Result]):
    """Something that a trainer does."""

    @abstractmethod
    def stages(self, trained: TrainedAdapter) -> Stages[Result]:
        """Yield stages, each of which gives its result back; return that of the command."""


@dataclass(frozen=True)
class Forward(Command[Scored]):
    """Computes a loss without gradients, and without dropout.

    Attributes:
        data: the data, each a `pcg.Datum`.
        loss: cross_entropy, importance_sampling, ppo, cispo, dro, gspo, dpo or preference; or a
            function of the log-probabilities of each datum's targets, [N] each, that returns a loss
            which torch differentiates.
        loss_options: the loss's options by name: clip_low_threshold and clip_high_threshold of ppo,
            cispo and gspo, beta of dro and dpo; of preference beta, label_smoothing and the weights
            of its terms.
    """

    data: Iterable[Datum] = field(repr=False, compare=False)
    loss: str | CustomLoss = "cross_entropy"
    loss_options: Mapping[str, float] | None = field(default=None, kw_only=True)

    def stages(self, trained: TrainedAdapter) -> Stages[Scored]:
        batches = yield Aside(lambda: self._batches(trained))
        scored: Scored = yield trained.forward(batches)
        if isinstance(self.loss, str):
            return scored
        loss, _ = yield Aside(lambda: self._evaluate(scored))
        return Scored(loss, scored.logprobs, scored.tokens, scored.targets)

    def _batches(self, trained: TrainedAdapter) -> list[ScoredBatch]:
        loss = OF_A_FUNCTION if callable(self.loss) else loss_of(self.loss)
        options = loss.with_options(self.loss_options)
        data = checked(self.data, loss, trained.sizes, trained.virtual_tokens)
        return trained.batches(data, loss, options)

    def _evaluate(self, scored: Scored) -> tuple[float, list[Tensor]]:
        """Return the loss by the caller's function, and its gradient by each log-probability."""
        assert not isinstance(self.loss, str)
        leaves = [one.detach().clone().requires_grad_() for one in scored.logprobs]
        total = self.loss([*leaves])  # its own list, which it may change
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
        found = [
            torch.zeros_like(leaf) if slope is None else slope
            for leaf, slope in zip(leaves, slopes, strict=True)
        ]
        if not all(one.isfinite().all() for one in (total, *found)):
            raise FinetuneError(
                "the loss function, or its gradient, is not finite; look at what it computes"
            )
        return float(total.detach()), found


@dataclass(frozen=True)
class ForwardBackward(Forward):
    """Computes a loss, and adds its gradients to those that wait for an update."""

    def stages(self, trained: TrainedAdapter) -> Stages[Scored]:
        batches = yield Aside(lambda: self._batches(trained))
        if isinstance(self.loss, str):
            done: Scored = yield trained.forward_backward(batches)
            return done
        scored: Scored = yield trained.forward(batches)
        loss, slopes = yield Aside(lambda: self._evaluate(scored))
        weighted = yield Aside(lambda: self._weighted(trained, batches, slopes))
        done = yield trained.forward_backward(weighted)
        return Scored(loss, scored.logprobs, done.tokens, done.targets)

    def _weighted(
        self,
        trained: TrainedAdapter,
        batches: Sequence[ScoredBatch],
        slopes: Sequence[Tensor],
    ) -> list[ScoredBatch]:
        """Return the batches whose cross entropy has the gradients of the caller's function."""
        read = [one for batch in batches for one in batch.data]
        data = [one.weighted(-slope) for one, slope in zip(read, slopes, strict=True)]
        return trained.batches(data, CROSS_ENTROPY, {})


@dataclass(frozen=True, kw_only=True)
class OptimStep(Command[Stepped]):
    """Updates the adapter by the gradients that wait, and drops them.

    Attributes:
        learning_rate: the learning rate of this update.
        betas: the two betas of Adam's family; by default those of the trainer's `optimizer_options`
            or the optimizer's own, as of the next two.
        eps: the optimizer's epsilon.
        weight_decay: decay of the weights, 0 by default; trained biases of the base do not decay.
        grad_clip_norm: the gradients are scaled down to this norm; None leaves them.
    """

    learning_rate: float
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value, is_required = getattr(self, name), name == "learning_rate"
            if value is None and not is_required:
                continue
            is_open = name in ("eps", "grad_clip_norm")  # an eps of 0 divides 0 by 0
            if not is_finite(value) or value < 0 or (is_open and not value):
                least = "above 0" if is_open else "of at least 0"
                least += "; None turns it off" if name == "grad_clip_norm" else ""
                raise FinetuneError(f"{name}={shown(value)}; use a number {least}")
        betas = self.betas
        if betas is not None and not (
            isinstance(betas, tuple | list)
            and len(betas) == 2
            and all(is_finite(beta) and 0 <= beta < 1 for beta in betas)
        ):
            raise FinetuneError(f"betas={shown(betas)}; use two numbers in [0, 1)")

    def stages(self, trained: TrainedAdapter) -> Stages[Stepped]:
        fields = {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        given = {name: value for name, value in fields.items() if value is not None}
        stepped: Stepped = yield trained.optim_step(self.learning_rate, given, self.grad_clip_norm)
        return stepped


@dataclass(frozen=True)
class SaveState(Command[Saved]):
    """Writes the adapter, the optimizer's state and the number of updates.

    Attributes:
        path: the directory, which is made; it is in peft's format, with the optimizer beside.
        overwrite: replace a state that is there.
        notes: values of JSON to keep with it, which `load_state` gives back.
    """

    path: str | Path
    overwrite: bool = field(default=False, kw_only=True)
    notes: Mapping[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_path(self.path)
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


@dataclass(frozen=True)
class LoadState(Command[Saved]):
    """Goes on from a state that was saved; gradients that wait are dropped.

    Attributes:
        path: the state's directory.
        optimizer: go on with the optimizer's state and the number of updates, too; else with the
            weights alone.
    """

    path: str | Path
    optimizer: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _check_path(self.path)

    def stages(self, trained: TrainedAdapter) -> Stages[Saved]:
        def load() -> Saved:
            path, found = read_state(self.path, trained.name, trained.facts(), self.optimizer)
            trained.load(found, optimizer=self.optimizer)
            return Saved(path, trained.steps, found.state.position)

        saved: Saved = yield Aside(load)
        return saved


@dataclass(frozen=True)
class Publish(Command[Snapshot]):
    """Serves the adapter as it is now, as the next version of its name.

    Attributes:
        name: another name to serve it by, which nothing trains; None for the trainer's.
    """

    name: str | None = None

    def stages(self, trained: TrainedAdapter) -> Stages[Snapshot]:
        copy = yield trained.copied()
        if self.name is not None:
            copy = dataclasses.replace(copy, name=self.name)
        program = yield Aside(lambda: trained.program_for(copy), compiles=True)
        snapshot: Snapshot = yield trained.publish(copy, program)
        return snapshot


def _check_path(path: object) -> None:
    if not isinstance(path, str | Path) or not str(path).strip():
        raise FinetuneError(f"path={shown(path)}; give the path of a directory")
