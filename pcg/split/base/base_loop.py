"""The loop of a base executor: takes messages, batches requests, runs them, and replies.

Work by the weights runs on a second thread, task by task. Meanwhile the loop's own thread continues
to read: it greets clients, notes when requests arrive, and replies to those that wait that the base
is busy, and not gone. Clients cannot fill the log, and wait after each failure.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from pcg.errors import BaseBusyError, PcgError, RankLostError, SplitError
from pcg.kernels.devices import device_pool, on_device
from pcg.keys import Key, Keys, Scope, open_keys
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.options import BaseOptions
from pcg.split.base.piece_rules import MOST_CHARACTERS
from pcg.split.base.queues import Queues, Waiting, make_policy
from pcg.split.messages import GRADIENT, GRAPH, VERSION, Message, Piece, config_difference, failure
from pcg.split.transport import Endpoint

_LINES_PER_S = 5.0
_MOST_AT_ONCE = 50


class LimitedLog:
    """A log with a limited number of lines a second.

    Attributes:
        left_out: lines that were dropped since the last written line.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._allowed = float(_MOST_AT_ONCE)
        self._seen_s = time.monotonic()
        self.left_out = 0

    def say(self, level: int, text: str, *values: object, error: bool = False) -> None:
        """Log a line; with `error` the traceback of the current exception follows."""
        now_s = time.monotonic()
        more = (now_s - self._seen_s) * _LINES_PER_S
        self._allowed, self._seen_s = min(_MOST_AT_ONCE, self._allowed + more), now_s
        if self._allowed < 1:
            self.left_out += 1
            return
        self._allowed -= 1
        if self.left_out:
            text, values = f"{text} (%d lines before it are left out)", (*values, self.left_out)
            self.left_out = 0
        self._logger.log(level, text, *values, exc_info=error)


_FIRST_S, _MOST_S = 0.25, 8.0
_FORGOTTEN_S = 60.0
_MOST_NAMES = 4096


@dataclass
class _Last:
    """The last failure of a name: the delay after it, and its end."""

    delay_s: float
    until_s: float


