"""A step of finetuning: gradients of some batches, clipping, and the optimizer's update.

With the batches b of a step, target tokens t of b and N = Σ_b |t(b)| of all of them,

    loss = Σ_b Σ_t ce(t) / N

so how a step is cut into batches, and these over replicas, changes nothing but rounding.

Over pipeline stages several micro-batches are under way at once. Each stage takes them in one
order, forward and back in turn (PipeDream's 1F1B): stage i of S has at most S - i under way, whose
activations it holds, and the last stage goes back through one as soon as its loss is there. With M
micro-batches a stage waits for (S - 1) / (M + S - 1) of the time.

    stage 0    f0 f1 f2 b0 f3 b1 …        3 stages
    stage 1       f0 f1 b0 f2 b1 …
    stage 2          f0 b0 f1 b1 …

Once a stage has as many under way as it may, it sends what goes forward in one exchange with what
comes back, and what goes back with what comes forward next. The stage on the other side does both
at the same time: its b0 goes back when f2 comes to stage 1, as that has two under way then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

import torch
from torch import Tensor

from pcg.errors import FinetuneError, UnsupportedError
from pcg.ranks.group import broadcast_from_first
from pcg.ranks.mesh import SINGLE_MESH, RankMesh
from pcg.ranks.step_parts import shares, sum_gradients
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.example import Example
from pcg.runtime.data.order import Batches
from pcg.runtime.model.batch import mixed_seed
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.optimizer import (
    HostStates,
    check_parameters,
    has_device_rate,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    set_rate,
)
from pcg.runtime.training.options import FinetuneOptions
from pcg.runtime.training.recorded.loss_graphs import UpdateGraphs
from pcg.runtime.training.runner import TrainingPass, TrainingRunner, pass_through
from pcg.runtime.training.training_data import places_of
from pcg.runtime.training.work_units import Reading, Release, StepBeginsAgain, Work

# ------------------------------------------------------------------------------------ micro batches


PARTS_PER_STAGE = 4
"""Micro-batches of a step for each stage, if it has so many sequences: a stage of S waits for about
a fifth of the time."""


@dataclass(frozen=True)
class BatchPart:
    """A replica's part of a batch.

    Attributes:
        examples: its sequences; empty if others have all.
        seed: the seed of dropout.
        numbers: the place of each of them in the batch.
    """

    examples: Sequence[Example]
    seed: int
    numbers: Sequence[int]


def parts_of_batch(batches: int, stages: int) -> int:
    """Return into how many micro-batches each batch of a step is cut, if it has the sequences."""
    return max(1, PARTS_PER_STAGE * stages // max(batches, 1))


def micro_batches(parts: Sequence[BatchPart], stages: int) -> list[tuple[int, BatchPart]]:
    """Cut the parts of a step's batches for so many stages; each comes with its batch's index."""
    found = []
    each = parts_of_batch(len(parts), stages)
    for index, part in enumerate(parts):
        lengths = [len(example.ids) for example in part.examples]
        for (places,) in shares([lengths], min(each, max(len(lengths), 1))):
            if places:
                some = [part.examples[i] for i in places]
                numbers = [part.numbers[i] for i in places]
                found.append((index, BatchPart(some, part.seed, numbers)))
    return found


def run_stages(
    runner: BoundTraining, parts: Sequence[BatchPart], normaliser: float
) -> list[Tensor]:
    """Add the gradients of the parts of a step's batches.

    Returns:
        The sum of the losses of each part on the last stage, fp64; zeros on the others.
    """
    losses = [torch.zeros((), dtype=torch.float64, device=runner.device) for _ in parts]
    stage, link = runner.stage, runner.link
    assert link is not None
    most = stage.count - stage.index
    gets_gradients = runner.training.first_back < stage.layers.stop
    under_way: deque[tuple[int, TrainingPass]] = deque()

    def back() -> None:
        index, oldest = under_way.popleft()
        while not oldest.is_done:
            oldest.run_part(oldest.load.tokens)
        losses[index] += oldest.loss_sum.to(runner.device)

    batches = micro_batches(parts, stage.count)
    for number, (index, one) in enumerate(batches):
        made = TrainingPass(runner, one.examples, normaliser, one.seed, numbers=one.numbers)
        is_full = len(under_way) + 1 == most
        link.exchanges = is_full and gets_gradients
        made.forward(made.remaining)
        under_way.append((index, made))
        if is_full:
            link.exchanges = number + 1 < len(batches)
            back()
    link.exchanges = False
    while under_way:
        back()
    link.settle()
    return losses


# --------------------------------------------------------------------------------------------- step


@dataclass(frozen=True)
class StepGradients:
    """Facts of a step's gradients, as those of `StepRecord`; `targets` are the target tokens."""

    epoch: int
    loss: float
    norm: float
    tokens: int
    targets: int


