"""A device in simulated time: the engine's steps without tensors.

Requests get an arbitrary token in each step, until their limit. A step advances the clock by its
predicted time; the engine sees no other difference from a machine. Adapters are copied from host
memory sequentially, concurrently with steps; a step waits for the copies of its adapters.

Finetuning jobs also lack tensors: their units of work have the order of a real job's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import torch

from pcg.errors import GenerationError
from pcg.parallel.costs.step_costs import SequenceChunk, StepCosts, StepShape
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.device.clock import SimulatedClock
from pcg.runtime.engine.device.device import Finished, SideStream
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Load, Results
from pcg.runtime.training.recorded.window_sizes import WindowSizes
from pcg.runtime.training.work_units import (
    Forward,
    Pages,
    Part,
    Phase,
    Reading,
    Release,
    Stage,
    StepBeginsAgain,
    WindowedPass,
    Work,
)

_JOBS = itertools.count(-1, -1)
"""Numbers of the adapters that jobs train; versions of served adapters are positive."""


class SimulatedPass(WindowedPass):
    """A forward in windows of tokens, the loss, and a backward layer by layer over the windows.

    Attributes:
        windows: the windows of the forward so far, each as the chunks of its sequences.
    """

    def __init__(
        self,
        lengths: List[int],
        layers: int,
        adapter: int,
        rank: int,
        sizes: WindowSizes | None = None,
    ) -> None:
        """Start before the first token.

        Args:
            adapter: a unique number.
            sizes: the sizes of recorded windows; None for any size.
        """
        self._sizes = sizes
        if sizes is not None:
            sizes.begin_pass()
        self.windows: list[list[SequenceChunk]] = []
        self.layers = layers
        self.layer = layers - 1
        self._begun = self._next = self._scored = 0
        self._lengths = list(lengths)
        self._place = 0
        self._context = 0
        self._window: int | None = None
        self._adapter = adapter
        self._rank = rank

    @property
    def remaining(self) -> int:
        return sum(self._lengths[self._place :]) - self._context

    @property
    def context(self) -> int:
        return self._context

    @property
    def row(self) -> int:
        return max(sum(self._lengths) // max(len(self._lengths), 1), 1)

    def window_load(self, tokens: int) -> Load:
        return sum(
            (Load.of(chunk.tokens, chunk.context) for chunk in self._tokens(tokens)[0]), Load()
        )

    @property
    def is_done(self) -> bool:
        """True if all layers of all windows have run backward."""
        return self.layer < 0

    @property
    def stage(self) -> Stage | None:
        if self._begun:
            return Stage(Phase.FORWARD, self.layers - self._next)
        if self.remaining:
            return None
        if self._scored < sum(self._lengths):
            return Stage(Phase.LOSS, 0)
        return Stage(Phase.BACKWARD, self.layer + 1)

    @property
    def next_window(self) -> list[SequenceChunk]:
        """The window of the next layer to run; in backward, the last window first."""
        return self._tokens(self._begun)[0] if self._begun else self.windows[self._index]

    @property
    def load(self) -> Load:
        stage = self.stage
        if stage is not None and stage.phase is Phase.LOSS:
            return Load(sum(self._lengths) - self._scored)
        chunks = (Load.of(chunk.tokens, chunk.context) for chunk in self.next_window)
        return sum(chunks, Load(ends=int(not self._begun and self.layer == 0)))

    def _tokens(self, tokens: int) -> tuple[list[SequenceChunk], int, int]:
        """Return a window of the next tokens, and the place and the context after it."""
        window: list[SequenceChunk] = []
        place, context = self._place, self._context
        while tokens and place < len(self._lengths):
            count = min(tokens, self._lengths[place] - context)
            window.append(SequenceChunk(count, context, False, True, self._adapter, self._rank))
            tokens -= count
            context += count
            if context == self._lengths[place]:
                place, context = place + 1, 0
        return window, place, context

    def fitting(self, tokens: int) -> int:
        if self._sizes is None or not tokens:
            return tokens
        return self._sizes.fitting(tokens, self.remaining)

    def forward(self, tokens: int) -> None:
        window, self._place, self._context = self._tokens(tokens)
        self.windows.append(window)

    def begin_window(self, tokens: int) -> None:
        self._begun, self._next = tokens, 0

    def run_part(self, tokens: int) -> None:
        if self._begun:
            self._next += 1
            if self._next == self.layers:
                self.forward(self._begun)
                self._begun = 0
        elif self._scored < sum(self._lengths):
            self._scored += tokens
        else:
            self._backward()

    def _backward(self) -> None:
        index = self._index
        if index:
            self._window = index - 1
        else:
            self._window = None
            self.layer -= 1

    @property
    def _index(self) -> int:
        return len(self.windows) - 1 if self._window is None else self._window


def simulated_steps(
    batches: Iterable[List[int]],
    layers: int,
    update: Callable[[], None],
    on_step: Callable[[int], None],
    rank: int = 16,
    sizes: WindowSizes | None = None,
) -> Work[int]:
    """Yield the units of a job that trains on a batch a step.

    Args:
        batches: the lengths of each step's sequences.
        update: runs an optimizer's update, between units.
        on_step: called with each step's number of tokens.
        sizes: the sizes of recorded windows; None for any size.
    Returns:
        The number of steps.
    """
    steps, adapter = 0, next(_JOBS)
    for lengths in batches:
        while True:
            yield Pages(lengths)
            whole = SimulatedPass(lengths, layers, adapter, rank, sizes)
            try:
                while not whole.is_done:
                    yield Forward(whole) if whole.stage is None else Part(whole)
                break
            except StepBeginsAgain:
                yield Release()
        yield Release()
        reading = Reading(torch.zeros(2))
        yield reading
        reading.read()
        update()
        steps += 1
        on_step(sum(lengths))
    return steps


@dataclass(frozen=True, eq=False)
class SimulatedAdapter:
    """An adapter without tensors; another adapter of the same name is a new version.

    Attributes:
        name: the name that requests use.
        size_bytes: the bytes of its tensors.
        rank: its rank; 0 for a method without ranks, which costs only its copy.
        prompt_tokens: the number of virtual tokens before each sequence.
        version: as in `Adapter`.
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
        cache: None, without keys and values.
        side: None, as parts of jobs do not overlap with the forward.
        busy_s: the seconds of computation.
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
        """Return a request's initial state.

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
        """Return an empty dict: a simulated device compiles nothing."""
        return {}

    @property
    def copies_bytes(self) -> int:
        """Return 0: adapters have no tensors."""
        return 0

    def copy_page(self, page: int, to: int) -> None:
        """Do nothing: the device has no keys and values."""

    def copy_states(self, slot: int, to: int) -> None:
        """Do nothing: the device has no recurrent states."""

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        """Start to copy adapters to the device, after the copies in progress."""
        for adapter in adapters:
            if adapter.version not in self._copied_s:
                started = max(self._clock.now_s(), self._link_free_s)
                self._link_free_s = started + self._costs.copy_seconds(adapter.size_bytes)
                self._copied_s[adapter.version] = self._link_free_s

    def is_copying(self, adapter: ServedAdapter) -> bool:
        """Return whether an adapter is being copied."""
        return self._copied_s.get(adapter.version, 0.0) > self._clock.now_s()

    def evict(self, adapter: ServedAdapter) -> None:
        """Forget the copy of an adapter that released its pages."""
        self._copied_s.pop(adapter.version, None)

    def reset(self) -> None:
        """Forget the copies of all adapters."""
        self._copied_s.clear()

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Finished:
        """Run sequences' next tokens, and windows of jobs, as a batch.

        Returns:
            The step, with a token for each sequence without pending tokens.
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
        """Run parts of the same stage together."""
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
