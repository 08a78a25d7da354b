"""The ranks of an async engine: rank 0 leads, and the other ranks follow.

    with executor.engine(limits).start() as running:  # on every rank
        if executor.ranks.rank == 0:
            …                                         # the others wait at the end of the `with`

Rank 0 takes requests, adapters and jobs, and sends each command to the followers. A command in
which ranks exchange messages is sent before rank 0 runs it; other commands are sent with the next
message, so that all requests between two steps travel with the step. Threads of rank 0 read and
tokenize data. Collective work, such as compiling, runs between two steps on the engine's thread.

A second thread watches for ranks that have ended. This engine then ends, too, even while its own
thread waits for the lost rank within a step. That thread is abandoned, as a pending receive cannot
be interrupted.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import ClassVar, TypeAlias

import msgspec
import torch

from pcg.errors import (
    AdapterError,
    EngineError,
    GenerationError,
    ParallelError,
)
from pcg.kernels.devices import device_thread
from pcg.peft.adapter import Adapter
from pcg.ranks.group import broadcast_from_first
from pcg.ranks.line import LOOK_S, Line
from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.rank_commands import (
    End,
    Message,
    PrepareJob,
    PutAdapter,
    RankCommand,
    Step,
    Submit,
    command_of,
    encode,
    message_of,
    names_of,
    put_adapter,
)
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import PlainRequest
from pcg.runtime.requests.request import Request
from pcg.runtime.training.options import JobArguments

PrepareJobHere: TypeAlias = Callable[[JobArguments], Job]


class Seat(ABC):
    """The role of a rank in an async engine over several ranks.

    Attributes:
        leads: True on rank 0.
        size: the number of ranks.
        over: event that is set when the engine has ended.
    """

    leads: ClassVar[bool]

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: PrepareJobHere,
        free: Callable[[], None],
    ) -> None:
        """Create the role of this rank; a collective call.

        Args:
            prepare_job: creates a job on this rank.
            free: called at the end, when the engine returns to collective calls.
        """
        self.engine = engine
        self.state = state
        self.prepare_job = prepare_job
        self.free = free
        self.over = Event()
        self._line = Line(state.world)
        self.size = self._line.size
        self._versions = NamedVersions(state, keeps=not self.leads)
        state.versions.agreed = self._alive

    @abstractmethod
    def _alive(self, alive: list[Adapter]) -> list[Adapter]:
        """Return rank 0's live adapters, given the live adapters of this rank."""

    @abstractmethod
    def check_takes(self, ended: EngineError | None) -> None:
        """Raise an EngineError on a follower, which takes no calls."""

    def is_called(self, is_called: bool) -> bool:
        """Return True if calls wait on rank 0; a collective call."""
        flag = torch.tensor([int(is_called)])
        return bool(broadcast_from_first(self.state.world, flag))

    def watch(self, lose: Callable[[str], None]) -> None:
        """Call a function on another thread once another rank has ended."""

        def look() -> None:
            while not self.over.wait(LOOK_S):
                try:
                    word = self._line.word()
                except ParallelError as error:
                    word = str(error)
                if word is not None:
                    # Usually the engine's own thread notices as well, with a more exact error.
                    if not self.over.wait(2 * LOOK_S):
                        lose(word)
                    return

        if self._line.has_words:
            device_thread(None, look, "pcg ranks").start()

    def leave(self, why: str) -> None:
        """Notify the other ranks that this rank has ended by an error."""
        self._line.leave_word(why)

    def close(self) -> None:
        self.state.versions.agreed = None
        self._versions.close()


class Leader(Seat):
    """Rank 0; only the engine's thread sends commands."""

    leads = True

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: PrepareJobHere,
        free: Callable[[], None],
    ) -> None:
        super().__init__(engine, state, prepare_job, free)
        self._pending: list[msgspec.Raw] = []
        self._failed: list[int] = []
        self._count = 0
        self._is_closed = False

    def check_takes(self, ended: EngineError | None) -> None:
        return

    @contextmanager
    def asked(self, command: RankCommand) -> Iterator[None]:
        """Broadcast a command for the action that rank 0 performs within the `with`.

        Raises:
            GenerationError: the command has a number or text that messages cannot encode.
            RankLostError: another rank is lost.
        """
        if self._is_closed:  # remaining work concerns this rank only
            yield
            return
        try:
            self._pending.append(msgspec.Raw(encode(command)))
        except (OverflowError, UnicodeEncodeError) as error:
            raise GenerationError(
                f"the call cannot be sent to the other ranks ({error}); use numbers of "
                "64 bits, and valid Unicode text"
            ) from None
        number, self._count = self._count, self._count + 1
        if command.at_once:
            self.beat()
        try:
            yield
        except Exception:
            self._failed.append(number)
            raise

    def beat(self) -> None:
        """Send pending commands; without commands, the message is a heartbeat."""
        message = Message(self._pending, self._failed, self._versions.take_released())
        self._pending, self._failed = [], []
        self._line.send(encode(message))

    def submit_command(self, request: Request, submitted_s: float) -> Submit:
        """Return the command for a request. AdapterError: the engine never served its adapter."""
        adapter = request.adapter
        name = None if adapter is None else self._versions.name_of(adapter)  # type: ignore[arg-type]
        return Submit(PlainRequest.of(request, name), submitted_s)

    def prepare_everywhere(self, arguments: JobArguments) -> Job:
        """Create a job on all ranks."""
        with self.asked(PrepareJob.of(arguments)):
            return self.prepare_job(arguments)

    def spread(
        self, name: str, path_or_config: object, seed: int, adapter: Adapter
    ) -> Callable[[], Adapter]:
        """Read an adapter's files, and return the function that serves it on all ranks."""
        command = PutAdapter.of(name, path_or_config, seed)

        def put() -> Adapter:
            with self.asked(command):
                return put_adapter(self.state, name, lambda: adapter)

        return put

    def end(self, ended: EngineError) -> None:
        """Release the followers, unless rank 0 ends by an error."""
        try:
            if ended.__cause__ is None:
                with self.asked(End(str(ended))):
                    pass
        except Exception as error:
            ended.__cause__ = error
        self._is_closed = True
        self.close()

    def _alive(self, alive: list[Adapter]) -> list[Adapter]:
        self._line.send(encode([self._versions.name_of(adapter) for adapter in alive]))
        return alive


