"""The channel between two processes."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from pcg.serve.engine.channel import Channel

MIB = 2**20


@pytest.mark.parametrize("is_blocking", [True, False])
def test_more_than_the_socket_holds_comes_whole(is_blocking: bool) -> None:
    """An event loop of libuv makes the sockets that it watches ones that never wait."""
    ends = socket.socketpair()
    ours, theirs = map(Channel, ends)
    os.set_blocking(ours.fileno(), is_blocking)
    sent = [bytes([index]) * (size * MIB) for index, size in enumerate((16, 1, 8))]
    for one in sent:
        ours.send(one)  # nobody reads yet
    found: list[bytes] = []

    def read() -> None:
        while len(found) < len(sent):
            found.extend(theirs.read(waits=True) or ())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert [len(one) for one in found] == [len(one) for one in sent]
    assert found == sent
    ours.send(b"later")
    assert theirs.read(waits=True) == [b"later"]
    theirs.close()
    ours.send(b"x" * 4 * MIB)  # to one that is gone
    ours.close()
