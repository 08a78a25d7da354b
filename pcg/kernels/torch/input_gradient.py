"""Gradients of the inputs of the base's linear operators, with the terms of bypass networks.

    dx = Σ_j dz_j W_j + ds_j A_j

A sum over several weights is one request. Together with a job that requests only some of these
weights, it runs in parts, a weight each, so that no product by the base's weights runs twice.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.products import (
    Product,
    ProductRequest,
    has_stand_in,
    joined_tokens,
    linear_backward,
)


class InputGradientTerm(ABC):
    """The term that bypass networks at the first weights add to the gradient of their input."""

    @abstractmethod
    def add(
        self,
        dys: Sequence[Tensor],
        dx: Tensor,
        jobs: Sequence[Self],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        """Add the terms of several jobs, this one included, to the base's dx [T, in].

        `dys` has dy [T, out] of each weight; `spans` are each job's first token and its number of
        tokens.
        """

    @abstractmethod
    def parts(self) -> Sequence[Self]:
        """Return a term for each of the first weights, to be added instead of this one."""


@dataclass(slots=True, eq=False)
class InputGradient(Product):
    """dy W, summed over several weights, with a term of bypass networks added.

    Attributes:
        others: dy and W after the first ones.
    """

    weight: Tensor
    term: InputGradientTerm | None
    others: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def rows(self) -> int:
        if has_stand_in(self.weight):
            return 0
        return len(self.weight) + sum(len(weight) for _, weight in self.others)

    def run_rows(self, start: int, stop: int) -> None:
        first, pairs = 0, self._pairs()
        for dy, weight in pairs:
            part = slice(max(start - first, 0), min(stop - first, len(weight)))
            if part.start < part.stop:
                dx = linear_backward(dy[:, part].contiguous(), weight[part])
                dx = dx.to(torch.promote_types(dy.dtype, torch.float32))
                self._outputs = dx if not first + part.start else self._outputs.add_(dx)
            first += len(weight)
        if stop == first:
            dys = [dy for dy, _ in pairs]
            self._outputs = self._outputs.to(dys[0].dtype)
            self._add_terms(dys, self._outputs, *(self._parts or ((self,), (len(dys[0]),))))
            self._x, self.others = None, ()

    @property
    def part_keys(self) -> Sequence[tuple[object, ...]]:
        layer, *names, kind = self.key
        return [(layer, name, kind) for name in names]

    def parts(self) -> Sequence[Self]:
        pairs = self._pairs()
        terms: list[InputGradientTerm | None] = [*self.term.parts()] if self.term else []
        terms += [None] * (len(pairs) - len(terms))
        self._x, self.others = None, ()
        return [
            dataclasses.replace(self, key=key, _x=dy, weight=weight, term=term)
            for key, (dy, weight), term in zip(self.part_keys, pairs, terms, strict=True)
        ]

    def add_part(self, part: Self) -> None:
        dx = part.take()
        self._outputs = dx if self._outputs is None else self._outputs.add_(dx)

    def joined(self, others: Sequence[Self]) -> Self:
        every = (self, *others)
        (first, *rest), counts = self._joined_pairs(every)
        whole = dataclasses.replace(self, _x=first[0], others=rest)
        whole._parts = every, counts
        return whole

    def run(self) -> None:
        (self._outputs,) = self._made((self,))

    def run_with(self, others: Sequence[InputGradient]) -> None:
        every = (self, *others)
        for product, rows in zip(every, self._made(every), strict=True):
            product._outputs = rows.clone()

    def _made(self, every: Sequence[InputGradient]) -> Sequence[Tensor]:
        pairs, counts = self._joined_pairs(every)
        (dy, weight), *others = pairs
        dx = linear_backward(dy, weight)
        for more, by in others:
            if has_stand_in(by):
                dx.add_(linear_backward(more, by))
            else:
                dx = torch.addmm(dx, more, by, out=dx) if dx.is_cuda else dx.add_(more @ by)
        self._add_terms([dy for dy, _ in pairs], dx, every, counts)
        parts: Sequence[Tensor] = dx.split(counts)
        return parts

    def _pairs(self) -> Sequence[tuple[Tensor, Tensor]]:
        assert self._x is not None
        return [(self._x, self.weight), *self.others]

    def _joined_pairs(
        self, every: Sequence[InputGradient]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
        """Join the dy of all for each weight; return them with the tokens of each product."""
        dy, counts = joined_tokens(every)
        pairs = [(dy, self.weight)]
        for place, (first_dy, weight) in enumerate(self.others):
            rows = [product.others[place][0] for product in every]
            pairs.append((torch.cat(rows) if len(rows) > 1 else first_dy, weight))
        for product in every:
            product.others = ()
        return pairs, counts

    @staticmethod
    def _add_terms(
        dys: Sequence[Tensor], dx: Tensor, every: Sequence[InputGradient], counts: Sequence[int]
    ) -> None:
        spans = zip(accumulate(counts[:-1], initial=0), counts, strict=True)
        present = [
            (product.term, span) for product, span in zip(every, spans, strict=True) if product.term
        ]
        if present:
            terms = [term for term, _ in present]
            terms[0].add(dys, dx, terms, [span for _, span in present])


def product_backward(
    batch: ProgramBatch,
    name: str,
    dy: Tensor,
    weight: Tensor,
    term: InputGradientTerm | None = None,
    others: Sequence[tuple[str, Tensor, Tensor]] = (),
) -> ProductRequest[Any]:
    """Request dx = dy W, [T, in], with a term of bypass networks added; `name` is the weight's.

    The dx of `others`, each a weight's name, dy and W, are summed with it.
    """
    names = (name, *(other for other, _, _ in others))
    pairs = [(other_dy, by) for _, other_dy, by in others]
    return InputGradient((batch.layer, *names, "backward"), dy, weight, term, pairs).requested()
