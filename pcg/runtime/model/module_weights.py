"""The weights of a module in memory, which the executor shares with it where it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pcg.errors import WeightsError
from pcg.ranks.shards import Ranges
from pcg.runtime.model.weights import DTYPE_NAMES, Weights, slices_of
from pcg.tensor_file import TensorInfo


class StateDictCheckpoint(Weights):
    """The weights of a module in memory, shared where neither dtype, device nor layout differ.

    Where weights of one product are to lie side by side, they are copied once, and the module's
    parameters get parts of the copy as their memory: their values, names and identities stay.

    Args:
        state_dict: the module's own parameters and buffers, not detached ones.
    Raises:
        WeightsError: a tensor has no data.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor],
        base_prefix: str = "",
        config: Mapping[str, Any] | None = None,
        where: str = "the given module",
    ) -> None:
        for name, tensor in state_dict.items():
            if tensor.is_meta:
                raise WeightsError(f"{name} of {where} is on the meta device; load its weights")
        index = {
            name: TensorInfo(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in state_dict.items()
        }
        super().__init__(index, base_prefix, config or {}, where)
        self._tensors = state_dict

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a tensor, or a part of it; see `Weights.load`."""
        tensor = super().load(name, shape, dtype, transposed, device, ranges, out)
        found = self._find(name)
        if out is not None and found is not None and not transposed:
            own = self._tensors[found]
            is_like = _is_like(own, out.shape, out.dtype, out.device) and not out.is_inference()
            if is_like and _owns_memory(own) and not self._has_alias(own):
                _hand_over(own, out)
        return tensor

    def shared(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
    ) -> Tensor | None:
        """Return a tensor of the module itself if it lies as asked; see `Weights.shared`."""
        found = self._find(name)
        tensor = None if found is None else self._tensors[found]
        if tensor is None or transposed or not _is_like(tensor, shape, dtype, device):
            return None
        part: Tensor | None = _PARTS.get(tensor)
        if part is not None and part.data_ptr() == tensor.data_ptr():
            return part
        return self.load(name, shape, dtype, device=device)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        whole = self._tensors[name].detach()
        return whole if ranges is None else whole[slices_of(ranges)]

    def _has_alias(self, tensor: Tensor) -> bool:
        """Return whether another tensor of the module has the same memory."""
        address = tensor.data_ptr()
        others = (other for other in self._tensors.values() if other is not tensor)
        return any(other.data_ptr() == address for other in others)


_PARTS = WeakTensorKeyDictionary()
"""The part of a joined tensor that a module's parameter was given as its memory."""


def _hand_over(tensor: Tensor, part: Tensor) -> None:
    """Let a module's tensor have a part of a joined one as its memory, whose values it has."""
    start = part.storage_offset() * part.element_size()
    # A storage of its own size: what saves modules takes storages of several tensors amiss.
    memory = part.untyped_storage()[start : start + part.nbytes]
    tensor.data = part.new_empty(0).set_(memory, 0, part.shape, part.stride())
    _PARTS[tensor] = part


def _is_like(
    tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> bool:
    """Return whether a tensor of a module lies in memory as a graph reads it."""
    return (
        tensor.shape == tuple(shape)
        and tensor.dtype is dtype
        and tensor.device == torch.empty(0, device=device).device
        and tensor.is_contiguous()
    )


def _owns_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is plain, and has memory of its own that no other process reads."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_inference()
        and (tensor.is_cuda or not tensor.is_shared())  # which on GPUs is always said to be
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
