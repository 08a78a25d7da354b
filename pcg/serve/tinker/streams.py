"""The stream of a model: its requests, executed strictly in the order of their numbers.

A request with missing predecessors waits for them, and fails after a time. The transaction that
settles a request also stores the model's new position. The engine's trainer is created when a
request needs it: it loads the last durable state and repeats the later requests that have results.
So the trainer's state always matches the results that clients have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pcg.errors import EngineError, FinetuneError, PcgError, RecordError
from pcg.records.record import RunRecord
from pcg.records.run_files import Status
from pcg.runtime.metrics.status import EngineState
from pcg.serve.engine.client import EngineClient
from pcg.serve.http.errors import LOG, ApiError
from pcg.serve.store.store import Store
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.operations import (
    CREATE,
    LOAD,
    LOAD_MODEL,
    REPLAYED,
    STEP,
    UNLOAD,
    Operations,
    Outcome,
    settle_row,
)
from pcg.serve.tinker.records import (
    DONE,
    FAILED,
    FUTURES,
    PENDING,
    USER,
    FutureRecord,
    ModelRecord,
    run_folder,
)

GAP_S = 120.0
"""Time for which a request waits for a missing predecessor, seconds."""
STATE_STEPS = 16
"""Updates between two saved states, and so the most updates repeated after a crash."""
STATE_BYTES = 32 * 2**20
"""Bytes of requests after which the state is saved earlier."""
MOST_ROWS = 2**17
"""The most rows of updates in a model's record."""
_MOST_BYTES = 2**30
"""The most bytes of requests after a state; a state has no accumulated gradients."""
_BROKEN = "the model could not be created; create another model"


class _Interrupted(Exception):
    """The engine ends; the next start repeats the request."""


