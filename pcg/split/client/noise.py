"""Noise on the rows that a client sends, whose effect on the result it subtracts (Symbiosis §3.8).

A piece is linear, so with noise N [K, in] and its effect E = N Wᵀ, K vectors of each piece and so
of each layer, a row x is sent as x + s q N, and what comes back less s q E is x Wᵀ; so with dy and
W. The rows q are those of the identity at first, and then, for further `uses` of the pool, of
random orthogonal matrices Q [K, K]: as Q N is distributed as N, the K rows of one Q have
independent Gaussian noise, and no two rows of different ones have the same. All K · uses rows lie
in a space of K dimensions, though; who has more than K of them can find it.

The size s is a power of two from `scale` times the largest row of a request on, as a size by row
would tell the rows' own, and zero gradients would go unhidden. It is made with the system's random
numbers: torch's generator has a seed of 32 bits, which can be tried.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.client.effects import Effects
from pcg.split.client.privacy import Privacy
from pcg.split.pieces import GRADIENT, LINEAR, Piece


@dataclass
class _Pool:
    """The noise of one piece.

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
        """Bytes of the pools."""
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
        rows = x.detach().to("cpu", self._privacy.dtype)
        largest = float(rows.square().mean(1).amax().sqrt())
        if not math.isfinite(largest):
            raise SplitError(f"noise cannot hide inputs of {piece} that are not finite")
        size = 2.0 ** math.ceil(math.log2(self._privacy.scale * (largest or 1.0)))
        with self._lock:
            noise, effects = self._take(piece, *rows.shape)
        found = ask(torch.add(rows, noise, alpha=size))
        return torch.sub(found.cpu(), effects, alpha=size).to(x.dtype)

    def close(self) -> None:
        """Drop the pools, and end what computes effects."""
        self._pools.clear()
        self._effects.close()

    def _take(self, piece: Piece, count: int, width: int) -> tuple[Tensor, Tensor]:
        """Return noise [count, in] and its effects [count, outs], that no row has had."""
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
                parts.append((rows @ pool.noise, rows @ pool.effects))
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
        noise = _gaussian(size, width).to(self._privacy.dtype)
        self.drawn += size
        return _Pool(noise, self._effects.of(piece, noise))


def _gaussian(rows: int, width: int) -> Tensor:
    """Return independent normal numbers [rows, width], fp64, of the system's randomness."""
    if not rows * width:
        return torch.empty(rows, width, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * rows * width)), dtype=torch.int64)
    # 52 bits, halfway between two numbers, so that neither 0 nor 1 is among them.
    uniform = ((bits >> 12) & (2**52 - 1)).double().add_(0.5).mul_(2.0**-52)
    numbers: Tensor = torch.special.ndtri(uniform)
    return numbers.view(rows, width)


def _orthogonal(size: int) -> Tensor:
    """Return a random orthogonal matrix, uniformly distributed (Mezzadri, math-ph/0609050, §5)."""
    q: Tensor
    q, r = torch.linalg.qr(_gaussian(size, size))
    return q.mul_(r.diagonal().sign())