class Follower(Seat):
    """A rank above 0, whose thread runs rank 0's commands in order.

    Attributes:
        prepared: created jobs that do not run yet, by name.
    """

    leads = False

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: PrepareJobHere,
        free: Callable[[], None],
    ) -> None:
        super().__init__(engine, state, prepare_job, free)
        self.prepared: dict[str, Job] = {}
        self._count = 0
        self._failed: set[int] = set()
        self._failed_there: set[int] = set()

    def check_takes(self, ended: EngineError | None) -> None:
        raise ended or EngineError(
            f"rank {self._line.rank} of an engine over {self.size} ranks follows rank 0 and takes "
            "no calls; make the call on rank 0 only, and call follow() on the other ranks"
        )

    def version(self, name: VersionName) -> Adapter:
        return self._versions.adapter(name)

    def follow(self) -> EngineError:
        """Run rank 0's commands to their end, and return the reason of the end."""
        rank = self._line.rank
        try:
            why = self._follow()
            ended = EngineError(f"rank 0, which rank {rank} follows, ended its engine: {why}")
        except BaseException as error:
            ended = EngineError(
                f"the engine's thread on rank {rank} ended by {type(error).__name__}: {error}"
            )
            ended.__cause__ = error
        self.close()
        for job in self.prepared.values():
            job.cancel()
        return ended

    def _follow(self) -> str:
        while True:
            message = message_of(self._line.receive())
            self._compare(message)
            for encoded in message.commands:
                command = command_of(encoded)
                if isinstance(command, End):
                    return command.text
                self._do(command)
            for name in message.released:
                self._versions.release(name)

    def _do(self, command: RankCommand) -> None:
        number, self._count = self._count, self._count + 1
        try:
            command.apply(self)
        except Exception:
            if isinstance(command, Step):  # ranks cannot recover from a failed step
                raise
            self._failed.add(number)

    def _compare(self, message: Message) -> None:
        """Compare the failed commands of earlier messages on this rank and on rank 0.

        Raises:
            ParallelError: a command failed on only one of the two ranks.
        """
        self._failed_there.update(message.failed)
        earlier = {number for number in self._failed_there if number < self._count}
        if earlier != self._failed:
            number = min(earlier ^ self._failed)
            place = "on this rank only" if number in self._failed else "on rank 0 only"
            raise ParallelError(
                f"rank {self._line.rank} of {self.size} differs from rank 0: command {number} "
                f"failed {place}; restart all ranks"
            )
        self._failed.clear()
        self._failed_there -= earlier

    def _alive(self, _: list[Adapter]) -> list[Adapter]:
        return [self._versions.adapter(name) for name in names_of(self._line.receive())]


class NamedVersions:
    """The adapter versions that messages may name, since the start of an engine.

    Args:
        keeps: True on followers, to keep adapters until `release`; False on rank 0, to record the
            versions that have been garbage-collected.
    """

    def __init__(self, state: ModelState, *, keeps: bool) -> None:
        self._versions = state.versions
        self._keeps = keeps
        self._adapters: dict[VersionName, Adapter | None] = {}
        self._released: deque[VersionName] = deque()
        for adapter in state.versions.alive():
            self._listen("", adapter)
        self._end = state.versions.listen(self._listen)

    def _listen(self, _: str, adapter: Adapter | None) -> None:
        version = None if adapter is None else self._versions.of(adapter)
        if adapter is not None and version is not None:
            self._adapters[version.key] = adapter if self._keeps else None
            if not self._keeps:
                weakref.finalize(adapter, self._released.append, version.key).atexit = False

    def close(self) -> None:
        """Stop listening for versions and drop all adapters."""
        self._end()
        self._adapters.clear()

    def release(self, name: VersionName) -> None:
        """Drop a version."""
        self._adapters.pop(name, None)

    def take_released(self) -> list[VersionName]:
        """Return the versions that were released since the last call."""
        released = []
        while self._released:
            released.append(self._released.popleft())
            self.release(released[-1])
        return released

    def name_of(self, adapter: Adapter) -> VersionName:
        """Return an adapter's version name. AdapterError: the engine never served the adapter."""
        version = self._versions.of(adapter)
        if version is None or version.key not in self._adapters:
            raise AdapterError(
                f"adapter {adapter.name!r} was never served by this engine; use one of the "
                "executor's `adapters`, or its name"
            )
        return version.key

    def adapter(self, name: VersionName) -> Adapter:
        """Return the adapter of a version. ParallelError: this rank has no such adapter."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise ParallelError(
                f"adapter {name.name}@{name.number} of rank 0 is not on this rank; have all ranks "
                "add and remove the same adapters before the engine is started"
            )
        return adapter
