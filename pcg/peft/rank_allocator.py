"""Ranks that training gives to modules (AdaLoRA): orthogonality, and which triplets are kept.

A triplet is a row of A, a singular value E and a column of B. With P = A or Bᵀ [r, m] of each of n
matrices, G = P Pᵀ and ||·|| the Frobenius norm, a loss beside the data's is

    R = weight / n · Σ ||G - I||                                               (§3.1, eq. 4)
    ∂R/∂P = weight / n · 2 (G - I) P / ||G - I||                               0 where G = I

Over ranks of the group, which hold shards P_i of m's entries, G is the sum of P_i P_iᵀ over all, in
one exchange of r² numbers a matrix; each then has its part of the gradient by its own P_i. Rows
that they have parts of are gathered before.

After step t of the optimizer, with each parameter w and its gradient g as it was clipped,

    I = |w g|;   Ī = β₁ Ī + (1 - β₁) I;   U = β₂ U + (1 - β₂) |I - Ī|          (§3.2, eq. 8-10)
    score of a triplet = Ī U of its E + the means of Ī U of its row of A and column of B

and where t is due, E of the triplets outside the budget, those with the lowest scores, is zero:

    budget(t) = target + (start - target) (1 - (t - before) / (last - before))³         (§3.3)

From the last step on the same triplets stay zero. E of the others may grow again until then.

Each rank of the group has Ī and U of its shards. A mean is a sum over the shards of all, in one
exchange of the scores alone, so all have the same scores and zero the same triplets.

torch is imported where it computes, so that recipes are read without it.

Source: "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning" (Zhang et al. 2023);
`RankAllocator`, `AdaLoraModel.forward` and `update_and_allocate` of peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pcg.peft.method import Shards

if TYPE_CHECKING:
    from torch import Tensor

_IMPORTANCE, _UNCERTAINTY, _MASK = "importance/", "uncertainty/", "mask/"


@dataclass(frozen=True)
class Schedule:
    """When ranks are allocated, and by what.

    Attributes:
        rank: triplets of each module at the start.
        target_rank: triplets of each module on average at the end.
        before: steps until the first triplet goes.
        last: the step after which none goes.
        interval: steps from one allocation to the next.
        beta1: decay of Ī.
        beta2: decay of U.
        orthogonality: weight of R.
    """

    rank: int
    target_rank: int
    before: int
    last: int
    interval: int
    beta1: float
    beta2: float
    orthogonality: float


class RankAllocator:
    """The allocation of ranks in one job."""

    def __init__(
        self, schedule: Schedule, shards: Shards, rank_dims: Mapping[str, int], values: str
    ) -> None:
        """Begin with all triplets.

        Args:
            shards: this rank's shards of the adapter.
            rank_dims: the dim of each kind of parameter that the triplets are along.
            values: the kind of E.
        """
        self._schedule = schedule
        self._shards = shards
        parts = {name: shards.path_of(name).rpartition(".") for name in shards.tensors}
        self._module_of = {n: path for n, (path, _, kind) in parts.items() if kind in rank_dims}
        self._rank_dims = {n: rank_dims[parts[n][2]] for n in self._module_of}
        self._values = [n for n in self._module_of if parts[n][2] == values]
        self._count = len({*self._module_of.values()})
        self._importance: dict[str, Tensor] = {}
        self._uncertainty: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}

    # ----------------------------------------------------------------------- orthogonality

    def regularize(self) -> float:
        """Add R's gradient to each parameter's, which ranks of the group have summed; return R."""
        import torch

        shards = self._shards
        dims = {n: dim for n, dim in self._rank_dims.items() if n not in self._values}
        parts = {name: shards.tensors[name].detach() for name in dims}
        of_rows = {name: parts[name] for name in dims if shards.sharded_dim(name) == dims[name]}
        for name, found in shards.gathered(of_rows).items():
            parts[name] = torch.cat(found, dims[name])
        rows = {name: part if dims[name] == 0 else part.t() for name, part in parts.items()}

        grams: dict[str, Tensor] = {}
        for name, p in rows.items():
            counts = shards.counts(name, gathered=dims[name])
            gram = p @ p.t() if counts else p.new_zeros(len(p), len(p))
            path = shards.path_of(name)
            grams[path] = grams[path] + gram if path in grams else gram

        total = 0.0
        each = self._schedule.orthogonality / len(grams)
        slopes = {}
        for path, gram in zip(grams, shards.summed([*grams.values()]), strict=True):
            difference = gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            distance = torch.linalg.matrix_norm(difference)
            total += each * float(distance)
            smallest = torch.finfo(gram.dtype).tiny
            slopes[path] = 2 * each * difference / distance.clamp_min(smallest)
        for name, p in rows.items():
            start, stop = shards.ranges(name)[dims[name]]
            gradient = slopes[shards.path_of(name)][start:stop] @ p
            gradient = gradient if dims[name] == 0 else gradient.t()
            tensor = shards.tensors[name]
            tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)
        return total

    # -------------------------------------------------------------------------- allocation

    def after_step(self, step: int) -> None:
        """Update the scores and zero what is beyond the budget.

        Args:
            step: the step that the optimizer has just done, from 1; its gradients are still there.
        """
        schedule, last = self._schedule, self._schedule.last
        if step > last:
            self._mask()
            return
        if step < last:
            self._update_scores()
        done = step - schedule.before
        if step == last or (done > 0 and step % schedule.interval == 0):
            self._choose(self._budget(done / (last - schedule.before)))
            self._mask()
        if step == last:
            self._importance, self._uncertainty = {}, {}

    def _budget(self, progress: float) -> int:
        """Triplets of the whole adapter after a part of the steps that allocate."""
        start = self._schedule.rank * self._count
        target = self._schedule.target_rank * self._count
        return int((start - target) * (1 - progress) ** 3 + target)

    def _update_scores(self) -> None:
        beta1, beta2 = self._schedule.beta1, self._schedule.beta2
        for name in self._module_of:
            parameter = self._shards.tensors[name]
            assert parameter.grad is not None
            now = (parameter.detach() * parameter.grad).abs()
            zeros = now.new_zeros(now.shape)
            importance = beta1 * self._importance.get(name, zeros) + (1 - beta1) * now
            before = self._uncertainty.get(name, zeros)
            self._importance[name] = importance
            self._uncertainty[name] = beta2 * before + (1 - beta2) * (now - importance).abs()

    def _choose(self, budget: int) -> None:
        """Keep the triplets of the highest scores."""
        import torch

        scores = self._scores()
        beyond = self._schedule.rank * self._count - budget
        if beyond >= 1:
            threshold = torch.cat([*scores.values()]).kthvalue(beyond).values
            self._masks = {module: found <= threshold for module, found in scores.items()}

    def _scores(self) -> dict[str, Tensor]:
        """The scores of each module's triplets, [rank]."""
        shards = self._shards
        found: dict[str, Tensor] = {}
        for name, module in self._module_of.items():
            each = self._importance[name] * self._uncertainty[name]
            along, across = self._rank_dims[name], 1 - self._rank_dims[name]
            scores = found.setdefault(module, each.new_zeros(self._schedule.rank))
            if shards.counts(name):
                start, stop = shards.ranges(name)[along]
                whole = shards.whole_shape(shards.path_of(name))
                scores[start:stop] += each.sum(across) / whole[across]
        return dict(zip(found, shards.summed([*found.values()]), strict=True))

    def _mask(self) -> None:
        for name in self._values if self._masks else ():
            start, stop = self._shards.ranges(name)[self._rank_dims[name]]
            values = self._shards.tensors[name].detach()
            values[self._masks[self._module_of[name]][start:stop]] = 0.0

    # ------------------------------------------------------------------------------- state

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state of whole tensors, for a checkpoint; all ranks of the group ask for it."""
        parts = ((_IMPORTANCE, self._importance), (_UNCERTAINTY, self._uncertainty))
        named = {
            f"{head}{path}": tensor
            for head, part in parts
            for path, tensor in self._shards.joined(part).items()
        }
        return {**named, **{f"{_MASK}{module}": mask for module, mask in self._masks.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the state of a checkpoint."""
        device = next(iter(self._shards.tensors.values())).device
        found: dict[str, dict[str, Tensor]] = {_IMPORTANCE: {}, _UNCERTAINTY: {}, _MASK: {}}
        for key, tensor in tensors.items():
            head, _, name = key.partition("/")
            found[f"{head}/"][name] = tensor.to(device)
        self._importance = self._shards.cut(found[_IMPORTANCE])
        self._uncertainty = self._shards.cut(found[_UNCERTAINTY])
        self._masks = found[_MASK]
