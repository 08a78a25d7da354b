"""The server: an engine and uvicorn around it, from the startup message to the drained end.

SIGTERM or Ctrl-C drains: new requests are refused by 503, running requests end or are cancelled
after `shutdown_timeout_s`, and jobs end with a checkpoint. A second signal ends the server
immediately. Closing the terminal also drains. Any other SIGHUP reloads the keys, the certificate
and the default sampling parameters. A reload ends nothing that runs; if a file is damaged, it
changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import uvicorn

from pcg.errors import ConfigError, PcgError, ServeError
from pcg.files import read_text, shown_path
from pcg.keys import Keys, open_keys
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.roots import Roots, check_modules
from pcg.serve.app import create_app, open_service
from pcg.serve.engine.client import EngineClient, SplitAccess
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.orders import Drain, SetKeys
from pcg.serve.engine.warm_jobs import parse_warm_jobs
from pcg.serve.files.files import Files
from pcg.serve.http.connection import BoundedConnection, allow_connections
from pcg.serve.http.errors import LOG
from pcg.serve.http.service import Service
from pcg.serve.jobs.records import check_base
from pcg.serve.listening import Listener, check_certificate
from pcg.serve.openai.sampling import GenerationConfig, read_generation_config
from pcg.serve.store.store import open_store
from pcg.units import counted, size_text

# ------------------------------------------------------------------------------------------ startup


def announcement(service: Service, url: str, made_key: str | None) -> str:
    """Return the text that a server prints when it takes requests.

    Args:
        url: address of the server.
        made_key: the generated key; None if the operator gave keys.
    """
    adapters = sorted(service.client.adapters)
    most = service.max_model_len
    length = "" if most is None else f", at most {most:,} tokens a request"
    memory = service.memory
    lines = [
        f"serving {service.part(Catalog).base.name} on {service.client.facts.device}{length}",
        f"adapters: {', '.join(adapters) if adapters else 'none'}",
        f"defaults of sampling: {service.part(GenerationConfig)}",
        f"memory: {size_text(memory.total)} = {size_text(memory.weights)} weights + "
        f"{size_text(memory.adapters)} adapters + {size_text(memory.kv_cache)} KV cache + "
        f"{size_text(memory.workspace)} workspace"
        f"{f' + {size_text(memory.recorded)} recorded' if memory.recorded else ''}",
    ]
    warmed = service.client.facts.warmed
    if warmed is not None:
        lines.append(
            f"recorded before the first request: {counted(warmed.graphs, 'graph')} of steps in "
            f"{warmed.seconds:.0f} s, {size_text(warmed.size_bytes)}"
        )
    if service.has(Files) and not service.part(Files).store.reserve.is_whole:
        lines.append(
            "the disk of --data-dir is full: stored data can be read and deleted, and nothing new "
            "is stored until there is room"
        )
    lines.append(f"listening at {url}")
    where = service.client.facts.split_address
    if where is not None:
        lines.append(f'split clients: pcg.connect("{where}", api_key=…)')
    if made_key is not None:
        lines.append(f"API key, made for this run: {made_key}")
    else:
        keys = counted(len(service.keys), "key")
        lines.append(f"API keys: {keys}; the command below reads a key from PCG_API_KEY")
    return "\n".join([*lines, "", _curl(service, url, made_key)])


def _curl(service: Service, url: str, key: str | None) -> str:
    body = {"model": service.part(Catalog).base.name, "prompt": "Hello", "max_tokens": 16}
    shown = key or "$PCG_API_KEY"
    unsafe = "-k " if url.startswith("https") else ""
    return (
        f"curl {unsafe}{url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -H "Authorization: Bearer {shown}" \\\n'
        f"  -d '{json.dumps(body)}'"
    )


# ------------------------------------------------------------------------------------------- server


Engine: TypeAlias = Callable[
    [ServeOptions, int, SplitAccess | None], contextlib.AbstractContextManager[EngineClient]
]
"""Opens an engine for a number of tenants and, with a SplitAccess, for split clients, within a
`with`."""

_CLOSING_S = 5
"""Time for connections to send the ends of replies, seconds."""
LEAST_S = 10.0
"""An engine that failed within this time, seconds, is not restarted: the next would fail, too."""
_READING_S = 30.0
"""Time limit of reading the files of a reload, seconds."""
_IDLE_S = 75
"""Time that idle connections are kept, seconds: longer than clients keep theirs, so that no client
sends a request on a connection that the server is closing."""


def serve(
    options: ServeOptions,
    engine: Engine,
    say: Callable[[str], None],
    ready: Callable[[Server], None] = lambda _: None,
    files: Callable[[], Path | None] = lambda: None,
    listener: Listener | None = None,
    restarts: bool = False,
) -> bool:
    """Serve until a signal, and end in order.

    Garbage collection may be disabled before the call; it is enabled when serving starts.

    Args:
        engine: opens the engine, after the server is sure to listen.
        say: prints a text for the operator.
        ready: is called with the server when it takes requests.
        files: returns the folder of the model's files, or None.
        listener: the socket, which `serve` closes; by default created from the options.
        restarts: open another engine on the same socket if an engine fails.
    Returns:
        True if all requests and jobs ended or were cancelled in time.
    Raises:
        ServeError: the server cannot listen, the keys are damaged, a file is missing, or the data
            folder cannot be used.
        PcgError: the engine cannot start.
    """
    with contextlib.ExitStack() as stack:
        hangups = stack.enter_context(_hangups())
        if listener is not None:
            stack.callback(listener.close)
        keys, made_key = open_keys(options.api_key, options.api_keys)
        _check_given_files(options)
        if listener is None:
            listener = stack.enter_context(contextlib.closing(Listener(options)))
        allow_connections()
        directory = files()
        generation = read_generation_config(options.generation_config, directory)
        split = None if options.split_port is None else SplitAccess(keys, directory)

        def run() -> tuple[Server, float | None]:
            """Serve with an engine. Return the seconds until it failed, or None."""
            nonlocal generation
            data_dir = options.data_dir
            opened = contextlib.nullcontext() if data_dir is None else open_store(data_dir)
            with opened as store, engine(options, keys.tenants, split) as client:
                if store is not None:
                    check_base(store, client.facts)
                service = open_service(client, keys, options, generation, store)
                text = announcement(service, listener.url, made_key)
                reread = partial(_reread, options, directory, reads_keys=made_key is None)

                def begun(server: Server) -> None:
                    ready(server)
                    if hangups:
                        server.reload()

                server = Server(service, text, reread, say, begun)
                # The loaded objects live until the end, so full collections can skip them. A
                # process that froze objects itself keeps them.
                freezes = gc.get_freeze_count() == 0
                if freezes:
                    gc.collect()
                    gc.freeze()
                gc.enable()
                began_s = time.monotonic()
                try:
                    server.run([listener.take().dup()])  # closes its copy
                finally:
                    if freezes:
                        gc.unfreeze()
                    service.close()
                generation = service.part(GenerationConfig)
                return server, None if client.ended is None else time.monotonic() - began_s

        while True:
            server, lost_s = run()
            if lost_s is None or not restarts or server.is_stopping or lost_s < LEAST_S:
                return not server.force_exit and lost_s is None
            listener.answer()
            say("The engine starts again.")


@dataclass(frozen=True)
class Reread:
    """The present contents of a server's files; no keys if the key was generated."""

    keys: Keys | None
    generation: GenerationConfig


