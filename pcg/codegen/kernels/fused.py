"""Launch the kernels that the emitter writes for groups of nodes.

A kernel runs over tiles of rows and columns; a token has one or several rows. It is given pointers
to what it reads and makes, then the distance between tokens of each token-wise input, then the
number of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Fused:
    """A kernel with what its launch needs."""

    def __init__(
        self,
        kernel: Any,
        token_wise: Sequence[bool],
        outputs: Sequence[str],
        rows_a_token: int,
        columns: int,
        block: tuple[int, int],
        warps: int,
    ) -> None:
        """Keep a kernel.

        Args:
            kernel: jitted.
            token_wise: for each input, whether its first dim is the tokens.
            outputs: dtype and features of each, as `bf16[32, 128]`.
            rows_a_token: rows that the kernel makes of a token.
            columns: of a row.
            block: rows and columns of a program.
            warps: of a program.
        """
        self.kernel = kernel
        self._token_wise = tuple(token_wise)
        self._first = self._token_wise.index(True)
        self._outputs = tuple(map(_parsed, outputs))
        self._rows_a_token = rows_a_token
        self._block = block
        self._columns = -(-columns // block[1])
        self._warps = warps

    def __call__(self, *inputs: Tensor) -> Any:
        """Run it; its output, or the tuple of them."""
        tokens = inputs[self._first].shape[0]
        device = inputs[self._first].device
        made = tuple(
            torch.empty((tokens, *features), dtype=dtype, device=device)
            for dtype, features in self._outputs
        )
        if tokens:
            given = [_dense(x) for x in inputs]
            strides = [
                x.stride(0) for x, is_of in zip(given, self._token_wise, strict=True) if is_of
            ]
            rows, (row_block, column_block) = tokens * self._rows_a_token, self._block
            grid = (-(-rows // row_block), self._columns)
            self.kernel[grid](
                *given, *made, *strides, rows,
                ROWS=row_block, COLUMNS=column_block, num_warps=self._warps,
            )  # fmt: skip
        return made if len(made) > 1 else made[0]


def fused(**launch: Any) -> Callable[[Any], Fused]:
    """Decorate a jitted kernel; the arguments are those of `Fused`."""
    return lambda kernel: Fused(kernel, **launch)


def _parsed(type_: str) -> tuple[torch.dtype, tuple[int, ...]]:
    found = re.fullmatch(r"(\w+)\[([\d, ]*)\]", type_)
    assert found is not None, type_
    return _DTYPES[found[1]], tuple(int(size) for size in found[2].split(","))


def _dense(x: Tensor) -> Tensor:
    """x with its features side by side; itself where they are."""
    size = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.shape[dim] != 1 and x.stride(dim) != size:
            return x.contiguous()
        size *= x.shape[dim]
    return x
