"""Noise on the rows that a client sends; it subtracts the effect on the result (Symbiosis §3.8).

A piece is linear, so with noise N [K, in] and its effect E = N Wᵀ, K vectors of each piece and so
of each layer, a row x is sent as x + s q N, and the result less s q E is x Wᵀ; so with dy and
W. The rows q are those of the identity at first, and then, for further `uses` of the pool, of
random orthogonal matrices Q [K, K]: as Q N is distributed as N, the K rows of a Q have
independent Gaussian noise, and no two rows of different ones have the same. All K · uses rows lie
in a space of K dimensions, though; an observer of more than K of them can find it.

The size s is a power of two from `scale` times the largest row of a request on, as a size by row
would show the rows' own, and zero gradients would go unhidden. It is drawn with the system's random
numbers: torch's generator has a seed of 32 bits, which can be tried.

Floating-point noise has gaps, and x + s n for a real x tells by its last digits which gap x is in
(Mironov, CCS 2012). So with a grid of g = 2⁻⁴⁹, or 2⁻²⁰ in float32,

    y = s g (round(x / (s g)) + k),    n = g k,    k an integer,  P(k) ∝ exp(-(g k)² / 2)

and every y can result from every x. `_gaussian` draws k with these probabilities, to a factor of
1 ± 2⁻⁴⁸, but for events of probability 2⁻⁵⁸; the normal distribution rounded to g = 2⁻⁴⁹ has them,
too, to 2⁻⁹⁰. So y is a Gaussian mechanism's output, rounded, and has its bounds: the messages of
rows x₁ … xₙ are μ-GDP with respect to those of x'₁ … x'ₙ, for μ² = Σ |xᵢ - x'ᵢ|² / sᵢ² (Dong, Roth,
Su, "Gaussian differential privacy", 2022, §2.3 and §3.1).

The effects n Wᵀ and n W are computed where the client chooses (`Privacy.effects`).
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.client.caller import Caller
from pcg.split.messages import DTYPES, GRADIENT, LINEAR, Piece
from pcg.split.transport import Transport

Place: TypeAlias = str | Transport | Sequence[str | Transport]
"""A base's address, or a transport to it; several of either, texts also with commas."""
BASE, DOWNLOAD = "base", "download"
_WORST_ERROR = 2.0**-10
"""Of a product, relative to its largest rows: a bf16 number is rounded by as much."""


@dataclass(frozen=True)
class Privacy:
    """Noise on all that a client sends to a base (Symbiosis §3.8; its guarantees: docs/split.md).

    Attributes:
        effects: who multiplies the noise by the weights: a second base executor, as host:port or a
            transport to it, or several that hold some layers each, and do not know the first;
            "download", this client, by weights that it reads and drops; or "base", the base
            itself, which then knows the noise.
        scale: the noise's size in multiples of the largest row's that it is added to, both as
            root mean squares.
        pool: noise vectors drawn together for a piece.
        uses: rows that a vector serves to hide before the pool is drawn again. With 1 every row has
            noise of its own; with more, rows have different mixtures of the pool's vectors.
        precision: the dtype of messages and products of rows with noise. A product's relative error
            is about `scale` times 1e-6 in float32, and 2e-15 in float64.
        effects_api_key: a key of the second base; by default that of the first.
        effects_curve_server: its CURVE key, or a file with it, to encrypt the connection.
    Raises:
        SplitError: a value is out of range, or the noise would drown the result.
    """

    effects: Place
    scale: float = 2.0**20
    pool: int = 64
    uses: int = 1
    precision: Literal["float32", "float64"] = "float64"
    effects_api_key: str | None = field(default=None, repr=False)
    effects_curve_server: str | Path | None = None

    def __post_init__(self) -> None:
        for name, value, most in (("pool", self.pool, 2**16), ("uses", self.uses, 2**20)):
            if type(value) is not int or not 1 <= value <= most:
                raise SplitError(f"privacy: {name}={value!r}; use 1 to {most}")
        if self.precision not in ("float32", "float64"):
            raise SplitError(f"privacy: precision={self.precision!r}; use float32 or float64")
        most_scale = _WORST_ERROR / self.step
        if not 0 < self.scale <= most_scale:
            raise SplitError(
                f"privacy: scale={self.scale:g} in {self.precision} leaves no digits of the "
                f"result; use more than 0, and {most_scale:g} at most"
            )
        if isinstance(self.effects, str) and not (
            self.effects in (BASE, DOWNLOAD) or ":" in self.effects
        ):
            raise SplitError(
                f"privacy: effects={self.effects!r}; use {BASE}, {DOWNLOAD}, or the host:port of a "
                "second base executor"
            )

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype

    @property
    def step(self) -> float:
        """The step of the grid that rows and noise are rounded to, in units of the noise's size.

        It is 8 eps, so that `precision` has every multiple of it up to 16 deviations.
        """
        return 8 * torch.finfo(self.dtype).eps


