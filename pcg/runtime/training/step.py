"""A training step of an adapter: forward, loss, backward, clip, update, publish.

    forward    the windows of all sequences of a batch, first to last     (`TrainingPass`)
    loss       in chunks of tokens, with the gradient of their hidden states
    backward   the windows, last to first, layer by layer
    clip       the gradients of all batches and ranks, by their common norm
    update     the optimizer's step
    publish    weights computed from trained weights, such as an encoder's outputs

Supervised jobs and trainers share this step. With the batches b of a step, target tokens t of b and
N = Σ_b |t(b)| target tokens in total, a supervised job's loss is

    loss = Σ_b Σ_t ce(t) / N

so that dividing a step into batches and over replicas changes only rounding.

Over pipeline stages, several micro-batches run concurrently. Each stage takes them in the same
order and alternates forward and backward (PipeDream's 1F1B): stage i of S holds the activations of
at most S - i micro-batches, and the last stage starts a backward right after its loss. With M
micro-batches, a stage waits for (S - 1) / (M + S - 1) of the time.

    stage 0    f0 f1 f2 b0 f3 b1 …        3 stages
    stage 1       f0 f1 b0 f2 b1 …
    stage 2          f0 b0 f1 b1 …

A stage with its maximum number of micro-batches exchanges activations and gradients with its
neighbour in a single message each way, at the same time as the neighbour: b0 of stage 0 runs when
f2 reaches stage 1, which then holds two micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ranks.mesh import SINGLE_MESH, RankMesh
from pcg.ranks.step_parts import shares, sum_gradients
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.data.example import Example
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
from pcg.runtime.training.recorded.loss_graphs import UpdateGraphs
from pcg.runtime.training.runner import TrainingPass, TrainingRunner, pass_through
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.runtime.training.work_units import Work


class TrainingStep:
    """The steps of an adapter.

    Attributes:
        parameters: the trained tensors by name; they have a `grad` only between a backward and
            `drop_gradients`.
        beside: the part of the method outside the program, such as AdaLoRA's ranks, or None.
    """

    def __init__(
        self,
        runner: TrainingRunner,
        kind: Optimizer,
        rate: float,
        total_steps: int,
        max_grad_norm: float | None = None,
        mesh: RankMesh = SINGLE_MESH,
    ) -> None:
        """Create the optimizer.

        Args:
            max_grad_norm: the maximum norm for `clip`; None for no clipping.
            mesh: the ranks; ranks with equal shards process different sequences of a step, or
                different tokens of the sequences.
        """
        self.runner, self._kind, self._mesh = runner, kind, mesh
        self._max_grad_norm = max_grad_norm
        self.parameters = dict(runner.parameters)
        recipe = runner.adapter.recipe
        self.beside = recipe.training_beside(runner.shards, total_steps)
        if self.beside is not None:
            mesh.check_no_stages(f"{recipe.method}, which ranks all layers' weights,")
        if self._shards is not None:
            kind.check_parted(runner.ranks.size)
        # Check parameters of other stages, too, so that all ranks raise the same error.
        check_parameters(runner.trained_everywhere, kind)
        self.optimizer = make_optimizer(self.parameters, kind, rate)
        offloaded = HostStates(self.optimizer) if kind.is_offloaded else None
        self._take_step = self.optimizer.step if offloaded is None else offloaded.step
        is_on_device = has_device_rate(self.optimizer) and offloaded is None
        self._may_record = is_on_device and self.beside is None
        self._graphs: UpdateGraphs | None = None
        self._is_recorded = False

    @property
    def _shards(self) -> AdapterShards | None:
        """The shards that contain the parameters; None for whole parameters."""
        shards = self.runner.shards
        is_whole = shards.is_whole or self.parameters.keys() != shards.tensors.keys()
        return None if is_whole else shards

    # ------------------------------------------------------------------- forward, loss, backward

    def gradients(
        self, group: Sequence[Sequence[Example]], targets: int, seed: int, step: int
    ) -> Work[list[Tensor]]:
        """Add the gradients of this rank's part of each batch; return the loss of each part.

        The losses are on the device, fp64.

        Args:
            seed: the seed of the job, for dropout.
        """
        runner, replicas = self.runner, self._mesh.dp
        lengths = [[len(example.ids) for example in batch] for batch in group]
        places_here = shares(lengths, replicas.size)[replicas.rank]
        parts = [
            BatchPart([batch[place] for place in places], mixed_seed(seed, step, index), places)
            for index, (batch, places) in enumerate(zip(group, places_here, strict=True))
        ]
        if runner.link is not None and not runner.windows:
            return run_stages(runner, parts, targets)
        losses = []
        for part in parts:
            if not part.examples:
                runner.pass_by(trains=True)
                losses.append(torch.zeros((), dtype=torch.float64, device=runner.device))
                continue
            arguments = (part.examples, targets, part.seed, part.numbers)
            passed = yield from pass_through(runner, *arguments)
            losses.append(passed.loss_sum.to(runner.device))
        return losses

    def drop_gradients(self) -> None:
        """Remove the gradients of all trained tensors."""
        for tensor in (*self.parameters.values(), *self.runner.shards.tensors.values()):
            tensor.grad = None

    # ---------------------------------------------------------------------- clip, update, publish

    def clip(self) -> Tensor:
        """Clip the gradients of all ranks to the maximum norm; return the norm before clipping.

        Raises:
            UnsupportedError: a weight of the recipe gets no gradient.
        """
        for path in sum_gradients(self._mesh.data, self.parameters):
            raise UnsupportedError(
                f"{path} gets no gradient, so it cannot be trained; leave it out of the recipe"
            )
        self.runner.sum_gradients()
        if self.beside is not None:
            self.beside.regularize()
        if self._may_record and self._graphs is None:
            self._graphs = self.runner.update_graphs(self.optimizer, self._clipped)
        self._is_recorded = self._graphs is not None and self._graphs.serves
        return self._graphs.clip() if self._graphs and self._is_recorded else self._clipped()

    def _clipped(self) -> Tensor:
        norm = self.runner.gradient_norm()
        self.scale(norm, self._max_grad_norm)
        return norm

    def scale(self, norm: Tensor, most: float | None) -> None:
        """Clip gradients with a known norm to a maximum norm; None for no clipping."""
        if most is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), most, norm)

    def update(self, step: int, rate: float) -> None:
        """Update the adapter by its gradients, after `step` steps, and drop the gradients."""
        if self._graphs is not None and self._is_recorded:
            self._graphs.step(rate)
        else:
            set_rate(self.optimizer, rate)
            self._take_step()
        if self.beside is not None:
            self.beside.after_step(step + 1)
        self.drop_gradients()
        self.runner.publish()
        if self.runner.link is not None and self.runner.windows:
            self.runner.link.meet()  # so that rank 0's clock includes the time of all stages

    # ------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state for a checkpoint, of whole tensors."""
        return optimizer_tensors(self.optimizer, self.parameters, self._shards)

    def tensors_beside(self) -> Mapping[str, Tensor]:
        """Return the tensors of `beside` for a checkpoint."""
        return {} if self.beside is None else self.beside.tensors

    def load(
        self, steps: int, optimizer: Mapping[str, Tensor], beside: Mapping[str, Tensor]
    ) -> None:
        """Load the tensors of a checkpoint; `steps` is its number of steps."""
        if steps:
            load_optimizer(self.optimizer, self._kind, self.parameters, optimizer, self._shards)
        if self.beside is not None:
            self.beside.load(beside)


