"""The base's end over ZeroMQ: TCP, and shared memory for the tensors of clients on its machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pcg.errors import SplitError
from pcg.split.messages import (
    Buffer,
    Message,
    frames_of,
    header_of,
    read_header,
    read_message,
)
from pcg.split.transports.curve import BaseCurve, ClientKeys
from pcg.split.transports.published_tensors import PublishedTensors
from pcg.split.transports.shared_memory import LEAST_BYTES, SharedMemory
from pcg.split.transports.transport import Endpoint
from pcg.split.transports.zeromq_library import zmq

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
        there = dict(self._poller.poll(math.ceil(max(0, timeout_s) * 1000)))
        if self._woken in there:
            os.read(self._woken, 4096)
        if self._client_keys is not None:
            for address in self._client_keys.answer():
                # Once each: such a client comes again and again.
                if address not in self._warned and len(self._warned) < _MOST_WARNINGS:
                    self._warned.add(address)
                    _LOG.warning("a client at %s has a CURVE key that is not known", address)
        while self._events in there and self._events.poll(0):
            self._events.recv_multipart()
            self._probes = [time.monotonic() + later for later in _LOOK_AGAIN_S]
        found: list[tuple[bytes, Message | Exception]] = []
        while len(found) < _MOST_AT_ONCE:
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
            except self._zmq.Again:
                break
            client = frames[0].bytes
            try:
                message = self._read(client, [one.buffer for one in frames[1:]])
                if message.op == "hello":
                    message.sender = self._sender(frames[-1])
                found.append((client, message))
            except SplitError as error:
                found.append((client, error))
            except Exception as error:  # whoever has sent it, perhaps without a key
                _LOG.debug("no message of client %s: %s", client.hex(), error)
                found.append((client, SplitError("this is no message that a base can read")))
        return found

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of calls that nobody has read yet
            os.write(self._waker, b"\0")

    def _sender(self, frame: Any) -> str:
        """Return the name of a client's certificate, if it was asked for, or its address."""
        name: str = frame.get("Peer-Address" if self._client_keys is None else "User-Id")
        return name

    def _read(self, client: bytes, frames: Sequence[Buffer]) -> Message:
        shared = self._shared.get(client)
        header = frames[0] if frames else b""
        if memoryview(header).nbytes > _MOST_HEADER_BYTES:
            raise SplitError(f"a header has {_MOST_HEADER_BYTES} bytes at most")
        message, kinds = read_header(header)
        places = message.fields.get("places")
        if places is None or shared is None:
            return read_message(frames)
        if not isinstance(places, list) or len(places) != len(kinds):
            raise SplitError("places of tensors in the shared memory are a list, one for each")
        message.tensors = [
            shared.view(at, *kind, is_reply=False) for at, kind in zip(places, kinds, strict=True)
        ]
        return message

    def send(self, client: bytes, message: Message) -> bool:
        shared = self._shared.get(client)
        places = None
        if shared is not None and message.tensors:
            places = self._published_place(message) or shared.put(message.tensors, is_reply=True)
        if places is None:
            frames = frames_of(message)
        else:
            fields = {**message.fields, "places": places}
            frames = [header_of(Message(message.op, message.seq, fields, message.tensors))]
        return self._send(client, frames)

    def _published_place(self, message: Message) -> list[Mapping[str, int]] | None:
        """Return where the tensor of a message was published, if it is one that was."""
        if self._published is None or len(message.tensors) > 1:
            return None
        place = self._published.place(message.tensors[0])
        return None if place is None else [place]

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
