"""The base in memory after it is loaded: its bytes are those that `explain` says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from tests.support import oracle
from tests.support.families import BY_NAME

TIED = {**BY_NAME["llama3"].config(3), "tie_word_embeddings": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": TIED,
    **{name: BY_NAME[name].config(3) for name in ("gpt2", "qwen2", "falcon-mha", "mpt")},
}


@contextmanager
def new_tensors() -> Iterator[Callable[[], list[Tensor]]]:
    """Yield a function that returns the CPU's live tensors that were made within the context."""

    def live() -> list[Tensor]:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
        return [one for one in found if one.device.type == "cpu"]

    gc.collect()
    gc.freeze()  # what there is already is not looked at again: that takes seconds
    try:
        yield live
    finally:
        gc.unfreeze()


def live_bytes(tensors: list[Tensor]) -> int:
    """The bytes of memory that tensors take, where they overlap once."""
    total = sum(tensor.nbytes for tensor in tensors if tensor.is_mkldnn)
    plain = [tensor for tensor in tensors if not tensor.is_mkldnn and tensor.nbytes]
    end = 0
    for start, stop in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in plain):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_live_bytes_after_load_are_those_explained(name: str, dtype: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    oracle.random_model(config, getattr(torch, dtype)).save_pretrained(tmp_path)
    with new_tensors() as live:  # tracing makes the constants
        explained = explaining.explain(str(tmp_path), None, dtype=dtype, device="cpu").memory_bytes
        # Weights of fp64 are not packed, so that they lie in memory as on a GPU.
        on_gpu = explaining.explain(str(tmp_path), None, dtype=dtype).memory_bytes
        assert (explained["weights"] == on_gpu["weights"]) == (dtype == "float64")
        executor = compiler.compile(str(tmp_path), dtype=dtype, device=torch.device("cpu"))
        assert live_bytes(live()) == explained["weights"]
    assert len(executor.generate([[3, 4, 5]], max_new_tokens=2, ignore_eos=True)) == 1
