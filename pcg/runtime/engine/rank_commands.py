"""Commands that rank 0 sends to its followers, in MessagePack.

    Submit · Cancel                              requests
    PutAdapter · RemoveAdapter                   adapters
    PrepareJob · AddJob · DropJob · ChangeJob    jobs
    Step                                         the next step
    End                                          release the followers

A command contains only numbers, text, bytes and lists, so that decoding creates no other objects.
All ranks run a command at the same position between two steps, and reach the same state or the same
error. A message also contains the numbers of earlier commands that failed on rank 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import msgspec
import torch

from pcg.files import expanded
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.peft.registry import is_saved, recipe_fields, recipe_from, recipe_of_fields
from pcg.ranks.agreement import agreed
from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.example import Example
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.metrics.events import Kind
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import PlainRequest, adapter_facts
from pcg.runtime.training.options import JobArguments


class Replica(Protocol):
    """The engine of a follower rank.

    Attributes:
        prepared: created jobs that do not run yet, by name.
    """

    engine: EngineLoop
    state: ModelState
    prepared: dict[str, Job]

    def prepare_job(self, arguments: JobArguments) -> Job:
        """Create a job."""

    def version(self, name: VersionName) -> Adapter:
        """Return the adapter of a version name of rank 0."""


class RankCommand(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A command for all ranks.

    Attributes:
        at_once: True if ranks exchange messages in the command, so that rank 0 sends it before
            running it; False to send it with the next message.
    """

    at_once: ClassVar[bool] = True

    def apply(self, replica: Replica) -> None:
        """Run the command on a follower rank."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------- requests


class Submit(RankCommand, frozen=True):
    """Submit a request; `submitted_s` is the arrival time on rank 0's clock."""

    at_once: ClassVar[bool] = False
    request: PlainRequest
    submitted_s: float

    def apply(self, replica: Replica) -> None:
        name = self.request.adapter
        adapter = None if name is None else replica.version(name)
        replica.engine.submit(self.request.request(adapter), self.submitted_s)


class Cancel(RankCommand, frozen=True):
    """End a request; `kind` is the kind of the event."""

    at_once: ClassVar[bool] = False
    request: str
    kind: str

    def apply(self, replica: Replica) -> None:
        replica.engine.cancel(self.request, Kind(self.kind))


# ---------------------------------------------------------------------------------------- adapters


class PutAdapter(RankCommand, frozen=True):
    """Serve an adapter.

    Attributes:
        recipe: fields of a new adapter's recipe; None for a saved adapter.
        files: the files of a saved adapter, by name.
    """

    name: str
    seed: int
    recipe: dict[str, Any] | None
    files: dict[str, bytes]

    @classmethod
    def of(cls, name: str, path_or_config: object, seed: int) -> Self:
        """Return the command for an adapter, with the content of its files.

        Raises:
            OSError: a file cannot be read.
            AdapterError, UnsupportedError: the value is not a recipe.
        """
        if is_saved(path_or_config):
            directory = expanded(path_or_config)
            files = {file: (directory / file).read_bytes() for file in (CONFIG, WEIGHTS)}
            return cls(name, seed, None, files)
        return cls(name, seed, recipe_fields(recipe_from(path_or_config)), {})

    def apply(self, replica: Replica) -> None:
        put_adapter(replica.state, self.name, lambda: self._adapter(replica.state))

    def _adapter(self, state: ModelState) -> Adapter:
        if self.recipe is not None:
            recipe = recipe_of_fields(self.recipe)
            return state.make_adapter(self.name, recipe, seed=self.seed)
        with tempfile.TemporaryDirectory(prefix="pcg-adapter-") as folder:
            for file, content in self.files.items():
                (Path(folder) / file).write_bytes(content)
            # Copy the tensors, which map files of a temporary folder.
            return state.make_adapter(self.name, Path(folder), seed=self.seed).map(torch.clone)


def put_adapter(state: ModelState, name: str, make: Callable[[], Adapter]) -> Adapter:
    """Create an adapter on each rank, compare the results, and serve it; a collective call.

    Raises:
        PcgError: a rank could not create the adapter, or the adapters differ.
    """
    adapter = agreed(state.world, f"add_adapter({name!r})", make, adapter_facts)
    program = state.program_for(adapter)
    for test in state.self_tests(adapter, program):
        test()
    return state.put_adapter(adapter, program)


class RemoveAdapter(RankCommand, frozen=True):
    """Remove an adapter."""

    name: str

    def apply(self, replica: Replica) -> None:
        replica.state.remove_adapter(self.name)


# -------------------------------------------------------------------------------------------- jobs


