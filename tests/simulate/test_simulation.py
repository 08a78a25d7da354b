"""The simulated engine: its clock sums costs, jobs go back in order, and requests move."""

import itertools
import random
from collections import Counter

import pytest

from pcg.errors import BenchmarkError, GenerationError
from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import Slo, serving_report
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.step import Load
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.work_units import Phase
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulation import FullestFirst, Migration, RoundRobin, Simulation
from pcg.simulate.workload import TimedRequest, Workload
from tests.support.linear_costs import LinearCosts

COSTS = LinearCosts()


def make_engine(pages=64, **options):
    return SimulatedEngine(COSTS, pages, 1000, **options)


def ask(prompt, new, adapter=None):
    return Request((1,) * prompt, SamplingParams(max_new_tokens=new), adapter)


def forward_s(tokens, keys):
    return COSTS.step_seconds(StepShape(tokens, keys))


def test_the_clock_is_the_sum_of_what_ran():
    engine = make_engine()
    engine.submit(ask(10, 3))
    while not engine.is_idle:
        engine.step()
    assert engine.clock.now_s() == pytest.approx(
        forward_s(10, 55) + forward_s(1, 11) + forward_s(1, 12)
    )
    assert engine.device.busy_s == pytest.approx(engine.clock.now_s())
    times = [event.time_s for event in engine.log.of("request 0") if event.kind is Kind.TOKEN]
    assert times[0] == pytest.approx(forward_s(10, 55))


def test_a_step_waits_for_its_adapter_and_not_for_another():
    """Two adapters of 0.5 s each: copied one after the other, the second while the first runs."""
    first, second = (SimulatedAdapter(name, 500_000) for name in "ab")
    engine = make_engine(2000, limits=Limits(running=1))
    engine.submit(ask(10, 60, first))
    engine.submit(ask(10, 1, second))
    engine.step()
    assert engine.clock.now_s() == pytest.approx(0.5 + forward_s(10, 55))
    while not engine.is_idle:
        engine.step()
    # By then 59 steps of 10 ms ran, and the copy was prefetched.
    assert engine.device.waited_s == pytest.approx(0.5)
    late = make_engine(2000, limits=Limits(running=1, prefetched=0))
    late.submit(ask(10, 60, first))
    late.submit(ask(10, 1, second))
    while not late.is_idle:
        late.step()
    assert late.device.waited_s == pytest.approx(1.0)


def test_a_job_goes_back_layer_by_layer_over_its_windows():
    engine = make_engine(limits=Limits(tokens=8))
    engine.submit(ask(1, 40))
    ran = []
    run = engine.device.run_parts

    def listen(parts):
        (part,) = parts
        ran.append((part.stage.phase, part.stage.left, part.load.tokens))
        run(parts)

    engine.device.run_parts = listen
    job = engine.finetune("tuned", [(12, 5), (3,)])
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    # Windows of as many tokens as a step has, and one of the rest, forward and then back.
    assert [(left, tokens) for phase, left, tokens in ran if phase is Phase.FORWARD] == [
        (2, 8), (1, 8), (2, 8), (1, 8), (2, 1), (1, 1), (2, 3), (1, 3)
    ]  # fmt: skip
    assert [(left, tokens) for phase, left, tokens in ran if phase is Phase.BACKWARD] == [
        (2, 1), (2, 8), (2, 8), (1, 1), (1, 8), (1, 8), (2, 3), (1, 3)
    ]  # fmt: skip
    assert sum(tokens for phase, _, tokens in ran if phase is Phase.LOSS) == 20
    assert job.result == 2
    steps = [event for event in engine.log.of("tuned") if event.kind is Kind.STEPPED]
    assert [event.details["tokens"] for event in steps] == [17, 3]


def test_jobs_go_back_together_and_those_behind_catch_up():
    """The layer furthest from the first runs; all that are there, as one."""
    engine = make_engine(limits=Limits(tokens=8))
    ran = []
    run = engine.device.run_parts

    def listen(parts):
        (stage,) = {part.stage for part in parts}
        if stage.phase is Phase.BACKWARD:
            ran.append((stage.left, sorted(part.load.tokens for part in parts)))
        run(parts)

    engine.device.run_parts = listen
    jobs = [engine.finetune(name, [(tokens,)]) for name, tokens in (("a", 3), ("b", 4))]
    engine.step()
    late = engine.finetune("c", [(8,), (5,)])
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    assert [job.result for job in (*jobs, late)] == [1, 1, 2]
    assert ran == [(2, [3, 4, 8]), (1, [3, 4, 8]), (2, [5]), (1, [5])]


def test_a_preempted_request_is_admitted_again_in_the_log():
    engine = make_engine(5)
    for _ in range(2):
        engine.submit(ask(20, 30))
    while not engine.is_idle:
        engine.step()
    kinds = [event.kind for event in engine.log.of("request 1") if event.kind is not Kind.TOKEN]
    assert kinds[:4] == [Kind.SUBMITTED, Kind.ADMITTED, Kind.PREEMPTED, Kind.ADMITTED]


