"""A step of a program that is under way: what its forward gave, and the choice of its tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pcg.kernels.devices import uploaded_list
from pcg.runtime.guided.grammars import Grammars
from pcg.runtime.model.latest_tokens import LatestTokens
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_results import Computed, DrawnTokens, StepResults
from pcg.runtime.sampling.logprobs import logprobs_of
from pcg.runtime.sampling.sampler import Sampler
from pcg.runtime.sampling.sampling import only_finite, sample, scored


@dataclass(frozen=True)
class TokenChoice:
    """Chooses the tokens of a step, by the program's kernels and what each request asks for."""

    runner: ModelRunner
    device: torch.device
    grammars: Grammars
    latest: LatestTokens

    def begin_masks(self, sequences: List[Sequence]) -> None:
        """Begin to make the masks of those that have guides, and of their followers."""
        if self.runner.alike.rank:
            return  # the first chooses
        every = (each for one in sequences for each in (one, *one.followers))
        guided = [each.grammar for each in every if each.grammar is not None]
        if guided:
            self.grammars.begin_masks(guided)

    def drawn(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None
    ) -> DrawnTokens:
        """Choose the token after each sequence, and those of its followers.

        Args:
            logits: [sequences, V].
            likeliest: the likeliest token of each, if it is known.
        """
        if any(sequence.followers for sequence in sequences):
            copies = [i for i, one in enumerate(sequences) for _ in (one, *one.followers)]
            logits, likeliest = logits[uploaded_list(copies, torch.int64, self.device)], None
            sequences = [each for one in sequences for each in (one, *one.followers)]
            return self._chosen(sequences, logits, likeliest)
        found = self._chosen(sequences, logits, likeliest)
        self.latest.put([one.id for one in sequences], found.tokens)
        return found

    def _chosen(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None
    ) -> DrawnTokens:
        tokens, first_ns = self._tokens(sequences, logits, likeliest)
        asking = [row for row, one in enumerate(sequences) if one.likeliest is not None]
        if not asking:
            return DrawnTokens(sequences, tokens, first_ns=first_ns)
        most = max(sequences[row].likeliest or 0 for row in asking)
        drawn = tokens
        if len(asking) < len(sequences):
            rows = uploaded_list(asking, torch.int64, self.device)
            logits, drawn = logits[rows], tokens[rows]
        samplers = _samplers([sequences[row] for row in asking])
        logits = scored(logits, samplers, self.runner.drawing)
        return DrawnTokens(sequences, tokens, logprobs_of(logits, drawn, most), first_ns)

    def _tokens(
        self, sequences: List[Sequence], logits: Tensor, likeliest: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens, and over ranks the first one's time, which comes with them.

        The first rank chooses for all, as it alone may have the logits.
        """
        ranks = self.runner.alike
        if ranks.rank:
            told = torch.empty(len(sequences) + 1, dtype=torch.int64, device=self.device)
            told = ranks.broadcast(told)
            return told[:-1], told[-1:]
        samplers = _samplers(sequences)
        if likeliest is not None and all(s.is_plain and s.is_greedy for s in samplers):
            found = only_finite(logits, likeliest)
        else:
            found = sample(logits, samplers, self.runner.drawing)
        if ranks.size == 1:
            return found, None
        told_here = [*found.tolist(), time.monotonic_ns()]
        told = ranks.broadcast(torch.tensor(told_here, device=self.device))
        return told[:-1], told[-1:]


def _samplers(sequences: List[Sequence]) -> List[Sampler]:
    return [cast(Sampler, sequence.sampler) for sequence in sequences]


class RunningStep:
    """A step whose forward is under way on the program's device.

    Its results are copied to the host behind it, and an event tells when they are there, so that
    the host waits for this step and not for those that were started since.

    Attributes:
        is_replayed: True if recorded steps ran all of its forward.
    """

    def __init__(self, choice: TokenChoice, ready: List[Sequence]) -> None:
        """Begin a step.

        Args:
            ready: the sequences after which a token is chosen.
        """
        self._choice = choice
        self._ready = ready
        self.is_replayed = False
        self._logits: Tensor | None = None
        self._likeliest: Tensor | None = None
        self._computed: list[Computed] = []
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        # Guides follow the tokens before, which the host may not know yet.
        self._has_masks = not any(one.ahead for one in ready)
        if self._has_masks:
            choice.begin_masks(ready)
        if choice.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self._events = began, ended

    def computed(
        self, logits: Tensor | None, likeliest: Tensor | None, others: List[Computed] = ()
    ) -> RunningStep:
        """Take what the forward gives.

        Args:
            logits: after the sequences that are ready, [ready, V]; None without any.
            likeliest: the likeliest tokens [ready], if they are known.
        """
        self._logits, self._likeliest, self._computed = logits, likeliest, [*others]
        return self

    def draw(self) -> None:
        """Choose the tokens after the sequences that still run; send all results to the host."""
        if self._logits is not None:
            with torch.inference_mode():
                self._draw(self._logits, self._likeliest)
        self._logits = self._likeliest = None
        self._computed = [one.sent() for one in self._computed]
        if self._events is not None:
            self._events[1].record()

    def _draw(self, logits: Tensor, likeliest: Tensor | None) -> None:
        rows = [row for row, one in enumerate(self._ready) if one.state is State.RUNNING]
        sequences = [self._ready[row] for row in rows]
        if not sequences:
            return
        if not self._has_masks:
            self._choice.begin_masks(sequences)
        if len(rows) < len(self._ready):
            chosen = uploaded_list(rows, torch.int64, logits.device)
            logits = logits[chosen]
            likeliest = None if likeliest is None else likeliest[chosen]
        self._computed.append(self._choice.drawn(sequences, logits, likeliest))

    def read(self) -> StepResults:
        """Wait until the results are on the host, if there are any, and return them."""
        if self._events is not None and self._computed:
            self._events[1].synchronize()
        results = StepResults()
        for part in self._computed:
            part.read(results)
        return results

    @property
    def device_s(self) -> float | None:
        """The device's own time, once the step was read; None without results, and on CPUs."""
        if self._events is None or not self._computed:
            return None
        began, ended = self._events
        return float(began.elapsed_time(ended)) / 1e3