def privacy_of(option: str | Privacy | None) -> Privacy | None:
    """Return the option `privacy` of `connect`, also a word for `effects`, as `Privacy`."""
    return Privacy(option) if isinstance(option, str) else option


_SLICE_BYTES = 2**24
"""Bytes of a weight that a client holds at a time."""


class Effects(ABC):
    """Computes a piece on rows of only noise."""

    @abstractmethod
    def of(self, piece: Piece, noise: Tensor) -> Tensor:
        """Return a piece's outputs, [rows, outs], for noise [rows, in], in its dtype."""

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        ...


class EffectsAtBase(Effects):
    """A base executor computes them, and sees the noise.

    Args:
        is_own: True if the connection is closed with this.
    """

    def __init__(self, caller: Caller, is_own: bool) -> None:
        self._caller = caller
        self._is_own = is_own

    def of(self, piece: Piece, noise: Tensor) -> Tensor:
        return self._caller.product(piece, noise, serves=False)

    def close(self) -> None:
        if self._is_own:
            self._caller.close()


class EffectsHere(Effects):
    """The client computes them, by rows of the weights that it downloads and drops."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.downloaded_bytes = 0

    def of(self, piece: Piece, noise: Tensor) -> Tensor:
        parts = []
        for name in piece.weights:
            outs, ins = self._caller.facts.pieces[name]
            is_linear = piece.kind == LINEAR
            effects = noise.new_zeros(len(noise), outs if is_linear else ins)
            step = max(1, _SLICE_BYTES // (ins * noise.element_size()))
            for begin in range(0, outs, step):
                end = min(begin + step, outs)
                wanted = [((end - begin, ins), DTYPES[self._caller.facts.dtype])]
                (stored,) = self._caller.tensors(
                    "rows", wanted, name=name, begin=begin + 1, end=end
                )
                self.downloaded_bytes += stored.nbytes
                weight = stored.to(noise.dtype)
                if is_linear:
                    torch.mm(noise, weight.t(), out=effects[:, begin:end])
                else:
                    effects.addmm_(noise[:, begin:end], weight)
            parts.append(effects)
        return torch.cat(parts, -1)


@dataclass
class _Pool:
    """The noise of a piece.

    Attributes:
        noise: [K, in].
        effects: [K, outs].
        mixing: the present Q; None for the identity.
        at: rows of it that were used.
        rounds: matrices Q that were used up.
    """

    noise: Tensor
    effects: Tensor
    mixing: Tensor | None = None
    at: int = 0
    rounds: int = 0


class Noise:
    """Hides the rows of requests; any thread may call.

    Attributes:
        drawn: noise vectors that were drawn so far, over all pieces.
    """

    def __init__(self, privacy: Privacy, effects: Effects) -> None:
        self._privacy = privacy
        self._effects = effects
        self._pools: dict[Piece, _Pool] = {}
        self._lock = Lock()
        self.drawn = 0

    @property
    def size_bytes(self) -> int:
        pools = self._pools.values()
        return sum(pool.noise.nbytes + pool.effects.nbytes for pool in pools)

    def run(self, piece: Piece, x: Tensor, ask: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a piece on rows without showing them.

        Args:
            x: [rows, in].
            ask: sends rows with noise to the base, and returns the outputs.
        Returns:
            [rows, outs], in the dtype of `x`, on the CPU.
        Raises:
            SplitError: the piece is not linear, or rows are not finite.
        """
        if piece.kind not in (LINEAR, GRADIENT):
            raise SplitError(f"noise hides linear operators' inputs, and {piece} is none")
        rows = x.detach().to("cpu", torch.float64)
        largest = float(rows.square().mean(1).amax().sqrt())
        if not math.isfinite(largest):
            raise SplitError(f"noise cannot hide inputs of {piece} that are not finite")
        size = 2.0 ** math.ceil(math.log2(self._privacy.scale * (largest or 1.0)))
        with self._lock:
            noise, effects = self._take(piece, *rows.shape)
        # Both are multiples of one step, so that their sum, however it is rounded, tells of the
        # row nothing but its own multiple.
        hidden = self._on_grid(rows / size).add_(noise).mul_(size)
        outputs = ask(hidden.to(self._privacy.dtype))
        return torch.sub(outputs.cpu(), effects, alpha=size).to(x.dtype)

    def close(self) -> None:
        """Drop the pools, and close the computation of effects."""
        self._pools.clear()
        self._effects.close()

    @torch.inference_mode(False)  # a pool that serving has drawn is used by training, too
    def _take(self, piece: Piece, count: int, width: int) -> tuple[Tensor, Tensor]:
        """Return noise [count, in] and its effects [count, outs], both unused."""
        parts: list[tuple[Tensor, Tensor]] = []
        while count:
            pool = self._pools.get(piece)
            if pool is None or pool.rounds == self._privacy.uses:
                pool = self._pools[piece] = self._draw(piece, count, width)
            size = len(pool.noise)
            taken = slice(pool.at, min(pool.at + count, size))
            if pool.mixing is None:
                parts.append((pool.noise[taken], pool.effects[taken]))
            else:
                rows = pool.mixing[taken]
                parts.append((self._on_grid(rows @ pool.noise), rows @ pool.effects))
            count -= taken.stop - taken.start
            pool.at = taken.stop
            if pool.at == size:
                pool.at, pool.rounds = 0, pool.rounds + 1
                if pool.rounds < self._privacy.uses:
                    pool.mixing = _orthogonal(size).to(self._privacy.dtype)
        if len(parts) == 1:
            return parts[0]
        noise, effects = zip(*parts, strict=True)
        return torch.cat(noise), torch.cat(effects)

    def _draw(self, piece: Piece, count: int, width: int) -> _Pool:
        # Noise that hides one row only is best drawn for all rows at once.
        size = max(self._privacy.pool, count) if self._privacy.uses == 1 else self._privacy.pool
        noise = self._on_grid(_gaussian(size, width)).to(self._privacy.dtype)
        self.drawn += size
        return _Pool(noise, self._effects.of(piece, noise))

    def _on_grid(self, tensor: Tensor) -> Tensor:
        step = self._privacy.step
        return tensor.div(step).round_().mul_(step)


