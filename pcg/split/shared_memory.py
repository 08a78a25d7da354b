"""Memory that processes of a machine share: of a base and a client, and of a base and all.

For the tensors of a client's messages the base makes memory (a `memfd`, which has no name), forbids
everyone to shrink it, as a base that reads memory which is gone would die, and sends the client its
process and the descriptor. The client maps it through /proc, which the system lets processes of the
same user do. It is gone once both are, however they end.

    [ request's tensors | reply's tensors ]    half of the memory each

As a client has a single call under way, each half holds a single message.

Tensors that all clients fetch, such as an embedding, are published: the base puts them in a
memory that nobody can write from then on, and a reply names the place of a tensor instead of
its bytes. A client maps it privately: a page that it does not write is the base's, and a page that
it writes becomes its copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.messages import bytes_of

_ALIGNED = 64
_NAME = "pcg-split"
LEAST_BYTES = 2**20
"""The least memory that is shared; a smaller tensor is sent, and not published."""


def open_memory(process: int, descriptor: int, name: str, flags: int) -> int:
    """Open memory that a process has under a name, and that cannot become shorter.

    The process at a base's address names the descriptor: no other file is opened, lest a file of
    the user be read or written.

    Raises:
        OSError: it is something else, or of another user, or gone.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise OSError(f"{path} is no memory of a base executor")
    opened = os.open(path, flags | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"{path} could become shorter")
    except BaseException:
        os.close(opened)
        raise
    return opened


class SharedMemory:
    """Memory of two processes.

    Attributes:
        half: bytes for the tensors of a direction.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.half = size_bytes // 2
        # The mapping goes when the last tensor of it does.
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)

    @classmethod
    def make(cls, size_bytes: int) -> SharedMemory:
        """Make memory. SplitError: this system has no such memory."""
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
        """Map another process's memory. OSError: it is of another user, or gone."""
        opened = open_memory(process, descriptor, _NAME, os.O_RDWR)
        try:
            if os.fstat(opened).st_size != size_bytes:
                raise OSError(f"its memory has {os.fstat(opened).st_size} bytes, not {size_bytes}")
            return cls(opened, size_bytes)
        except BaseException:
            os.close(opened)
            raise

    def put(self, tensors: Sequence[Tensor], is_reply: bool) -> list[int] | None:
        """Write tensors; return their places, or None if they do not fit."""
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


_PUBLISHED_NAME = "pcg-base"
_F_SEAL_FUTURE_WRITE = 0x10
"""As in Linux's fcntl.h, from 5.1 on; Python names it from 3.13 on."""


class PublishedTensors:
    """The base's end.

    Attributes:
        tensors: the tensors by name, in memory that clients may map.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to such memory. OSError: this system lacks it."""
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create(_PUBLISHED_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, self._size)
            memory = torch.frombuffer(mmap.mmap(self._descriptor, self._size), dtype=torch.uint8)
            self.tensors = {
                name: _view(memory, places[name], tensor.dtype, tuple(tensor.shape)).copy_(tensor)
                for name, tensor in tensors.items()
            }
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise
        self._places = {tensor.data_ptr(): places[name] for name, tensor in self.tensors.items()}

    def place(self, tensor: Tensor) -> Mapping[str, int] | None:
        """Return a tensor's place, as fields of a message; None if it is not published."""
        at = self._places.get(tensor.data_ptr())
        if at is None:
            return None
        memory = {"process": os.getpid(), "descriptor": self._descriptor}
        return {**memory, "bytes": self._size, "at": at}

    def close(self) -> None:
        """Close the descriptor; tensors of the memory stay valid, also at clients."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def published_tensor(place: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a tensor that a base has published.

    Raises:
        SplitError: the place is invalid, or the base is of another user, or gone.
    """
    numbers = [place.get(name) for name in ("process", "descriptor", "bytes", "at")]
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
        raise SplitError(f"{place} is no place of a published tensor")
    process, descriptor, size, at = numbers
    try:
        opened = open_memory(process, descriptor, _PUBLISHED_NAME, os.O_RDONLY)
        try:
            if os.fstat(opened).st_size != size:
                raise OSError(f"its memory has {os.fstat(opened).st_size} bytes, not {size}")
            begin = at // mmap.PAGESIZE * mmap.PAGESIZE
            end = at + dtype.itemsize * torch.Size(shape).numel()
            if end > size or at % _ALIGNED:
                raise OSError(f"a tensor from {at} to {end} is not in memory of {size} bytes")
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(opened, end - begin, mmap.MAP_PRIVATE, access, offset=begin)
        finally:
            os.close(opened)
    except OSError as error:
        raise SplitError(
            f"the tensors of process {process} cannot be mapped ({error}): the base executor is of "
            "another user, or in another container; use transport='tcp'"
        ) from None
    return _view(torch.frombuffer(mapped, dtype=torch.uint8), at - begin, dtype, shape)


def _view(memory: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return memory[at : at + size].view(dtype).view(shape)