class Setbacks:
    """Names that failed lately, which wait: addresses of wrong keys, and keys of refused graphs."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def wait_s(self, name: str, now_s: float) -> float:
        """Return how long a name waits for the next try; 0 for not at all."""
        last = self._last.get(name)
        return 0.0 if last is None else max(0.0, last.until_s - now_s)

    def note(self, name: str, now_s: float) -> None:
        """Note a failure; the delay doubles."""
        kept = {
            other: failure
            for other, failure in self._last.items()
            if failure.until_s + _FORGOTTEN_S > now_s and other != name
        }
        before = self._last.get(name)
        again = before is not None and before.until_s + _FORGOTTEN_S > now_s
        delay_s = min(_MOST_S, 2 * before.delay_s) if before is not None and again else _FIRST_S
        while len(kept) >= _MOST_NAMES:
            del kept[next(iter(kept))]
        self._last = {**kept, name: _Last(delay_s, now_s + delay_s)}


Result = TypeVar("Result")
Answer = TypeVar("Answer", Message, Message | None)
_LOG = logging.getLogger("pcg.split")
_BUSY_S = 0.25
"""A client whose request waits is told so again after this time."""
_ACTIVE_S = 1.0
"""A client that asked nothing for so long is not waited for."""
_MOST_WAITING = 64
"""Requests of one client that may wait at once."""
_MOST_HELD = 64
"""Clients that wait because wrong keys came from their address."""


@dataclass
class _Client:
    """An accepted client, and its key."""

    name: str
    key: Key
    seen_s: float = 0.0
    has_asked: bool = False


@dataclass
class Counts:
    """Counts of a base's work.

    Attributes:
        batches: pieces that were run.
        requests: their requests.
        tokens: their tokens.
        refused: messages that were answered by an error.
        dropped: requests of clients that were gone.
    """

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    refused: int = 0
    dropped: int = 0


class BaseLoop:
    """Serves the clients of an endpoint; a single thread runs it.

    Attributes:
        base: the weights, and the functions that run by them.
        endpoint: the clients' transport.
        counts: counts of its work so far.
        is_draining: True once new clients are refused.
    """

    def __init__(
        self,
        base: BaseExecutor,
        endpoint: Endpoint,
        options: BaseOptions,
        files: Mapping[str, str] | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.base = base
        self.endpoint = endpoint
        self._options = options
        self._keys = open_keys(options.api_key, options.api_keys)[0] if keys is None else keys
        self._policy = make_policy(options.policy, options.max_batch_tokens, options.wait_ms)
        base.publish(endpoint.publish)
        self._facts = base.facts(
            files or {},
            rows=options.downloads,
            most_bytes=options.max_request_mib * 2**20,
            instance=secrets.token_hex(16),
        )
        self._queues = Queues()
        self._clients: dict[bytes, _Client] = {}
        self._wrong_keys, self._refused_graphs = Setbacks(), Setbacks()
        self._log = LimitedLog(_LOG)
        self._held: dict[bytes, Message] = {}
        self._asked: list[tuple[bytes, Message]] = []
        self._told_s: dict[tuple[bytes, int], float] = {}
        self._next_told_s = 0.0
        self._worker = device_pool(base.device, 1, "pcg base products")
        self._is_stopped = False
        self.counts = Counts()
        self.is_draining = False

    @property
    def clients(self) -> int:
        return len(self._clients)

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queues)

    def run(self) -> None:
        """Serve until `stop`, or until a drain has ended."""
        drained_s = None
        wait_s = 0.0
        with self._worker, on_device(self.base.device):
            while not self._is_stopped:
                wait_s = self.step(wait_s)
                if self.is_draining:
                    now_s = time.monotonic()
                    drained_s = drained_s or now_s + self._options.drain_s
                    if not self._clients or now_s > drained_s:
                        break
        left = len(self._clients)
        if left:
            _LOG.warning("%d clients are left behind", left)

    def stop(self) -> None:
        """End `run` after its present step."""
        self._is_stopped = True

    def drain(self) -> None:
        """Refuse new clients, and end once the present ones have left."""
        self.is_draining = True

    def step(self, wait_s: float) -> float:
        """Read messages, and run a batch; return how long to wait for more."""
        self._receive(min(wait_s, 0.2))
        asked, self._asked = self._asked, []
        for client, message in asked:
            self._reply(client, self._guarded(client, message, self._computed))
        if not len(self._queues):
            return 1.0
        now_s = time.monotonic()
        active = [
            client
            for client, known in self._clients.items()
            if known.has_asked and now_s - known.seen_s < _ACTIVE_S
        ]
        choice = self._policy.choose(self._queues, active, now_s)
        if not choice.batch:
            return max(choice.wait_s, 0.0)
        self._run(choice.batch)
        return 0.0

    def _receive(self, wait_s: float) -> None:
        """Read messages, forget lost clients, and send `busy` to those that wait."""
        for client, message in self.endpoint.receive(wait_s):
            self._take(client, message)
        held, self._held = self._held, {}
        for client, message in held.items():
            self._take(client, message)
        for client in self.endpoint.gone(list(self._clients)):
            self._drop(client, "is gone")
        now_s = time.monotonic()
        if now_s < self._next_told_s:
            return
        self._next_told_s = now_s + _BUSY_S / 2
        for (client, seq), told_s in list(self._told_s.items()):
            if told_s + _BUSY_S < now_s and client in self._clients:
                self._told_s[client, seq] = now_s
                facts = {"requests": len(self._told_s)}
                self._send(client, Message("busy", seq, facts))

    def _aside(self, act: Callable[[], Result]) -> Result:
        """Have the second thread do something, and read messages until it ends."""
        future = self._worker.submit(act)
        future.add_done_callback(lambda _: self.endpoint.wake())
        try:
            while not future.done():
                self._receive(_BUSY_S)
        finally:
            wait([future])  # also where reading fails: it wakes an endpoint that has to be there
        return future.result()

    # ------------------------------------------------------------------------------- messages

    def _take(self, client: bytes, message: Message | Exception) -> None:
        if isinstance(message, Exception):
            self._reply(client, failure(0, message))
            return
        reply = self._guarded(client, message, self._answered)
        if reply is not None:
            self._reply(client, reply)

    def _guarded(
        self, client: bytes, message: Message, answer: Callable[[bytes, Message], Answer]
    ) -> Answer | Message:
        try:
            return answer(client, message)
        except RankLostError:
            raise
        except PcgError as error:
            self.counts.refused += 1
            return failure(message.seq, error)
        except Exception as error:
            what = message.op[:40]
            self._log.say(logging.ERROR, "%s of client %s failed", what, client.hex(), error=True)
            return failure(message.seq, SplitError(f"the base failed: {type(error).__name__}"))

    def _computed(self, client: bytes, message: Message) -> Message:
        return self._aside(lambda: self.base.answer(message))

    def _answered(self, client: bytes, message: Message) -> Message | None:
        """Answer a message, or return None if its answer follows later."""
        if message.op == "hello":
            return self._hello(client, message) if self._is_heard(client, message) else None
        known = self._clients.get(client)
        if known is None:
            raise SplitError("say hello first: this base does not know you, or was started anew")
        known.seen_s = time.monotonic()
        if message.op == "run":
            known.has_asked = True
            self._queue(client, message, known.key)
            return None
        if message.op == "define":
            return self._define(client, message, known.key)
        if message.op == "echo":
            return Message("reply", message.seq, tensors=message.tensors)
        if message.op == "bye":
            self._drop(client, "leaves")
            return Message("reply", message.seq)
        if message.op == "stats":
            counts = {**asdict(self.counts), "clients": self.clients}
            return Message("reply", message.seq, counts)
        if message.op == "share":
            most = self._options.max_request_mib * 2**20
            shared = self.endpoint.share(client, message.number("bytes", 2 * most))
            if shared is None:
                raise SplitError("this transport shares no memory")
            return Message("reply", message.seq, shared.fields)
        if message.op == "rows" and not self._options.downloads:
            raise SplitError("this base does not let its weights be downloaded (--downloads)")
        if sum(sender == client for sender, _ in self._asked) >= _MOST_WAITING:
            raise BaseBusyError(f"{_MOST_WAITING} requests of yours wait already")
        self._asked.append((client, message))
        self._told_s[client, message.seq] = known.seen_s
        return None

    def _is_heard(self, client: bytes, hello: Message) -> bool:
        """Return whether a client's key is checked now, and not after a delay for wrong keys."""
        if not self._wrong_keys.wait_s(hello.sender, time.monotonic()):
            return True
        if len(self._held) >= _MOST_HELD or client in self._held:
            raise BaseBusyError("too many wrong keys come from your address; try again later")
        self._held[client] = hello
        return False

    def _hello(self, client: bytes, message: Message) -> Message:
        fields = message.fields
        if fields.get("version") != VERSION:
            raise SplitError(
                f"this base speaks version {VERSION} of the messages, and the client version "
                f"{str(fields.get('version'))[:20]}; install the same pcg on both"
            )
        secret = fields.get("key")
        key = self._keys.find(secret if isinstance(secret, str) else "")
        if key is None:
            self._wrong_keys.note(message.sender, time.monotonic())
            where = message.sender or client.hex()
            self._log.say(logging.WARNING, "a client at %s has a wrong key", where)
            raise SplitError("the key is none of this base's; give api_key=…, or PCG_API_KEY")
        if key.scopes.isdisjoint((Scope.INFER, Scope.TRAIN)):
            raise SplitError(
                f"the key {key.name!r} has neither of the scopes {Scope.INFER} and {Scope.TRAIN}; "
                "use one that has"
            )
        self._check_model(fields)
        if self.is_draining:
            raise SplitError("this base ends, and takes no new clients")
        if client not in self._clients and len(self._clients) >= self._options.max_clients:
            raise SplitError(f"this base has {len(self._clients)} clients, and takes no more")
        name = fields.get("client")
        shown = name[:100] if isinstance(name, str) else client.hex()
        self._clients[client] = _Client(shown, key)
        self._log.say(logging.INFO, "client %r comes; %d are here", shown, self.clients)
        return Message("reply", message.seq, msgspec.to_builtins(self._facts))

    def _check_model(self, fields: Mapping[str, object]) -> None:
        """Compare a client's expectation with this base. SplitError: they differ."""
        config, base = fields.get("config"), self.base
        if isinstance(config, Mapping):
            difference = config_difference(config, base.config)
            if difference:
                raise SplitError(
                    f"the client's model is another than the base's {base.name} ({difference}); "
                    "connect with the base's model, or with none to take what it has"
                )
        for name in ("dtype", "digest"):
            wanted, known = fields.get(name), getattr(self._facts, name)
            if wanted is not None and wanted != known:
                raise SplitError(
                    f"the client wants {base.name} with {name} {str(wanted)[:80]}, and this base "
                    f"has {known}; use the same on both sides"
                )

    def _define(self, client: bytes, message: Message, key: Key) -> Message:
        """Let a client call a graph. BaseBusyError: a graph of its key was refused just now."""
        if not self.base.runs_graphs:
            raise SplitError("this base runs products alone, over several ranks")
        wait_s = self._refused_graphs.wait_s(key.name, time.monotonic())
        if wait_s:
            raise BaseBusyError(
                f"a graph of the key {key.name!r} was refused; define another in {wait_s:.2f} s"
            )
        try:
            digest = self.base.graphs.define(client, message.text("text", MOST_CHARACTERS))
        except Exception:
            self._refused_graphs.note(key.name, time.monotonic())
            raise
        return Message("reply", message.seq, {"digest": digest})

    def _queue(self, client: bytes, message: Message, key: Key) -> None:
        piece = Piece.parse(message.text("piece", 2**14))
        trains, most_tokens = piece.kind == GRADIENT, None
        if piece.kind == GRAPH:
            graph = self.base.graphs.checked(client, piece, message.tensors)
            trains = graph.trains
            most_tokens = self._checked_memory(len(message.tensors[0]), graph.bytes_per_token)
        else:
            self.base.checked(piece, message.tensors)
        if trains and Scope.TRAIN not in key.scopes:
            raise SplitError(f"{GRADIENT} needs a key with the scope {Scope.TRAIN}")
        # A key without the scope has no priority over those that train.
        serves = message.fields.get("serves") is True and Scope.INFER in key.scopes
        self._check_load(client, message, key)
        request = (client, message.seq, piece, message.tensors, serves, time.monotonic())
        self._queues.add(Waiting(*request, key.name, most_tokens))
        self._told_s[client, message.seq] = request[-1]

    def _check_load(self, client: bytes, message: Message, key: Key) -> None:
        """Bound waiting requests. BaseBusyError: too much now. SplitError: always too much."""
        if self._queues.count(client) >= _MOST_WAITING:
            raise BaseBusyError(f"{_MOST_WAITING} requests of yours wait already")
        most_tokens, most_bytes = self._options.key_tokens, self._options.key_mib * 2**20
        tokens, size = len(message.tensors[0]), message.size_bytes
        if tokens > most_tokens or size > most_bytes:
            raise SplitError(
                f"a request of {tokens} tokens and {size} bytes is more than a key may have "
                f"waiting ({most_tokens} tokens, {most_bytes} bytes); send fewer tokens at once"
            )
        waiting_tokens, waiting_bytes = self._queues.load_of(key.name)
        if waiting_tokens + tokens > most_tokens or waiting_bytes + size > most_bytes:
            raise BaseBusyError(
                f"{waiting_tokens} tokens and {waiting_bytes} bytes of the key {key.name!r} wait "
                f"already; it may have {most_tokens} and {most_bytes}"
            )

    def _checked_memory(self, tokens: int, bytes_per_token: int) -> int:
        """Return the most tokens of a batch of a graph. SplitError: a request has more."""
        most = self._options.max_piece_mib * 2**20
        if tokens * bytes_per_token > most:
            raise SplitError(
                f"a piece of {tokens:,} tokens has {tokens * bytes_per_token:,} bytes of values, "
                f"and this base allows {most:,}; send {most // bytes_per_token:,} tokens at most, "
                "in smaller batches or windows, or start it with --max-piece-mib"
            )
        return most // bytes_per_token

    # ------------------------------------------------------------------------------- running

    def _run(self, batch: Sequence[Waiting]) -> None:
        """Run requests of a piece as a batch, and answer each."""
        self._queues.take(batch)

        def run() -> Sequence[Sequence[Tensor]]:
            inputs = batch[0].tensors
            if len(batch) > 1:
                every = zip(*(request.tensors for request in batch), strict=True)
                inputs = [torch.cat(parts) for parts in every]
            outputs = self.base.run(batch[0].piece, inputs)
            counts = [request.tokens for request in batch]
            return list(zip(*(output.split(counts) for output in outputs), strict=True))

        begun_s = time.monotonic()
        try:
            parts = self._aside(run)
        except RankLostError:
            raise  # nothing runs without it
        except Exception as error:
            self._log.say(logging.ERROR, "%s failed", batch[0].piece, error=True)
            for request in batch:
                text = f"the base failed at {request.piece}: {type(error).__name__}: {error}"
                self._reply(request.client, failure(request.seq, SplitError(text)))
            return
        took_s = time.monotonic() - begun_s
        self.counts.batches += 1
        self.counts.requests += len(batch)
        self.counts.tokens += sum(request.tokens for request in batch)
        for request, outputs in zip(batch, parts, strict=True):
            self._reply(request.client, Message("reply", request.seq, tensors=outputs))
        self._queues.ran(batch, took_s, time.monotonic())

    def _reply(self, client: bytes, message: Message) -> None:
        self._told_s.pop((client, message.seq), None)
        known = self._clients.get(client)
        if known is not None:
            known.seen_s = time.monotonic()
        self._send(client, message)

    def _send(self, client: bytes, message: Message) -> None:
        try:
            is_sent = self.endpoint.send(client, message)
        except Exception:
            self._log.say(logging.ERROR, "a reply to client %s failed", client.hex(), error=True)
            is_sent = False
        if not is_sent:
            self._drop(client, "is gone")

    def _drop(self, client: bytes, why: str) -> None:
        known = self._clients.pop(client, None)
        dropped = self._queues.drop(client)
        self._told_s = {key: at for key, at in self._told_s.items() if key[0] != client}
        self.counts.dropped += dropped
        self.endpoint.forget(client)
        self.base.graphs.forget(client)
        if known is not None:
            text = "client %r %s; %d of its requests are dropped, %d clients are here"
            self._log.say(logging.INFO, text, known.name, why, dropped, self.clients)
