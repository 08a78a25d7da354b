"""Tensors for a run that computes no activations: floats without data, integers with data.

transformers reads values of tensors, for example to see whether positions form a single sequence,
or whether anything is masked. Integers, and values no longer than the tokens, are computed if they
depend on no weight. All others are fake tensors on the CPU, with torch's CPU operators except two,
which behave as on CUDA: dropout keeps a boolean mask, and layer norm its statistics in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_COMPUTED = 2**24
"""Maximum number of entries of an integer tensor with data; masks of long windows exceed it."""

_HALVES = (torch.bfloat16, torch.float16)


class ComputedIntegers(TorchDispatchMode):
    """Runs operators on fake tensors, and with data if their inputs have data.

    Attributes:
        place: a mark of the current part of the run, set from outside.
        places: the place where each storage was allocated, by the storage's identity. Python lists
            as indices are not seen.
    """

    def __init__(self, fake: FakeTensorMode, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place: int | None = None
        self.places: dict[int, int | None] = {}
        self._fake = fake
        self._tokens = tokens
        self._seen: list[StorageWeakRef] = []  # keeps identities unique

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        out = self._run(func, args, kwargs, tensors)
        if func is torch.ops.aten.native_layer_norm.default:
            out = (out[0], *(t.float() if t.dtype in _HALVES else t for t in out[1:]))
        known = {storage_key(tensor) for tensor in tensors}
        for tensor in _tensors(out):
            if (key := storage_key(tensor)) not in known:
                self.places[key] = self.place
                self._seen.append(StorageWeakRef(tensor.untyped_storage()))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if func is torch.ops.aten._grouped_mm.default:  # its type check only accepts bf16
            return func(*(t.bfloat16() for t in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors) or _is_large(tensors):
            return func(*args, **kwargs)
        if not tensors:
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor) or not self._has_data(result):
                return result
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        return tree_map_only(
            Tensor, lambda t: t if self._has_data(t) else self._fake.from_tensor(t), out
        )

    def _has_data(self, tensor: Tensor) -> bool:
        is_integer = not tensor.is_floating_point() and not tensor.is_complex()
        return tensor.numel() <= (MOST_COMPUTED if is_integer else self._tokens)


class DropoutOfCuda(TorchFunctionMode):
    """Runs dropout as CUDA does, as a single operator that returns its mask."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, during its lifetime; views share it."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_large(tensors: list[Tensor]) -> bool:
    """Return whether the broadcast of the tensors is too large to compute."""
    try:
        shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        return shape.numel() > MOST_COMPUTED
    except RuntimeError:
        return False  # it joins them, or indexes one by another
