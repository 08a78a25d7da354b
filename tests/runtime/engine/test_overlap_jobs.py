"""Steps that begin before the one before is read, with jobs in them: nothing differs but the time.

Each life of an engine runs twice, with steps ahead and without. What is compared is the same to the
bit: windows have fixed sizes here, so that nothing depends on how long steps take.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.scheduling.co_serving import CoServing
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.step import Load
from pcg.runtime.training.runner import TrainingPass
from pcg.runtime.training.work_units import Forward, Phase, Reading
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.interpreter.streams import ORDER
from tests.support.prompts import prompts
from tests.support.small_engine import DATA, LORA, make_executor


class FixedParts(Sharing):
    """Five parts a step, of windows of eight tokens, whatever the time."""

    def forward(self, work: Work, unit: Forward) -> int:
        return 0

    def in_layers(self, work: Work, unit: Forward, ahead_s: float, **_: bool) -> int:
        return min(8, unit.remaining)

    def fits(self, work: Work, phase: Phase, load: Load, ahead_s: float, **_: bool) -> bool:
        return work.units < 5


class WholeWindows(FixedParts):
    """As many parts, of windows that go forward whole, with what is served."""

    def forward(self, work: Work, unit: Forward) -> int:
        return min(8, unit.remaining)

    def in_layers(self, work: Work, unit: Forward, ahead_s: float, **_: bool) -> int:
        return 0


def latencies() -> Latencies:
    """Any: what is measured is not compared."""
    return Latencies(Latency(2e-3, 1e-4, 1e-7), Latency(5e-4, 5e-5, 1e-7))


_OF_JOBS = (Kind.STEPPED, Kind.PUBLISHED, Kind.COMPLETED, Kind.CANCELLED, Kind.FAILED)


@dataclass
class Life:
    """What an engine did.

    Attributes:
        tokens: those of each request, by its name, and why it ended.
        versions: the tensors of each published version, by its text.
        events: those of each job.
        ends: the state of each job, and its error.
        ahead: number of steps that began while the one before was not read, and a job ran.
    """

    tokens: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    versions: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    events: dict[str, list[Any]] = field(default_factory=dict)
    ends: dict[str, tuple[JobState, str]] = field(default_factory=dict)
    ahead: int = 0


class Tenants:
    """An engine with several tenants, who ask, train, cancel and remove as `act` says."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self.engine, self.executor = engine, executor
        self.life = Life()
        self.jobs: dict[str, Job] = {}
        self._names: dict[int, str] = {}
        self._tokens: dict[str, list[int]] = {}
        self._seen = 0
        start = engine.device.start

        def started(*of: Any) -> Any:
            self.life.ahead += engine.is_ahead and len(engine.jobs) > 0
            return start(*of)

        engine.device.start = started  # type: ignore[method-assign]

    def ask(self, name: str, length: int, adapter: str | None = None, new: int = 24) -> str:
        number = len(self._names)
        self._names[number], self._tokens[name] = name, []
        (ids,) = prompts((length,))
        request = self.executor.request(
            ids, adapter, max_new_tokens=new, ignore_eos=True, tenant=name[0]
        )
        return self.engine.submit(request)

    def train(self, name: str, **options: Any) -> None:
        given = {"max_steps": 4, "batch_size": 2, "learning_rate": 0.01} | options
        self.jobs[name] = job = self.engine.finetune(DATA, name, peft=LORA, **given)
        # Products of several jobs at once round by who is beside whom, which depends on turns.
        job.runs_alone = True

    def run(self, act: Callable[[Tenants, int], None]) -> Life:
        for step in range(2000):
            act(self, step)
            for chunk in self.engine.step():
                name = self._names[chunk.index]
                if chunk.token_id is not None:
                    self._tokens[name].append(chunk.token_id)
                if chunk.completion is not None:
                    reason = chunk.completion.finish_reason
                    self.life.tokens[name] = self._tokens[name], reason
            self._published()
            self.engine.check_integrity()
            if step > 40 and self.engine.is_idle:
                break
        else:
            raise AssertionError("the engine goes on for ever")
        assert "an error" not in self.engine.reads  # what fails is run again, and would be hidden
        for name, job in self.jobs.items():
            self.life.ends[name] = job.state, str(job.error)
            self.life.events[name] = [
                (event.kind, tuple(event.details.items()))
                for event in self.engine.log.of(name)
                if event.kind in _OF_JOBS
            ]
        return self.life

    def _published(self) -> None:
        """Ask each version that came, once, and note its tensors."""
        new = [event for event in self.engine.log if event.kind is Kind.PUBLISHED][self._seen :]
        for event in new:
            self._seen += 1
            adapter = self.executor.adapters[event.subject]
            text = f"{event.subject}@{event.details['adapter_version']}"
            self.life.versions[text] = [tensor.cpu().clone() for tensor in adapter.tensors]
            self.ask(f"v {text}", 7, event.subject, 6)


