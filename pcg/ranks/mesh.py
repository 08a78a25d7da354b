"""The mesh of a job's ranks: their number along each axis, and the groups of a rank.

    number of a rank = ((p · dp + d) · cp + c) · tp + t    at place (p, d, c, t) of the axes
    stage of a rank  = pp - 1 - p

so that ranks of a tensor-parallel group, which send the most, are next to each other, and the
first rank, which decides for all, has the last stage, with losses and logits. The ranks that differ
along an axis are a group. All groups of a job make the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from pcg.errors import ParallelError, UnsupportedError
from pcg.ranks.agreement import check_same
from pcg.ranks.group import SINGLE_RANK, Ranks


@dataclass(frozen=True)
class MeshSizes:
    """The number of ranks along each axis, the outermost first.

    Attributes:
        pp: pipeline stages.
        dp: replicas, which share the sequences of a finetuning step.
        cp: parts of every sequence.
        tp: shards of every matrix.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if type(size) is not int or size < 1:
                raise ParallelError(f"{axis}={size!r}; use an int of at least 1")

    @property
    def sizes(self) -> Mapping[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in fields(self)}

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return " ".join(f"{axis}={n}" for axis, n in self.sizes.items() if n > 1) or "tp=1"


AXES = tuple(MeshSizes().sizes)


@dataclass(frozen=True)
class RankMesh:
    """The groups of a rank.

    Attributes:
        sizes: the number of ranks along each axis.
        world: all ranks of the job, which agree on its calls.
        pp, dp, cp, tp: the ranks that differ from this rank only along that axis.
        model: those that differ along pp and tp: together they have all weights once.
        replica: those that differ along pp, cp and tp: they serve the same requests.
        data: those that differ along dp and cp: they have the same shards of adapters, and other
            tokens of a finetuning step, so that gradients are summed over them.
        shards_base: True if these hold parts of the layers, which they gather as they run.
    """

    sizes: MeshSizes = MeshSizes()
    world: Ranks = SINGLE_RANK
    pp: Ranks = SINGLE_RANK
    dp: Ranks = SINGLE_RANK
    cp: Ranks = SINGLE_RANK
    tp: Ranks = SINGLE_RANK
    model: Ranks = SINGLE_RANK
    replica: Ranks = SINGLE_RANK
    data: Ranks = SINGLE_RANK
    shards_base: bool = False

    def check_alone(self, what: str) -> None:
        """Raise an UnsupportedError, which names the call, over several ranks."""
        if self.world.size > 1:
            raise UnsupportedError(f"{what} over {self.world.size} ranks; use one, or finetune")

    def check_no_parts(self, what: str) -> None:
        """Raise an UnsupportedError if ranks have parts of sequences."""
        if self.sizes.cp > 1:
            raise UnsupportedError(
                f"{what} over {self.sizes}: ranks share the tokens of what is served, and of "
                "Executor.finetune and Executor.logits, alone; use cp=1"
            )

    def check_no_replicas(self, what: str) -> None:
        """Raise an UnsupportedError if there are replicas."""
        if self.sizes.dp > 1:
            raise UnsupportedError(
                f"{what} over {self.sizes}: replicas take parts of finetuning steps alone; serve "
                "by one engine for each, in processes of its own"
            )

    def check_no_stages(self, what: str) -> None:
        """Raise an UnsupportedError if there are pipeline stages."""
        if self.sizes.pp > 1:
            raise UnsupportedError(f"{what} over {self.sizes}; use pp=1")

    def sharing(self, shard_base: bool) -> RankMesh:
        """Return the mesh with replicas that have parts of the base, if requested; all call this.

        Raises:
            ParallelError: on every rank: there are no replicas, ranks share the tokens of sequences
                or stages, or ranks ask for different things.
        """
        check_same(self.world, "the base", {"shard_base": repr(shard_base)})
        if shard_base and self.sizes.dp == 1:
            raise ParallelError(
                f"shard_base={shard_base!r} gives each of dp replicas 1/dp of the layers' weights, "
                "and dp=1; give dp=2 or more (--dp 2), or leave it out"
            )
        if shard_base and self.sizes.pp > 1:
            raise ParallelError(
                f"shard_base={shard_base!r} over {self.sizes}: stages hold whole layers; use pp=1, "
                "or leave shard_base out"
            )
        if shard_base and self.sizes.cp > 1:
            raise ParallelError(
                f"shard_base={shard_base!r} over {self.sizes}: ranks that share the tokens of "
                "sequences hold whole layers; use cp=1, or leave shard_base out"
            )
        return replace(self, shards_base=shard_base)

    @property
    def parts(self) -> Ranks:
        """The ranks that have the other parts of this rank's layers."""
        return self.data if self.shards_base else SINGLE_RANK

    @property
    def alike(self) -> Ranks:
        """The ranks that run the same steps: they need each other's shards, tokens, or layers."""
        return self.world if self.shards_base else self.replica

    @property
    def stage(self) -> int:
        """The index of this rank's stage, 0 for the stage that tokens enter."""
        return self.sizes.pp - 1 - self.pp.rank


SINGLE_MESH = RankMesh()


def members(sizes: MeshSizes, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the groups of ranks that differ along some axes only, each in its order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(_places(sizes)):
        rest = tuple(at for axis, at in zip(AXES, place, strict=True) if axis not in axes)
        groups.setdefault(rest, []).append(number)
    return list(groups.values())


def _places(sizes: MeshSizes) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for size in sizes.sizes.values():
        places = [(*place, at) for place in places for at in range(size)]
    return places
