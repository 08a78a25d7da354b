"""Launch the kernels that the emitter writes for groups of nodes.

A kernel runs over tiles of rows and columns; a token has one or several rows. Its arguments are
pointers of inputs and outputs, the distance between tokens of each token-wise input, the distance
between heads that may lie apart, and the number of rows. Groups side by side get the number of
tokens instead, and the first program of each part but the first.

LoRA that is left to a kernel (`pcg.kernels.triton.adapters.deferred_lora`) is several pointers and
numbers in place of a sum; without it the kernel is compiled without LoRA.

Keys and values go to the layer's cache, to the rows of the batch's tokens, if the batch has a
cache: the kernel gets these rows behind its pointers, and the cache's distances behind the inputs'.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.kernels.sizes import DEFERRED_NUMBERS, DEFERRED_POINTERS, PAGE_TOKENS
from pcg.kernels.triton.adapters.deferred_lora import DeferredLora
from pcg.kernels.triton.attention.cache_rows import CacheRows

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_DEFERRED_WARPS = 2
"""Times as many warps for a kernel that adds LoRA: a thread has 8 columns of 8 ranks of B under way
at once, 32 registers, so that a tile of 4096 columns has 64 KiB."""


@dataclass(frozen=True)
class FusedPart:
    """Rows that a kernel cuts into programs in the same way.

    Attributes:
        rows_a_token: rows that the kernel makes of a token.
        block: rows and columns of a program.
        outputs: dtype and features of each, as `bf16[32, 128]`; an output of the cache is
            `keys bf16[8, 128]`, or `values bf16[8, 128] of 2` if value 2 of inputs and outputs
            replaces it without a cache.
    """

    rows_a_token: int
    columns: int
    block: tuple[int, int]
    outputs: Sequence[str]


@dataclass(frozen=True)
class _Output:
    """A tensor, or with `to` the `keys` or `values` of the cache.

    `stand_in` is the index of the value that replaces it without a cache, or None.
    """

    to: str
    dtype: torch.dtype
    features: tuple[int, ...]
    stand_in: int | None

    @classmethod
    def parsed(cls, text: str) -> _Output:
        match = re.fullmatch(r"(?:(keys|values) )?(\w+)\[([\d, ]*)\](?: of (\d+))?", text)
        assert match is not None, text
        features = tuple(int(size) for size in match[3].split(","))
        stand_in = None if match[4] is None else int(match[4])
        return cls(match[1] or "", _DTYPES[match[2]], features, stand_in)


Made: TypeAlias = Tensor | CacheRows


class Fused:
    """A kernel with the data of its launch."""

    def __init__(
        self,
        kernel: Any,
        token_wise: Sequence[bool],
        parts: Sequence[FusedPart],
        warps: int,
        apart: Sequence[int] = (),
        deferred: Sequence[int] = (),
    ) -> None:
        """Keep a jitted kernel.

        Args:
            token_wise: for each input, True if its first dim is the tokens.
            parts: parts side by side; most kernels have a single part.
            warps: warps of a program.
            apart: indices of inputs [T, heads, d] whose heads may lie apart.
            deferred: indices of `DeferredLora` inputs.
        """
        self.kernel = kernel
        self._apart = tuple(apart)
        self._deferred = tuple(deferred)
        self._token_wise = tuple(
            is_of and number not in deferred for number, is_of in enumerate(token_wise)
        )
        self._first = self._token_wise.index(True)
        self._parts = tuple(parts)
        self._by_part = [tuple(map(_Output.parsed, part.outputs)) for part in parts]
        self._outputs = [output for outputs in self._by_part for output in outputs]
        self._appends = any(output.to for output in self._outputs)
        self._warps = warps
        self._parts_names = [name for name in kernel.arg_names if name.endswith("_PARTS")]

    def __call__(self, *arguments: Any) -> Any:
        """Run it on its inputs, after the batch if it writes to the cache."""
        batch, inputs = (arguments[0], arguments[1:]) if self._appends else (None, arguments)
        cached = None if batch is None else batch.cached
        tokens, device = inputs[self._first].shape[0], inputs[self._first].device
        outputs: list[Made] = []
        for output in self._outputs:
            if output.to and cached is not None:
                outputs.append(CacheRows.of_layer(cached[output.to == "values"]))
            elif output.stand_in is not None:
                outputs.append((*inputs, *outputs)[output.stand_in])
            else:
                shape = (tokens, *output.features)
                outputs.append(torch.empty(shape, dtype=output.dtype, device=device))
        slots: Tensor | None = None if batch is None or cached is None else batch.rows
        programs = [self._programs(i, tokens, slots) for i in range(len(self._parts))]
        if any(map(all, programs)):
            dense = [x if self._is_taken(i, x) else _dense(x) for i, x in enumerate(inputs)]
            self._launch(dense, outputs, slots, tokens, programs)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _programs(self, number: int, tokens: int, slots: Tensor | None) -> tuple[int, int]:
        """Return a part's blocks of rows and of columns; 0 if all its outputs exist already."""
        part = self._parts[number]
        if slots is None and all(output.stand_in is not None for output in self._by_part[number]):
            return 0, 0
        row_block, column_block = part.block
        return -(-tokens * part.rows_a_token // row_block), -(-part.columns // column_block)

    def _is_taken(self, number: int, x: Any) -> bool:
        return number in self._deferred or (number in self._apart and x.stride(-1) == 1)

    def _launch(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Made],
        slots: Tensor | None,
        tokens: int,
        programs: Sequence[tuple[int, int]],
    ) -> None:
        pointers: list[Any] = []
        for number, x in enumerate(inputs):
            if number in self._deferred:
                # Of what is not there the kernel reads nothing.
                pointers += x.pointers or [inputs[self._first]] * len(DEFERRED_POINTERS)
            else:
                pointers.append(x)
        pointers += (x.base if isinstance(x, CacheRows) else x for x in outputs)
        strides = [x.stride(0) for x, is_of in zip(inputs, self._token_wise, strict=True) if is_of]
        strides += [inputs[number].stride(1) for number in self._apart]
        lora: Sequence[DeferredLora] = [inputs[number] for number in self._deferred]
        for summand in lora:
            strides += summand.numbers if summand.parts else [0] * len(DEFERRED_NUMBERS)
        constants: dict[str, int] = dict(
            zip(self._parts_names, (summand.parts for summand in lora), strict=True)
        )
        warps = self._warps
        if any(summand.parts for summand in lora):
            warps = min(32, _DEFERRED_WARPS * warps)
        if self._appends:
            pointers.append(inputs[0] if slots is None else slots)
            constants["PAGE"] = 0 if slots is None else PAGE_TOKENS
        for output, x in zip(self._outputs, outputs, strict=True):
            if output.to:
                strides += x.strides if isinstance(x, CacheRows) else (0, 0, 0)
        if len(self._parts) == 1:
            part, grid = self._parts[0], programs[0]
            counts = [tokens * part.rows_a_token]
            constants |= {"ROWS": part.block[0], "COLUMNS": part.block[1]}
        else:
            *firsts, end = accumulate(rows * columns for rows, columns in programs)
            grid, counts = (end, 1), [tokens, *firsts]
        self.kernel[grid](*pointers, *strides, *counts, **constants, num_warps=warps)


def fused(
    *,
    token_wise: Sequence[bool],
    outputs: Sequence[str],
    rows_a_token: int,
    columns: int,
    block: tuple[int, int],
    warps: int,
    apart: Sequence[int] = (),
    deferred: Sequence[int] = (),
) -> Callable[[Any], Fused]:
    """Decorate a jitted kernel of a single part, by the arguments of `Fused` and `FusedPart`."""
    part = FusedPart(rows_a_token, columns, block, outputs)
    return lambda kernel: Fused(kernel, token_wise, (part,), warps, apart, deferred)


def side_by_side(
    *,
    token_wise: Sequence[bool],
    parts: Sequence[FusedPart],
    warps: int,
    apart: Sequence[int] = (),
    deferred: Sequence[int] = (),
) -> Callable[[Any], Fused]:
    """Decorate a jitted kernel of several parts; the arguments are those of `Fused`."""
    return lambda kernel: Fused(kernel, token_wise, parts, warps, apart, deferred)


def _dense(x: Tensor) -> Tensor:
    size = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.shape[dim] != 1 and x.stride(dim) != size:
            return x.contiguous()
        size *= x.shape[dim]
    return x