def many(tmp_path: Path) -> Callable[[Tenants, int], None]:
    """Jobs that end, fail, are cancelled and paused beside requests of tenants that do, too."""

    def act(tenants: Tenants, step: int) -> None:
        engine, jobs = tenants.engine, tenants.jobs
        if step == 0:
            for number, length in enumerate((9, 21)):
                tenants.ask(f"a{number}", length, "a", 60)
            tenants.ask("b0", 5, "b", 30)
        if step == 2:
            directory = tmp_path / str(engine.device.is_ahead)
            keeps = {"checkpoint_dir": directory, "save_every": 1}
            tenants.train("whole", publish_every=1, eval_data=DATA[:3], eval_every=2, **keeps)
            tenants.train("gathers", publish_every=2, gradient_accumulation_steps=2)
            tenants.train("breaks", learning_rate=1e20)
            tenants.train("gone", publish_every=1, max_steps=50)
            tenants.train("held", seed=5)
        if step == 6:
            tenants.executor.remove_adapter("b")
            tenants.ask("c0", 4)
            engine.cancel(tenants.ask("c1", 30))
        if step == 9:
            engine.pause_job("held")
        if step == 30:
            engine.resume_job("held")
        gone = jobs.get("gone")
        if gone is not None and not gone.is_over and gone.record is not None:
            engine.cancel_job("gone")

    return act


def life(
    act: Callable[[Tenants, int], None], device: str, is_ahead: bool, sharing: Sharing
) -> Life:
    executor = make_executor(device=device)
    executor.add_adapter("b", LORA, seed=3)
    engine = executor.engine(
        Limits(running=8, tokens=32),
        kv_cache_bytes=2**20,
        latencies=latencies(),
        sharing=sharing,
    )
    engine.device.is_ahead = is_ahead
    # Copies of adapters beside steps have a test of their own; when they end depends on time.
    engine.device.prefetch = lambda adapters: None
    engine.device.is_copying = lambda adapter: False
    return Tenants(engine, executor).run(act)


def lives(act: Callable[[Tenants, int], None], device: str) -> tuple[Life, Life]:
    """The same life with steps one by one, and with steps ahead."""
    return (
        life(act, device, is_ahead=False, sharing=FixedParts()),
        life(act, device, is_ahead=True, sharing=FixedParts()),
    )


ON_GPU = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_jobs_and_tokens_are_those_of_steps_one_by_one(device: str, tmp_path: Path) -> None:
    """On a GPU that is not there, whose streams are watched for races, too."""
    with nullcontext() if device == "cpu" else tensors_on_cuda():
        alone, ahead = lives(many(tmp_path), device)
    assert alone.ahead == 0
    assert ahead.ahead > 40
    assert ahead.ends == alone.ends
    states = {name: state.value for name, (state, _) in ahead.ends.items()}
    assert states == {
        "whole": "succeeded", "gathers": "succeeded", "breaks": "failed", "gone": "cancelled",
        "held": "succeeded",
    }  # fmt: skip
    assert "the loss is" in ahead.ends["breaks"][1]
    assert ahead.events == alone.events
    assert ahead.tokens == alone.tokens
    assert ahead.versions.keys() == alone.versions.keys()
    assert len(ahead.versions) > 8
    for text, tensors in ahead.versions.items():
        for one, other in zip(tensors, alone.versions[text], strict=True):
            assert torch.equal(one, other), text


# ------------------------------------------------------------- on the stand-in for a GPU


def small(tenants: Tenants, step: int) -> None:
    """A job of two steps beside two requests, whose version is asked at once."""
    if step == 0:
        tenants.ask("a0", 9, new=30)
        tenants.ask("b0", 4, new=30)
    if step == 1:
        tenants.train("whole", max_steps=2, publish_every=1)


def test_the_host_waits_for_no_step_that_runs() -> None:
    """For a job's numbers neither, though it has windows and updates in many steps."""
    waited: list[bool] = []
    read = Reading.read

    def late(reading: Reading) -> list[float]:
        served = ORDER.streams[0].number
        before = ORDER.host.get(served, 0)
        found = read(reading)
        waited.append(before != ORDER.host.get(served, 0))
        return found

    with tensors_on_cuda(), patch.object(Reading, "read", late):
        alone, ahead = lives(small, "cuda")
    # Of two steps, and of the loss of the first data at the end: ahead, the host waits at most for
    # the stream beside, and never for what serves.
    assert waited == [True, True, True, False, False, False]
    assert ahead.ahead > 10
    assert ahead.events == alone.events
    assert ahead.tokens == alone.tokens
    for text, tensors in ahead.versions.items():
        for one, other in zip(tensors, alone.versions[text], strict=True):
            assert torch.equal(one, other), text