class ModelStream:
    """Executes a model's requests; for a single event loop.

    Attributes:
        model: the model at its present position.
        is_closing: True once no more requests are added.
    """

    def __init__(
        self,
        model: ModelRecord,
        client: EngineClient,
        store: Store,
        futures: Futures,
        operations: Operations,
    ) -> None:
        self.model = model
        self.is_closing = False
        self._client = client
        self._store = store
        self._futures = futures
        self._operations = operations
        self._record = _TrainingRecord(model, store.folder / run_folder(model.id))
        self._waiting: set[int] = set()
        self._failed_early: set[int] = set()
        self._coming: list[int] = []
        self._refused: set[int] = set()
        self._changed = asyncio.Event()
        self._is_loaded = False
        self._broken: str | None = None
        self._steps = self._bytes = 0
        self._doing = 0

    def put(self, seq: int) -> None:
        """Add the pending request of a position; its body is read from disk on its turn."""
        self._waiting.add(seq)
        self._changed.set()

    def refuse(self, seq: int) -> None:
        """Do not wait for the position of a refused request, unless a corrected request arrives."""
        if seq > self.model.done_seq:
            self._refused.add(seq)
            self._changed.set()

    @property
    def behind(self) -> int:
        """The position after the last received request."""
        places = (*self._waiting, *self._failed_early, *self._coming)
        return max((self.model.done_seq, self._doing, *places)) + 1

    @contextmanager
    def coming(self, seq: int) -> Iterator[None]:
        """Reserve a position while its request is being stored."""
        self._coming.append(seq)
        try:
            yield
        finally:
            self._coming.remove(seq)

    def close(self) -> None:
        """End the stream after the waiting requests."""
        self.is_closing = True
        self._changed.set()

    async def recover(self) -> None:
        """Add the requests of an earlier run of the server."""
        for seq, state, _ in await self._places(self.model.done_seq):
            if state == PENDING:
                self.put(seq)
            elif state == FAILED:
                self._failed_early.add(seq)
        first = await self._store.read(FUTURES.find, stream=self.model.id, seq=0)
        if first is not None and first.state == FAILED:
            self._broken = _BROKEN

    async def _places(self, behind: int) -> list[tuple[int, str, str]]:
        """Return position, state and verb of the requests after a position, in order."""
        columns, order = "seq, state, kind", "ORDER BY seq"
        rows = await self._store.read(
            FUTURES.read, columns, "seq > ?", (behind,), order, stream=self.model.id
        )
        return [(seq, state, kind) for seq, state, kind in rows]

    async def _at(self, seq: int) -> FutureRecord:
        future = await self._store.read(FUTURES.find, stream=self.model.id, seq=seq)
        assert future is not None
        return future

    async def run(self) -> bool:
        """Execute requests until the stream is closed. Return False if the engine ends first."""
        is_whole = False
        try:
            await self._run()
            is_whole = True
        except _Interrupted:
            pass
        finally:
            self._record.end(is_whole=is_whole)
        return is_whole

    async def _run(self) -> None:
        while True:
            seq = self.model.done_seq + 1
            self._refused.discard(seq - 1)
            if seq in self._waiting:
                self._waiting.discard(seq)
                await self._do(await self._at(seq))
            elif seq in self._failed_early:
                self._failed_early.discard(seq)
                self.model = replace(self.model, done_seq=seq)
            elif self._waiting and seq in self._refused:
                self.model = replace(self.model, done_seq=seq)
            elif self._waiting:
                await self._wait_for(seq)
            elif self.is_closing:
                break
            else:
                await self._wait(None)
        await self._unload()

    async def _unload(self) -> None:
        """Free the engine's trainer; the next request creates it again."""
        if self._is_loaded:
            self._is_loaded = False
            await self._operations.end(self.model)

    async def _wait(self, timeout_s: float | None) -> bool:
        """Wait for a change. Return False on a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def _wait_for(self, seq: int) -> None:
        """Wait for the request of a position. If it does not arrive, fail the waiting requests."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + GAP_S
        while seq not in self._waiting | self._refused:
            left_s = 0.0 if self.is_closing else until_s - clock()
            if left_s <= 0 or not await self._wait(left_s):
                break
        if seq in self._waiting | self._refused:
            return
        for other in sorted(self._waiting):
            self._waiting.discard(other)
            words = f"request {seq} of {self.model.id} did not arrive; request {other} needs it"
            await self._futures.fail(await self._at(other), words, USER)
            self._failed_early.add(other)

    # ------------------------------------------------------------------------------- requests

    async def _do(self, future: FutureRecord) -> None:
        """Execute a request and store its result."""
        self._doing = future.seq
        try:
            outcome = await self._outcome(future)
        except Exception as error:
            if self._ends(error):
                raise _Interrupted from error
            await self._fail(future, None, error)
            return
        settle = settle_row(self.model, future, outcome)
        try:
            await self._futures.resolve(future, outcome.result, outcome.media_type, settle)
        except (PcgError, ApiError) as error:  # the rows written with the result are refused
            await self._fail(future, outcome, error)
            return
        self.model = replace(self.model, done_seq=future.seq)
        if outcome.stale is not None:
            self._operations.folders.remove(outcome.stale)
        if outcome.state is not None:
            self.model = replace(self.model, state=outcome.state, state_seq=future.seq)
            self._steps = self._bytes = 0
        if future.kind == UNLOAD:
            self._is_loaded = False
            self.close()
        if outcome.step is not None:
            await self._record.add(outcome.step)

    def _ends(self, error: Exception) -> bool:
        """Return True if the engine ends; its requests are repeated after the next start."""
        is_running = self._client.health().state is EngineState.RUNNING
        return isinstance(error, EngineError) or not is_running

    async def _fail(self, future: FutureRecord, outcome: Outcome | None, error: Exception) -> None:
        if outcome is not None and outcome.folder is not None:
            self._operations.folders.remove(outcome.folder)
        if future.kind in (CREATE, LOAD_MODEL):
            self._broken = _BROKEN
        elif future.kind == LOAD:  # the trainer may have loaded a state that was not stored
            await self._unload()
        settle = settle_row(self.model, future, None)
        shown = self._operations.folders.without_paths(error)
        await self._futures.fail_by(future, shown, settle)
        self.model = replace(self.model, done_seq=future.seq)

    async def _outcome(self, future: FutureRecord) -> Outcome:
        if self._broken is not None:
            raise FinetuneError(self._broken)
        if future.kind in (CREATE, LOAD_MODEL):
            outcome = await self._operations.do(self.model, future)
            self._is_loaded = True
            return outcome
        if not self._is_loaded:
            await self._load()
        if future.kind in REPLAYED and self._bytes > _MOST_BYTES:
            raise FinetuneError(
                f"{self._bytes} bytes of data since the last saved state, at most {_MOST_BYTES}: "
                "call optim_step or save_weights first"
            )
        outcome = await self._operations.do(self.model, future)
        self._count(future)
        is_due = self._steps >= STATE_STEPS or self._bytes >= STATE_BYTES
        if future.kind == STEP and is_due:
            outcome = await self._with_state(outcome)
        return outcome

    async def _with_state(self, outcome: Outcome) -> Outcome:
        """Save the state and add it to an outcome; return the outcome as it is on an error."""
        try:
            state = await self._operations.keep_state(self.model)
        except FinetuneError as error:  # the stored requests can be repeated instead
            if self._ends(error):
                raise
            LOG.error("the state of %s cannot be written: %s", self.model.id, error)
            return outcome
        return replace(outcome, state=state, folder=state, stale=self.model.state)

    def _count(self, future: FutureRecord) -> None:
        if future.kind in REPLAYED:
            self._bytes += future.size_bytes
            self._steps += future.kind == STEP

    async def _load(self) -> None:
        """Create the engine's trainer and replay the requests after its saved state."""
        await self._operations.begin(self.model)
        self._is_loaded, self._steps, self._bytes = True, 0, 0
        try:
            for seq, state, kind in await self._places(self.model.state_seq):
                if state == DONE and kind in REPLAYED:
                    future = await self._at(seq)
                    await self._operations.do(self.model, future)
                    self._count(future)
        except BaseException:
            await self._unload()
            raise