class ExampleData(msgspec.Struct, array_like=True, frozen=True):
    """Examples: concatenated ids and labels, lengths, all 64-bit integers, and weights."""

    ids: bytes
    labels: bytes
    lengths: bytes
    weights: tuple[float, ...]
    format: str
    truncated: int
    dropped: int
    places: tuple[str, ...]
    parts: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, data: Dataset) -> Self:
        examples = data.examples
        return cls(
            _joined([example.ids for example in examples]),
            _joined([example.labels for example in examples]),
            array("q", [len(example.ids) for example in examples]).tobytes(),
            tuple(example.weight for example in examples),
            data.format,
            data.truncated,
            data.dropped,
            tuple(data.places),
            data.parts,
            data.names,
        )

    def dataset(self) -> Dataset:
        ids, labels, lengths = (array("q", x) for x in (self.ids, self.labels, self.lengths))
        ends = list(itertools.accumulate(lengths, initial=0))
        examples = tuple(
            Example(list(ids[start:end]), list(labels[start:end]), weight=weight)
            for weight, (start, end) in zip(self.weights, itertools.pairwise(ends), strict=True)
        )
        facts = (self.format, self.truncated, self.dropped, self.places)
        return Dataset(examples, *facts, parts=self.parts, names=self.names)


def _joined(rows: Sequence[Sequence[int]]) -> bytes:
    joined = array("q")
    for row in rows:
        joined.extend(row)
    return joined.tobytes()


class PrepareJob(RankCommand, frozen=True):
    """Create a job from tokenized examples.

    Attributes:
        recipe: fields of a new adapter's recipe; None for a path or without a recipe.
        path: directory of the initial adapter, which each rank reads; None without one.
        options: the other fields of `JobArguments`, except the callback.
    """

    data: ExampleData
    evaluation: ExampleData | None
    recipe: dict[str, Any] | None
    path: str | None
    options: dict[str, Any]

    @classmethod
    def of(cls, arguments: JobArguments) -> Self:
        """Return the command for a job with tokenized data."""
        data, evaluation, peft = arguments.data, arguments.eval_data, arguments.peft
        assert isinstance(data, Dataset)
        assert isinstance(evaluation, Dataset | None)
        recipe, path = None, None
        if is_saved(peft):
            path = str(peft)
        elif peft is not None:
            recipe = recipe_fields(recipe_from(peft))
        names = {field.name for field in dataclasses.fields(arguments)} - _OTHERWISE
        return cls(
            ExampleData.of(data),
            None if evaluation is None else ExampleData.of(evaluation),
            recipe,
            path,
            {name: getattr(arguments, name) for name in names},
        )

    def apply(self, replica: Replica) -> None:
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.options.items()
        }
        job = replica.prepare_job(
            JobArguments(
                self.data.dataset(),
                eval_data=None if self.evaluation is None else self.evaluation.dataset(),
                peft=self.path if self.recipe is None else recipe_of_fields(self.recipe),
                **options,
            )
        )
        replica.prepared[job.name] = job


_OTHERWISE = {"data", "eval_data", "peft", "on_step", "chat_template", "chat_template_kwargs"}


class AddJob(RankCommand, frozen=True):
    """Run a created job by name."""

    name: str

    def apply(self, replica: Replica) -> None:
        replica.engine.add_job(replica.prepared.pop(self.name))


class DropJob(RankCommand, frozen=True):
    """End a created job that does not run, by name."""

    name: str

    def apply(self, replica: Replica) -> None:
        replica.engine.drop_job(replica.prepared.pop(self.name))


class ChangeJob(RankCommand, frozen=True):
    """Pause, resume, cancel or interrupt a running job."""

    name: str
    change: Literal["pause", "resume", "cancel", "interrupt"]

    def apply(self, replica: Replica) -> None:
        getattr(replica.engine, f"{self.change}_job")(self.name)


# ------------------------------------------------------------------------------------------- steps


class Step(RankCommand, frozen=True):
    """Run the next step."""

    def apply(self, replica: Replica) -> None:
        replica.engine.step()


class End(RankCommand, frozen=True):
    """End the followers' command loops; `text` is the reason."""

    text: str


# ---------------------------------------------------------------------------------------- messages


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message of rank 0.

    Attributes:
        commands: encoded commands, in order.
        failed: numbers of commands that failed on rank 0 since the last message.
        released: adapter versions that were garbage-collected on rank 0.
    """

    commands: list[msgspec.Raw] = []
    failed: list[int] = []
    released: list[VersionName] = []


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a {type(value).__name__} has no place in a message")


AnyCommand: TypeAlias = (
    Submit | Cancel | PutAdapter | RemoveAdapter | PrepareJob | AddJob | DropJob | ChangeJob
    | Step | End
)  # fmt: skip
encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
command_of = msgspec.msgpack.Decoder(AnyCommand).decode
message_of = msgspec.msgpack.Decoder(Message).decode
names_of = msgspec.msgpack.Decoder(list[VersionName]).decode