_CELLS = 4
"""Cells of the table below for a standard deviation."""
_CELL_BITS = 47
"""Bits of a place within a cell, so that numbers are multiples of 2⁻⁴⁹, which is 8 eps of fp64."""
_DRAWN_AT_ONCE = 2**15


def _cell_thresholds() -> Tensor:
    """Return P(cell ≤ a) for a = 0, 1, … in units of 2⁻⁶³, with P(a) ∝ exp(-(a / cells)² / 2).

    The last cell starts 9 deviations from 0, where the probability is below 2⁻⁶³.
    """
    weights = [math.exp(-0.5 * (a / _CELLS) ** 2) for a in range(9 * _CELLS + 1)]
    counts = [round(weight / math.fsum(weights) * 2.0**63) for weight in weights]
    counts[0] += 2**63 - sum(counts)
    return torch.tensor(list(accumulate(counts))[:-1])


_THRESHOLDS = _cell_thresholds()


def _gaussian(rows: int, width: int) -> Tensor:
    """Return independent normal numbers [rows, width], fp64, of the system's randomness.

    They are multiples of g = 2⁻⁴⁹, with probabilities in proportion to exp(-x² / 2): a cell by a
    table, a place t in the cell, uniform, which is kept with probability exp(-t (t + 2 a) / 2 c²)
    for cell a of c a deviation, and a sign.

    Source: Ducas, Durmus, Lepoint, Lyubashevsky, "Lattice signatures and bimodal Gaussians" (BLISS,
    CRYPTO 2013), Algorithm 11.
    """
    numbers_kept, count_kept = torch.empty(rows * width, dtype=torch.float64), 0
    while count_kept < len(numbers_kept):
        # 9 in 10 are kept.
        count = min((len(numbers_kept) - count_kept) * 9 // 8 + 64, _DRAWN_AT_ONCE)
        bits = torch.frombuffer(bytearray(os.urandom(24 * count)), dtype=torch.int64)
        of_cell, of_place, of_choice = bits.view(3, count)
        cell = torch.searchsorted(_THRESHOLDS, of_cell & (2**63 - 1), right=True).double()
        place = (of_place & (2**_CELL_BITS - 1)).double().mul_(2.0**-_CELL_BITS)
        chance = torch.exp(place * (place + 2 * cell) / (-2 * _CELLS**2))
        is_kept = (of_choice & (2**53 - 1)).double().mul_(2.0**-53) < chance
        numbers, is_negative = (cell + place) / _CELLS, of_place < 0
        is_kept &= (numbers != 0) | ~is_negative  # 0 is drawn with either sign, and counts once
        kept = torch.where(is_negative, -numbers, numbers)[is_kept][
            : len(numbers_kept) - count_kept
        ]
        numbers_kept[count_kept : count_kept + len(kept)] = kept
        count_kept += len(kept)
    return numbers_kept.view(rows, width)


def _orthogonal(size: int) -> Tensor:
    """Return a random orthogonal matrix, uniformly distributed (Mezzadri, math-ph/0609050, §5)."""
    q: Tensor
    q, r = torch.linalg.qr(_gaussian(size, size))
    return q.mul_(r.diagonal().sign())