class TrainingStep:
    """Takes batches in their order and updates the adapter.

    Attributes:
        parameters: the adapter's tensors by name; they have a `grad` between `gradients` and
            `drop_gradients` alone.
        beside: the part of the job outside the program, such as AdaLoRA's ranks; None without.
        optimizer: the optimizer of the parameters.
    """

    def __init__(
        self,
        runner: TrainingRunner,
        data: Dataset,
        batches: Batches,
        options: FinetuneOptions,
        total_steps: int,
        mesh: RankMesh = SINGLE_MESH,
    ) -> None:
        """Make a step of a job.

        Args:
            mesh: the ranks; those that have the same shards take other sequences of a step, or
                other tokens of these.
        """
        self.parameters = dict(runner.parameters)
        self.beside = runner.adapter.recipe.training_beside(runner.shards, total_steps)
        self._runner = runner
        if self.beside is not None:
            mesh.check_no_stages(
                f"{runner.adapter.recipe.method}, which ranks all layers' weights,"
            )
        self._data = data
        self._batches = batches
        self._options = options
        self._mesh = mesh
        self._kind = options.make_optimizer()
        if self._shards is not None:
            self._kind.check_parted(runner.ranks.size)
        # Of other stages, too, so that all refuse the same.
        check_parameters(runner.trained_everywhere, self._kind)
        self.optimizer = make_optimizer(self.parameters, self._kind, options.learning_rate)
        offloaded = HostStates(self.optimizer) if self._kind.is_offloaded else None
        self._take_step = self.optimizer.step if offloaded is None else offloaded.step
        is_on_device = has_device_rate(self.optimizer) and offloaded is None
        self._may_record = is_on_device and self.beside is None
        self._graphs: UpdateGraphs | None = None
        self._is_recorded = False

    def gradients(self, step: int, rate: float) -> Work[StepGradients]:
        """Take the next batches and compute their gradients, clipped.

        Args:
            step: number of steps done, which seeds dropout.
            rate: the learning rate, for messages.
        Raises:
            FinetuneError: the loss or the norm is not finite; the adapter is as before.
            UnsupportedError: a weight of the recipe gets no gradient.
        """
        self.drop_gradients()
        epoch, first = self._batches.epoch, self._batches.index
        # Fewer at the end of an epoch.
        group = [*islice(self._batches, self._options.gradient_accumulation_steps)]
        examples = [example for batch in group for example in batch]
        targets = self._runner.count_targets(examples)
        while True:
            try:
                losses = yield from self._passes(group, targets, step)
                break
            except StepBeginsAgain:
                self.drop_gradients()
                yield Release()
        # The first rank's numbers decide how the job goes on.
        norm_here = self._clip()
        summed = self._mesh.data.all_reduce(torch.stack(losses).to(self._runner.device))
        numbers = torch.stack([x.to(self._runner.device).double() for x in (*summed, norm_here)])
        reading = Reading(broadcast_from_first(self._mesh.model, numbers))
        yield reading
        *each, norm = reading.read()
        for index, (loss, batch) in enumerate(zip(each, group, strict=True)):
            if not math.isfinite(loss):
                places = self._places(epoch, first + index)
                self._refuse(f"the loss is {loss:g}", batch, places, step, rate)
        if not math.isfinite(norm):
            places = [p for i in range(len(group)) for p in self._places(epoch, first + i)]
            self._refuse(f"the norm of the gradients is {norm:g}", examples, places, step, rate)
        tokens = sum(len(example.ids) for example in examples)
        return StepGradients(epoch, sum(each) / targets, norm, tokens, targets)

    def _passes(
        self, group: Sequence[Sequence[Example]], targets: int, step: int
    ) -> Work[list[Tensor]]:
        """Add the gradients of this rank's part of some batches; returns the loss of each part.

        The losses are on the device, fp64.
        """
        replicas = self._mesh.dp
        lengths = [[len(example.ids) for example in batch] for batch in group]
        own = shares(lengths, replicas.size)[replicas.rank]
        if self._runner.link is not None and not self._runner.windows:
            parts = [
                BatchPart(
                    [batch[place] for place in places],
                    mixed_seed(self._options.seed, step, index),
                    places,
                )
                for index, (batch, places) in enumerate(zip(group, own, strict=True))
            ]
            return run_stages(self._runner, parts, targets)
        losses = []
        for index, (batch, places) in enumerate(zip(group, own, strict=True)):
            if not places:
                self._runner.pass_by(trains=True)
                losses.append(torch.zeros((), dtype=torch.float64, device=self._runner.device))
                continue
            seed = mixed_seed(self._options.seed, step, index)
            part = [batch[place] for place in places]
            done = yield from pass_through(self._runner, part, targets, seed, places)
            losses.append(done.loss_sum.to(self._runner.device))
        return losses

    def update(self, step: int, rate: float) -> None:
        """Update the adapter by its gradients, after `step` steps before."""
        if self._graphs is not None and self._is_recorded:
            self._graphs.step(rate)
        else:
            set_rate(self.optimizer, rate)
            self._take_step()
        if self.beside is not None:
            self.beside.after_step(step + 1)
        self.drop_gradients()
        self._runner.publish()
        if self._runner.link is not None and self._runner.windows:
            self._runner.link.meet()  # so that the first rank's clock has the time of all

    def drop_gradients(self) -> None:
        """Remove the gradients of the adapter's tensors."""
        for tensor in self.parameters.values():
            tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state for a checkpoint, of whole tensors."""
        return optimizer_tensors(self.optimizer, self.parameters, self._shards)

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the optimizer's state of a checkpoint."""
        load_optimizer(self.optimizer, self._kind, self.parameters, saved, self._shards)

    @property
    def _shards(self) -> AdapterShards | None:
        """The shards that the parameters are; None if they are whole."""
        runner = self._runner
        is_whole = runner.shards.is_whole or self.parameters.keys() != runner.shards.tensors.keys()
        return None if is_whole else runner.shards

    def _clip(self) -> Tensor:
        """Return the norm of the whole gradients, which are scaled down to `max_grad_norm`."""
        for path in sum_gradients(self._mesh.data, self.parameters):
            raise UnsupportedError(
                f"{path} gets no gradient, so it cannot be trained; leave it out of the recipe"
            )
        self._runner.sum_gradients()
        if self.beside is not None:
            self.beside.regularize()
        if self._may_record and self._graphs is None:
            self._graphs = self._runner.update_graphs(self.optimizer, self._scaled)
        self._is_recorded = self._graphs is not None and self._graphs.serves
        return self._graphs.clip() if self._graphs and self._is_recorded else self._scaled()

    def _scaled(self) -> Tensor:
        """Scale the gradients down to `max_grad_norm`, and return the norm that they had."""
        norm = self._runner.gradient_norm()
        if self._options.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), self._options.max_grad_norm, norm
            )
        return norm

    def _places(self, epoch: int, index: int) -> list[str]:
        """Return the places of the examples of a batch."""
        places = places_of(self._data)
        return [places[example] for example in self._batches.plan(epoch)[index]]

    def _refuse(
        self, what: str, examples: Sequence[Example], places: Sequence[str], step: int, rate: float
    ) -> NoReturn:
        """Raise a FinetuneError that names the examples at fault."""
        culprits = [
            place
            for example, place in zip(examples, places, strict=True)
            if not math.isfinite(self._runner.evaluate([example])[0])
        ]
        if 0 < len(culprits) < len(places):
            where = f"it comes from {_listed(culprits)}, in a batch of {len(places)}"
            fix = "look at that data, or leave it out"
        else:
            where = f"the batch was {_listed(places)}"
            fix = (
                f"lower learning_rate={self._options.learning_rate:g}, warm up longer, or lower "
                f"max_grad_norm={self._options.max_grad_norm}"
            )
        raise FinetuneError(
            f"{what} in step {step + 1} at a learning rate of {rate:.3g}; {where}. The adapter is "
            f"as after step {step}; {fix}"
        )


def _listed(places: Sequence[str], most: int = 8) -> str:
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more
