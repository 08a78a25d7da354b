"""What the loads of `soak_kills.py` share: where the server is now, and what it acknowledged."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import httpx2
import openai

KEY, MODEL = "tml-key-of-the-soak", "tiny"
GONE = (httpx2.TransportError, openai.APIConnectionError)
"""Errors of a client whose server is gone: nobody knows whether its request was done."""


class Wrong(Exception):
    """A promise that was broken."""


class Away(Exception):
    """The server is gone, or goes."""


class World:
    """The server as its clients know it, over its lives.

    Attributes:
        counts: how often what was acknowledged or compared.
        wrong: promises that were broken, in words.
        is_over: True once nothing new is to be begun.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.is_over = False
        self._url: str | None = None
        self._life = 0
        self._changed = threading.Condition()

    def is_at(self, url: str | None) -> None:
        """Note where the server is; None while it is nowhere."""
        with self._changed:
            self._url = url
            self._life += 1
            self._changed.notify_all()

    def url(self) -> str:
        """Return where the server is, once it is somewhere."""
        with self._changed:
            self._changed.wait_for(lambda: self._url is not None)
            assert self._url is not None
            return self._url

    def acknowledge(self, what: str) -> None:
        """Count something that the server acknowledged."""
        with self._changed:
            self.counts[what] += 1
            self._changed.notify_all()

    def wait_for_more(
        self, count: int, timeout_s: float, of: Collection[str] | None = None
    ) -> None:
        """Return once so many more things of some kinds, or any, were told, or after a time."""

        def found() -> int:
            return sum(n for what, n in self.counts.items() if of is None or what in of)

        with self._changed:
            least = found() + count
            self._changed.wait_for(lambda: found() >= least, timeout_s)

    def raw(self) -> httpx2.Client:
        """Return a client of Tinker's bare protocol."""
        headers = {"x-api-key": KEY}
        return httpx2.Client(base_url=f"{self.url()}/tinker/api/v1/", headers=headers, timeout=60)

    def openai(self) -> openai.OpenAI:
        """Return a client of OpenAI's API, which asks once."""
        return openai.OpenAI(base_url=f"{self.url()}/v1", api_key=KEY, max_retries=0, timeout=60)


class Load(ABC):
    """A client on a thread of its own, which goes on over the server's lives.

    Args:
        seed: of what it does.
    """

    name = "a client"

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.drawn = random.Random(seed)
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @abstractmethod
    def work(self) -> None:
        """Do something; what a server that is gone leaves undone is done by the next call."""

    @abstractmethod
    def settle(self) -> bool:
        """Look at what was promised, once no server is killed; True once all of it is there."""

    def check(self, is_kept: bool, what: str) -> None:
        """Note a promise that was broken."""
        if not is_kept:
            self.world.wrong.append(f"{self.name}: {what}")

    def _run(self) -> None:
        while not self.world.is_over:
            self.asked(self.work)

    def finish(self, timeout_s: float) -> None:
        """Look until all that was promised is there."""
        until = time.monotonic() + timeout_s
        while not self.asked(self.settle):
            if time.monotonic() > until:
                self.world.wrong.append(f"{self.name}: what was promised does not come")
                return
            time.sleep(0.2)

    def asked(self, act: Callable[[], Any]) -> Any:
        """Do something with a server that may go meanwhile; None if it did."""
        try:
            return act()
        except (*GONE, Away):
            time.sleep(0.02)
        except openai.APIStatusError as error:
            if error.status_code == 503:
                time.sleep(0.02)
            else:
                self.world.wrong.append(f"{self.name}: {error!r:.600}")
        except openai.APIError as error:  # of a stream that had begun
            if error.code == "engine_ended":
                time.sleep(0.02)
            else:
                self.world.wrong.append(f"{self.name}: {error!r:.600}")
        except Exception as error:
            self.world.wrong.append(f"{self.name}: {error!r:.600}")
        return None


def answered(reply: httpx2.Response) -> Any:
    """Return the JSON of a reply. Away: the server ends. Wrong: it is an error."""
    if reply.status_code == 503 or '"code":"ending"' in reply.text:
        raise Away
    if reply.status_code != 200:
        raise Wrong(f"{reply.request.url.path} {reply.status_code} {reply.text[:400]}")
    return reply.json()
