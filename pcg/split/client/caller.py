"""A client's calls of a base, or of several that hold some layers each.

Calls are numbered, and continue where a base was started again: a base keeps nothing of a call, so
a lost call is repeated, with the same result, and a finetuning step continues where the connection
broke. The facts of a base are checked before a client believes them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from pcg.errors import BaseBusyError, BaseLostError, SplitError
from pcg.parallel.costs.accelerators import SHEETS, known_name
from pcg.split.messages import GRADIENT, LINEAR, UNKNOWN_GRAPH, VERSION, BaseFacts, Message, Piece
from pcg.split.transport import Disconnected, Moved, Transport


def checked_facts(fields: Mapping[str, Any], where: str) -> BaseFacts:
    """Return the facts of the base at an address. SplitError: they are damaged."""
    try:
        facts = msgspec.convert(fields, BaseFacts)
        # A name of a data sheet, and no path: a cost model may be read from a file, too.
        if known_name(facts.device.partition(":")[0], SHEETS) is None:
            raise msgspec.ValidationError(f"no data sheet is named {facts.device[:100]!r}")
    except msgspec.ValidationError as error:
        raise SplitError(
            f"the facts of what answers at {where} are damaged, or it is no base executor of this "
            f"version of pcg: {error}"
        ) from None
    return facts


_LOG = logging.getLogger("pcg.split")
_RETRY_S = 0.2
Kinds: TypeAlias = Sequence[tuple[Sequence[int], torch.dtype]]
"""Shapes and dtypes of tensors."""
_BUSY, _BUSY_S = BaseBusyError.__name__, 0.02
"""The kind of error of a base which has too much of this key waiting, and when to ask again."""
_MOST_LOST = 8
"""Connections that a call may break before it is the call that breaks them."""


class Caller:
    """Calls a base over a transport; any thread may call.

    Attributes:
        facts: the base's description of itself.
        moved: counts of the transport's traffic.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Mapping[str, Any],
        *,
        connect_s: float = 20.0,
        lost_s: float = 30.0,
    ) -> None:
        """Connect.

        Args:
            hello: this client's expectation of the base, and its key.
            connect_s: how long to wait for the base at first.
            lost_s: how long to look for a base that is gone.
        Raises:
            SplitError: the base refuses this client, with its reason.
            BaseLostError: no base answers.
        """
        self._transport = transport
        self._hello = {"version": VERSION, **hello}
        self._lost_s = lost_s
        self._numbers = itertools.count(1)
        self._lock = Lock()
        self._is_closed = False
        self._defined: set[str] = set()
        self.moved = Moved()
        with self._lock:
            self.facts: BaseFacts = self._open(connect_s, "no base executor answers at")
        # It may go away meanwhile, and come back with other weights.
        self._hello = {**self._hello, "digest": self.facts.digest}

    @property
    def where(self) -> str:
        return self._transport.where

    @torch.inference_mode(False)  # training goes on with what it maps and keeps
    def call(self, op: str, tensors: Sequence[Tensor] = (), **fields: bool | int | str) -> Message:
        """Make a call and return its reply.

        Raises:
            SplitError: the base refuses it, with its reason; or it is larger than the base takes.
            BaseLostError: the base is gone, or goes each time that it gets this call.
        """
        largest, most = (
            max((tensor.nbytes for tensor in tensors), default=0),
            self.facts.most_bytes,
        )
        if largest > most:
            raise SplitError(
                f"{op} has a tensor of {largest:,} bytes, and the base executor takes {most:,}; "
                "send fewer tokens at once, or start the base with a larger --max-request-mib"
            )
        with self._lock:
            if self._is_closed:
                raise SplitError("this connection to a base executor was closed")
            message = Message(op, next(self._numbers), fields, tensors)
            end_s, lost = time.monotonic() + self._lost_s, 0
            while True:
                try:
                    reply = self._transport.exchange(message, self._lost_s)
                except Disconnected as error:
                    where, lost = self._transport.where, lost + 1
                    if lost > _MOST_LOST:
                        raise BaseLostError(
                            f"the base executor at {where} was gone each of {lost} times that "
                            f"{op} was called ({error}); its log may say why"
                        ) from None
                    # A record that holds the error would hold all that is in the step's frames.
                    _LOG.warning(
                        "the base executor at %s is gone (%s); looking for it", where, str(error)
                    )
                    self._open(self._lost_s, "the base executor is gone, and none answers at")
                    _LOG.warning("the base executor at %s is back", where)
                    continue
                if reply.fields.get("kind") == _BUSY and time.monotonic() < end_s:
                    time.sleep(_BUSY_S)
                    continue
                break
            self.moved.calls += 1
            self.moved.sent_bytes += message.size_bytes
            self.moved.received_bytes += reply.size_bytes
        return _accepted(reply)

    def tensors(
        self, op: str, wanted: Kinds, tensors: Sequence[Tensor] = (), **fields: bool | int | str
    ) -> Sequence[Tensor]:
        """Make a call and return the tensors of its reply, of the shapes and dtypes `wanted`.

        Raises:
            SplitError: the base refuses it, with its reason; or its reply has other tensors.
            BaseLostError: the base is gone.
        """
        reply = self.call(op, tensors, **fields)
        kinds = [(tuple(shape), dtype) for shape, dtype in wanted]
        received = [(tuple(tensor.shape), tensor.dtype) for tensor in reply.tensors]
        if received != kinds:
            raise SplitError(
                f"the base executor answers {op} with {_shown(received)}, and not with "
                f"{_shown(kinds)}; it is damaged, or no base executor of pcg"
            )
        return reply.tensors

    def product(self, piece: Piece, x: Tensor, serves: bool) -> Tensor:
        """Return a product, or its gradient, on rows [T, in]; errors are those of `tensors`."""
        shapes = [self.facts.pieces[name] for name in piece.weights]
        width = shapes[0][1] if piece.kind == GRADIENT else sum(rows for rows, _ in shapes)
        wanted = [((len(x), width), x.dtype)]
        (outputs,) = self.tensors("run", wanted, (x,), piece=str(piece), serves=serves)
        return outputs

    def run_graph(
        self, piece: str, text: str, wanted: Kinds, tensors: Sequence[Tensor], serves: bool
    ) -> Sequence[Tensor]:
        """Run a graph, defined first if the base does not know it; errors are those of `tensors`.

        A base that was started again knows no graphs.
        """
        if text not in self._defined:
            self._define(text)
        try:
            return self.tensors("run", wanted, tensors, piece=piece, serves=serves)
        except SplitError as error:
            if UNKNOWN_GRAPH not in str(error):
                raise
        self._define(text)
        return self.tensors("run", wanted, tensors, piece=piece, serves=serves)

    def _define(self, text: str) -> None:
        self.call("define", text=text)
        self._defined.add(text)

    def close(self) -> None:
        """Say goodbye, and close the transport."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._transport.exchange(Message("bye", next(self._numbers)), 1.0)
            except Disconnected:
                pass
            finally:
                self._transport.close()

    def _open(self, timeout_s: float, otherwise: str) -> BaseFacts:
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                self._transport.open()
                message = Message("hello", next(self._numbers), self._hello)
                reply = _accepted(self._transport.exchange(message, max(left_s, _RETRY_S)))
                self._transport.welcomed(Message("share", next(self._numbers)))
                return checked_facts(reply.fields, self._transport.where)
            except Disconnected as error:
                self._transport.close()
                if time.monotonic() + _RETRY_S > end_s:
                    raise BaseLostError(
                        f"{otherwise} {self._transport.where} within {timeout_s:g} s ({error}); "
                        "start one with pcg serve-base"
                    ) from None
                time.sleep(_RETRY_S)
            except BaseException:  # an interruption, too
                self._transport.close()
                raise


def _accepted(reply: Message) -> Message:
    if reply.op == "error":
        raise SplitError(f"the base executor refuses: {reply.fields.get('error')}")
    return reply


def _shown(kinds: Kinds) -> str:
    return ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in kinds) or "no tensors"


class LayeredCaller(Caller):
    """Calls the base that holds the layer of a call.

    Attributes:
        callers: the connections.
    """

    def __init__(self, callers: Sequence[Caller]) -> None:
        """Check that the bases are of the same model. SplitError: they are not."""
        first = callers[0].facts
        for caller in callers:
            if caller.facts.digest != first.digest:
                raise SplitError(
                    f"the bases at {callers[0].where} and {caller.where} have other weights: "
                    f"{first.name} and {caller.facts.name}; connect to bases of one model"
                )
        self.callers = callers
        # A tied embedding is fetched from any base; only the base of the last layer multiplies it.
        self._holders: dict[str, dict[str, Caller]] = {}
        shapes: dict[str, dict[str, Any]] = {}
        for kind in ("fetched", "pieces"):
            known = [(caller, getattr(caller.facts, kind)) for caller in callers]
            self._holders[kind] = {name: caller for caller, of in known[::-1] for name in of}
            shapes[kind] = {name: shape for _, of in known for name, shape in of.items()}
        absent = {name for caller in callers for name in caller.facts.absent}
        self.facts = msgspec.structs.replace(
            first,
            **shapes,
            graphs=False,
            absent=tuple(sorted(absent - shapes["pieces"].keys())),
            rows=all(caller.facts.rows for caller in callers),
        )

    @property
    def where(self) -> str:
        return ",".join(caller.where for caller in self.callers)

    @property
    def moved(self) -> Moved:  # type: ignore[override]
        every = [caller.moved for caller in self.callers]
        return Moved(
            sum(counts.calls for counts in every),
            sum(counts.sent_bytes for counts in every),
            sum(counts.received_bytes for counts in every),
        )

    def call(self, op: str, tensors: Sequence[Tensor] = (), **fields: bool | int | str) -> Message:
        if op != "run":
            kind = "fetched" if op == "fetch" else "pieces"
            return self._at(kind, str(fields.get("name"))).call(op, tensors, **fields)
        piece = Piece.parse(str(fields["piece"]))
        where = [self._at("pieces", name) for name in piece.weights]
        if all(holder is where[0] for holder in where):
            return where[0].call(op, tensors, **fields)
        if piece.kind != LINEAR:
            raise SplitError(f"{piece} is at several base executors")
        replies = [
            caller.call(op, tensors, **{**fields, "piece": str(Piece(LINEAR, (name,)))})
            for caller, name in zip(where, piece.weights, strict=True)
        ]
        joined = torch.cat([reply.tensors[0] for reply in replies], -1)
        return Message("reply", replies[0].seq, tensors=(joined,))

    def close(self) -> None:
        for caller in self.callers:
            caller.close()

    def _at(self, kind: str, name: str) -> Caller:
        holder = self._holders[kind].get(name)
        if holder is None:
            raise SplitError(f"none of the base executors at {self.where} has {name[:200]!r}")
        return holder
