"""Options of the noise by which a client hides what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from pcg.errors import SplitError
from pcg.split.transports.transport import Transport

Place: TypeAlias = str | Transport | Sequence[str | Transport]
"""A base's address, or a transport to it; several of either, texts also with commas."""
BASE, DOWNLOAD = "base", "download"
_WORST_ERROR = 2.0**-10
"""Of a product, relative to its largest rows: a bf16 number is rounded by as much."""


@dataclass(frozen=True)
class Privacy:
    """Noise on all that a client sends to a base (Symbiosis §3.8; what it hides: docs/split.md).

    Attributes:
        effects: who multiplies the noise by the weights: a second base executor, as host:port or a
            transport to it, or several that hold some layers each, none of which meets the first;
            "download", this client, by weights that it reads and drops; or "base", the base
            itself, which then knows the noise.
        scale: the noise's size in multiples of the largest row's that it is added to, both as
            root mean squares.
        pool: noise vectors that are drawn at once for a piece.
        uses: rows that a vector serves to hide before the pool is drawn anew. With 1 every row has
            noise of its own; with more, rows have different mixtures of the pool's vectors.
        precision: what rows with noise travel and are multiplied in. A product's relative error is
            about `scale` times 1e-6 in float32, and 2e-15 in float64.
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
        """The dtype of rows with noise."""
        found: torch.dtype = getattr(torch, self.precision)
        return found

    @property
    def step(self) -> float:
        """The step of the grid that rows and noise are rounded to, in units of the noise's size.

        It is 8 eps, so that `precision` has every multiple of it up to 16 deviations.
        """
        return 8 * torch.finfo(self.dtype).eps


def privacy_of(given: str | Privacy | None) -> Privacy | None:
    """Return what `connect` was given, a word for `effects` among it, as options."""
    return Privacy(given) if isinstance(given, str) else given
