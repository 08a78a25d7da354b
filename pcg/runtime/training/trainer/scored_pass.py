"""A scored pass: a training pass whose loss is a function of the tokens' log-probabilities.

With the log-probabilities l [T] of the targets and a loss C(l),

    dC/dx = Σ_t (dC/dl_t) dl_t/dx,    and the program's loss of a token is -l_t,

so the program's loss goes back with the weight -dC/dl_t of each token. Where C is linear, the
weights are known before. Else they are known once all l are; as what goes back to a token's state
depends on no other token, it is computed with the weight 1, and then multiplied by the weight. Only
where something behind the layers is trained, whose gradients are sums over tokens, the loss is
computed twice: first forward alone, then forward and back. Either way it is computed for chunks of
tokens, and no logits are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.runtime.data.example import IGNORED
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.loss_chunks import PassLoss, WindowLoss
from pcg.runtime.training.pass_sequences import HasTokens
from pcg.runtime.training.trainer.batches import ScoredBatch
from pcg.runtime.training.trainer.datum import CheckedDatum
from pcg.runtime.training.training_pass import TrainingPass
from pcg.runtime.training.work_units import Pages


class ScoredPass(TrainingPass):
    """A pass over some data, as far as it is not told in `TrainingPass`.

    Attributes:
        logprobs: the log-probability of each token's target, [T] without virtual tokens, on the
            device, or [T, K] of K targets each; 0 where nothing is predicted. They are there once
            the loss is.
    """

    def __init__(
        self,
        runner: BoundTraining,
        batch: ScoredBatch,
        pages: Pages,
        *,
        trains: bool,
        dropout_seed: int | None,
    ) -> None:
        """Begin before the first token; see `TrainingPass`.

        Args:
            trains: compute gradients, and not the loss alone.
        """
        normaliser = 1.0 if trains else None
        super().__init__(runner, batch.data, normaliser, dropout_seed, pages.cache, pages.tables)
        self._score, self._columns = batch.score, batch.columns
        self._data = batch.data
        self._lengths = [len(one.ids) for one in batch.data]
        self._further = self._further_targets(batch)
        self.targets += sum(int((targets >= 0).sum()) for targets in self._further)
        self.logprobs = torch.zeros(0)
        self._slopes: Tensor | None = None
        is_linear = batch.score.loss.is_linear
        self._scales = trains and not is_linear and not runner.trained_in_loss()
        if trains and is_linear:
            self._slopes = self._with_virtual(batch.columns.weights).view(self.tokens, -1)

    def targets_of(self, example: HasTokens) -> list[int]:
        assert isinstance(example, CheckedDatum)
        return [*[IGNORED] * self._runner.adapter.prompt_tokens, *example.targets]

    def _further_targets(self, batch: ScoredBatch) -> list[Tensor]:
        """Return the second target of each token, the third, …: [T] each, virtual ones included."""
        virtual = [IGNORED] * self._runner.adapter.prompt_tokens
        found = []
        for k in range(1, batch.columns.width):
            rows = (one.further_targets(k) for one in batch.data)
            found.append(torch.tensor([t for row in rows for t in (*virtual, *row)]))
        return found

    def window_losses(self) -> list[WindowLoss]:
        first = self._losses_of(0, None)
        made = [*first]
        for k in range(1, len(self._further) + 1):
            made += self._losses_of(k, first)
        return made

    def _losses_of(self, k: int, first: list[WindowLoss] | None) -> list[WindowLoss]:
        """Return the windows with the k-th target of each token, the last one first.

        Args:
            first: those with the first targets, of k > 0.
        """
        made, begin = [], 0
        for index, window in enumerate(self._windows):
            targets = self._further[k - 1][begin : window.end] if k else window.targets
            weight = 1.0 if self._scales else None
            loss = WindowLoss(window.batch, targets, window.carried, window.shared, weight)
            loss.losses = torch.zeros(
                window.end - begin,
                dtype=torch.promote_types(window.carried[0].dtype, torch.float32),
                device=self._runner.device,
            )
            if self._slopes is not None:
                loss.weight, loss.slopes = 1.0, self._slopes[begin : window.end, k]
            loss.first = None if first is None else first[-1 - index]
            made.append(loss)
            begin = window.end
        return made[::-1]

    def end_loss(self, computed: PassLoss) -> None:
        count = len(self._windows)
        kept = [one.losses for one in computed.windows if one.losses is not None]
        losses = [
            torch.cat(kept[begin : begin + count][::-1]) for begin in range(0, len(kept), count)
        ]
        found = 0.0 - (torch.stack(losses, 1) if len(losses) > 1 else losses[0])  # and not -0.0
        logprobs = self._without_virtual(found)
        score = self._score
        total, by_logprobs = score.loss.evaluate(logprobs, self._columns, score.options)
        if self._scales:
            self._scale(computed.windows, self._with_virtual(-by_logprobs))
        elif self.trains and self._slopes is None:
            self._slopes = self._with_virtual(-by_logprobs).view(self.tokens, -1)
            self.logprobs = logprobs
            self._loss = PassLoss(self._runner, self.window_losses())
            return
        if score.loss.is_linear or self._scales or not self.trains:
            self.logprobs = logprobs
        super().end_loss(computed)
        self.loss_sum = total

    def _scale(self, windows: Sequence[WindowLoss], slopes: Tensor) -> None:
        """Multiply the gradients of tokens' states, which are for the weight 1, by the weights."""
        end = self.tokens
        for window in windows:  # the last one first
            begin = end - len(window.targets)
            weights = slopes[begin:end, None]
            for gradient in window.gradients:
                gradient.mul_(weights.to(torch.promote_types(gradient.dtype, torch.float32)))
            end = begin

    def of_data(self, numbers: Tensor) -> list[Tensor]:
        """Return log-probabilities by data, each in the shape of the datum's targets.

        Args:
            numbers: `logprobs`, flat, in host memory.
        """
        rows = numbers.view(self.logprobs.shape).split(self._lengths)
        return [one.shaped(row).clone() for one, row in zip(self._data, rows, strict=True)]

    def _with_virtual(self, x: Tensor) -> Tensor:
        """Put zeros for the adapter's virtual tokens before each sequence."""
        virtual = self._virtual
        if not virtual:
            return x
        none = x.new_zeros(virtual, *x.shape[1:])
        return torch.cat([part for one in x.split(self._lengths) for part in (none, one)])

    def _without_virtual(self, x: Tensor) -> Tensor:
        virtual = self._virtual
        if not virtual:
            return x
        parts = x.split([virtual + length for length in self._lengths])
        return torch.cat([part[virtual:] for part in parts])