def _reread(options: ServeOptions, directory: Path | None, *, reads_keys: bool) -> Reread:
    """Read the files that may change while a server runs.

    Args:
        directory: folder of the model's files, or None.
        reads_keys: False if the key was generated.
    Raises:
        PcgError: a file is missing or damaged.
    """
    if options.ssl_certfile is not None:
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
    keys = open_keys(options.api_key, options.api_keys)[0] if reads_keys else None
    return Reread(keys, read_generation_config(options.generation_config, directory))


@contextlib.contextmanager
def _hangups() -> Iterator[list[int]]:
    """Record each SIGHUP while the model loads; unhandled, it would end the process."""
    hangups: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        yield hangups
        return
    had_terminal = _has_terminal()

    def note(number: int, _: FrameType | None) -> None:
        if had_terminal and not _has_terminal():
            raise KeyboardInterrupt
        hangups.append(number)

    before = signal.signal(signal.SIGHUP, note)
    try:
        yield hangups
    finally:
        signal.signal(signal.SIGHUP, before)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _check_given_files(options: ServeOptions) -> None:
    """Refuse missing and invalid files before the model is loaded."""
    if options.ssl_certfile is not None:
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
    check_modules(options.lora_modules)
    parse_warm_jobs(options.warm_jobs)
    Roots(options.lora_roots)
    if options.chat_template is not None:
        read_text(options.chat_template, ConfigError)


