"""The engine: serves requests and trains adapters over one compiled program."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from signal import SIGINT
from typing import Self, TypeAlias, cast

from pcg.errors import DeviceMemoryError, FinetuneError, FinetuneInterrupted
from pcg.ir.program.program import labels_of
from pcg.kernels.devices import is_out_of_memory, on_device
from pcg.keywords import takes
from pcg.machine_memory import memory
from pcg.peft.adapter import Adapter
from pcg.ranks.agreement import check_call, check_same, described
from pcg.runtime.adapters.cache import AdapterCache, ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.admission.backlog import UNLIMITED, QueueLimits
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.sources import DataLimits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.device.calibration import calibrated
from pcg.runtime.engine.device.clock import MachineClock
from pcg.runtime.engine.device.device_memory import DeviceParts, fitted
from pcg.runtime.engine.device.step_runner import StepRunner
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.options import KV_CACHE_BYTES, EngineArguments
from pcg.runtime.engine.replicas import Follower, Leader
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.scheduling.scheduler import Scheduler
from pcg.runtime.memory.kv_cache import KvCache, page_bytes_of, stage_kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.memory.recurrent_states import recurrent_types, snapshots_of
from pcg.runtime.metrics.events import EventLog, Kind
from pcg.runtime.model.state import ModelState, ServingProgram
from pcg.runtime.requests.plain import option_facts, request_facts
from pcg.runtime.requests.prefixes import Prefixes
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.training.finetuning import finetune_run
from pcg.runtime.training.options import FinetuneResult, JobArguments, StepRecord
from pcg.runtime.training.publishers import VersionPublisher
from pcg.runtime.training.trainer.datum import Stepped, TrainerArguments
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter
from pcg.runtime.training.warm_jobs import KeptRunners
from pcg.runtime.training.work_units import Interrupt, Work
from pcg.units import size_text


class Engine(EngineLoop):
    """An engine: serves requests and trains adapters at the same time, step by step.

    `executor.engine(...)` returns one. Call `submit` and `finetune`, then `step` until `is_idle`;
    or `start` to have a thread run the steps.

    Attributes:
        runners: recorded windows of ended jobs, for the next job of the same shape.
    """

    device: StepRunner

    def __init__(
        self, state: ModelState, arguments: EngineArguments, requests: Sequence[Request] = ()
    ) -> None:
        """Create an engine; a collective call over ranks.

        Args:
            requests: all requests that it will serve, so that ranks compare no later call; empty
                for an engine that takes any request.
        """
        if state.world.size > 1:
            facts = request_facts(requests) if requests else option_facts(arguments, ("log",))
            check_same(state.world, "generate" if requests else "engine", facts)
        self._leads = False
        self._compares = state.world.size > 1 and not requests
        self._was_called = True
        self.state = state
        self._data_limits = arguments.data_limits or DataLimits()
        limits = arguments.limits or Limits()
        # A request for labels asks for all of them.
        most_logprobs = max(limits.logprobs, len(labels_of(state.program.config)))
        limits = replace(limits, logprobs=most_logprobs)
        state.most_rank = limits.lora_rank
        state.tests_adapters = arguments.adapter_self_test
        runner, adapters, self.runners = _on_device(state, arguments, limits)
        cache = runner.cache
        state.add_listener(self)
        prefixes = None
        if arguments.prefix_caching:
            slots = range(cache.pool.slots, cache.pool.slots + cache.snapshots)
            tenants = arguments.prefixes_between_tenants
            prefixes = Prefixes(cache.pool, between_tenants=tenants, snapshots=slots)
        queue = arguments.queue or QueueLimits()
        scheduler = Scheduler(cache.pool, adapters, limits, arguments.policy, prefixes, queue)
        super().__init__(runner, scheduler, MachineClock(state.mesh.alike), arguments)
        has_slo = limits.tpot_slo_s or limits.ttft_slo_s
        if arguments.latencies is None and has_slo:
            self.calibrate()

    def step(self) -> list[Chunk]:
        # Consecutive steps need no further comparison between ranks.
        if self._compares and (self._was_called or self.is_idle):
            check_call(self.state.world, "step")
            self._was_called = False
        with on_device(self.state.device):
            return super().step()

    def _called(self, verb: str, subject: str | Request) -> None:
        """Compare a call with the calls of other ranks."""
        if not self._compares:
            return
        if isinstance(subject, Request):
            check_same(self.state.world, verb, request_facts([subject]))
        else:
            check_call(self.state.world, f"{verb}({subject!r})")
        self._was_called = True

    @takes(JobArguments, FinetuneError)
    def finetune(self, arguments: JobArguments) -> Job:
        """Train an adapter while requests are served by its last published version.

        Raises:
            DataError, FinetuneError, UnsupportedError: see `Executor.finetune`.
            AdapterError: the name is not a valid adapter name.
            PcgError: a job already has the name.
        """
        self.jobs.check_free(arguments.adapter)
        return self.add_job(self.prepare_job(arguments))

    def prepare_job(self, arguments: JobArguments) -> Job:
        """Read the data of a job, compile its program and create its adapter, on any thread."""
        note, adapter = self._note, arguments.adapter

        interrupts: list[Interrupt] = []
        failed: list[Exception] = []
        jobs: list[Job] = []

        def stepped(record: StepRecord) -> None:
            jobs[0].record, jobs[0].steps = record, jobs[0].steps + 1
            details = {"step": record.step, "loss": record.loss, "tokens": record.tokens}
            note(Kind.STEPPED, adapter, **details)
            if arguments.on_step is None:
                return
            try:
                arguments.on_step(record)
            except Exception as error:
                if not self._leads:
                    raise
                # Other ranks have no callback: interrupt the job on all ranks after this step.
                failed.append(error)
                interrupts.append((SIGINT, None))

        def units(work: Work[FinetuneResult]) -> Work[FinetuneResult]:
            try:
                return (yield from work)
            except FinetuneInterrupted:
                if failed:
                    raise failed[0] from None
                raise

        def publish(version: AdapterVersion) -> None:
            note(Kind.PUBLISHED, adapter, adapter_version=version.number)

        publisher = VersionPublisher(self.state, arguments.publish_every, publish, self.runners)
        frees = self.state.begin_training(adapter)
        is_over = self.runners.begin_job()

        def ends() -> None:
            frees()
            is_over()

        try:
            with on_device(self.state.device):
                work = units(finetune_run(publisher, arguments, stepped, interrupts).work())
            interrupt = functools.partial(interrupts.append, (SIGINT, None))
            jobs.append(Job(adapter, work, ends, interrupt, arguments.tenant))
            return jobs[0]
        except BaseException:
            ends()
            raise

    def prepare_trainer(self, arguments: TrainerArguments) -> TrainedAdapter:
        """Create the adapter of a trainer, and compile its program, on any thread."""
        note, name = self._note, arguments.name

        def stepped(update: Stepped) -> None:
            note(Kind.STEPPED, name, step=update.step, loss=update.loss, tokens=update.tokens)

        def published(version: AdapterVersion) -> None:
            note(Kind.PUBLISHED, name, adapter_version=version.number)

        return TrainedAdapter(self.state, arguments, True, stepped, published)

    def start(self) -> AsyncEngine:
        """Run the steps on a thread from now on.

        A collective call over ranks. Rank 0's engine takes calls; the engines of other ranks repeat
        these calls until rank 0's engine is closed, and take no calls themselves.

        Raises:
            EngineError: an engine of the executor already runs on a thread.
        """
        state = self.state
        state.check_no_engine("a second thread", "use the AsyncEngine that start() gave")
        seat: Leader | Follower | None = None
        if state.world.size > 1:
            check_same(state.world, "start", {"the adapters": described(sorted(state.adapters))})
            self._compares, self._leads = False, state.world.rank == 0
            kind = Leader if self._leads else Follower
            seat = kind(self, state, self.prepare_job, self._free)
        makers = (self.prepare_job, self.prepare_trainer)
        return AsyncEngine(self, state, *makers, self._data_limits, seat)

    def _free(self) -> None:
        """Return to collective calls, after the thread has ended."""
        self._leads, self._compares, self._was_called = False, True, True

    def wait_prepared(self) -> None:
        """Wait until the guides of all requests are compiled."""
        for grammar in self.scheduler.preparing.values():
            grammar.wait()

    def calibrate(self) -> None:
        """Measure the time of steps on this machine, so that the first steps keep their SLOs."""
        with on_device(self.state.device):
            self.learn(calibrated(self.state, self.clock, self.device.graphs))

    def use_program(self, program: ServingProgram) -> None:
        self.when_landed(functools.partial(self.device.use, program))

    @classmethod
    def for_requests(cls, state: ModelState, requests: Sequence[Request]) -> Self:
        """Return an engine for the given requests only, with the memory that they need."""
        tables = state.serving.tables
        page_bytes = page_bytes_of(state.serving.serving.model, state.stages)
        needs = [pages_for(r.length + r.params.max_new_tokens) for r in requests]
        served = (cast(Adapter, r.adapter) for r in requests if r.adapter)
        adapters = {adapter.version: adapter for adapter in served}
        sizes = [tables.pages_of(adapter, page_bytes) for adapter in adapters.values()]
        # No other request waits, and chunk sizes from measured times would differ between runs.
        limits = Limits(prompt_stretch=math.inf)
        count = sum(request.params.width for request in requests)
        pages, most = max(needs, default=1) * count + sum(sizes), KV_CACHE_BYTES // page_bytes
        if pages > most:
            if state.device.type == "cuda" and state.mesh.alike.size == 1:
                most = DeviceParts.of(state, limits, _SHARE, None).pool // page_bytes
            pages = min(pages, max(max(needs, default=1) + max(sizes, default=0), most))
        size_bytes = pages * page_bytes
        arguments = EngineArguments(
            limits, kv_cache_bytes=size_bytes, log=EventLog(0), queue=UNLIMITED
        )
        return cls(state, arguments, requests)


_SHARE = EngineArguments().gpu_memory_utilization
_OnDevice: TypeAlias = tuple[StepRunner, AdapterCache, KeptRunners]


def _on_device(state: ModelState, arguments: EngineArguments, limits: Limits) -> _OnDevice:
    """Allocate an engine's parts on its device, with its pool, and record possible steps.

    Raises:
        DeviceMemoryError: a GPU has too little memory for all parts together.
    """
    model = state.serving.serving.model
    page_bytes = page_bytes_of(model, state.stages)
    # Triton kernels follow block tables, so adapters can lie in pages of the cache.
    in_pages = state.program.options.backend == "triton"
    types = stage_kv_types(model, state.stages, state.mesh.stage)

    def pages_of(adapter: ServedAdapter) -> int:
        return state.serving.tables.pages_of(cast(Adapter, adapter), page_bytes)

    def make(size_bytes: int) -> _OnDevice:
        pages = max(1, size_bytes // page_bytes)
        cache = KvCache(
            types,
            pages,
            state.device,
            in_pages=in_pages,
            page_bytes=page_bytes,
            states=recurrent_types(state.stage.own(model)),
            slots=limits.running,
            snapshots=snapshots_of(limits.running) if arguments.prefix_caching else 0,
        )
        adapters, kept = AdapterCache(cache.pool, pages_of), KeptRunners()
        runner = StepRunner(state, cache, adapters, limits)
        if arguments.warm_up:
            runner.warm_up(list(state.adapters.values()), kept, arguments.warm_jobs)
        return runner, adapters, kept

    size_bytes = arguments.kv_cache_bytes
    if state.device.type != "cuda":
        total = memory().total
        if size_bytes is not None and total is not None and size_bytes > total:
            raise DeviceMemoryError(
                f"a KV cache of {size_text(size_bytes)} does not fit this machine's "
                f"{size_text(total)}; use a smaller kv_cache_gib"
            )
        return make(KV_CACHE_BYTES if size_bytes is None else size_bytes)
    share = arguments.gpu_memory_utilization if size_bytes is None else None
    jobs = arguments.warm_jobs if arguments.warm_up else None
    count = functools.partial(DeviceParts.of, state, limits, share, jobs)
    if size_bytes is None:
        least = pages_for(limits.tokens) * page_bytes
        return fitted(make, count(), least, state.mesh.alike)
    try:
        return make(size_bytes)
    except (RuntimeError, DeviceMemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise count().refused(size_bytes, error) from error
