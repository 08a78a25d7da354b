"""Tensors that a base shows all clients on its machine: one copy, which each of them maps.

An embedding is most of what a client fetches. The base puts such tensors in one memory (a `memfd`)
that nobody can write from then on, and a reply tells where a tensor lies there instead of its
bytes. A client maps it privately: what it does not write is the base's page, and what it does is a
copy of its own. Clients are of the base's user, as `shared_memory` says.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.transports.shared_memory import open_memory

LEAST_BYTES = 2**20
"""A smaller tensor is sent."""
_ALIGNED = 64
_NAME = "pcg-base"
_F_SEAL_FUTURE_WRITE = 0x10
"""As in Linux's fcntl.h, from 5.1 on; Python names it from 3.13 on."""


class PublishedTensors:
    """The base's end.

    Attributes:
        tensors: the tensors by name, in memory that clients may map.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to such memory. OSError: this system has none."""
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        """Return where a client finds a tensor, as fields of a message; None if it is not here."""
        at = self._places.get(tensor.data_ptr())
        if at is None:
            return None
        own = {"process": os.getpid(), "descriptor": self._descriptor}
        return {**own, "bytes": self._size, "at": at}

    def close(self) -> None:
        """Close the descriptor; tensors of the memory stay valid, here and at clients."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def published_tensor(place: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a tensor that a base has published.

    Raises:
        SplitError: the place is none, or the base is of another user, or gone.
    """
    numbers = [place.get(name) for name in ("process", "descriptor", "bytes", "at")]
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
        raise SplitError(f"{place} is no place of a published tensor")
    process, descriptor, size, at = numbers
    try:
        own = open_memory(process, descriptor, _NAME, os.O_RDONLY)
        try:
            if os.fstat(own).st_size != size:
                raise OSError(f"its memory has {os.fstat(own).st_size} bytes, not {size}")
            begin = at // mmap.PAGESIZE * mmap.PAGESIZE
            end = at + dtype.itemsize * torch.Size(shape).numel()
            if end > size or at % _ALIGNED:
                raise OSError(f"a tensor from {at} to {end} is not in memory of {size} bytes")
            access = mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(own, end - begin, mmap.MAP_PRIVATE, access, offset=begin)
        finally:
            os.close(own)
    except OSError as error:
        raise SplitError(
            f"the tensors of process {process} cannot be mapped ({error}): the base executor is of "
            "another user, or in another container; use transport='tcp'"
        ) from None
    return _view(torch.frombuffer(mapped, dtype=torch.uint8), at - begin, dtype, shape)


def _view(memory: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return memory[at : at + size].view(dtype).view(shape)
