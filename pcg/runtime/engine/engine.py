"""The engine: serves requests and trains adapters over one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self, cast

from pcg.errors import UnsupportedError
from pcg.peft.adapters import Adapter
from pcg.runtime.adapters.cache import AdapterCache, ServedAdapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.calibration import calibrated
from pcg.runtime.engine.clock import MachineClock
from pcg.runtime.engine.events import EventLog, Kind
from pcg.runtime.engine.job import Job
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.policies import Policy
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.sharing import Sharing
from pcg.runtime.engine.step_runner import StepRunner
from pcg.runtime.memory.kv_cache import KvCache, bytes_of_page, kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.memory.prefixes import Prefixes
from pcg.runtime.model.specialised import ServingProgram
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.finetuning import FinetuneJob
from pcg.runtime.training.options import Data, FinetuneOptions
from pcg.runtime.training.publishers import VersionPublisher
from pcg.runtime.training.result import OnStep, StepRecord

KV_CACHE_BYTES = 4 * 2**30
"""Memory for the KV cache and adapters by default."""


class Engine(EngineLoop):
    """Serves and trains over one executor; see `EngineLoop`."""

    device: StepRunner

    def __init__(
        self,
        state: ModelState,
        limits: Limits | None = None,
        *,
        kv_cache_bytes: int = KV_CACHE_BYTES,
        policy: Policy | None = None,
        job_share: float = 0.5,
        log: EventLog | None = None,
        latencies: Latencies | None = None,
        sharing: Sharing | None = None,
        prefix_caching: bool = True,
    ) -> None:
        """Take memory for KV blocks and adapters.

        Args:
            executor: of the program and the adapters.
            limits: of a step.
            kv_cache_bytes: memory of the pool; pages that nothing uses are not touched.
            policy: of admission; first come, first served by default.
            job_share: of the pool, that finetuning may hold at most.
            log: to write to.
            latencies: of this machine; measured now by default.
            sharing: how finetuning goes beside what is served; see `EngineLoop`.
            prefix_caching: whether requests with the same version of an adapter share the KV blocks
                of common prefixes.
        """
        types = kv_types(state.serving.runner.model)
        page_bytes = bytes_of_page(types)
        pages = max(1, kv_cache_bytes // page_bytes)
        # Kernels follow block tables, so pages are runs of bytes that adapters share.
        in_pages = state.program.options.backend == "triton"
        cache = KvCache(types, pages, state.device, in_pages=in_pages)
        adapters = AdapterCache(cache.pool, functools.partial(_pages_of, state, page_bytes))
        self.state = state
        state.add_listener(self)
        limits = Limits() if limits is None else limits
        prefixes = Prefixes(cache.pool) if prefix_caching else None
        scheduler = Scheduler(cache.pool, adapters, limits, policy, prefixes)
        super().__init__(
            StepRunner(state, cache, adapters),
            scheduler,
            MachineClock(state.ranks),
            log=log,
            latencies=latencies,
            job_share=job_share,
            sharing=sharing,
        )
        promises = limits.tpot_slo_s or limits.ttft_slo_s
        if latencies is None and (promises or self.sharing.needs_latencies):
            self.calibrate()

    def finetune(
        self,
        data: Data,
        adapter: str = "default",
        *,
        peft: object = None,
        publish_every: int = 0,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> Job:
        """Train an adapter beside what is served; what was published last is served meanwhile.

        Args:
            data: as `Executor.finetune` takes it.
            adapter: its name, and the job's.
            peft: the recipe of a new one, likewise.
            publish_every: steps from one version that is served to the next; 0 serves the end.
            on_step: told of each step when it is done, evaluated and saved.
            options: the fields of `FinetuneOptions`.
        Raises:
            DataError, FinetuneError, UnsupportedError: as `Executor.finetune`.
            PcgError: there is a job of that name.
        """
        self.jobs.check_none(adapter)
        options |= {"peft": peft, "publish_every": publish_every, "on_step": on_step}
        return self.add_job(self.prepare_job(data, adapter, **options))

    def prepare_job(
        self,
        data: Data,
        adapter: str = "default",
        *,
        peft: object = None,
        publish_every: int = 0,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> Job:
        """Read the data of a job, compile its program and make its adapter, on any thread.

        Args:
            data: as for `finetune`, with all that follows.
            adapter: its name, and the job's.
            peft: the recipe of a new one.
            publish_every: steps from one version that is served to the next.
            on_step: told of each step.
            options: the fields of `FinetuneOptions`.
        Raises:
            DataError, FinetuneError, UnsupportedError: as `Executor.finetune`.
        """
        note = self._note

        def stepped(record: StepRecord) -> None:
            details = {"step": record.step, "loss": record.loss, "tokens": record.tokens}
            note(Kind.STEPPED, adapter, **details)
            if on_step is not None:
                on_step(record)

        given = FinetuneOptions.of({"progress": False, **options})
        publish = functools.partial(note, Kind.PUBLISHED, adapter)
        publisher = VersionPublisher(self.state, publish_every, publish)
        work = FinetuneJob(publisher, data, adapter, given, peft).work(stepped)
        return Job(adapter, work)

    def start(self) -> AsyncEngine:
        """Have a thread run the steps from now on; what it is asked goes through the front.

        Raises:
            UnsupportedError: over ranks, where threads would not ask in one order.
        """
        if self.state.ranks.size > 1:
            raise UnsupportedError(
                f"this engine runs over {self.state.ranks.size} ranks, which have to be asked "
                "alike and in one order, and threads are not; call submit, finetune and step on "
                "all of them"
            )
        return AsyncEngine(self, self.state, self.prepare_job)

    def calibrate(self) -> None:
        """Measure how long steps take here, to keep promises from the first one on."""
        self.learn(calibrated(self.state, self.clock))

    def use_program(self, program: ServingProgram) -> None:
        """Serve by a program for other adapter sites from now on."""
        self.device.use(program)

    @classmethod
    def for_requests(cls, state: ModelState, requests: Sequence[Request]) -> Self:
        """Return an engine for some requests alone, with no more memory than they need."""
        tables = state.serving.tables
        page_bytes = bytes_of_page(kv_types(state.serving.runner.model))
        needs = [pages_for(r.length + r.params.max_new_tokens) for r in requests]
        adapters = {id(r.adapter): cast(Adapter, r.adapter) for r in requests if r.adapter}
        sizes = [tables.pages_of(adapter, page_bytes) for adapter in adapters.values()]
        most = max(max(needs, default=1) + max(sizes, default=0), KV_CACHE_BYTES // page_bytes)
        pages = min(max(needs, default=1) * len(needs) + sum(sizes), most)
        return cls(state, kv_cache_bytes=pages * page_bytes, log=EventLog(0))


def _pages_of(state: ModelState, page_bytes: int, adapter: ServedAdapter) -> int:
    """Count the pages that an adapter takes in the program that serves now."""
    return state.serving.tables.pages_of(cast(Adapter, adapter), page_bytes)
