"""The server.

The text that a server prints when it is ready: what it serves, memory, and a first request.

The server: an engine and uvicorn around it, from the first request to the last.

SIGTERM or Ctrl-C drains: new requests are refused by a 503, running ones end or are given up after
`shutdown_timeout_s`, jobs end with a checkpoint. A second one ends at once. A terminal that is
closed drains, too. SIGHUP otherwise reads keys, the certificate and the defaults of sampling again;
nothing that runs ends, and where one of the files is damaged everything stays as it was.
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
    """Return what a server prints when it takes requests.

    Args:
        url: its address.
        made_key: the key that was made for it; None if the operator gave keys.
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
            "the disk of --data-dir has no room: what is there is read and deleted, and nothing is "
            "kept until there is"
        )
    lines.append(f"listening at {url}")
    where = service.client.facts.split_address
    if where is not None:
        lines.append(f'split clients: pcg.connect("{where}", api_key=…)')
    if made_key is not None:
        lines.append(f"API key, made for this run: {made_key}")
    else:
        keys = counted(len(service.keys), "key")
        lines.append(f"API keys: {keys}; what follows reads one from PCG_API_KEY")
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
"""Opens an engine for so many tenants, and for split clients if there may be any; closes it at the
end of the `with`."""

_CLOSING_S = 5
"""Time that connections have to send the ends of replies, seconds."""
LEAST_S = 10.0
"""An engine that ended sooner is not started again, as the next would end, too."""
_READING_S = 30.0
"""Time that the files which SIGHUP has read again may take, seconds."""
_IDLE_S = 75
"""Time that connections are kept between requests, seconds.

Clients keep theirs for less, so that none sends a request on a connection that is being closed.
"""


def serve(
    options: ServeOptions,
    engine: Engine,
    say: Callable[[str], None],
    ready: Callable[[Server], None] = lambda _: None,
    files: Callable[[], Path | None] = lambda: None,
    listener: Listener | None = None,
    restarts: bool = False,
) -> bool:
    """Serve until a signal, and end in order; the garbage collector may rest until it serves.

    Args:
        engine: opens the engine, once it is sure that the server can listen.
        say: takes the text that is printed when requests are taken.
        ready: is called with the server when it takes requests.
        files: finds the directory of the model's files; None where it has none.
        listener: the socket; it is closed in the end. By default it is made of the options.
        restarts: whether to open another engine where one ends by an error, on the same socket.
    Returns:
        True if all that was begun ended, or was given up in time.
    Raises:
        ServeError: the server cannot listen, the keys are damaged, a file is not there, or the data
            folder cannot be used.
        PcgError: the engine cannot be made.
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
            """Serve by one engine; returns how long until it was lost, seconds."""
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
                # What is loaded stays: full collections need not go through it.
                gc.collect()
                gc.freeze()
                gc.enable()
                began_s = time.monotonic()
                try:
                    server.run([listener.take().dup()])  # which closes what it has
                finally:
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
    """The contents of a server's files as they are now; no keys where one was made for the run."""

    keys: Keys | None
    generation: GenerationConfig


def _reread(options: ServeOptions, directory: Path | None, *, reads_keys: bool) -> Reread:
    """Read what may change while a server runs.

    Args:
        directory: that of the model; None where it has none.
        reads_keys: False where the key was made for this run.
    Raises:
        PcgError: a file is not there, or damaged.
    """
    if options.ssl_certfile is not None:
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
    keys = open_keys(options.api_key, options.api_keys)[0] if reads_keys else None
    return Reread(keys, read_generation_config(options.generation_config, directory))


@contextlib.contextmanager
def _hangups() -> Iterator[list[int]]:
    """Record each SIGHUP during the load of the model, which would end the process."""
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
    """Refuse missing and invalid files before a model is loaded."""
    if options.ssl_certfile is not None:
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
    check_modules(options.lora_modules)
    parse_warm_jobs(options.warm_jobs)
    Roots(options.lora_roots)
    if options.chat_template is not None:
        read_text(options.chat_template, ConfigError)


class Server(uvicorn.Server):
    """uvicorn with a drain before its end, which signals begin.

    Args:
        text: is said when requests are taken; then `ready` is called.
        reread: reads what SIGHUP changes.
        say: takes texts for the operator.
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
            log_level="error",  # its warnings are of what strangers send, a line for each
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
        """Refuse new requests, and end after the last; a second call ends at once. Any thread."""
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
        """Read keys, the certificate and the defaults of sampling again; from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        task = asyncio.create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        service, options = self.service, self.service.options
        async with self._reloading:  # each reads what the files say once it was asked for
            try:
                reread = await self._read_again()
                if self.config.ssl is not None:  # connections that are open keep what they have
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
        """Read the files on a thread that nobody waits for, as a pipe or a share may never answer.

        PcgError, OSError: they cannot be read, or not in time.
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
        """Return True to end: also when the engine has, as nothing is served then."""
        ended = self.service.client.ended
        if ended is not None:
            LOG.error("%s", ended)
            self._stop_waiting()
            return True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals drain or reload, in the main thread; uvicorn's handlers end by the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Under nohup a terminal that is closed is nothing to end for.
        heeds_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

        def handle(number: int, _: FrameType | None) -> None:
            if self._loop is None:
                raise KeyboardInterrupt
            if number != signal.SIGHUP:
                self.drain()
            elif not heeds_terminal or _has_terminal():
                self.reload()
            elif self._drained is None:  # the system and the shell both tell of a closed terminal
                self.drain()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before: dict[int, Any] = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
