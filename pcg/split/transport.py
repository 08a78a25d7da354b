"""The interface of transports: a client's end, and the base's end that all its clients share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pcg.split.messages import Message


class Disconnected(Exception):
    """The other end is gone; a client may open the transport again."""


@dataclass
class Moved:
    """Counts of a transport's traffic, as a client sees it.

    Attributes:
        calls: messages that were answered: round trips.
        sent_bytes: bytes of their tensors.
        received_bytes: bytes of the replies' tensors.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Transport(ABC):
    """A client's end: a message at a time, and its reply.

    Attributes:
        where: the base's address, for messages.
    """

    where: str

    @abstractmethod
    def open(self) -> None:
        """Open it, or open it again."""

    @abstractmethod
    def exchange(self, message: Message, timeout_s: float) -> Message:
        """Send a message and return the reply of the same `seq`.

        A base that computes sends `busy` repeatedly; each restarts the time.

        Raises:
            Disconnected: the base is gone, or has been silent for that time.
        """

    def welcomed(self, ask: Message) -> None:  # noqa: B027  # most have nothing to do
        """Use a connection that the base has accepted, by sending requests like `ask`."""

    @abstractmethod
    def close(self) -> None: ...


class Endpoint(ABC):
    """The base's end, which a single thread calls.

    A client is a number of bytes that the transport chose; no client can choose another's.

    Attributes:
        where: the address that it listens at.
    """

    where: str

    @abstractmethod
    def receive(self, timeout_s: float) -> Sequence[tuple[bytes, Message | Exception]]:
        """Wait for messages, at most so long; return all that have arrived.

        An exception replaces a message that could not be read.
        """

    @abstractmethod
    def wake(self) -> None:
        """Have `receive` return now; any thread may call."""

    @abstractmethod
    def send(self, client: bytes, message: Message) -> bool:
        """Send a reply; return False if the client is gone."""

    @abstractmethod
    def gone(self, clients: Sequence[bytes]) -> list[bytes]:
        """Return the clients known to be gone since."""

    def publish(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Put tensors in memory that clients may read; return those that moved.

        A reply with a published tensor is only a header, for clients that can map it.
        """
        return {}

    def share(self, client: bytes, size_bytes: int) -> Message | None:
        """Share memory with a client for its tensors; None if the transport shares no memory."""
        return None

    def forget(self, client: bytes) -> None:  # noqa: B027
        ...

    @abstractmethod
    def close(self) -> None: ...