class _TrainingRecord:
    """The record of a model's training, with a row for each update.

    If the record cannot be written, training continues and the log says so once.
    """

    def __init__(self, model: ModelRecord, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._record: RunRecord | None = None
        self._is_broken = False

    async def add(self, numbers: Mapping[str, float]) -> None:
        """Add an update. A repeated update, after an older state was loaded, replaces its row."""
        rest = dict(numbers)
        step = int(rest.pop("step"))
        if not self._is_broken and step <= MOST_ROWS:
            await asyncio.to_thread(self._logged, lambda: self._add(step, rest))

    def _add(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._record is not None and step <= self._record.last_step:
            self._record.end(Status.INTERRUPTED)
            self._record = None
        if self._record is None:
            model = self._model
            config = {
                "model": model.base_model,
                "tenant": model.tenant,
                "session": model.session,
                "lora": json.loads(model.lora),
                "user_metadata": json.loads(model.user_metadata or "null"),
            }
            self._record = RunRecord(
                self._folder, config, name=model.id, kind="tinker", done=step - 1,
                waits_for_page=False,
            )  # fmt: skip
        self._record.log(step, **numbers)

    def end(self, *, is_whole: bool) -> None:
        """End the record of a closed model (`is_whole`), or at the server's end."""
        record, self._record = self._record, None
        if record is not None:
            status = Status.COMPLETED if is_whole else Status.INTERRUPTED
            self._logged(lambda: record.end(status))

    def _logged(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RecordError as error:
            self._is_broken = True
            LOG.error("the record of %s cannot be written: %s", self._model.id, error)
