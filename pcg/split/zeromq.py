"""Transports over ZeroMQ: TCP, and shared memory for the tensors within a machine."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.curve import BaseCurve, ClientCurve, ClientKeys, is_loopback, zmq
from pcg.split.messages import Buffer, Message, frames_of, header_of, read_message
from pcg.split.shared_memory import LEAST_BYTES, PublishedTensors, SharedMemory, published_tensor
from pcg.split.transport import Disconnected, Endpoint, Transport

_LOG = logging.getLogger("pcg.split")
HEARTBEAT_MS = 5_000
"""Ends ping each other so often; one whose machine is gone is noticed after three of them."""
_MOST_REPLIES = 8
"""Replies that wait for a client which reads none, before it is dropped."""
_MOST_UNREAD = 4
"""Messages of a client that are taken from the network before the base reads them."""
_MOST_AT_ONCE = 256
"""Messages that are read before a batch runs."""
_MOST_HEADER_BYTES = 2**20
_MOST_WARNINGS = 1000
_SWEEP_S = 0.05
"""Time between two probes of all clients."""
_LOOK_AGAIN_S = (0.0, 0.1, 0.5, 2.0)
"""Times after a disconnection at which clients are probed: ZeroMQ forgets one a little later."""
_PROBE = Message("ping", 0)


class ZeroMqEndpoint(Endpoint):
    """Listens at a port."""

    def __init__(
        self, host: str, port: int, max_request_bytes: int, curve: BaseCurve | None = None
    ) -> None:
        """Listen, encrypted with `curve`.

        Raises:
            SplitError: the address is taken, or none of this machine.
        """
        self._zmq = zmq()
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.ROUTER)
        self._socket.set(self._zmq.ROUTER_MANDATORY, 1)
        self._socket.set(self._zmq.LINGER, 1000)
        self._socket.set(self._zmq.SNDHWM, _MOST_REPLIES)
        self._socket.set(self._zmq.RCVHWM, _MOST_UNREAD)
        self._socket.set(self._zmq.MAXMSGSIZE, max_request_bytes)
        self._socket.set(self._zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(self._zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        host = host.removeprefix("[").removesuffix("]")
        self._socket.set(self._zmq.IPV6, int(":" in host))
        self._client_keys: ClientKeys | None = None
        self._warned: set[str] = set()
        if curve is not None:
            self._socket.set(self._zmq.CURVE_SERVER, 1)
            self._socket.set(self._zmq.CURVE_SECRETKEY, curve.secret)
            if curve.clients is not None:
                self._client_keys = ClientKeys(self._context, curve.clients)
        shown = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{shown}:{port or '*'}")
        except self._zmq.ZMQError as error:
            self._context.destroy(0)
            raise SplitError(
                f"cannot listen at {shown}:{port}: {error}; choose another --host or --port"
            ) from None
        bound = self._socket.get_string(self._zmq.LAST_ENDPOINT)
        self.where = f"{shown}:{bound.rpartition(':')[2]}"
        self._events = self._socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
        self._poller = self._zmq.Poller()
        self._poller.register(self._socket, self._zmq.POLLIN)
        self._poller.register(self._events, self._zmq.POLLIN)
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poller.register(self._woken, self._zmq.POLLIN)
        if self._client_keys is not None:
            self._poller.register(self._client_keys.socket, self._zmq.POLLIN)
        self._probes: list[float] = []
        self._swept_s = 0.0
        self._shared: dict[bytes, SharedMemory] = {}
        self._published: PublishedTensors | None = None

    def receive(self, timeout_s: float) -> Sequence[tuple[bytes, Message | Exception]]:
        # Rounded up: it takes whole milliseconds, and would be asked again and again in the last.
        ready = dict(self._poller.poll(math.ceil(max(0, timeout_s) * 1000)))
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._client_keys is not None:
            for address in self._client_keys.answer():
                # Once each: such a client comes again and again.
                if address not in self._warned and len(self._warned) < _MOST_WARNINGS:
                    self._warned.add(address)
                    _LOG.warning("a client at %s has a CURVE key that is not known", address)
        while self._events in ready and self._events.poll(0):
            self._events.recv_multipart()
            self._probes = [time.monotonic() + later for later in _LOOK_AGAIN_S]
        received: list[tuple[bytes, Message | Exception]] = []
        while len(received) < _MOST_AT_ONCE:
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                break
            client = frames[0].bytes
            try:
                message = self._read(client, [frame.buffer for frame in frames[1:]])
                if message.op == "hello":
                    # The name of a client's certificate, if there are any, or its address.
                    has_names = self._client_keys is not None
                    message.sender = frames[-1].get("User-Id" if has_names else "Peer-Address")
                received.append((client, message))
            except SplitError as error:
                received.append((client, error))
            except Exception as error:  # whoever has sent it, perhaps without a key
                _LOG.debug("no message of client %s: %s", client.hex(), error)
                received.append((client, SplitError("this is no message that a base can read")))
        return received

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of calls that nobody has read yet
            os.write(self._waker, b"\0")

    def _read(self, client: bytes, frames: Sequence[Buffer]) -> Message:
        shared = self._shared.get(client)
        header = frames[0] if frames else b""
        if memoryview(header).nbytes > _MOST_HEADER_BYTES:
            raise SplitError(f"a header has {_MOST_HEADER_BYTES} bytes at most")
        placed = None if shared is None else partial(shared.view, is_reply=False)
        return read_message(frames, placed)

    def send(self, client: bytes, message: Message) -> bool:
        shared, place = self._shared.get(client), None
        if shared is not None and self._published is not None and len(message.tensors) == 1:
            place = self._published.place(message.tensors[0])
        frames = _frames(message, shared, True) if place is None else _placed(message, [place])
        return self._send(client, frames)

    def _send(self, client: bytes, frames: Sequence[Buffer]) -> bool:
        try:
            self._socket.send_multipart([client, *frames], self._zmq.NOBLOCK, copy=False)
        except self._zmq.ZMQError as error:  # it is gone, or reads nothing
            _LOG.debug("no reply to client %s: %s", client.hex(), error)
            return False
        return True

    def gone(self, clients: Sequence[bytes]) -> list[bytes]:
        now_s = time.monotonic()
        # Clients that come and go quickly do not have all others probed as often.
        if not self._probes or max(self._probes[0], self._swept_s + _SWEEP_S) > now_s:
            return []
        self._swept_s = now_s
        self._probes = [at for at in self._probes if at > now_s]
        return [client for client in clients if not self._send(client, frames_of(_PROBE))]

    def publish(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not tensors or not hasattr(os, "memfd_create"):
            return {}
        try:
            self._published = PublishedTensors(tensors)
        except OSError as error:  # an older Linux
            _LOG.debug("clients fetch copies: %s", error)
            return {}
        return self._published.tensors

    def share(self, client: bytes, size_bytes: int) -> Message:
        self.forget(client)
        size = max(LEAST_BYTES, -(-size_bytes // 4096) * 4096)
        shared = self._shared[client] = SharedMemory.make(size)
        place = {"process": os.getpid(), "descriptor": shared.descriptor, "bytes": size}
        return Message("reply", 0, place)

    def forget(self, client: bytes) -> None:
        shared = self._shared.pop(client, None)
        if shared is not None:
            shared.close()

    def close(self) -> None:
        for client in list(self._shared):
            self.forget(client)
        if self._published is not None:
            self._published.close()
        self._socket.disable_monitor()
        if self._client_keys is not None:
            self._client_keys.socket.close()
        os.close(self._woken)
        os.close(self._waker)
        self._context.destroy(1000)


_SLICE_MS = 200
"""A base that ends is noticed so much later at most."""
_PATIENCE_S = 10.0
"""A call that waits so long says that the base is busy, and again each time that this doubles."""
_FIRST_BYTES = 2**22
_ADDRESS = re.compile(
    r"(?P<host>\[[0-9a-f:.]+(?:%\w+)?\]|[0-9a-f:.]+|[\w.-]+):(?P<port>\d{1,5})", re.ASCII | re.I
)
_MOST_HANDSHAKES = 5
"""Handshakes that fail before a client gives up: a base that ends may break off one."""


def address_of(where: str) -> tuple[str, int]:
    """Return the host and the port of a base's address. SplitError: it is invalid."""
    match = _ADDRESS.fullmatch(where.removeprefix("tcp://"))
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise SplitError(
            f"{where!r} is no address of a base executor; use host:port, and [::1]:port for IPv6"
        )
    return match["host"], int(match["port"])


