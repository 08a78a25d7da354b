"""What PyTorch keeps for backward of a transformers + peft model: the oracle of `explain`."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer

from pcg.ir.types import TORCH_NAMES

SHORT_NAMES = {getattr(torch, name): short for short, name in TORCH_NAMES.items()}


def saved_bytes(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    adapter: peft.PeftConfig | None,
    *,
    batch: int,
    seq: int,
    autocast: bool = True,
) -> int:
    """Bytes of the storages that autograd holds after a forward with loss, parameters apart.

    Args:
        config: the contents of a config.json.
        dtype: of the base model.
        adapter: peft's configuration, whose own dropout alone is at work; None trains the biases of
            the base.
        batch: sequences.
        seq: tokens of each, virtual ones included.
        autocast: peft's `autocast_adapter_dtype`; False keeps adapters in the base's dtype.
    """
    return sum(size for _, _, size in saved_tensors(config, dtype, adapter, batch, seq, autocast))


def saved_tensors(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    adapter: peft.PeftConfig | None,
    batch: int,
    seq: int,
    autocast: bool,
) -> list[tuple[torch.Size, torch.dtype, int]]:
    """A tensor of each of those storages, and the storage's bytes."""
    model = _model(config, dtype, adapter, autocast)
    tensors = [*model.parameters(), *model.buffers()]
    resident = {t.untyped_storage().data_ptr() for t in tensors}
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        alive.add(saved)
        return saved

    seq -= getattr(adapter, "num_virtual_tokens", None) or 0
    ids = torch.zeros(batch, seq, dtype=torch.long)
    # Dropout as CUDA runs it, which keeps a mask of booleans; the CPU keeps one of floats.
    dropout = mock.patch("torch.nn.functional.dropout", _native_dropout)
    with dropout, torch.autograd.graph.saved_tensors_hooks(pack, _no_backward):
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


class _Saved:
    """What autograd holds of a tensor, as long as it does: DoRA drops some within a forward.

    A tensor itself would hold more, such as what it was detached from.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.storage = tensor.untyped_storage()


def _model(
    config: Mapping[str, Any], dtype: torch.dtype, adapter: peft.PeftConfig | None, autocast: bool
) -> Any:
    fields = dict(config)
    with warnings.catch_warnings(), _default_dtype(dtype):
        warnings.simplefilter("ignore")  # Conv1D's layout, options of generation
        parsed = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = transformers.AutoModelForCausalLM.from_config(parsed).eval()
    if adapter is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, adapter, autocast_adapter_dtype=autocast).eval()
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
