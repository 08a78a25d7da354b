"""Orders: what the first rank of an engine over ranks has the others do, in MessagePack.

    Submit · Cancel                        requests
    Put · Remove                           adapters
    Prepare · Add · Drop · Change          jobs
    Step                                   the next step
    End                                    the others are free

An order holds numbers, texts, bytes and lists alone: nothing in it becomes an object of another
kind. The first rank does what it orders at the same place between two steps, so that both come to
the same state, or fail alike; a message also tells which orders before it have failed there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.requests.plain import PlainRequest


class Submit(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """A request, and when it came."""

    request: PlainRequest
    submitted_s: float


class Cancel(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    """A request is to end; `kind` is that of the event."""

    request: str
    kind: str

    @property
    def call(self) -> str:
        return f"cancel({self.request!r})"


class Put(msgspec.Struct, array_like=True, tag="put", frozen=True):
    """An adapter is to be served.

    Attributes:
        recipe: that of a fresh adapter, as a manifest has it; None for one that was saved.
        files: those of a saved adapter, by their names.
    """

    name: str
    seed: int
    recipe: dict[str, Any] | None
    files: dict[str, bytes]


class Remove(msgspec.Struct, array_like=True, tag="remove", frozen=True):
    """No request names an adapter any more."""

    name: str


class ExampleData(msgspec.Struct, array_like=True, frozen=True):
    """Examples: all ids, all labels, as 64-bit integers, and the length of each example."""

    ids: bytes
    labels: bytes
    lengths: bytes
    format: str
    truncated: int
    dropped: int
    places: tuple[str, ...]


class Prepare(msgspec.Struct, array_like=True, tag="prepare", frozen=True):
    """A job is to be made.

    Attributes:
        recipe: that of a new adapter, as a manifest has it; None without one, and for a path.
        path: the directory of the adapter to start from, which each rank reads.
        options: the other fields of `JobArguments`, but its callback.
    """

    data: ExampleData
    evaluation: ExampleData | None
    recipe: dict[str, Any] | None
    path: str | None
    options: dict[str, Any]


class Add(msgspec.Struct, array_like=True, tag="add", frozen=True):
    """The job of that name, which was made, is to run."""

    name: str

    @property
    def call(self) -> str:
        return f"add_job({self.name!r})"


class Drop(msgspec.Struct, array_like=True, tag="drop", frozen=True):
    """The job of that name, which was made, does not run."""

    name: str

    @property
    def call(self) -> str:
        return f"drop_job({self.name!r})"


class Change(msgspec.Struct, array_like=True, tag="change", frozen=True):
    """A job that runs is to be changed by one of the engine's methods: `pause_job` and others."""

    method: str
    name: str

    @property
    def call(self) -> str:
        return f"{self.method}({self.name!r})"


class Step(msgspec.Struct, array_like=True, tag="step", frozen=True):
    """The next step is to run."""


class End(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """Nothing is ordered any more, and why."""

    text: str


Order: TypeAlias = Submit | Cancel | Put | Remove | Prepare | Add | Drop | Change | Step | End
Call: TypeAlias = Cancel | Add | Drop | Change
"""Orders that are calls of the engine, too, which ranks without a driver compare by their words."""


class Message(msgspec.Struct, array_like=True, frozen=True):
    """The orders that the first rank sends at once.

    Attributes:
        orders: what is to be done, in this order.
        failed: numbers of orders that have failed on the first rank, since the last message.
        released: versions that nothing on the first rank refers to any more.
    """

    orders: list[msgspec.Raw] = []
    failed: list[int] = []
    released: list[VersionName] = []


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"a {type(value).__name__} has no place in a message")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
order_of = msgspec.msgpack.Decoder(Order).decode
message_of = msgspec.msgpack.Decoder(Message).decode
names_of = msgspec.msgpack.Decoder(list[VersionName]).decode
