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
    """Counts of what has crossed a transport, as a client sees it.

    Attributes:
        calls: messages that were answered: round trips.
        sent_bytes: bytes of their tensors.
        received_bytes: bytes of the replies' tensors.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Transport(ABC):
    """A client's end: one message at a time, and its reply.

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

        A base that computes says `busy` again and again, each of which begins the time anew.

        Raises:
            Disconnected: the base is gone, or has said nothing for so long.
        """

    def welcomed(self, ask: Message) -> None:  # noqa: B027  # most have nothing to do
        """Make use of a connection that the base has accepted, for which `ask` may be sent."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class Endpoint(ABC):
    """The base's end, which one thread calls.

    A client is a number of bytes that the transport chose; no client can choose another's.

    Attributes:
        where: the address that it listens at.
    """

    where: str

    @abstractmethod
    def receive(self, timeout_s: float) -> Sequence[tuple[bytes, Message | Exception]]:
        """Wait for messages, at most so long; returns all that are there.

        An exception stands for a message that could not be read.
        """

    @abstractmethod
    def wake(self) -> None:
        """Have `receive` return now; any thread may call."""

    @abstractmethod
    def send(self, client: bytes, message: Message) -> bool:
        """Send a reply; returns False if the client is gone."""

    @abstractmethod
    def gone(self, clients: Sequence[bytes]) -> list[bytes]:
        """Return those of some clients that are known to be gone since."""

    def publish(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Put tensors where clients may read them; returns those that lie elsewhere from now on.

        A reply with one of them is as long as its header alone, for clients that can map it.
        """
        return {}

    def share(self, client: bytes, size_bytes: int) -> Message | None:
        """Share memory with a client for its tensors; None if the transport has none."""
        return None

    def forget(self, client: bytes) -> None:  # noqa: B027
        """Free what is kept for a client."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""
