"""What PyTorch keeps for backward of a transformers + peft model: the oracle of `explain`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import peft
import torch
import transformers


def saved_bytes(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    batch: int,
    seq: int,
    autocast: bool = True,
    **lora: Any,
) -> int:
    """Bytes of the storages that autograd holds after a forward with loss, parameters apart.

    Args:
        config: the contents of a config.json.
        dtype: of the base model.
        batch: sequences.
        seq: tokens of each.
        autocast: peft's `autocast_adapter_dtype`; False keeps adapters in the base's dtype.
        lora: fields of peft's LoraConfig.
    """
    model = _model(config, dtype, autocast, lora)
    tensors = [*model.parameters(), *model.buffers()]
    resident = {t.untyped_storage().data_ptr() for t in tensors}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            storages[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    ids = torch.zeros(batch, seq, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(storage.nbytes() for storage in storages.values())


def _model(
    config: Mapping[str, Any], dtype: torch.dtype, autocast: bool, lora: Mapping[str, Any]
) -> Any:
    fields = dict(config)
    with warnings.catch_warnings(), _default_dtype(dtype):
        warnings.simplefilter("ignore")  # Conv1D's layout, options of generation
        parsed = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = transformers.AutoModelForCausalLM.from_config(parsed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = peft.LoraConfig(task_type="CAUSAL_LM", **lora)
        return peft.get_peft_model(model, recipe, autocast_adapter_dtype=autocast).eval()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
