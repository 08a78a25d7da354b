"""Commands: all calls of a running engine, as values that cross processes.

    client.call(MostTokens(None))   → Future[int]

A command is a struct with fields, a reply type and a handler. A caller in the engine's process
applies the command. A caller in another process sends the encoded command, and the engine's process
decodes and applies it. `pcg.serve.engine.orders` has the commands that need parts of the server.

    class Ping(Command[str]):           # the reply type
        text: str

        def apply(self, engine: AsyncEngine) -> str | Future[str]: …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, cast, get_args

import msgspec

from pcg.errors import FinetuneError
from pcg.ir.program.program import Program
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion, VersionName
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.metrics.status import EngineNumbers, EngineStatus, JobStatus
from pcg.runtime.training.trainer.commands import (
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Publish,
    SaveState,
    TrainerCommands,
)
from pcg.runtime.training.trainer.datum import Saved, Scored, Stepped

Reply = TypeVar("Reply")
Value = TypeVar("Value")


class Command(msgspec.Struct, Generic[Reply], frozen=True, array_like=True, tag=True):
    """A command of an engine; subclasses name their reply type in their base."""

    def apply(self, engine: Any) -> Reply | Future[Reply]:
        """Run the command, on any thread; return the reply, or its future."""
        raise NotImplementedError

    @property
    def reply_type(self) -> Any:
        """The type of the reply in messages."""
        (base,) = type(self).__orig_bases__  # type: ignore[attr-defined]
        return get_args(base)[0]


def command_types() -> Any:
    """Return the union of all commands defined so far, for decoding."""

    def leaves(kind: type[Command[Any]]) -> list[type[Command[Any]]]:
        below = kind.__subclasses__()
        return [leaf for subclass in below for leaf in leaves(subclass)] if below else [kind]

    return Union[tuple(leaves(Command))]  # noqa: UP007  # of a list


# ---------------------------------------------------------------------------------------- adapters


class AddAdapter(Command[ServedAdapter], frozen=True):
    """Load a saved adapter while steps run; raises the errors of `AsyncEngine.add_adapter`."""

    name: str
    path: Path
    replace: bool = False
    expected_version: int | None = None

    def apply(self, engine: AsyncEngine) -> Future[ServedAdapter]:
        added = engine.add_adapter(
            self.name, self.path, replace=self.replace, expected_version=self.expected_version
        )
        return cast("Future[ServedAdapter]", added)


class RemoveAdapter(Command[None], frozen=True):
    """Remove an adapter; raises the errors of `AsyncEngine.remove_adapter`."""

    name: str

    def apply(self, engine: AsyncEngine) -> Future[None]:
        return engine.remove_adapter(self.name)


class Hash(Command[list[str | None]], frozen=True):
    """Return the digest of each version, computing missing digests; None for freed weights."""

    versions: list[VersionName]

    def apply(self, engine: AsyncEngine) -> Future[list[str | None]]:
        return engine.state.versions.hash(self.versions)


class MostTokens(Command[int], frozen=True):
    """Return the maximum length of prompt and output for which the pool has pages."""

    adapter: VersionName | None

    def apply(self, engine: AsyncEngine) -> int:
        adapter = None if self.adapter is None else engine.state.versions.named(self.adapter)
        return engine.most_tokens(adapter)


# ---------------------------------------------------------------------------------------- trainers


class LoraOrder(msgspec.Struct, frozen=True):
    """The options of a LoRA: rank, seed, and whether attention, other modules and head train."""

    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


class BeginTrainer(Command[None], frozen=True):
    """Create a trainer of a LoRA with AdamW; reply once the adapter is created.

    Raises:
        AdapterConflictError: a job or trainer already trains an adapter of that name.
        FinetuneError: the LoRA adapts no module.
    """

    name: str
    tenant: str
    lora: LoraOrder

    def apply(self, engine: AsyncEngine) -> Future[None]:
        recipe = {
            "peft_type": "LORA",
            "r": self.lora.rank,
            "lora_alpha": _ALPHA,
            "target_modules": _targets(engine.state.program, self.lora),
        }
        trainer = engine.trainer(
            self.name, peft=recipe, seed=self.lora.seed, optimizer="adamw", tenant=self.tenant
        )
        return trainer.created.future


class Train(Command[Any], frozen=True):
    """Queue a command of a trainer; the reply is the command's result.

    Raises:
        FinetuneError: no trainer has the name.
    """

    name: str
    command: TrainerCommands

    def apply(self, engine: AsyncEngine) -> Future[Any]:
        trainer = engine.trainers.get(self.name)
        if trainer is None:
            raise FinetuneError(f"there is no trainer {self.name!r}")
        result: Future[Any] = trainer.run(self.command).future
        if isinstance(self.command, Publish):  # the adapter itself does not cross processes
            return then(result, lambda snapshot: snapshot.version)
        return result

    @property
    def reply_type(self) -> Any:
        return _RESULTS[type(self.command)]


_RESULTS: Mapping[type, Any] = {
    Forward: Scored,
    ForwardBackward: Scored,
    OptimStep: Stepped,
    SaveState: Saved,
    LoadState: Saved,
    Publish: AdapterVersion,
}
_ALPHA = 32
"""LoRA's alpha; Tinker's protocol has no field for it."""


class EndTrainer(Command[None], frozen=True):
    """Close a trainer; no effect if no trainer has the name."""

    name: str

    def apply(self, engine: AsyncEngine) -> Future[None] | None:
        trainer = engine.trainers.get(self.name)
        return None if trainer is None else trainer.close()


def _targets(program: Program, lora: LoraOrder) -> list[str]:
    """Return the paths of the linear modules that a LoRA adapts.

    Modules with `attn` or `attention` in their paths count as attention.
    """
    base, targets = program.base, []
    for path in base.linear_modules():
        is_attention = "attn" in path or "attention" in path
        if path == base.output_module:
            is_trained = lora.train_unembed
        else:
            is_trained = lora.train_attn if is_attention else lora.train_mlp
        if is_trained:
            targets.append(path)
    if not targets:
        raise FinetuneError(
            "the LoRA would adapt no module of this model; set train_attn, train_mlp or "
            "train_unembed"
        )
    return targets


# ------------------------------------------------------------------------------------------ status


class Numbers(Command[EngineNumbers], frozen=True):
    """Return the engine's current numbers and totals since the start."""

    def apply(self, engine: AsyncEngine) -> EngineNumbers:
        return engine.numbers()


