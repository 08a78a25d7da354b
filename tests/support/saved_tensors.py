"""What PyTorch keeps for backward of a transformers + peft model: the oracle of `explain`."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from unittest import mock

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.bottlenecks import hooked

Source: TypeAlias = "Mapping[str, Any] | torch.nn.Module"
Adapter: TypeAlias = "peft.PeftConfig | tuple[list[str], dict[str, Any]] | None"


def saved_bytes(
    source: Source,
    dtype: torch.dtype,
    adapter: Adapter,
    *,
    batch: int,
    seq: int,
) -> int:
    """Bytes of the storages that autograd holds after a forward with loss, parameters apart.

    Args:
        source: the contents of a config.json, or a module.
        dtype: of the base model.
        adapter: peft's configuration, whose own dropout alone is at work; None trains the biases of
            the base; bottlenecks are the recipe of `tests.support.bottlenecks` and the modules'
            paths.
        batch: sequences.
        seq: tokens of each, virtual ones included.
    """
    return sum(size for _, _, size in saved_tensors(source, dtype, adapter, batch, seq))


def saved_tensors(
    source: Source, dtype: torch.dtype, adapter: Adapter, batch: int, seq: int
) -> list[tuple[torch.Size, torch.dtype, int]]:
    """A tensor of each of those storages, and the storage's bytes."""
    model = finetuned_model(source, dtype, adapter)
    tensors = [*model.parameters(), *model.buffers()]
    resident = {t.untyped_storage().data_ptr() for t in tensors}
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        alive.add(saved)
        return saved

    seq -= getattr(adapter, "num_virtual_tokens", None) or 0
    ids = torch.full((batch, seq), 3)
    # Dropout as CUDA runs it, which keeps a mask of booleans; the CPU keeps one of floats.
    dropout = mock.patch("torch.nn.functional.dropout", _native_dropout)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _no_backward)
    with without_onednn(), dropout, hooks, _StatisticsInFp32():
        output = model(input_ids=ids, labels=ids, use_cache=False)
    assert output.loss.requires_grad  # it holds what is alive
    storages = {}
    for saved in alive:
        address = saved.storage.data_ptr()
        if address not in resident:
            storages[address] = (saved.shape, saved.dtype, saved.storage.nbytes())
    return list(storages.values())


def _no_backward(saved: _Saved) -> torch.Tensor:
    raise AssertionError(f"backward asks for {saved}")


def _native_dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(x, p, train=True)[0] if training and p else x


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Without the CPU's library for LSTMs, which keeps a workspace of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other hardware
        with torch.backends.mkldnn.flags(enabled=False):
            yield


class _StatisticsInFp32(TorchDispatchMode):
    """Layer norm as CUDA runs it, whose mean and deviation are fp32; the CPU's are of its input."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default and out[1].dtype != torch.float64:
            return out[0], out[1].float(), out[2].float()
        return out


class _Saved:
    """What autograd holds of a tensor, as long as it does: DoRA drops some within a forward.

    A tensor itself would hold more, such as what it was detached from.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.storage = tensor.untyped_storage()


def finetuned_model(source: Source, dtype: torch.dtype, adapter: Adapter) -> Any:
    """A model with an adapter, whose other parameters need no gradient."""
    with warnings.catch_warnings(), _default_dtype(dtype):
        warnings.simplefilter("ignore")  # Conv1D's layout, options of generation
        if isinstance(source, torch.nn.Module):
            model: Any = copy.deepcopy(source).eval()
        else:
            fields = dict(source)
            parsed = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            model = transformers.AutoModelForCausalLM.from_config(parsed).eval()
    if adapter is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model
    if isinstance(adapter, tuple):
        model, networks = hooked(model, *adapter)
        model.bottlenecks = torch.nn.ModuleList(networks.values())
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, copy.deepcopy(adapter)).eval()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.train()
    return model


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
