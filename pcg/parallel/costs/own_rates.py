"""Rates that this machine's CPU reaches, measured in some hundredths of a second.

A CPU's data sheet describes a whole socket, but a process has only some threads. A cost model that
compares the CPU with a link therefore has the sheet's kinds of arithmetic at measured rates:

    products   [64, 1024] by [1024, 1024] in fp32 and in the model's dtype; others in proportion
    vectors    in proportion to fp32's products
    memory     a copy of 16 MiB, read and written

A rate is rounded to a power of two, so that processes of the same machine agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch.products import linear
from pcg.parallel.costs.accelerators import ASSUMED
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.cost_model import CostModel, SheetModel

_ROWS, _WIDTH = 64, 1024
_COPIED_BYTES = 2**24
_TRIES = 4


@dataclass(frozen=True)
class OwnRates:
    """Rates of a CPU.

    Attributes:
        product_flops_per_s: rates of matrix products, by the IR's dtype, including f32.
        memory_bytes_per_s: rate of memory, read and written.
    """

    product_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float


def own_rates(device: torch.device, dtype: torch.dtype) -> OwnRates | None:
    """Measure a CPU's rates for a model's dtype; None for a GPU, which has a data sheet."""
    if device.type != "cpu":
        return None
    measured = {torch.float32, dtype}
    products = {
        short: _product_rate(getattr(torch, name))
        for short, name in TORCH_NAMES.items()
        if getattr(torch, name) in measured
    }
    source, copy = torch.ones(_COPIED_BYTES // 4), torch.empty(_COPIED_BYTES // 4)
    seconds = _least_seconds(lambda: copy.copy_(source))
    return OwnRates(products, _rounded(2 * _COPIED_BYTES / seconds))


def rated_model(sheet: str, rates: OwnRates | None) -> CostModel:
    """Return a data sheet's cost model, at measured rates if given; CostModelError if unknown."""
    model = find_cost_model(sheet)
    if rates is None or not isinstance(model, SheetModel):
        return model
    vendor = model.sheet
    share = rates.product_flops_per_s["f32"] / vendor.product_flops_per_s["f32"]
    products = {name: peak * share for name, peak in vendor.product_flops_per_s.items()}
    measured = replace(
        vendor,
        product_flops_per_s={**products, **rates.product_flops_per_s},
        vector_flops_per_s={name: rate * share for name, rate in vendor.vector_flops_per_s.items()},
        memory_bytes_per_s=rates.memory_bytes_per_s,
        source="measured as the process began",
    )
    return SheetModel(model.name, measured, achieved=replace(ASSUMED, product=1.0, memory=1.0))


@torch.no_grad()
def _product_rate(dtype: torch.dtype) -> float:
    x = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    return _rounded(2 * _ROWS * _WIDTH**2 / _least_seconds(lambda: linear(x, weight)))


def _least_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return max(min(seconds), 1e-9)


def _rounded(rate: float) -> float:
    return float(2.0 ** round(math.log2(rate)))
