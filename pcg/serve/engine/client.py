"""The engine's client: all that the server asks of an engine, wherever that runs.

Nothing else of an engine is known in `pcg.serve`. What may take longer than a look at this
process's memory is a future, so that nobody who asks on the event loop waits for the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pcg.errors import EngineError
from pcg.keys import Keys
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.metrics.status import (
    AdapterStatus,
    EngineNumbers,
    Health,
    JobStatus,
    RunningStatus,
)
from pcg.runtime.requests.request import Request, RequestFields
from pcg.runtime.requests.stream import Stream
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.engine.jobs.news import JobOrder, Tell
from pcg.serve.engine.trainer_orders import LoraOrder, TrainerOrder, TrainerReply

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineStatus:
    """The status of an engine: its numbers, adapters, running requests and jobs."""

    numbers: EngineNumbers
    adapters: list[AdapterStatus]
    running: list[RunningStatus]
    jobs: list[JobStatus]


class EngineClient(Protocol):
    """An engine that serves a model; for one event loop, and for threads beside it."""

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it came without one."""

    @property
    def ended(self) -> EngineError | None:
        """The reason why nothing is served any more; None while it is."""

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        """The adapters that requests may name."""

    def version_of(self, adapter: ServedAdapter) -> AdapterVersion:
        """Return the version that an adapter of `adapters` is, or was."""

    def hash(self, versions: Iterable[AdapterVersion]) -> Future[None]:
        """Have the digests of versions computed that are not known."""

    # ------------------------------------------------------------------------------- requests

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        """Make a request; for any thread, as a text is tokenized. Errors as `Executor.request`."""

    def submit(self, request: Request) -> Stream:
        """Submit a request; why the engine refuses it is raised by the stream.

        Raises:
            EngineError: the engine takes no requests.
        """

    def taken(self) -> Future[None]:
        """Return what is done once the engine has seen all that was submitted before."""

    def most_tokens(self, adapter: ServedAdapter | None) -> Future[int]:
        """Count the most tokens of a prompt and its output that there are pages for."""

    # ------------------------------------------------------------------------------- adapters

    def add_adapter(
        self, name: str, path: Path, *, replace: bool = False, expected_version: int | None = None
    ) -> Future[ServedAdapter]:
        """Load an adapter beside the steps, as `AsyncEngine.add_adapter`."""

    def remove_adapter(self, name: str) -> Future[None]:
        """Forget an adapter, as `AsyncEngine.remove_adapter`."""

    # ------------------------------------------------------------------------------- jobs

    def begin_job(self, order: JobOrder, tell: Tell) -> Future[None]:
        """Begin a finetuning job; errors as of `OrderedJobs.begin`.

        Args:
            tell: is called with what comes of it, on any thread.
        """

    def end_job(self, adapter: str, *, interrupts: bool) -> Future[None]:
        """End a job after its step with a checkpoint, or now; its end is told."""

    def put_grades(
        self, adapter: str, rewards: Sequence[float], error: str | None = None
    ) -> Future[None]:
        """Give a job the grades of the completions that it told last, or why there are none."""

    def begin_trainer(self, name: str, order: LoraOrder) -> Future[None]:
        """Make a trainer of the engine's name; errors as of `AsyncEngine.trainer`."""

    def train(self, name: str, order: TrainerOrder) -> Future[TrainerReply]:
        """Have a trainer do something, behind what it was told before."""

    def end_trainer(self, name: str) -> Future[None]:
        """Close a trainer; nothing happens if there is none."""

    # ------------------------------------------------------------------------------- status

    def numbers(self) -> Future[EngineNumbers]:
        """Return what is there now, and what was done since the start."""

    def jobs(self) -> Future[list[JobStatus]]:
        """Return the jobs as they came, and how far each is."""

    def status(self) -> Future[EngineStatus]:
        """Return all that is known of the engine."""

    def health(self) -> Health:
        """Return whether the engine goes on, and takes requests."""

    # ------------------------------------------------------------------------------- its life

    def wait(self, future: Future[Result]) -> Result:
        """Wait for one of these futures, before the event loop runs."""

    def listening(self) -> AbstractContextManager[None]:
        """Have the running event loop hear the engine, within a `with`."""

    def pause(self, timeout_s: float) -> Future[None]:
        """Run no steps, as `StepThread.pause`."""

    def go_on(self) -> Future[None]:
        """Run steps again."""

    def set_keys(self, keys: Keys) -> Future[None]:
        """Let clients of its base, if it has a port for them, come with these keys alone."""

    def drain(self, timeout_s: float) -> Future[None]:
        """End the work that is there, and take nothing new, as `AsyncEngine.drain`."""
