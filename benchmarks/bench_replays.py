"""The share of steps that a GPU replays, in simulated time, with jobs running.

    python benchmarks/bench_replays.py [--rate 8 --rate 40] [--duration 180] [--warm 1]

Llama-3.1-8B serves ShareGPT's single turns, each by one of 32 adapters of rank 16, and
trains two jobs of LoRA on all linear operators, 4 sequences of 1,024 tokens a step, beside them.
The engine, its rule of sharing, the rooms of steps and the sizes of windows are the real ones; the
device takes the time that a cost model predicts, and says of each step what a GPU would replay:

    served     what is served has a room among those that are recorded at warm-up
    whole      and so has each layer of a window that runs in the step, forward or back: its place
               in its pass was recorded. A step that runs layers eagerly records as many, and if it
               serves requests no more than one beyond those for which the device gives the host
               time, by the launches of a layer (benchmarks/roofline.py)
    later      as whole, of the steps of the second half, when the jobs have run for a while
    overlap    the step began before the one before was read, of all steps, those that serve nothing
               and have windows alone included; the rest of the row says why others did not
    late       layers of windows that were recorded while requests were served: what
               `pcg:late_preparations_total` would count
    before     the step only decodes, which is all that was replayed before there were rooms for
               prompts and windows

With `--warm`, the windows of so many of the jobs were recorded at warm-up: one where the program
was compiled for their recipe and step. Losses and updates, of which a step has a few graphs at
most, do not count.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from measure import write

from pcg.kernels.triton.step_rooms import DECODE_TOKENS, StepRooms, StepSizes
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.scheduling.running import AHEAD
from pcg.runtime.training.recorded.window_sizes import WindowSizes
from pcg.runtime.training.warm_jobs import WINDOW
from pcg.runtime.training.work_units import Phase
from pcg.simulate.distributions import (
    SHAREGPT_FIRST_OUTPUTS,
    SHAREGPT_FIRST_PROMPTS,
    Poisson,
    Uniform,
)
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import assign_adapters, synthetic

MODEL = "meta-llama/Llama-3.1-8B"
GROUP = 4
"""Its heads that share a KV head."""
BATCH = (1024,) * 4
JOBS = 2
ADAPTERS = 32
LIMITS = Limits(ttft_slo_s=5.0, tpot_slo_s=0.05)
EAGER_LAYER_S = 53 / 2 * 29e-6
"""The host's time for a layer of a window, forward or back: launches, and each one's of Python."""
LONGEST = 8192
"""Tokens of the longest request, as --max-model-len."""


class JobWindows(WindowSizes):
    """A job's sizes of windows, and which of its windows' places are recorded."""

    def __init__(self, layers: int, is_warm: bool = False) -> None:
        super().__init__()
        self._recordings = 2 * layers
        self._left: list[int] = []
        self.late = 0
        if is_warm:
            self.begin_with(WINDOW)
            self._left = [0] * -(-sum(BATCH) // self.size)

    def begin_pass(self) -> None:
        """Forget what is recorded if the size changes."""
        before = self.size
        super().begin_pass()
        if self.size != before:
            self._left.clear()

    def replays(self, place: int, tokens: int) -> bool:
        """Return whether a window that begins is replayed."""
        if not self.holds(tokens):
            return False
        if place == len(self._left):
            self._left.append(self._recordings)
        return place < len(self._left) and not self._left[place]

    def record(self, layers: int) -> None:
        """Record so many layers, if as many are left."""
        for place, left in enumerate(self._left):
            recorded = min(left, layers)
            self.late += recorded
            self._left[place], layers = left - recorded, layers - recorded


@dataclass
class Watch:
    """Counts what a device would replay."""

    engine: SimulatedEngine
    rooms: StepRooms
    layers: int
    half_s: float
    counts: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    _windows: dict[tuple[int, int], bool] = field(default_factory=dict)
    _now: Counter[str] = field(default_factory=Counter)
    _eager: Counter[JobWindows] = field(default_factory=Counter)
    _ended_s: float = 0.0

    def __post_init__(self) -> None:
        device: Any = self.engine.device
        self._start, self._run_parts = device.start, device.run_parts
        device.start, device.run_parts = self.start, self.run_parts

    def start(self, chunks: Sequence[Any], windows: Sequence[Any]) -> Any:
        """Count a step's served sequences, and windows that go forward whole."""
        for unit, tokens in windows:
            self._window(unit.whole, tokens, self.layers)
        if chunks:
            self._serve(chunks)
        return self._start(chunks, windows)

    def _serve(self, chunks: Sequence[Any]) -> None:
        lengths = [count for _, count in chunks]
        slots = sum(-(-count // 16) for one, count in chunks if one.request.adapter is not None)
        own = self.rooms.of(StepSizes(lengths, [one.cached for one, _ in chunks], slots))
        held = own is not None and any(room.holds(own) for room in self.rooms.all)
        self._now["steps"] = 1
        self._now["served"] = int(held)
        single = max(lengths) == 1 and len(lengths) <= DECODE_TOKENS[-1]
        self._now["decodes"] = int(single)

    def run_parts(self, parts: Sequence[Any]) -> None:
        """Count layers of windows."""
        for part in parts:
            if part.stage.phase is Phase.FORWARD:
                tokens = sum(chunk.tokens for chunk in part.whole.next_window)
                self._window(part.whole, tokens, 1)
            elif part.stage.phase is Phase.BACKWARD:
                window = part.whole.next_window
                place = next(i for i, one in enumerate(part.whole.windows) if one is window)
                self._ran(part.whole, place, 1)
        self._run_parts(parts)

    def _window(self, whole: Any, tokens: int, layers: int) -> None:
        place = len(whole.windows)
        if (id(whole), place) not in self._windows:
            self._windows[id(whole), place] = whole._sizes.replays(place, tokens)
        self._ran(whole, place, layers)

    def _ran(self, whole: Any, place: int, layers: int) -> None:
        is_replayed = self._windows[id(whole), place]
        self._now["layers"] += layers
        self._now["eager layers"] += 0 if is_replayed else layers
        if not is_replayed:
            self._eager[whole._sizes] += layers

    def ended(self, _: int) -> None:
        """Note the end of a step."""
        now, self._now = self._now, Counter()
        lasted_s, self._ended_s = (
            self.engine.clock.now_s() - self._ended_s,
            self.engine.clock.now_s(),
        )
        # To record is to launch twice.
        left = int((lasted_s / EAGER_LAYER_S - now["eager layers"]) / 2)
        for sizes, layers in self._eager.items():
            recorded = min(layers, max(left, 1)) if now["steps"] else layers
            sizes.record(recorded)
            left -= recorded
        self._eager.clear()
        self.counts["layers"] += now["layers"]
        self.counts["eager layers"] += now["eager layers"]
        if now["steps"]:
            self.counts["steps"] += 1
            self.counts["served"] += now["served"]
            whole = now["served"] and not now["eager layers"]
            self.counts["whole"] += whole
            if self.engine.clock.now_s() > self.half_s:
                self.counts["later steps"] += 1
                self.counts["later"] += whole
            self.counts["before"] += now["decodes"] and not now["layers"]


def measured(
    program: SimulatedProgram, rate: float, duration_s: float, warm: int
) -> dict[str, Any]:
    """Return the shares of one rate."""
    engine = program.engine(LIMITS, is_ahead=True)
    pool, layers = engine.pool.size, program.costs.layers
    rooms = StepRooms(LIMITS.running, LIMITS.tokens, LONGEST // 16, pool, GROUP, has_adapters=True)
    watch = Watch(engine, rooms, layers, duration_s / 2)
    of_jobs = [JobWindows(layers, is_warm=job < warm) for job in range(JOBS)]
    for job, sizes in enumerate(of_jobs):
        engine.finetune(f"job {job}", repeat(BATCH), sizes=sizes)
    lengths = SHAREGPT_FIRST_PROMPTS, SHAREGPT_FIRST_OUTPUTS
    workload = synthetic(Poisson(rate), *lengths, seed=0, duration_s=duration_s)
    names = [f"adapter-{i}" for i in range(ADAPTERS)]
    workload = assign_adapters(workload, Uniform(ADAPTERS), seed=0, adapters=names)
    adapters = {name: program.adapter(name, 16) for name in names}
    simulation = Simulation([engine], RoundRobin(), adapters, on_step=watch.ended)
    simulation.run(workload, jobs_end_s=duration_s)
    found = watch.counts
    return {
        "steps": found["steps"],
        "served": round(found["served"] / found["steps"], 4),
        "whole": round(found["whole"] / found["steps"], 4),
        "later": round(found["later"] / found["later steps"], 4),
        "before": round(found["before"] / found["steps"], 4),
        "overlap": round(engine.reads[AHEAD] / engine.reads.total(), 4),
        "read first": {why: n for why, n in engine.reads.items() if why != AHEAD},
        "late": sum(sizes.late for sizes in of_jobs),
        "layers of jobs": found["layers"],
        "replayed layers": round(1 - found["eager layers"] / max(found["layers"], 1), 4),
        "rooms": len(rooms.all),
    }


def main() -> None:
    """Simulate and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--duration", type=float, default=180.0)
    parser.add_argument("--device", default="H200")
    parser.add_argument("--warm", type=int, default=1)
    arguments = parser.parse_args()
    program = simulated_program(MODEL, arguments.device, finetuning_tokens=sum(BATCH))
    rates = arguments.rate or [8.0, 40.0]
    duration_s, warm = arguments.duration, arguments.warm
    found = {f"{rate:g}": measured(program, rate, duration_s, warm) for rate in rates}
    facts = {"device": arguments.device, "duration_s": duration_s, "warm_jobs": warm}
    write("replays", {**facts, "rates": found})


if __name__ == "__main__":
    main()