def test_promises_are_kept_beside_finetuning():
    """The engine begins with latencies that are four times too short, and corrects them."""
    latencies = Latencies(Latency(0.0025, 2.5e-5, 2.5e-9), Latency(0.0025, 2.5e-5, 2.5e-9))
    limits = Limits(ttft_slo_s=5.0, tpot_slo_s=0.05)
    engine = make_engine(4096, limits=limits, latencies=latencies)
    engine.finetune("tuned", [(700,)] * 1000)
    workload = Workload(tuple(TimedRequest(i * 0.4, None, 50, 40) for i in range(200)))
    events = Simulation([engine], RoundRobin()).run(workload, 80.0)
    report = serving_report(events, Slo(5.0, 0.05), start_s=8.0, end_s=80.0)
    assert report.slo_attainment is not None
    assert report.slo_attainment > 0.97
    assert report.gap_attainment is not None
    assert report.gap_attainment > 0.99
    # A step without them takes a fifth of 50 ms, and 700 tokens forward and back 0.32 s.
    assert report.finetuning_throughput > 900


class _UnsteadyCosts(LinearCosts):
    """Steps take up to three tenths less or more than on average."""

    def __init__(self):
        super().__init__(layers=16)
        self.__dict__["drawn"] = random.Random(0)

    def step_seconds(self, shape):
        factor = self.__dict__["drawn"].uniform(0.7, 1.3)
        return factor * super().step_seconds(shape)


def test_promises_are_kept_where_steps_are_unsteady():
    """Requests leave at any step, and a last one that is late can be made up for no more."""
    latencies = Latencies(Latency(0.01, 1e-4, 1e-8), Latency(0.01, 1e-4, 1e-8))
    limits = Limits(ttft_slo_s=5.0, tpot_slo_s=0.05)
    engine = SimulatedEngine(_UnsteadyCosts(), 4096, 1000, limits=limits, latencies=latencies)
    engine.finetune("tuned", [(700,)] * 1000)
    workload = Workload(tuple(TimedRequest(i * 0.4, None, 50, 10) for i in range(200)))
    events = Simulation([engine], RoundRobin()).run(workload, 80.0)
    report = serving_report(events, Slo(5.0, 0.05), start_s=8.0, end_s=76.0)
    assert report.slo_attainment is not None
    assert report.slo_attainment >= 0.99
    assert report.gap_attainment is not None
    assert report.gap_attainment >= 0.99
    assert report.finetuning_throughput > 1400


def test_latencies_stay_sound_where_loads_are_alike():
    """Three loads again and again, of which one is always faster than the line says."""
    latency = Latency(0.01, 1e-4, 1e-8)
    loads = [Load(1744, 12_766_952), Load(2421, 12_681_198), Load(4027, 8_110_378)]
    for i in range(30_000):
        load = loads[i % 3]
        took = 0.005 + 0.8e-4 * load.tokens + 2e-8 * load.keys
        latency.observe(load, took * (0.1 if i % 97 == 0 else 1.0))
    for load in loads:
        took = 0.005 + 0.8e-4 * load.tokens + 2e-8 * load.keys
        assert latency.seconds(load) == pytest.approx(took, rel=0.2)
    # And what was never seen is not taken for impossible.
    assert latency.tokens_within(0.2, 0, Load()) > 500


def test_requests_that_cannot_run_are_refused():
    engine = make_engine(most_positions=32)
    with pytest.raises(GenerationError, match="prompt 0 has 32 tokens"):
        engine.submit(ask(32, 1))


def test_a_cluster_fills_one_engine_before_the_next():
    engines = [make_engine() for _ in range(3)]
    workload = Workload(tuple(TimedRequest(0.0, None, 10, 20) for _ in range(7)))
    Simulation(engines, FullestFirst(3)).run(workload)
    served = [sum(e.kind is Kind.FINISHED for e in engine.log) for engine in engines]
    # The last is the fullest of equals; the seventh waits for the first that ends, of any.
    assert sum(served) == 7
    assert served[2] == 3
    assert min(served) == 1
    alone = [make_engine() for _ in range(3)]
    events = Simulation(alone, RoundRobin()).run(workload)
    assert [sum(e.kind is Kind.FINISHED for e in x.log) for x in alone] == [3, 2, 2]
    assert sum(event.kind is Kind.FINISHED for event in events) == 7


def test_requests_that_come_during_a_step_have_their_own_time():
    engine = make_engine()
    workload = Workload((TimedRequest(0.0, None, 300, 2), TimedRequest(0.01, None, 10, 1)))
    events = Simulation([engine], RoundRobin()).run(workload)
    submitted = [event.time_s for event in events if event.kind is Kind.SUBMITTED]
    assert submitted == [0.0, 0.01]