class Jobs(Command[list[JobStatus]], frozen=True):
    """Return the status of each job in order of submission."""

    def apply(self, engine: AsyncEngine) -> list[JobStatus]:
        return engine.jobs()


class Status(Command[EngineStatus], frozen=True):
    """Return the numbers, adapters, running requests and jobs of the engine."""

    def apply(self, engine: AsyncEngine) -> EngineStatus:
        return EngineStatus(engine.numbers(), engine.adapters(), engine.running(), engine.jobs())


class Taken(Command[None], frozen=True):
    """Wait until the engine has processed all requests submitted earlier."""

    def apply(self, engine: AsyncEngine) -> Future[None]:
        return engine.call(lambda: None)  # calls run in order


# -------------------------------------------------------------------------------------------- life


class Pause(Command[None], frozen=True):
    """Stop steps until `GoOn` or a timeout in seconds; reply once no step runs."""

    timeout_s: float

    def apply(self, engine: AsyncEngine) -> Future[None]:
        return engine.pause(self.timeout_s)


class GoOn(Command[None], frozen=True):
    """Resume steps."""

    def apply(self, engine: AsyncEngine) -> Future[None]:
        return engine.go_on()


class Close(Command[None], frozen=True):
    """End the engine after its step."""

    def apply(self, engine: AsyncEngine) -> None:
        engine.close()


# ----------------------------------------------------------------------------------------- futures


def settled(act: Callable[[], Value | Future[Value]]) -> Future[Value]:
    """Return the future of a function's result or error."""
    future: Future[Value] = Future()
    try:
        value = act()
    except Exception as error:
        future.set_exception(error)
        return future
    if isinstance(value, Future):
        return value
    future.set_result(value)
    return future


def then(future: Future[Value], act: Callable[[Value], Reply]) -> Future[Reply]:
    """Return the future of a function applied to another future's result."""
    after: Future[Reply] = Future()

    def go_on(ended: Future[Value]) -> None:
        try:
            after.set_result(act(ended.result()))
        except Exception as error:
            after.set_exception(error)

    future.add_done_callback(go_on)
    return after
