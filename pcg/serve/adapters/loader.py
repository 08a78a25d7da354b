"""The loader: loads and unloads adapters of the engine, and limits their number.

All adapters are in host memory, so their number is limited. An adapter that was found under a root
may be unloaded to free its place, the least recently used first, unless it is pinned; the next
request that names it loads it again. An adapter that was loaded by name stays until it is unloaded.
If all places are taken by adapters being loaded, further loads wait in turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pcg.errors import AdapterConflictError, AdapterError, AdapterNotFoundError, UnsupportedError
from pcg.files import SUMS, is_file, shown_path
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.engine.commands import AddAdapter, Hash, RemoveAdapter
from pcg.runtime.text.tokenizer import adapter_template
from pcg.serve.engine.client import EngineClient
from pcg.serve.http.errors import ApiError
from pcg.source import TEMPLATE


@dataclass(frozen=True)
class Origin:
    """The source of an adapter.

    Attributes:
        path: its folder as the caller wrote it.
        created_s: time of loading, Unix seconds.
        parent: the base in its model card; None for the base's name.
        is_found: True if it was found under a root by its name, and so may be unloaded to free its
            place.
        template: the chat template in its folder; None without.
    """

    path: str
    created_s: int
    parent: str | None = None
    is_found: bool = False
    template: str | None = None


class Loader:
    """Loads and unloads adapters by the engine's names; for a single event loop.

    Args:
        most: the most loaded adapters.
    """

    def __init__(self, client: EngineClient, most: int) -> None:
        self._client = client
        self._most = most
        self._origins: dict[str, Origin] = {}
        self._used: OrderedDict[str, None] = OrderedDict()
        self._coming: set[str] = set()
        # Requested places by tenant, in the order of tenants' turns and of requests.
        self._waiting: dict[str, dict[asyncio.Future[None], str]] = {}
        self._handing_out: asyncio.Task[None] | None = None

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        return self._client.adapters

    def origin(self, name: str) -> Origin | None:
        """Return the source of an adapter; None for an adapter of a job or of the library."""
        return self._origins.get(name)

    def adopt(self, name: str, origin: Origin) -> None:
        """Record the source of an adapter that a job may have published."""
        if name in self.adapters:
            self._origins[name] = origin
            self.used(name)

    def used(self, name: str) -> None:
        if name in self._origins:
            self._used[name] = None
            self._used.move_to_end(name)

    def load_now(self, name: str, directory: Path, origin: Origin) -> None:
        """Load an adapter and wait for it, before the event loop runs."""
        origin = replace(origin, template=adapter_template(directory))
        self._client.wait(self._client.call(AddAdapter(name, directory)))
        self._origins[name] = origin

    async def load(
        self,
        name: str,
        directory: Path,
        origin: Origin,
        *,
        tenant: str = "",
        is_replacing: bool = False,
        expected_version: int | None = None,
    ) -> ServedAdapter:
        """Load an adapter while steps run; wait in turn if all places are taken.

        Args:
            tenant: the tenant that requests it.
        Raises:
            AdapterConflictError: as `Executor.add_adapter`.
            ApiError: 400, it cannot be read, or is for another base; 503, all places are taken by
                adapters that cannot be unloaded.
        """
        command = AddAdapter(name, directory, is_replacing, expected_version)
        try:
            async with self._place(name, tenant):
                if is_file(directory / TEMPLATE):
                    template = await asyncio.to_thread(adapter_template, directory)
                    origin = replace(origin, template=template)
                adapter = await asyncio.wrap_future(self._client.call(command))
        except AdapterConflictError:
            raise
        except (AdapterError, UnsupportedError) as error:
            raise refusal(with_client_path(str(error), directory, origin.path)) from None
        self._origins[name] = origin
        self.used(name)
        return adapter

    async def take(
        self, name: str, origin: Origin, come: Callable[[], Awaitable[object]], *, tenant: str = ""
    ) -> None:
        """Get a place for an adapter that the engine creates, and record its source.

        Args:
            come: makes the engine serve the adapter.
        Raises:
            ApiError: 503, all places are taken by adapters that cannot be unloaded.
        """
        async with self._place(name, tenant):
            await come()
        self.adopt(name, origin)

    async def unload(self, name: str) -> None:
        """Unload an adapter; running requests keep it.

        AdapterError: the adapter does not exist, or a job trains it.
        """
        await asyncio.wrap_future(self._client.call(RemoveAdapter(name)))
        self._used.pop(name, None)
        if name not in self.adapters:
            self._origins.pop(name, None)
        self._hand_out()

    @asynccontextmanager
    async def _place(self, name: str, tenant: str) -> AsyncIterator[None]:
        await self._make_room(name, tenant)
        try:
            yield
        finally:
            self._arrived(name)

    async def _make_room(self, name: str, tenant: str) -> None:
        """Wait for a place for an adapter, unless it has a place.

        Tenants get places in turn, each in the order of its requests. While requests wait, adapters
        that may be unloaded are, including those loaded after the request.
        """
        present = self.adapters.keys() | self._coming
        if name in present or (len(present) < self._most and not any(self._waiting.values())):
            self._coming.add(name)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(tenant, {})
        waiting[place] = name
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            waiting.pop(place, None)
            if not place.cancelled():  # the place was assigned
                self._arrived(name)
            raise

    def _arrived(self, name: str) -> None:
        self._coming.discard(name)
        self._hand_out()

    def _hand_out(self) -> None:
        """Start the task that assigns places to waiting requests, unless it runs."""
        if self._handing_out is None and any(self._waiting.values()):
            self._handing_out = asyncio.create_task(self._hand_out_all())

    async def _hand_out_all(self) -> None:
        try:
            await self._hand_out_places()
        except Exception as error:  # such as the engine's end, which fails all waiting requests
            while (turn := self._next_turn()) is not None:
                self._take_turn(turn[0], error)
        finally:
            self._handing_out = None

    async def _hand_out_places(self) -> None:
        while (turn := self._next_turn()) is not None:
            place, name = turn
            present = self.adapters.keys() | self._coming
            if name in present or len(present) < self._most:
                self._coming.add(name)
                self._take_turn(place, None)
                continue
            last = next((each for each in self._used if self._may_go(each)), None)
            if last is None and self._coming:
                return  # `_arrived` starts the task again
            if last is None:
                self._take_turn(place, self._too_many(len(present)))
                continue
            del self._used[last]
            try:
                await self.unload(last)
            except AdapterNotFoundError:
                continue
            except AdapterConflictError:  # a job trains it
                self._origins[last] = replace(self._origins[last], is_found=False)

    def _next_turn(self) -> tuple[asyncio.Future[None], str] | None:
        """Return the first waiting request of the next tenant, or None."""
        for tenant in [tenant for tenant, waiting in self._waiting.items() if not waiting]:
            del self._waiting[tenant]
        every = (turn for waiting in self._waiting.values() for turn in waiting.items())
        return next((turn for turn in every if not turn[0].cancelled()), None)

    def _take_turn(self, place: asyncio.Future[None], error: Exception | None) -> None:
        """Assign or refuse a place, and move its tenant to the end of the turns."""
        tenant = next(tenant for tenant, waiting in self._waiting.items() if place in waiting)
        waiting = self._waiting.pop(tenant)
        del waiting[place]
        self._waiting[tenant] = waiting
        if error is None:
            place.set_result(None)
        else:
            place.set_exception(error)

    def _too_many(self, count: int) -> ApiError:
        return ApiError(
            503,
            f"{count} adapters are loaded by name or trained, and --max-cpu-loras is {self._most}; "
            "unload one, or raise it",
            code="too_many_adapters",
        )

    def _may_go(self, name: str) -> bool:
        origin = self._origins.get(name)
        return origin is not None and origin.is_found and name not in self._coming


async def learn_digests(client: EngineClient, versions: Sequence[AdapterVersion]) -> None:
    """Let the engine compute the digests of versions."""
    digests = await asyncio.wrap_future(client.call(Hash([version.key for version in versions])))
    for version, digest in zip(versions, digests, strict=True):
        if digest is not None:
            version.learn(digest)


def with_client_path(message: str, directory: Path, shown: str) -> str:
    """Replace an adapter's folder in a message, also if truncated, by the client's path."""
    files = (directory, directory / CONFIG, directory / WEIGHTS, directory / SUMS)
    for path in (str(directory), *map(shown_path, files)):
        message = message.replace(path, shown)
    return message


def refusal(message: str) -> ApiError:
    """Return the error of an adapter that cannot be loaded."""
    return ApiError(400, message, code="invalid_adapter")
