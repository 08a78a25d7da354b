"""Adapter shards: the part of an adapter that a rank trains, its gradients, and gathering.

The layout of a parameter (`pcg.ir.layouts`) determines how the gradient g of its shard is completed
for a step of the optimizer, and how shards are gathered to the whole:

    -    whole        g on every rank             any rank's
    =    replicated   the sum of the ranks' g     any rank's
    |d   partitioned  g                           the shards concatenated along d
    |d   c copies     the sum of c ranks' g       every c-th rank's, concatenated along d
    ~d   of experts   g                           the experts of all ranks' shards, in their order
    ~d|e shared       g                           parts along e of ranks in a row, then as of ~d

|g|² = Σ_{-, =} |g|² + Σ_ranks Σ_{|d} |g|² / c

A fused weight has the rows of several parameters, each partitioned separately. With a single rank,
the shards are the adapter's own tensors. Over pipeline stages, a rank has the tensors of its
stage's layers, and squares of norms are summed over the stages, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from pcg.errors import ParallelError
from pcg.ir.graph import Parameter
from pcg.ir.layouts import PRE_REDUCE, REPLICATED
from pcg.ir.program.program import ModelGraph, python_name
from pcg.peft.adapter import Adapter
from pcg.peft.weights import AdapterWeight
from pcg.ranks.group import SINGLE_RANK, Ranks, united
from pcg.ranks.shards import Ranges, joined_shards, part_of, ranges_of, shard_of

_Parts: TypeAlias = Sequence[Tensor]


class AdapterShards:
    """A rank's shards of an adapter at a training program's sites.

    The name of a shard is its path in the adapter, with rows in brackets.
    """

    def __init__(
        self,
        model: ModelGraph,
        adapter: Adapter,
        device: torch.device,
        ranks: Ranks,
        stages: Ranks = SINGLE_RANK,
    ) -> None:
        """Cut this rank's shards.

        Args:
            model: this rank's stage of the model.
            ranks: ranks with the other shards of each tensor.
            stages: ranks with the tensors of other stages' layers.
        """
        self._adapter = adapter
        self._ranks = ranks
        self._stages = stages
        self._device = device
        self._weights: dict[str, AdapterWeight] = {}
        self._parameters: dict[str, tuple[str, Parameter]] = {}
        for parameter, layer in model.parameters():
            if parameter.role == "adapter":
                path = parameter.source.format(layer=layer)
                self._parameters.setdefault(_name(path, parameter), (path, parameter))
        for name, (path, parameter) in self._parameters.items():
            whole = adapter.parameter(path)
            if whole is not None:
                self._weights[name] = replace(whole, weight=self._own(whole.weight, parameter))
        self.tensors = {
            name: weight.weight
            for name, weight in self._weights.items()
            if self._parameters[name][0] not in adapter.shared
        }
        for name in self.tensors:
            if self._parameters[name][1].part == PRE_REDUCE:
                raise ParallelError(f"{name} is held as summands, which no rank can train alone")

    @property
    def is_whole(self) -> bool:
        """True if the shards are all of the adapter's own tensors."""
        return self._ranks.size == 1 and self._stages.size == 1

    def _own(self, whole: Tensor, parameter: Parameter) -> Tensor:
        if self.is_whole:
            return whole
        shard = shard_of(whole, parameter, self._ranks)
        return shard.detach().clone().contiguous().to(self._device)

    def bind(self, parameters: Sequence[Parameter], layer: int) -> SimpleNamespace:
        """Return the adapter's weights for the parameters of a layer's graph."""
        bound = SimpleNamespace()
        for parameter in parameters:
            if parameter.role == "adapter":
                weight = self._weights[_name(parameter.source.format(layer=layer), parameter)]
                setattr(bound, python_name(parameter.name), weight)
        return bound

    def sum_gradients(self) -> None:
        if self._ranks.size == 1:
            return
        summands = {
            name: tensor.grad
            for name, tensor in self.tensors.items()
            if self._is_summed(name) and tensor.grad is not None
        }
        wholes = [self._among_zeros(name, gradient) for name, gradient in summands.items()]
        for (name, gradient), total in zip(summands.items(), self.summed(wholes), strict=True):
            gradient.copy_(self._own_part(name, total))

    def _is_summed(self, name: str) -> bool:
        parameter = self._parameters[name][1]
        return parameter.part == REPLICATED or parameter.copies > 1

    def _among_zeros(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient as a summand of the whole, with zeros in the parts of other ranks."""
        parameter = self._parameters[name][1]
        if parameter.copies == 1:
            return gradient
        rows, *rest = gradient.shape
        parts = self._ranks.size // parameter.copies
        whole = gradient.new_zeros(rows * parts, *rest)
        self._own_part(name, whole).copy_(gradient)
        return whole

    def _own_part(self, name: str, whole: Tensor) -> Tensor:
        parameter = self._parameters[name][1]
        if parameter.copies == 1:
            return whole
        return whole.narrow(0, *part_of(parameter, whole.shape[0], self._ranks))

    def norm(self) -> Tensor:
        """Return the norm of the whole adapter's gradients, after `sum_gradients`."""
        whole: list[Tensor] = []
        sharded: list[Tensor] = []
        for name, tensor in self.tensors.items():
            assert tensor.grad is not None
            if not self._is_sharded(name):
                whole.append(tensor.grad)
            elif self.counts(name):
                sharded.append(tensor.grad)
        norm = torch.nn.utils.get_total_norm(whole)
        if self.is_whole:
            return norm
        others = torch.nn.utils.get_total_norm(sharded).to(self._device, torch.float64)
        squares = self._ranks.all_reduce(others.square().reshape(1))
        return self._stages.all_reduce(norm.to(squares) ** 2 + squares)[0].sqrt()

    def summed(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Sum tensors over the ranks in a single exchange, bitwise equal on all ranks."""
        if self._ranks.size == 1 or not values:
            return [*values]
        total = self._ranks.all_reduce(torch.cat([value.reshape(-1) for value in values]))
        parts = total.split(_sizes(values))
        return [part.view_as(value) for part, value in zip(parts, values, strict=True)]

    def gathered(self, values: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Return every rank's tensors for partitioned shards, by name, in a single exchange."""
        if self._ranks.size == 1 or not values:
            return {name: [value] for name, value in values.items()}
        flat = torch.cat([value.reshape(-1) for value in values.values()]).to(self._device)
        by_rank = [part.split(_sizes(values.values())) for part in self._ranks.all_gather(flat)]
        return {
            name: [parts[index].view(value.shape) for parts in self._apart(name, by_rank)]
            for index, (name, value) in enumerate(values.items())
        }

    def _apart(self, name: str, by_rank: Sequence[_Parts]) -> Sequence[_Parts]:
        return by_rank[:: self._parameters[name][1].copies]

    def counts(self, name: str, gathered: int | None = None) -> bool:
        """Return True if this rank contributes its part of a tensor to a sum over ranks.

        A single rank contributes for all ranks with the same part. `gathered` is the dim, from 0,
        along which all ranks have gathered a tensor that was partitioned along that dim.
        """
        if self._ranks.size == 1 or self.sharded_dim(name) in (None, gathered):
            return self._ranks.rank == 0
        return self._ranks.rank % self._parameters[name][1].copies == 0

    def ranges(self, name: str) -> Ranges:
        """Return a shard's range of each dim of the whole."""
        path, parameter = self._parameters[name]
        return ranges_of(parameter, self.whole_shape(path), self._ranks)

    def whole_shape(self, path: str) -> tuple[int, ...]:
        weight = self._adapter.parameter(path)
        assert weight is not None
        return tuple(weight.weight.shape)

    def sharded_dim(self, name: str) -> int | None:
        """Return the dim, from 0, along which a tensor is partitioned; None if not partitioned."""
        path, parameter = self._parameters[name]
        dim = parameter.part.dim
        return len(self.whole_shape(path)) + dim if dim and self._ranks.size > 1 else None

    def gather(self) -> None:
        """Write the shards of all ranks into the adapter."""
        if not self.is_whole:
            for path, tensor in self.united(self.joined(self.tensors)).items():
                weight = self._adapter.parameter(path)
                assert weight is not None
                weight.weight.copy_(tensor)

    def scatter(self) -> None:
        """Copy this rank's shards from the adapter again, after a change of the adapter."""
        if not self.is_whole:
            for name, weight in self._weights.items():
                path, parameter = self._parameters[name]
                whole = self._adapter.parameter(path)
                assert whole is not None
                weight.weight.copy_(shard_of(whole.weight, parameter, self._ranks))

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join every rank's tensors for its shards, by name, to whole tensors by path."""
        everywhere = self.gathered({n: v for n, v in values.items() if self._is_sharded(n)})
        by_path: dict[str, list[tuple[tuple[int, int], Tensor]]] = {}
        for name, value in values.items():
            path, parameter = self._parameters[name]
            parts = everywhere.get(name)
            whole = value if parts is None else joined_shards(parts, parameter)
            by_path.setdefault(path, []).append((parameter.rows or (0, 0), whole))
        return {
            path: torch.cat([part for _, part in sorted(parts, key=lambda entry: entry[0])])
            for path, parts in by_path.items()
        }

    def united(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all stages by name."""
        return united(values, self._stages)

    def cut(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cut this rank's shards, by name, out of whole tensors by path; some may be missing."""
        return {
            name: shard_of(wholes[path], parameter, self._ranks).clone()
            for name, (path, parameter) in self._parameters.items()
            if name in self.tensors and path in wholes
        }

    def has(self, path: str) -> bool:
        """Return True if the adapter has a tensor of the path, on any stage."""
        return self._adapter.parameter(path) is not None

    def path_of(self, name: str) -> str:
        return self._parameters[name][0]

    def _is_sharded(self, name: str) -> bool:
        return bool(self._parameters[name][1].part.dim)


def _name(path: str, parameter: Parameter) -> str:
    if not parameter.rows:
        return path
    start, stop = parameter.rows
    return f"{path}[{start}:{stop}]"


def _sizes(tensors: Iterable[Tensor]) -> list[int]:
    return [prod(tensor.shape) for tensor in tensors]