class Server(uvicorn.Server):
    """uvicorn's server with signals that drain and reload.

    Args:
        text: is printed when requests are taken; then `ready` is called.
        reread: reads the files of a reload.
        say: prints a text for the operator.
    """

    def __init__(
        self,
        service: Service,
        text: str,
        reread: Callable[[], Reread],
        say: Callable[[str], None],
        ready: Callable[[Server], None],
    ) -> None:
        options = service.options
        config = uvicorn.Config(
            create_app(service),
            lifespan="off",
            http=BoundedConnection,
            ws="none",
            log_config=None,
            log_level="error",  # a warning per invalid request would fill the log
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_CLOSING_S,
            timeout_keep_alive=_IDLE_S,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        super().__init__(config)
        self.service = service
        self._text = text
        self._reread = reread
        self._say = say
        self._ready = ready
        self._reloading = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drained: Future[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with self.service.client.listening():
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        for begin in self.service.begins:
            begin()
        self._say(self._text)
        self._ready(self)

    @property
    def is_stopping(self) -> bool:
        return self._drained is not None

    def drain(self) -> None:
        """Refuse new requests and end after the last; a second call ends now. From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._drained is not None:
            self.force_exit = self.should_exit = True
            return
        self._stop_waiting()
        self._drained = self.service.client.call(Drain(self.service.options.shutdown_timeout_s))
        self._drained.add_done_callback(self._end)

    def _stop_waiting(self) -> None:
        """Answer the clients that wait for results."""
        for stop in self.service.stops:
            stop()

    def _end(self, _: Future[None]) -> None:
        self.should_exit = True

    def reload(self) -> None:
        """Reload keys, the certificate and the default sampling parameters, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        task = asyncio.create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        service, options = self.service, self.service.options
        async with self._reloading:  # each reload reads the files after its signal
            try:
                reread = await self._read_again()
                if self.config.ssl is not None:  # open connections keep their certificate
                    assert options.ssl_certfile is not None
                    self.config.ssl.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
            except (PcgError, OSError) as error:
                LOG.error("nothing was reloaded: %s", error)
                return
            lines = ["reloaded"]
            if reread.keys is not None:
                was_alone = service.keys.tenants == 1
                service.keys.become(reread.keys)
                await asyncio.wrap_future(service.client.call(SetKeys(list(reread.keys))))
                lines.append(f"API keys: {counted(len(reread.keys), 'key')}")
                if was_alone is not (reread.keys.tenants == 1):
                    lines.append("shares of tenants in the engine: those of the start")
            service.add(reread.generation)
            lines.append(f"defaults of sampling: {reread.generation}")
            if options.ssl_certfile is not None:
                lines.append(f"certificate: {shown_path(options.ssl_certfile)}")
            self._say("\n".join(lines))

    async def _read_again(self) -> Reread:
        """Read the files on a thread without joining it, as a pipe or a share may block for ever.

        PcgError, OSError: the files cannot be read, or not in time.
        """
        future = Future[Reread]()

        def read() -> None:
            try:
                result = self._reread()
            except (PcgError, OSError) as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=read, name="pcg reload", daemon=True).start()
        waiting = asyncio.wrap_future(future)
        if not (await asyncio.wait([waiting], timeout=_READING_S))[0]:
            raise ServeError(
                f"the files could not be read within {_READING_S:g} s; send SIGHUP again"
            )
        return await waiting

    async def on_tick(self, counter: int) -> bool:
        """Return True to end the server, also when the engine has ended."""
        ended = self.service.client.ended
        if ended is not None:
            LOG.error("%s", ended)
            self._stop_waiting()
            return True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals drain or reload, in the main thread; uvicorn's handlers would end it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Under nohup, closing the terminal does not end the server.
        heeds_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

        def handle(number: int, _: FrameType | None) -> None:
            if self._loop is None:
                raise KeyboardInterrupt
            if number != signal.SIGHUP:
                self.drain()
            elif not heeds_terminal or _has_terminal():
                self.reload()
            elif self._drained is None:  # the system and the shell both signal a closed terminal
                self.drain()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