class ZeroMqTransport(Transport):
    """A connection to `host:port`; tensors may lie in memory that the processes share."""

    def __init__(
        self,
        where: str,
        curve: ClientCurve | None = None,
        *,
        shares_memory: bool = False,
        is_required: bool = True,
    ) -> None:
        """Check the address; with `curve` the connection is encrypted.

        Args:
            shares_memory: True if tensors lie in shared memory of this machine.
            is_required: True if a base that shares no memory is an error, and not a warning.
        """
        self._host, port = address_of(where)
        self.where = f"{self._host}:{port}"
        self._curve = curve
        self._failed = 0
        self._zmq = zmq()
        self._context: Any = None
        self._socket: Any = None
        self._events: Any = None
        self._shares_memory, self._is_required = shares_memory, is_required
        self._shared: SharedMemory | None = None
        self._ask: Message | None = None

    def open(self) -> None:
        self.close()
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.DEALER)
        # A reply has come to all that matters; what waits for a base that is gone is made again.
        self._socket.set(self._zmq.LINGER, 0)
        self._socket.set(self._zmq.IPV6, int(":" in self._host))
        self._socket.set(self._zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(self._zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        if self._curve is not None:
            self._socket.set(self._zmq.CURVE_SERVERKEY, self._curve.server)
            self._socket.set(self._zmq.CURVE_PUBLICKEY, self._curve.public)
            self._socket.set(self._zmq.CURVE_SECRETKEY, self._curve.secret)
        self._events = self._socket.get_monitor_socket(
            sum(getattr(self._zmq, f"EVENT_{name}") for name in _EVENTS)
        )
        self._socket.set(self._zmq.RCVTIMEO, _SLICE_MS)
        try:
            self._socket.connect(f"tcp://{self.where}")
        except self._zmq.ZMQError as error:
            self.close()
            raise SplitError(f"{self.where!r} cannot be connected to: {error}") from None

    def welcomed(self, ask: Message) -> None:
        if not self._shares_memory:
            return
        self._ask = ask
        try:
            self._grow(_FIRST_BYTES)
        except SplitError as error:
            if self._is_required:
                raise
            _LOG.warning("%s", error)

    def _grow(self, size_bytes: int) -> None:
        """Have the base share memory. SplitError: it is not on this machine."""
        assert self._ask is not None
        self._forget()
        reply = self._reply(dataclasses.replace(self._ask, fields={"bytes": size_bytes}), 30.0)
        if reply.op == "error":
            raise SplitError(f"the base executor shares no memory: {reply.fields.get('error')}")
        process, descriptor = reply.number("process", 2**31), reply.number("descriptor", 2**31)
        try:
            self._shared = SharedMemory.attach(process, descriptor, reply.number("bytes", 2**48))
        except OSError as error:
            raise SplitError(
                f"the memory of process {process} cannot be shared ({error}): the base executor is "
                "on another machine, in another container or of another user; use transport='tcp'"
            ) from None

    def exchange(self, message: Message, timeout_s: float) -> Message:
        size = sum(-(-tensor.nbytes // 64) * 64 for tensor in message.tensors)
        if self._shared is not None and size > self._shared.half:
            self._grow(2 * size + size // 2)
        reply = self._reply(message, timeout_s)
        places = reply.fields.get("places")
        is_mapped = isinstance(places, list) and any(isinstance(at, dict) for at in places)
        if self._shared is not None and reply.size_bytes > self._shared.half and not is_mapped:
            self._grow(2 * reply.size_bytes + reply.size_bytes // 2)
        return reply

    def _reply(self, message: Message, timeout_s: float) -> Message:
        try:
            return self._exchanged(message, timeout_s)
        except Exception:
            raise
        except BaseException:
            # Interrupted. The base may answer yet, and would write where later replies lie.
            self.close()
            raise

    def _exchanged(self, message: Message, timeout_s: float) -> Message:
        if self._socket is None:
            raise Disconnected("not connected")
        self._look()
        try:
            self._socket.send_multipart(_frames(message, self._shared, False), copy=False)
        except self._zmq.ZMQError as error:
            raise Disconnected(str(error)) from None
        begun_s = time.monotonic()
        end_s, said_s = begun_s + timeout_s, begun_s + _PATIENCE_S
        while time.monotonic() <= end_s:  # also where something else comes again and again
            try:
                reply = self._read(self._socket.recv_multipart(copy=False))
            except self._zmq.Again:
                self._look()
                continue
            if reply.op == "error":  # perhaps of a base that has come since, and knows nobody
                self._look()
            # Replies that nobody waited for, after an interruption, and probes of the base.
            if reply.seq == message.seq and reply.op != "busy":
                return reply
            if reply.seq == message.seq:
                now_s = time.monotonic()
                end_s = now_s + timeout_s
                if now_s > said_s:
                    waited_s, said_s = now_s - begun_s, now_s + (now_s - begun_s)
                    _LOG.warning(
                        "the base executor at %s is busy: %s requests of its clients wait, this "
                        "one for %.0f s", self.where, reply.fields.get("requests"), waited_s,
                    )  # fmt: skip
            if reply.op == "error" and reply.seq == 0:
                raise SplitError(f"the base executor refuses: {reply.fields.get('error')}")
        raise Disconnected(f"no answer in {timeout_s:g} s")

    def _look(self) -> None:
        """Read the connection's events.

        Raises:
            Disconnected: it has ended.
            SplitError: the ends do not accept each other, and will not.
        """
        failed = [getattr(self._zmq, f"EVENT_{name}") for name in _HANDSHAKE_FAILED]
        while self._events.poll(0):
            event = self._zmq.utils.monitor.parse_monitor_message(self._events.recv_multipart())
            if event["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failed = 0
                continue
            if event["event"] == self._zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise SplitError(
                    f"the base executor at {self.where} does not know this client's CURVE key; "
                    "have its NAME.key put in the folder that the base was given (--curve-clients)"
                )
            if event["event"] in failed:
                self._failed += 1
                if self._failed >= _MOST_HANDSHAKES:
                    raise SplitError(f"no handshake with {self.where} succeeds: {self._mismatch}")
                raise Disconnected(f"the handshake fails: {self._mismatch}")
            raise Disconnected("the connection is closed")

    @property
    def _mismatch(self) -> str:
        if self._curve is None:
            return "it is encrypted by CURVE; give the base's public key (curve_server=…)"
        return (
            "the base's CURVE key is another than the one given (curve_server=…), or the base was "
            "started without (--curve-key)"
        )

    def _read(self, frames: Sequence[Any]) -> Message:
        buffers = [frame.buffer for frame in frames]
        return read_message(buffers, None if self._shared is None else self._placed)

    def _placed(self, at: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if isinstance(at, dict):
            return published_tensor(at, dtype, shape)
        assert self._shared is not None
        # A copy: the next reply comes to the same place.
        return self._shared.view(at, dtype, shape, is_reply=True).clone()

    def _forget(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def close(self) -> None:
        self._forget()
        if self._context is not None:
            self._socket.disable_monitor()
            self._context.destroy(0)
            self._context = self._socket = self._events = None


def _frames(message: Message, shared: SharedMemory | None, is_reply: bool) -> Sequence[Buffer]:
    places = shared.put(message.tensors, is_reply) if shared and message.tensors else None
    return frames_of(message) if places is None else _placed(message, places)


def _placed(message: Message, places: Sequence[object]) -> Sequence[Buffer]:
    return [header_of(dataclasses.replace(message, fields={**message.fields, "places": places}))]


_HANDSHAKE_FAILED = (
    "HANDSHAKE_FAILED_AUTH", "HANDSHAKE_FAILED_NO_DETAIL", "HANDSHAKE_FAILED_PROTOCOL",
)  # fmt: skip
_EVENTS = ("DISCONNECTED", "HANDSHAKE_SUCCEEDED", *_HANDSHAKE_FAILED)


def transport_to(where: str, kind: str, curve: ClientCurve | None = None) -> Transport:
    """Return a transport to a base's address, by its name; `auto` shares memory on loopback.

    Raises:
        SplitError: the address or the name is invalid.
    """
    is_local = is_loopback(address_of(where)[0]) and hasattr(os, "memfd_create")
    if kind == "tcp" or (kind == "auto" and not is_local):
        return ZeroMqTransport(where, curve)
    if kind == "distributed":
        raise SplitError(
            "transport='distributed': the members of a process group are fixed, so that a client "
            "that comes late could not join, and one that dies would end all; use shared-memory on "
            "the base's machine, and tcp elsewhere"
        )
    if kind not in ("auto", "shared-memory"):
        raise SplitError(f"transport={kind!r}; use auto, tcp or shared-memory")
    is_required = kind == "shared-memory"
    return ZeroMqTransport(where, curve, shares_memory=True, is_required=is_required)
