"""A device that takes simulated time: the engine's steps without tensors.

Requests get an arbitrary token whenever one is due, until their limit. A step takes the time that
its costs predict; the engine sees the clock move, as on a machine, and nothing else. Adapters are
copied from the host's memory one after the other, beside what runs; a step waits for the copies of
the adapters that it uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

from pcg.errors import GenerationError
from pcg.parallel.costs.step_costs import SequenceChunk, StepCosts, StepShape
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.device.clock import SimulatedClock
from pcg.runtime.engine.device.device import Finished, SideStream
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Results
from pcg.runtime.training.work_units import Forward, Part, Phase
from pcg.simulate.simulated_training import SimulatedPass


@dataclass(frozen=True, eq=False)
class SimulatedAdapter:
    """An adapter without tensors; one of the same name is another version.

    Attributes:
        name: the name that requests use.
        size_bytes: the bytes of its tensors.
        rank: its rank; 0 for a method without ranks, which costs nothing but its copy.
        prompt_tokens: the number of virtual tokens before each sequence.
        version: as of `Adapter`.
    """

    name: str
    size_bytes: int
    rank: int = 16
    prompt_tokens: int = 0
    version: int = field(default_factory=itertools.count(1).__next__, init=False)


SAMPLED_TOKEN = 1
"""The token that every request gets."""


class SimulatedDevice:
    """Moves a clock; see `pcg.runtime.engine.device.device.Device`.

    Args:
        costs: the seconds of steps, parts, updates and copies.
        clock: the engine's clock.
        most_positions: the model's positions; None for any number.

    Attributes:
        cache: None, as there are no keys and values.
        side: None, as parts of jobs do not run beside the forward.
        busy_s: the seconds that it computed.
        waited_s: the seconds that steps waited for adapters.
    """

    def __init__(
        self, costs: StepCosts, clock: SimulatedClock, most_positions: int | None = None
    ) -> None:
        self.cache: Any = None
        self.side: SideStream | None = None
        self.fails_alike, self.is_ahead = True, False
        self.busy_s = 0.0
        self.waited_s = 0.0
        self._costs = costs
        self._clock = clock
        self._most_positions = most_positions
        self._copied_s: dict[int, float] = {}
        self._link_free_s = 0.0

    def open(self, request: Request, number: int) -> Sequence:
        """Return a request's state before anything ran.

        Raises:
            GenerationError: the prompt is empty, or longer than the model's positions.
        """
        room = 2**62 if self._most_positions is None else self._most_positions - request.length
        if not request.prompt_ids or room < 1:
            raise GenerationError(
                f"prompt {number} has {request.length} tokens; give at least 1 and fewer than the "
                f"model's {self._most_positions} positions"
            )
        params = request.params
        asks_logprobs = (params.logprobs, params.of_prompt) != (None, None)
        if asks_logprobs or request.pooling is not None or params.width > params.n:
            raise GenerationError(
                f"prompt {number} asks for logprobs, best_of or an embedding, and a simulated "
                "device computes no logits; ask for tokens alone"
            )
        limit = min(params.max_new_tokens, room)
        sequence, *sequence.followers = [
            Sequence(request.named(number, i), number, request, limit=limit, choice=i)
            for i in range(params.width)
        ]
        return sequence

    @property
    def layers(self) -> int:
        return self._costs.layers

    @property
    def late(self) -> dict[str, int]:
        """Nothing: a simulated device compiles nothing."""
        return {}

    @property
    def copies_bytes(self) -> int:
        """Nothing: adapters have no tensors."""
        return 0

    def copy_page(self, page: int, to: int) -> None:
        """Do nothing: there are no keys and values."""

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        """Begin to copy adapters to the device, behind copies that are under way."""
        for adapter in adapters:
            if adapter.version not in self._copied_s:
                started = max(self._clock.now_s(), self._link_free_s)
                self._link_free_s = started + self._costs.copy_seconds(adapter.size_bytes)
                self._copied_s[adapter.version] = self._link_free_s

    def is_copying(self, adapter: ServedAdapter) -> bool:
        """Return whether an adapter is being copied."""
        return self._copied_s.get(adapter.version, 0.0) > self._clock.now_s()

    def evict(self, adapter: ServedAdapter) -> None:
        """Forget the copy of an adapter that gave its pages up."""
        self._copied_s.pop(adapter.version, None)

    def reset(self) -> None:
        """Forget the copies of all adapters."""
        self._copied_s.clear()

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Finished:
        """Run sequences' next tokens, and windows of jobs, as one batch.

        Returns:
            The step, with a token for each sequence without pending ones.
        """
        pieces: list[SequenceChunk] = []
        there_s = 0.0
        for sequence, count in chunks:
            adapter = sequence.request.adapter
            is_sampled = count == sequence.pending
            if adapter is None:
                pieces.append(SequenceChunk(count, sequence.cached, is_sampled))
                continue
            self.prefetch([adapter])
            there_s = max(there_s, self._copied_s[adapter.version])
            rank = getattr(adapter, "rank", 0)
            pieces.append(
                SequenceChunk(count, sequence.cached, is_sampled, False, adapter.version, rank)
            )
        for unit, count in windows:
            assert isinstance(unit.whole, SimulatedPass)
            unit.run(count)
            pieces += unit.whole.windows[-1]
        self.waited_s += max(0.0, there_s - self._clock.now_s())
        self._clock.wait_until(there_s)
        self._take(self._costs.step_seconds(StepShape.of(pieces)))
        ready = [sequence for sequence, count in chunks if count == sequence.pending]
        ready += [follower for sequence in ready for follower in sequence.followers]
        ready = [sequence for sequence in ready if sequence.limit]
        return Finished(lambda: Results(dict.fromkeys(ready, SAMPLED_TOKEN)))

    def run_parts(self, parts: List[Part]) -> None:
        """Run parts of one stage together."""
        phase, left = parts[0].stage
        pieces: list[SequenceChunk] = []
        for part in parts if phase is not Phase.LOSS else ():
            assert isinstance(part.whole, SimulatedPass)
            pieces += part.whole.next_window
        shape = StepShape.of(pieces)
        if phase is Phase.LOSS:
            self._take(sum(self._costs.loss_seconds(part.load.tokens) for part in parts))
        elif phase is Phase.FORWARD:
            self._take(self._costs.layer_seconds(self._costs.layers - left, shape))
        else:
            self._take(self._costs.backward_seconds(left - 1, shape))
        for part in parts:
            part.run()

    def check_alive(self) -> None:
        """Do nothing: a simulated device does not fail."""

    def update(self) -> None:
        """Run an optimizer's update."""
        self._take(self._costs.update_seconds())

    def _take(self, seconds: float) -> None:
        self.busy_s += seconds
        self._clock.advance(seconds)
