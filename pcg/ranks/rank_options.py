"""The options of how ranks divide a model and its work, beside the shards of `tp`."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.ranks.join import sizes_of
from pcg.ranks.mesh import MeshSizes


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The numbers of ranks that divide a model and its work (docs/parallel.md).

    Attributes:
        dp: data-parallel degree: so many times `tp` processes, of which each group of `tp` takes
            some sequences of every finetuning step. By default the number of processes over those
            of `tp`, `cp` and `pp`, if one of these is above 1.
        pp: pipeline stages: so many groups of ranks have some of the layers each, and pass on what
            these make of the tokens.
        cp: context-parallel degree: so many ranks share the tokens of each sequence that is
            finetuned; each has all weights, or a shard of `tp`.
        shard_base: hold 1/dp of the layers' weights on each replica, which gathers every layer
            before it runs and drops it after: for bases that do not fit.
        rank_timeout_s: the longest time that a rank waits for the others, seconds; 300 by default.
    """

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    shard_base: bool = False
    rank_timeout_s: float | None = None

    def sizes(self, tp: int) -> MeshSizes:
        """Return the number of ranks along each axis, of `tp` shards."""
        return sizes_of(tp, self.dp, self.cp, self.pp)
