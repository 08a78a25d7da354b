"""Memory that a base shares with one client on its machine, for the tensors of their messages.

The base makes it (a `memfd`, which has no name), forbids everyone to shrink it, as a base that
reads memory which is gone would die, and tells the client its own process and the descriptor. The
client maps it through /proc, which the system lets processes of the same user do. It is gone once
both are, however they end.

    [ request's tensors | reply's tensors ]    half of the memory each

As a client has one call under way, there is one place for either.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.messages import bytes_of

_ALIGNED = 64
_NAME = "pcg-split"
LEAST_BYTES = 2**20


def open_memory(process: int, descriptor: int, name: str, flags: int) -> int:
    """Open memory that a process has made under a name, which cannot become shorter.

    Whoever answers at a base's address names the descriptor: no other file is opened, lest
    something of the user's own be read or written.

    Raises:
        OSError: it is something else, or of another user, or gone.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise OSError(f"{path} is no memory of a base executor")
    own = os.open(path, flags | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"{path} could become shorter")
    except BaseException:
        os.close(own)
        raise
    return own


class SharedMemory:
    """Memory of two processes.

    Attributes:
        half: bytes for the tensors of one direction.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.half = size_bytes // 2
        # The mapping goes when the last tensor of it does.
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)

    @classmethod
    def make(cls, size_bytes: int) -> SharedMemory:
        """Make some. SplitError: this system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise SplitError("shared memory needs Linux; connect by transport='tcp'")
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return cls(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, process: int, descriptor: int, size_bytes: int) -> SharedMemory:
        """Map what another process has made. OSError: it is of another user, or gone."""
        own = open_memory(process, descriptor, _NAME, os.O_RDWR)
        try:
            if os.fstat(own).st_size != size_bytes:
                raise OSError(f"its memory has {os.fstat(own).st_size} bytes, not {size_bytes}")
            return cls(own, size_bytes)
        except BaseException:
            os.close(own)
            raise

    def put(self, tensors: Sequence[Tensor], is_reply: bool) -> list[int] | None:
        """Write tensors; returns where each begins, or None if they do not fit."""
        places, at = [], self.half * is_reply
        end = at + self.half
        for tensor in tensors:
            if at + tensor.nbytes > end:
                return None
            places.append(at)
            if tensor.nbytes:
                # By one thread: torch would start those of another pool beside the products'.
                bytes_of(self._bytes[at : at + tensor.nbytes])[:] = bytes_of(tensor)
            at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return places

    def view(self, at: int, dtype: torch.dtype, shape: tuple[int, ...], is_reply: bool) -> Tensor:
        """Return a tensor of this memory. SplitError: it is not within its direction's half."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        begin = self.half * is_reply
        if type(at) is not int or at % _ALIGNED or not begin <= at <= begin + self.half - size:
            raise SplitError(f"a tensor of {size} bytes at {at!r} is not in the shared memory")
        return self._bytes[at : at + size].view(dtype).view(shape)

    def close(self) -> None:
        """Close the descriptor; tensors of the memory stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
