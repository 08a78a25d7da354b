"""The training runner: losses, gradients and evaluation of one adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pcg.kernels.devices import on_device
from pcg.peft.adapter import Adapter
from pcg.ranks.stage_link import StageLink
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.memory.host_allocator import SLACK, FreedMemory, return_freed_memory
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.stages.checks import check_stages
from pcg.runtime.training.training_pass import TrainingPass
from pcg.runtime.training.work_units import (
    Forward,
    Pages,
    Part,
    Release,
    StepBeginsAgain,
    Work,
    run_to_end,
)

Pass = TypeVar("Pass", bound=TrainingPass)


class TrainingRunner(BoundTraining):
    """Computes losses and gradients of one adapter.

    Over ranks each trains its shards of the adapter, which `settle` gathers.
    """

    def forward_backward(
        self, examples: Sequence[Example], normaliser: float, dropout_seed: int | None = None
    ) -> float:
        """Add the gradients of sum(loss) / normaliser to each `grad`; return sum(loss).

        Args:
            examples: whole sequences; their labels are shifted here, and the virtual tokens of the
                adapter's prompt come before them.
            normaliser: the number of target tokens that the loss is a mean over.
            dropout_seed: the seed of dropout; None drops nothing.
        """
        with on_device(self.device):
            loss = run_to_end(pass_through(self, examples, normaliser, dropout_seed)).loss_sum
            return float(self.mesh.pp.broadcast(loss.to(self.device)))

    def evaluate(self, examples: Sequence[Example]) -> tuple[float, int]:
        """Return the sum of the target tokens' losses, of all parts of them, and their number."""
        with on_device(self.device):
            done = run_to_end(pass_through(self, examples))
        own = torch.tensor([done.loss, done.targets], dtype=torch.float64, device=self.device)
        loss, targets = self.mesh.pp.broadcast(self.cp.all_reduce(own)).tolist()
        return loss, int(targets)

    def count_targets(self, examples: Sequence[Example]) -> int:
        """Count target tokens; the first of a sequence is one after a prompt, as in peft."""
        firsts = sum(example.labels[0] != IGNORED for example in examples)
        of_prompt = firsts if self.adapter.recipe.learns_first_token else 0
        return sum(example.targets for example in examples) + of_prompt

    @property
    def trained_everywhere(self) -> Mapping[str, Tensor]:
        """The adapter's trained tensors by name, whole, of all pipeline stages."""
        return {
            f"{path}.{kind}": one.weight
            for path, weights in self.adapter.weights.items()
            for kind, one in weights.parameters.items()
        }

    def sum_gradients(self) -> None:
        """Sum the gradients of replicated shards over the ranks, at the end of a step."""
        if self._encoder is None:
            self.shards.sum_gradients()

    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole adapter's gradients."""
        if self._encoder is None:
            return self.shards.norm()
        gradients = [tensor.grad for tensor in self.parameters.values() if tensor.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def publish(self) -> None:
        """Encode the virtual tokens anew, after the encoder's parameters have changed."""
        if self._encoder is not None:
            self._encoder.publish()
            self.shards.scatter()

    def scatter(self) -> None:
        """Take the adapter's tensors as they are now, which all ranks have alike."""
        self.shards.scatter()

    def settle(self) -> None:
        """Gather what all ranks have trained into the adapter."""
        if self._encoder is None:
            self.shards.gather()


def training_runner(
    state: ModelState, adapter: Adapter, windows: bool = False, slack: float = SLACK
) -> TrainingRunner:
    """Return a runner that trains an adapter, which need not be one of the state's.

    With `windows`, sequences go through the KV cache window by window, not as wholes. On the CPU,
    what its steps free goes back to the system, so that memory is as planned: by a budget of 1 once
    it is too much; by a smaller one, all that this process frees, from now on. A step that would
    save more than a memory budget in bytes is planned again.

    Args:
        slack: how much is too much; see `FreedMemory`.
    Raises:
        UnsupportedError: the adapter's encoder was not saved with it; or pipeline stages, or ranks
            that share tokens, cannot train it.
    """
    budget = state.program.options.budget
    freed = None
    if state.device.type == "cpu" and budget.share == 1.0:
        freed = FreedMemory(slack)
    elif state.device.type == "cpu":
        return_freed_memory()
    if windows:
        state.mesh.check_no_parts("a job of an engine")
    training = state.training(adapter, windows)
    check_stages(state, training, adapter)
    weights = state.weight_store.bind(state.stage.own(training.model))
    is_promise = budget.size_bytes is not None
    training_for = partial(state.training, adapter, windows) if is_promise else None
    link = StageLink.of(training.model, state.stages, state.mesh, state.device)
    own = (training, weights, adapter, state.mesh, link, training_for, freed, windows)
    return TrainingRunner(*own)


def pass_through(
    runner: BoundTraining,
    examples: Sequence[Example],
    normaliser: float | None = None,
    dropout_seed: int | None = None,
    numbers: Sequence[int] | None = None,
) -> Work[TrainingPass]:
    """Yield the units of a `TrainingPass` over whole sequences, and return it, done."""

    def begin(pages: Pages) -> TrainingPass:
        own = (pages.cache, pages.tables, numbers)
        return TrainingPass(runner, examples, normaliser, dropout_seed, *own)

    return run_pass(runner, [len(example.ids) for example in examples], begin)


def evaluation_pass(runner: BoundTraining, examples: Sequence[Example]) -> Work[TrainingPass]:
    """Yield the units of a pass without gradients, and return it, done; it may begin again."""
    while True:
        try:
            return (yield from pass_through(runner, examples))
        except StepBeginsAgain:
            yield Release()


def run_pass(
    runner: BoundTraining, lengths: Sequence[int], begin: Callable[[Pages], Pass]
) -> Work[Pass]:
    """Yield the units of a pass, and return it, done.

    Args:
        lengths: the tokens of each sequence, without virtual ones.
        begin: makes the pass, once it has its pages.
    """
    pages = Pages([runner.adapter.prompt_tokens + length for length in lengths])
    yield pages
    made = begin(pages)
    while not made.is_done:
        is_part = made.stage is not None
        yield Part(made) if is_part else Forward(made)
    yield Release()
    return made
