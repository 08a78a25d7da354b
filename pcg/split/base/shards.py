"""A base's matrices over the ranks of a group: each has some rows of every matrix.

The first rank is the driver, and the others follow: it sends a command of a few numbers, which
names the matrices, then the rows x, and all of them do the same:

    x Wᵀ = [x W₀ᵀ | x W₁ᵀ | …]         an all-gather
    dy W = Σ dy[:, rows of r] W_r       an all-reduce

for W's rows in parts W₀, W₁, … of the ranks, with sizes that differ by 1 at most.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.ir.operators.linear import multiplied
from pcg.ir.program.program import Program
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.devices import device_thread
from pcg.kernels.torch.products import RemoteWeight, linear, linear_backward, stand_in_tensor
from pcg.ranks.group import Ranks
from pcg.ranks.join import TIMEOUT_S
from pcg.ranks.shards import Ranges
from pcg.runtime.model.base_weights import hashing_threads, row_digests
from pcg.runtime.model.weights import Weights
from pcg.split.messages import DTYPES

_NUMBERS = 16
"""Numbers of a command: what, dtype, rows, two numbers, a count, and so many matrices."""
_MOST_NAMES = _NUMBERS - 6
_DTYPES = tuple(DTYPES.values())


class _Do(IntEnum):
    """Commands of the driver; NOTHING shows that it is alive."""

    NOTHING = 0
    LINEAR = 1
    GRADIENT = 2
    LENGTHS = 3
    ROWS = 4
    END = 5


class Shards:
    """A rank's rows of every matrix that a base multiplies by.

    Attributes:
        ranks: the group.
        shapes: of whole matrices, by name.
        digests: the SHA-256 of the SHA-256 of all rows of each.
    """

    def __init__(
        self, program: Program, source: Weights, device: torch.device, ranks: Ranks
    ) -> None:
        """Read this rank's rows. WeightsError: a tensor is missing or damaged."""
        self.ranks = ranks
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtype: torch.dtype = getattr(torch, TORCH_NAMES[program.dtype])
        self._device = device
        self._rows: dict[str, Tensor] = {}
        self._driving = threading.Lock()
        base = program.base
        layers = [(base.blocks[block], layer) for layer, block in enumerate(base.layers)]
        for graph, layer in [(base.prologue, 0), *layers, (base.epilogue, 0)]:
            for name in multiplied(graph):
                parameter = graph.parameters_by_name[name]
                shape, source_name = parameter.type.features, parameter.source.format(layer=layer)
                ranges = (self._range(shape[0], ranks.rank), (0, shape[1]))
                self.shapes[source_name] = tuple(shape)
                self._rows[source_name] = source.load(
                    source_name, shape, self.dtype, parameter.transposed, device, ranges
                ).clone()  # a part of a file's map would keep all of it
        self.digests = self._digests()
        self._names = list(self._rows)
        self._numbers = {name: number for number, name in enumerate(self._names)}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._rows.values())

    def _range(self, rows: int, rank: int) -> tuple[int, int]:
        size = self.ranks.size
        return rows * rank // size, rows * (rank + 1) // size

    def _digests(self) -> Mapping[str, str]:
        """Hash this rank's rows, and return the digests of whole matrices."""
        by_name = {}
        with hashing_threads(self._device) as pool:
            of_rows = zip(self._rows, pool.map(row_digests, self._rows.values()), strict=True)
            for name, digests in of_rows:
                rows = self.shapes[name][0]
                words = self.ranks.tell(digests.ljust(-(-rows // self.ranks.size) * 32, b"\0"))
                ends = [self._range(rows, rank) for rank in range(self.ranks.size)]
                parts = [
                    word[: (end - begin) * 32]
                    for word, (begin, end) in zip(words, ends, strict=True)
                ]
                by_name[name] = hashlib.sha256(b"".join(parts)).hexdigest()
        return by_name

    # ------------------------------------------------------------------------------- the driver

    def linear(self, names: Sequence[str], x: Tensor) -> Tensor:
        """Return x Wᵀ by some matrices, side by side: [T, outs]."""
        parts = [
            self._ask(_Do.LINEAR, names[at : at + _MOST_NAMES], x)
            for at in range(0, len(names), _MOST_NAMES)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def input_gradient(self, name: str, dy: Tensor) -> Tensor:
        """Return dy W, [T, in]."""
        return self._ask(_Do.GRADIENT, (name,), dy)

    def lengths(self, name: str) -> Tensor:
        """Return the sum of the squares of each row, fp32."""
        return self._ask(_Do.LENGTHS, (name,))

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a matrix, [end - begin, in]."""
        return self._ask(_Do.ROWS, (name,), None, begin, end)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Drive the other ranks within a `with`, which end with it.

        They get a command from time to time, as collectives time out.
        """
        has_ended = threading.Event()

        def tell() -> None:
            while not has_ended.wait(TIMEOUT_S / 5):
                self._ask(_Do.NOTHING)

        device_thread(self._device, tell, "pcg ranks").start()
        try:
            yield
            self._ask(_Do.END)
        finally:
            has_ended.set()

    def _ask(
        self,
        what: _Do,
        names: Sequence[str] = (),
        x: Tensor | None = None,
        begin: int = 0,
        end: int = 0,
    ) -> Tensor:
        dtype = _DTYPES.index(self.dtype if x is None else x.dtype)
        numbers = [what, dtype, 0 if x is None else len(x), begin, end, len(names)]
        numbers += [self._numbers[name] for name in names]
        numbers += [0] * (_NUMBERS - len(numbers))
        with self._driving:
            self.ranks.broadcast(torch.tensor(numbers, device=self._device))
            if x is not None:
                x = self.ranks.broadcast(x.contiguous())
            return self._do(what, names, x, begin, end)

    # ------------------------------------------------------------------------------- every rank

    def follow(self) -> None:
        """Execute the driver's commands, until it ends."""
        while True:
            command = torch.zeros(_NUMBERS, dtype=torch.int64, device=self._device)
            what, dtype, rows, begin, end, count, *rest = self.ranks.broadcast(command).tolist()
            if what == _Do.END:
                return
            names = [self._names[number] for number in rest[:count]]
            x = None
            if what in (_Do.LINEAR, _Do.GRADIENT):
                width = self.shapes[names[0]][1 if what == _Do.LINEAR else 0]
                x = torch.empty(rows, width, dtype=_DTYPES[dtype], device=self._device)
                x = self.ranks.broadcast(x)
            self._do(_Do(what), names, x, begin, end)

    @torch.no_grad()
    def _do(
        self, what: _Do, names: Sequence[str], x: Tensor | None, begin: int, end: int
    ) -> Tensor:
        """Do a rank's part of a command; return the result of all."""
        if what == _Do.LINEAR:
            assert x is not None
            return self._gathered(names, [linear(x, self._rows[n].to(x.dtype)) for n in names])
        if what == _Do.GRADIENT:
            assert x is not None
            columns = slice(*self._range(self.shapes[names[0]][0], self.ranks.rank))
            weight = self._rows[names[0]].to(x.dtype)
            return self.ranks.all_reduce(linear_backward(x[:, columns].contiguous(), weight))
        if what == _Do.LENGTHS:
            squares = self._rows[names[0]].float().square().sum(1)
            return self._gathered(names, [squares[None]])[0]
        if what == _Do.ROWS:
            first, last = self._range(self.shapes[names[0]][0], self.ranks.rank)
            chosen = self._rows[names[0]].new_zeros(end - begin, self.shapes[names[0]][1])
            kept = slice(max(begin, first), min(end, last))
            if kept.start < kept.stop:
                held = self._rows[names[0]][kept.start - first : kept.stop - first]
                chosen[kept.start - begin : kept.stop - begin] = held
            return self.ranks.all_reduce(chosen)
        return torch.empty(0)

    def _gathered(self, names: Sequence[str], parts: Sequence[Tensor]) -> Tensor:
        """Return outputs [T, outs] of matrices; ranks have parts [T, rows]."""
        size = self.ranks.size
        widths = [-(-self.shapes[name][0] // size) for name in names]
        padded = [
            F.pad(tensor, (0, width - tensor.shape[1]))
            for tensor, width in zip(parts, widths, strict=True)
        ]
        by_rank = [
            tensor.split(widths, 1) for tensor in self.ranks.all_gather(torch.cat(padded, 1))
        ]
        whole = []
        for index, name in enumerate(names):
            for rank, outputs in enumerate(by_rank):
                begin, end = self._range(self.shapes[name][0], rank)
                whole.append(outputs[index][:, : end - begin])
        return torch.cat(whole, 1)


@dataclass(frozen=True, eq=False)
class ShardedWeight(RemoteWeight):
    """A matrix [out, in] over ranks, or several side by side, as the driver's graphs read it."""

    names: tuple[str, ...]
    shards: Shards

    @property
    def refusal(self) -> str:
        return "a base executor over ranks runs products alone; adapters are at its clients"

    def linear(self, x: Tensor, others: Sequence[Self]) -> Tensor:
        return self.shards.linear(self.joined(others).names, x)

    def input_gradient(self, dy: Tensor) -> Tensor:
        (name,) = self.names
        return self.shards.input_gradient(name, dy)

    def digest(self) -> str:
        (name,) = self.names
        return self.shards.digests[name]


class ShardedSource(Weights):
    """A base's tensors at the driver: the group has its matrices, and it the others."""

    def __init__(self, source: Weights, shards: Shards) -> None:
        super().__init__(source.index, source.base_prefix, source.config, source.where)
        self._source = source
        self._shards = shards

    def remote(self, name: str, shape: Sequence[int], serves: bool = False) -> Tensor | None:
        if name not in self._shards.shapes:
            return None
        return stand_in_tensor(shape, self._shards.dtype, ShardedWeight((name,), self._shards))

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        return self._source._read(name, ranges)