def test_what_one_stream_makes_and_the_other_frees_is_in_order() -> None:
    """Windows that go forward with what is served, and back beside it: no stream races another."""
    with tensors_on_cuda():
        found = life(small, "cuda", is_ahead=True, sharing=WholeWindows())
    assert found.ends["whole"] == (JobState.SUCCEEDED, "None")
    assert {reason for _, reason in found.tokens.values()} == {"length"}
    assert found.ahead > 10


def test_parts_beside_a_forward_are_paid_when_they_are_launched() -> None:
    """So that a step without a promise has no more of them than its share of the time."""
    executor = make_executor()
    engine = executor.engine(
        Limits(tokens=32, finetuning_floor=0.5),
        kv_cache_bytes=2**20,
        latencies=Latencies(Latency(1e-2, 1e-4, 1e-7), Latency(4e-3, 1e-5, 1e-7)),
        sharing=CoServing(),
    )
    engine.device.side = OpenSide()  # type: ignore[assignment]
    ran: list[int] = []
    start, run_parts = engine.device.start, engine.device.run_parts

    def started(*of: Any) -> Any:
        ran.append(0)
        return start(*of)

    def counted(parts: Any) -> None:
        ran[-1] += 1
        run_parts(parts)

    engine.device.start = started  # type: ignore[method-assign]
    engine.device.run_parts = counted  # type: ignore[method-assign]
    engine.finetune(DATA, "trained", peft=LORA, max_steps=50, batch_size=2, learning_rate=0.01)
    engine.submit(executor.request(prompts((5,))[0], max_new_tokens=30, ignore_eos=True))
    # What steps take here is not learned: the predictions stay.
    with patch.object(Latency, "observe"):
        for _ in range(25):
            engine.step()
    assert sum(ran) > 3
    assert max(ran) <= 3  # of 4 ms each, beside 10 ms


@pytest.mark.parametrize("sharing", [FixedParts, WholeWindows])
@pytest.mark.parametrize("lasts_s", [0.0, 1e3])
def test_windows_are_recorded_while_the_device_runs_what_is_served(
    lasts_s: float, sharing: type[Sharing]
) -> None:
    """One layer in a step, and further ones for as long as it takes; all where nobody waits."""
    executor = make_executor()
    forward, back = Latency(lasts_s, 0.0, 0.0), Latency(1e-6, 0.0, 0.0)
    limits = Limits(tokens=32, tpot_slo_s=2e3)
    engine = executor.engine(
        limits, kv_cache_bytes=2**20, sharing=sharing(), latencies=Latencies(forward, back)
    )
    order: list[str] = []
    start, run_parts = engine.device.start, engine.device.run_parts

    def started(*of: Any) -> Any:
        order.append("start")
        return start(*of)

    def ran(parts: Any) -> None:
        order.append("part")
        run_parts(parts)

    engine.device.start, engine.device.run_parts = started, ran  # type: ignore[method-assign]
    engine.finetune(DATA, "trained", peft=LORA, max_steps=20, batch_size=2, learning_rate=0.01)
    engine.submit(executor.request(prompts((5,))[0], max_new_tokens=20, ignore_eos=True))
    with (
        patch.object(Latency, "observe"),
        patch.object(TrainingPass, "has_unrecorded", True),
        patch.object(TrainingPass, "record_next", lambda whole: order.append("record")),
    ):
        for _ in range(20):
            engine.step()
        served, order[:] = " ".join(order), []
        for _ in range(3):
            engine.step()
    assert served.count("start") == 20
    assert served.count("record") > 10
    assert ("record record" in served) == (lasts_s > 0)
    assert "part record" not in served  # the step's forward is launched before
    assert order.count("record") > 6


class OpenSide:
    """Stands for a GPU's second stream; its parts take as long as is predicted."""

    def __init__(self) -> None:
        self._parts = 0

    def begin(self) -> None:
        """Do nothing: all runs in turn."""

    def rejoin(self) -> None:
        """Do nothing, likewise."""

    def beside(self) -> nullcontext[None]:
        return nullcontext()

    def timed(self) -> nullcontext[None]:
        self._parts += 1
        return nullcontext()

    def join(self) -> list[float]:
        parts, self._parts = self._parts, 0
        return [4e-3] * parts