PARTS_PER_STAGE = 4
"""Micro-batches of a step per stage, given enough sequences: a stage waits for about a fifth of the
time."""


@dataclass(frozen=True)
class BatchPart:
    """A replica's part of a batch."""

    examples: Sequence[Example]
    seed: int
    numbers: Sequence[int]


def parts_of_batch(batches: int, stages: int) -> int:
    """Return the number of micro-batches per batch of a step, given enough sequences."""
    return max(1, PARTS_PER_STAGE * stages // max(batches, 1))


def micro_batches(parts: Sequence[BatchPart], stages: int) -> list[tuple[int, BatchPart]]:
    """Cut the parts of a step's batches into micro-batches, each with its batch's index."""
    cut = []
    each = parts_of_batch(len(parts), stages)
    for index, part in enumerate(parts):
        lengths = [len(example.ids) for example in part.examples]
        for (places,) in shares([lengths], min(each, max(len(lengths), 1))):
            if places:
                some = [part.examples[i] for i in places]
                numbers = [part.numbers[i] for i in places]
                cut.append((index, BatchPart(some, part.seed, numbers)))
    return cut


def run_stages(
    runner: BoundTraining, parts: Sequence[BatchPart], normaliser: float
) -> list[Tensor]:
    """Add the gradients of the parts of a step's batches.

    Returns:
        The sum of the losses of each part on the last stage, fp64; zeros on other stages.
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
    for number, (index, part) in enumerate(batches):
        passed = TrainingPass(runner, part.examples, normaliser, part.seed, numbers=part.numbers)
        is_full = len(under_way) + 1 == most
        link.exchanges = is_full and gets_gradients
        passed.forward(passed.remaining)
        under_way.append((index, passed))
        if is_full:
            link.exchanges = number + 1 < len(batches)
            back()
    link.exchanges = False
    while under_way:
        back()
    link.settle()
    return losses
