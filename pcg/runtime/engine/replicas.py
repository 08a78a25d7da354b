"""The ranks of an engine on threads: rank 0 leads, and the others follow.

    with executor.engine(limits).start() as running:  # on every rank
        if executor.ranks.rank == 0:
            …                                         # the others wait at the end of the `with`

Rank 0 takes requests, adapters and jobs. It sends every command to the others: before it does it
where ranks exchange messages in it, else with the next message, so that all requests between two
steps travel with the step. What is read or tokenized is so on threads of rank 0; what ranks do
together, such as compiling, is done between two steps by the thread that runs them.

A second thread looks whether another rank has ended: then this engine ends, too, although its
thread may wait for that rank within a step. That thread is left to itself in this case, as nothing
interrupts a message that it waits for.
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
    """The part of an engine on threads that knows its rank.

    Attributes:
        leads: True on rank 0.
        size: the number of ranks.
        over: is set at the end of the engine.
    """

    leads: ClassVar[bool]

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: PrepareJobHere,
        free: Callable[[], None],
    ) -> None:
        """Take a seat; all ranks do it at once.

        Args:
            prepare_job: makes a job on this rank.
            free: is called at the end: all ranks are called alike again.
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
        """Return the adapters that are alive on rank 0, of those that are alive here."""

    @abstractmethod
    def check_takes(self, ended: EngineError | None) -> None:
        """Raise an EngineError on a rank that takes no calls."""

    def is_called(self, is_called: bool) -> bool:
        """Return whether rank 0 has calls that wait; all ranks ask at the same places."""
        flag = torch.tensor([int(is_called)])
        return bool(broadcast_from_first(self.state.world, flag))

    def watch(self, lose: Callable[[str], None]) -> None:
        """Have a function called once another rank has ended, on another thread."""

        def look() -> None:
            while not self.over.wait(LOOK_S):
                try:
                    word = self._line.word()
                except ParallelError as error:
                    word = str(error)
                if word is not None:
                    # The engine's thread usually hears by itself, with its own error.
                    if not self.over.wait(2 * LOOK_S):
                        lose(word)
                    return

        if self._line.has_words:
            device_thread(None, look, "pcg ranks").start()

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one has ended by an error."""
        self._line.leave_word(why)

    def close(self) -> None:
        self.state.versions.agreed = None
        self._versions.close()


class Leader(Seat):
    """Rank 0; its commands come from the engine's thread alone."""

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
        """Have all ranks do the command that is done within the `with`.

        Raises:
            GenerationError: it holds a number or a text that no message can.
            RankLostError: another rank is gone.
        """
        if self._is_closed:  # what is left here concerns this rank alone
            yield
            return
        try:
            self._pending.append(msgspec.Raw(encode(command)))
        except (OverflowError, UnicodeEncodeError) as error:
            raise GenerationError(
                f"what was asked for cannot be told to the other ranks ({error}); use numbers of "
                "64 bits, and characters of Unicode"
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
        """Send the commands that wait, or nothing but that this rank is there."""
        message = Message(self._pending, self._failed, self._versions.take_released())
        self._pending, self._failed = [], []
        self._line.send(encode(message))

    def submit_command(self, request: Request, submitted_s: float) -> Submit:
        """Return the command for a request. AdapterError: its adapter was never served here."""
        adapter = request.adapter
        name = None if adapter is None else self._versions.name_of(adapter)  # type: ignore[arg-type]
        return Submit(PlainRequest.of(request, name), submitted_s)

    def prepare_everywhere(self, arguments: JobArguments) -> Job:
        """Make a job on all ranks."""
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
        """Let the other ranks go, unless this one ends by an error."""
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
    """Any other rank: its thread does rank 0's commands, in their order.

    Attributes:
        prepared: jobs that are made and do not run yet, by name.
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
            f"this is rank {self._line.rank} of an engine over {self.size} ranks, which follows "
            "rank 0 and takes nothing itself; make the call on rank 0 alone, and follow() on the "
            "others"
        )

    def version(self, name: VersionName) -> Adapter:
        return self._versions.adapter(name)

    def follow(self) -> EngineError:
        """Do rank 0's commands to their end, and return why they ended."""
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
            if isinstance(command, Step):  # of which no rank goes on
                raise
            self._failed.add(number)

    def _compare(self, message: Message) -> None:
        """Compare which commands of earlier messages have failed here and on rank 0.

        Raises:
            ParallelError: one of them has failed on one of the two ranks alone.
        """
        self._failed_there.update(message.failed)
        earlier = {number for number in self._failed_there if number < self._count}
        if earlier != self._failed:
            number = min(earlier ^ self._failed)
            place = "on this rank alone" if number in self._failed else "on rank 0 alone"
            raise ParallelError(
                f"rank {self._line.rank} of {self.size} is not as rank 0 is: order {number} has "
                f"failed {place}. All ranks have to start again"
            )
        self._failed.clear()
        self._failed_there -= earlier

    def _alive(self, _: list[Adapter]) -> list[Adapter]:
        return [self._versions.adapter(name) for name in names_of(self._line.receive())]


class NamedVersions:
    """The versions of adapters that messages name, from the start of an engine on.

    Args:
        keeps: keep the adapters until `release`, as followers do; else note the versions that
            nothing refers to any more.
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
        """Hear of no version any more, and keep none."""
        self._end()
        self._adapters.clear()

    def release(self, name: VersionName) -> None:
        """Keep a version no longer."""
        self._adapters.pop(name, None)

    def take_released(self) -> list[VersionName]:
        """Return the versions that were released since the last call."""
        released = []
        while self._released:
            released.append(self._released.popleft())
            self.release(released[-1])
        return released

    def name_of(self, adapter: Adapter) -> VersionName:
        """Return the name of an adapter. AdapterError: it was never served here."""
        version = self._versions.of(adapter)
        if version is None or version.key not in self._adapters:
            raise AdapterError(
                f"adapter {adapter.name!r} was never served by this engine; use one of the "
                "executor's `adapters`, or its name"
            )
        return version.key

    def adapter(self, name: VersionName) -> Adapter:
        """Return the adapter of a version. ParallelError: there is none."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise ParallelError(
                f"adapter {name.name}@{name.number} of rank 0 is not on this rank; have all ranks "
                "add and remove the same adapters before the engine is started"
            )
        return adapter
