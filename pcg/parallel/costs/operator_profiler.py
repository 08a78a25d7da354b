"""Measure operators on the device at hand, each as the operator table writes it for PyTorch.

An operator is called in a row for the grid's time, thrice, and the fastest row counts; of one that
takes longer than that, the fastest of three calls. Its inputs are the same each time, so that small
ones are found in caches. Attention sees one sequence.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.errors import CostModelError
from pcg.ir.operators import operator
from pcg.ir.types import CONTEXT, TOKENS, TORCH_NAMES, TensorType
from pcg.kernels.batch import DroppedPart, DroppedTokens, Span
from pcg.kernels.torch import ops as torch_ops
from pcg.parallel.costs.device_profile import OperatorTime
from pcg.parallel.costs.profile_cases import CPU_GRID, GPU_GRID, QUICK, Case, Grid, cases
from pcg.parallel.costs.work import work_of
from pcg.peft.weights import AdapterWeight
from pcg.ranks.group import Ranks

HALVES = ("bf16", "f16")


class _OneOfTwo(Ranks):
    """One rank of two without the other: only its own work is measured."""

    size = 2

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x, x]


@dataclass
class _Step:
    """A batch as operators need it: one sequence whose first tokens are virtual."""

    tokens: int
    device: torch.device
    virtual: int = 8
    keeps: bool = True
    cached: None = None
    chosen: None = None
    parts: None = None
    ranks: Ranks = field(default_factory=_OneOfTwo)

    def __post_init__(self) -> None:
        self.spans = (Span(0, self.tokens),)
        self.uniform_length = self.tokens
        rows = torch.arange(min(self.virtual, self.tokens), device=self.device)
        self.virtual_rows, self.virtual_places = rows, rows

    def dropped_parts(self, key: int) -> list[DroppedPart]:
        generator, n = torch.Generator(self.device).manual_seed(key), self.tokens
        return [DroppedPart(0, n, 0, n, generator)]

    def dropped_tokens(self) -> DroppedTokens:
        places = torch.arange(self.tokens, device=self.device)
        key = torch.ones(2, dtype=torch.int64, device=self.device)
        return DroppedTokens(key, places, torch.zeros_like(places))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Keep no cache."""


def measure_operators(
    device: torch.device,
    dtype: str,
    *,
    quick: bool = False,
    on_case: Callable[[str], None] = lambda op: None,
) -> tuple[OperatorTime, ...]:
    """Times of all operators.

    Args:
        device: the device to measure.
        dtype: the base model's; in half precision adapters are measured in it and in f32.
        quick: True to measure a small grid, in seconds, for trying out.
        on_case: called with the name of each operator before it is measured.
    Raises:
        CostModelError: the dtype is no float.
    """
    if dtype not in (*HALVES, "f32", "f64"):
        raise CostModelError(f"a profile is of bf16, f16, f32 or f64, not of {dtype}")
    grid = QUICK if quick else GPU_GRID if device.type == "cuda" else CPU_GRID
    points: dict[tuple[str, str], OperatorTime] = {}
    with torch.no_grad():
        for case in _all_cases(grid, dtype):
            on_case(case.op)
            for point in _points(case, grid, device):
                points.setdefault((point.work.kernel, point.work.shapes), point)
    return tuple(points.values())


def _all_cases(grid: Grid, dtype: str) -> Iterator[Case]:
    yield from cases(grid, dtype, dtype)
    if dtype in HALVES:
        yield from cases(grid, dtype, "f32")
        yield from (c for c in cases(grid, "f32", "f32") if not operator(c.op).is_product)


def _points(case: Case, grid: Grid, device: torch.device) -> Iterator[OperatorTime]:
    entry = operator(case.op)
    outputs = entry.infer(case.inputs, case.attributes)
    has_tokens = any(type_.is_token_wise for type_ in case.inputs)
    for tokens in grid.tokens if has_tokens else grid.tokens[-1:]:
        work = work_of(case.op, case.inputs, outputs, case.attributes, tokens, tokens)
        scratch = entry.temporaries(case.inputs, outputs, case.attributes)
        needed = work.moved_bytes + float(scratch.subs({TOKENS: tokens, CONTEXT: tokens}))
        if needed <= _room_bytes(device):
            seconds = _seconds(_call(case, tokens, device), device, grid.budget_s)
            yield OperatorTime(work, seconds)


def _room_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 4
    return 2.0**31


def _call(case: Case, tokens: int, device: torch.device) -> Callable[[], Any]:
    values: dict[str, Any] = {}
    for i, type_ in enumerate(case.inputs):
        value = _random(type_, tokens, device)
        values[f"x{i}"] = AdapterWeight(value) if i in case.adapters else value
    source = operator(case.op).source(list(values), case.attributes)
    known = {"torch": torch, "F": F, "K": torch_ops, "batch": _Step(tokens, device), **values}
    call: Callable[[], Any] = eval(f"lambda: {source}", known)
    return call


def _random(type_: TensorType, tokens: int, device: torch.device) -> Tensor:
    shape = [tokens] * type_.is_token_wise + list(type_.features)
    dtype = getattr(torch, TORCH_NAMES[type_.dtype])
    if not type_.is_float:
        return torch.randint(0, 8, shape, device=device).to(dtype)
    return torch.rand(shape, device=device).add_(0.1).to(dtype)


def _seconds(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    first = _row(call, device, 1)
    once = _row(call, device, 1)
    if once > 3 * budget_s:
        return min(first, once, _row(call, device, 1))
    count = max(1, min(1000, round(budget_s / once)))
    return min(_row(call, device, count) for _ in range(3)) / count


def _row(call: Callable[[], Any], device: torch.device, count: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The device's name by its driver or the machine; a CPU's with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{_processor()}, {count} thread{'s' * (count != 1)}"


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