def test_an_adapter_that_is_not_there():
    workload = Workload((TimedRequest(0.0, "x", 10, 1),))
    with pytest.raises(BenchmarkError, match="adapter 'x' of the workload is not there"):
        Simulation([make_engine()], RoundRobin()).run(workload)


def busy_engine(is_ahead):
    """An engine with a promise and two jobs, after two seconds of four requests that decode."""
    latency = Latency(0.01, 1e-4, 0.0)
    engine = make_engine(
        400,
        limits=Limits(tokens=64, tpot_slo_s=0.1),
        latencies=Latencies(latency, Latency(0.005, 1e-4, 0.0)),
        is_ahead=is_ahead,
    )
    for name in ("one", "two"):
        engine.finetune(name, itertools.repeat((60, 40)))
    for number in range(4):
        engine.submit(ask(5 + number, 800))
    while engine.clock.now_s() < 20.0:
        engine.step()
        engine.check_integrity()
    return engine


def test_steps_that_overlap_serve_and_train_as_much():
    """On a device beside its host: nothing of a step's time is planned for twice, or lost."""
    alone, ahead = busy_engine(is_ahead=False), busy_engine(is_ahead=True)
    trained, served = [], []
    for engine in (alone, ahead):
        trained.append(sum(event.kind is Kind.STEPPED for event in engine.log))
        served.append(engine.totals.output_tokens)
    assert alone.reads.keys() == {"never ahead"}
    assert ahead.reads["ahead"] > 0.98 * ahead.reads.total()
    assert trained[1] > 0.95 * trained[0] > 10
    assert served[1] > 0.95 * served[0] > 100


def run(requests, engines, pages, most, migration):
    made = [
        SimulatedEngine(LinearCosts(), pages, 1000, Limits(running=most)) for _ in range(engines)
    ]
    moved = []
    adapters = {name: SimulatedAdapter(name, 3000) for name in ("a", "b")}
    simulation = Simulation(made, FullestFirst(most), adapters, migration=migration)
    simulation.on_move = lambda place, sequence: moved.append((place, sequence))
    events = simulation.run(Workload(tuple(requests)))
    for engine in made:
        engine.check_integrity()
        assert engine.is_idle
    return simulation, moved, events


def tokens_of(events):
    return sum(event.kind is Kind.TOKEN for event in events)


def busy_s(simulation):
    return sum(engine.device.busy_s for engine in simulation.engines)


def test_a_lightly_loaded_engine_is_emptied():
    """Six requests fill an engine, and a seventh has one for itself until two of them end."""
    adapters = ["a", "b", None]
    requests = [TimedRequest(0.0, adapters[i % 3], 20, 400 if i > 1 else 50) for i in range(7)]
    without, _, before = run(requests, 2, 400, 6, None)
    found, moved, events = run(requests, 2, 400, 6, Migration(6, 3, period_s=0.5))
    ((place, sequence),) = moved
    # The seventh went on where there was room, from the prompt and its tokens so far.
    assert (place, sequence.request.prompt_ids) == (0, (1,) * 20)
    assert 50 <= len(sequence.generated) < 150
    assert len(found.resumed) == 1
    assert tokens_of(events) == tokens_of(before) == 2 * 50 + 5 * 400
    submitted = [e.details["prompt_tokens"] for e in events if e.kind is Kind.SUBMITTED]
    assert sorted(submitted)[-1] == 20 + len(sequence.generated)
    # Five requests at one engine keep one busy instead of two.
    assert busy_s(found) < 0.75 * busy_s(without)


def test_an_engine_stays_where_others_have_no_room():
    requests = [TimedRequest(0.0, None, 20, 100) for _ in range(7)]
    # All end together: there is no slot for the seventh as long as it runs.
    _, moved, _ = run(requests, 2, 400, 6, Migration(6, 3, period_s=0.1))
    assert moved == []
    # Slots, and no pages.
    requests = [TimedRequest(0.0, None, 150, 40), TimedRequest(0.0, None, 150, 40)]
    _, moved, _ = run(requests, 2, 14, 6, Migration(6, 3, period_s=0.1))
    assert moved == []


@pytest.mark.parametrize("migration", [None, Migration(4, 0)], ids=["stays", "moves"])
def test_what_is_preempted_goes_where_there_is_room(migration):
    requests = [TimedRequest(0.1 * i, None, 20, 60) for i in range(4)]
    simulation, moved, events = run(requests, 2, 9, 4, migration)
    kinds = Counter(event.kind for event in events)
    assert kinds[Kind.PREEMPTED] > 0
    assert kinds[Kind.TOKEN] == 4 * 60
    assert kinds[Kind.FINISHED] == 4
    assert bool(moved) == bool(simulation.resumed) == (migration is not None)
