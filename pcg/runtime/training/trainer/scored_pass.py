"""A scored pass: a training pass whose loss is a function of the tokens' log-probabilities.

With the log-probabilities l [T] of the targets and a loss C(l),

    dC/dx = Σ_t (dC/dl_t) dl_t/dx,    and the program's loss of a token is -l_t,

so the program's loss goes back with the weight -dC/dl_t of each token. Where C is linear, the
weights are known before; else the loss is computed twice: first forward alone, which gives l and so
the weights, then forward and back. Either way it is computed for chunks of tokens, and no logits
are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcg.runtime.data.example import IGNORED
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.loss_chunks import PassLoss, WindowLoss
from pcg.runtime.training.trainer.batches import ScoredBatch
from pcg.runtime.training.trainer.datum import CheckedDatum
from pcg.runtime.training.training_pass import HasTokens, TrainingPass
from pcg.runtime.training.work_units import Pages


class ScoredPass(TrainingPass):
    """A pass over some data, as far as it is not told in `TrainingPass`.

    Attributes:
        logprobs: the log-probability of each token's target, [T] without virtual tokens, on the
            device; 0 where nothing is predicted. They are there once the loss is.
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
        self._lengths = [len(one.ids) for one in batch.data]
        self.logprobs = torch.zeros(0)
        self._slopes: Tensor | None = None
        if trains and batch.score.loss.is_linear:
            self._slopes = self._with_virtual(batch.columns.weights)

    def targets_of(self, example: HasTokens) -> list[int]:
        assert isinstance(example, CheckedDatum)
        return [*[IGNORED] * self._runner.adapter.prompt_tokens, *example.targets]

    def window_losses(self) -> list[WindowLoss]:
        made, begin = [], 0
        slopes = self._slopes
        for window in self._windows:
            losses = torch.zeros(
                window.end - begin,
                dtype=torch.promote_types(window.carried[0].dtype, torch.float32),
                device=self._runner.device,
            )
            loss = WindowLoss(window.batch, window.targets, window.carried, window.shared, None)
            loss.losses = losses
            if slopes is not None:
                loss.weight, loss.slopes = 1.0, slopes[begin : window.end]
            made.append(loss)
            begin = window.end
        return made[::-1]

    def end_loss(self, computed: PassLoss) -> None:
        losses = [one.losses for one in reversed(computed.windows) if one.losses is not None]
        logprobs = self._without_virtual(0.0 - torch.cat(losses))  # and not -0.0
        score = self._score
        total, by_logprobs = score.loss.evaluate(logprobs, self._columns, score.options)
        if self.trains and self._slopes is None:
            self._slopes = self._with_virtual(-by_logprobs)
            self.logprobs = logprobs
            self._loss = PassLoss(self._runner, self.window_losses())
            return
        if score.loss.is_linear or not self.trains:
            self.logprobs = logprobs
        super().end_loss(computed)
        self.loss_sum = total

    def _with_virtual(self, x: Tensor) -> Tensor:
        """Put zeros for the adapter's virtual tokens before each sequence."""
        virtual = self._virtual
        if not virtual:
            return x
        parts = [part for one in x.split(self._lengths) for part in (x.new_zeros(virtual), one)]
        return torch.cat(parts)

    def _without_virtual(self, x: Tensor) -> Tensor:
        virtual = self._virtual
        if not virtual:
            return x
        parts = x.split([virtual + length for length in self._lengths])
        return torch.cat([part[virtual:] for part in parts])
