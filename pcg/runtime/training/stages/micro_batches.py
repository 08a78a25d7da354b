"""The passes of a step over pipeline stages: several micro-batches are under way at once.

Each stage takes them in one order, forward and back in turn (PipeDream's 1F1B): stage i of S has at
most S - i under way, whose activations it holds, and the last stage goes back through one as soon
as its loss is there. With M micro-batches a stage waits for (S - 1) / (M + S - 1) of the time.

    stage 0    f0 f1 f2 b0 f3 b1 …        3 stages
    stage 1       f0 f1 b0 f2 b1 …
    stage 2          f0 b0 f1 b1 …

Once a stage has as many under way as it may, it sends what goes forward in one exchange with what
comes back, and what goes back with what comes forward next. The stage on the other side does both
at the same time: its b0 goes back when f2 comes to stage 1, as that has two under way then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.ranks.data_parallel import shares
from pcg.runtime.data.example import Example
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.training_pass import TrainingPass

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
