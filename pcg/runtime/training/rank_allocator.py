"""AdaLoRA's training beside the data's gradients: orthogonality, and which triplets are kept.

The loss has `pcg.runtime.training.orthogonality`'s beside the data's, once a step. After step t of
the optimizer, with each parameter w and its gradient g as it was clipped,

    I = |w g|;   Ī = β₁ Ī + (1 - β₁) I;   U = β₂ U + (1 - β₂) |I - Ī|          (§3.2, eq. 8-10)
    score of a triplet = Ī U of its E + the means of Ī U of its row of A and column of B

and where t is due, E of the triplets outside the budget, those with the lowest scores, is zero:

    budget(t) = target + (start - target) (1 - (t - before) / (steps - after - before))³   (§3.3)

From step `steps - after` on the same triplets stay zero. E of the others may grow again until then.

Over ranks each has Ī and U of its pieces. A mean is a sum over the pieces of all ranks, in one
message of the scores alone, so all ranks have the same scores and zero the same triplets.

Source: "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning" (Zhang et al. 2023);
`RankAllocator` and `AdaLoraModel.update_and_allocate` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.peft.adalora import AdaLoraRecipe
from pcg.peft.adalora_weights import AdaLoraWeights
from pcg.peft.adapters import Adapter
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.training.orthogonality import add_orthogonality

_IMPORTANCE, _UNCERTAINTY, _MASK = "importance/", "uncertainty/", "mask/"
_RANK_DIMS = {"adalora_A": 0, "adalora_B": 1, "adalora_E": 0}
"""The dim of each kind that the triplets are along."""


class RankAllocator:
    """What a job on an AdaLoRA adapter does beside the optimizer."""

    def __init__(self, recipe: AdaLoraRecipe, pieces: AdapterShards, total_steps: int) -> None:
        """Take an adapter of the recipe's ranks.

        Args:
            recipe: its configuration.
            pieces: what this rank trains of it.
            total_steps: of the job; the schedule's where the recipe has none.
        Raises:
            FinetuneError: the ranks are given already, or the schedule has no room or no aim.
        """
        if recipe.kept is not None:
            raise FinetuneError(
                "the adapter's ranks are given already (rank_pattern), and AdaLoRA would begin "
                "anew; train a fresh one, or go on from a checkpoint"
            )
        if recipe.target_rank > recipe.rank:
            raise FinetuneError(
                f"target_r={recipe.target_rank} is above init_r={recipe.rank}; lower it"
            )
        steps = total_steps if recipe.steps is None else recipe.steps
        self._recipe = dataclasses.replace(recipe, steps=steps)
        self._pieces = pieces
        modules = {name: pieces.path_of(name).rpartition(".") for name in pieces.tensors}
        self._module_of = {n: path for n, (path, _, kind) in modules.items() if kind in _RANK_DIMS}
        self._rank_dims = {n: _RANK_DIMS[modules[n][2]] for n in self._module_of}
        self._of_values = [n for n in self._module_of if modules[n][2] == "adalora_E"]
        self._modules = list(dict.fromkeys(self._module_of.values()))
        self._importance: dict[str, Tensor] = {}
        self._uncertainty: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}

    @classmethod
    def of(cls, adapter: Adapter, pieces: AdapterShards, total_steps: int) -> Self | None:
        """The allocator of an adapter; None where it is no AdaLoRA."""
        recipe = adapter.recipe
        if not isinstance(recipe, AdaLoraRecipe):
            return None
        return cls(recipe, pieces, total_steps)

    def regularize(self) -> float:
        """Add R's gradient to each parameter's, which ranks have summed, and return R."""
        names = [name for name in self._module_of if name not in self._of_values]
        dims = [self._rank_dims[name] for name in names]
        return add_orthogonality(self._pieces, names, dims, self._recipe.orthogonality)

    # -------------------------------------------------------------------------- allocation

    @torch.no_grad()
    def allocate(self, step: int) -> None:
        """Update the scores and zero what is beyond the budget.

        Args:
            step: that the optimizer has just done, from 1; its gradients are still there.
        """
        recipe = self._recipe
        assert recipe.steps is not None
        last = recipe.steps - recipe.steps_after
        if step > last:
            self._mask()
            return
        if step < last:
            self._update_scores()
        done = step - recipe.steps_before
        if step == last or (done > 0 and step % recipe.interval == 0):
            self._choose(self._budget(done / (last - recipe.steps_before)))
            self._mask()
        if step == last:
            self._importance, self._uncertainty = {}, {}

    def _budget(self, progress: float) -> int:
        """Triplets of the whole adapter after a part of the steps that allocate."""
        start = self._recipe.rank * len(self._modules)
        target = self._recipe.target_rank * len(self._modules)
        return int((start - target) * (1 - progress) ** 3 + target)

    def _update_scores(self) -> None:
        beta1, beta2 = self._recipe.beta1, self._recipe.beta2
        for name in self._module_of:
            parameter = self._pieces.tensors[name]
            assert parameter.grad is not None
            now = (parameter * parameter.grad).abs()
            before = self._importance.get(name, torch.zeros_like(now))
            importance = beta1 * before + (1 - beta1) * now
            before = self._uncertainty.get(name, torch.zeros_like(now))
            self._importance[name] = importance
            self._uncertainty[name] = beta2 * before + (1 - beta2) * (now - importance).abs()

    def _choose(self, budget: int) -> None:
        """Keep the triplets of the highest scores."""
        scores = self._scores()
        beyond = self._recipe.rank * len(self._modules) - budget
        if beyond < 1:
            return
        threshold = torch.cat([*scores.values()]).kthvalue(beyond).values
        self._masks = {module: found <= threshold for module, found in scores.items()}

    def _scores(self) -> dict[str, Tensor]:
        """Of each module's triplets, [rank]."""
        pieces = self._pieces
        found: dict[str, Tensor] = {}
        for name, module in self._module_of.items():
            each = self._importance[name] * self._uncertainty[name]
            along, across = self._rank_dims[name], 1 - self._rank_dims[name]
            scores = found.setdefault(module, each.new_zeros(self._recipe.rank))
            if pieces.is_first or pieces.parted_dim(name) is not None:
                start, stop = pieces.ranges(name)[along]
                whole = pieces.whole_shape(pieces.path_of(name))
                scores[start:stop] += each.sum(across) / whole[across]
        return dict(zip(found, pieces.summed([*found.values()]), strict=True))

    def _mask(self) -> None:
        for name in self._of_values if self._masks else ():
            start, stop = self._pieces.ranges(name)[self._rank_dims[name]]
            self._pieces.tensors[name][self._masks[self._module_of[name]][start:stop]] = 0.0

    # ------------------------------------------------------------------------------- state

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state of whole tensors, for a checkpoint; all ranks ask for it."""
        parts = ((_IMPORTANCE, self._importance), (_UNCERTAINTY, self._uncertainty))
        named = {
            f"{head}{path}": tensor
            for head, part in parts
            for path, tensor in self._pieces.joined(part).items()
        }
        return {**named, **{f"{_MASK}{module}": mask for module, mask in self._masks.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the state of a checkpoint."""
        device = next(iter(self._pieces.tensors.values())).device
        found: dict[str, dict[str, Tensor]] = {_IMPORTANCE: {}, _UNCERTAINTY: {}, _MASK: {}}
        for key, tensor in tensors.items():
            head, _, name = key.partition("/")
            found[f"{head}/"][name] = tensor.to(device)
        self._importance = self._pieces.cut(found[_IMPORTANCE])
        self._uncertainty = self._pieces.cut(found[_UNCERTAINTY])
        self._masks = found[_MASK]

    def allocated(self, adapter: Adapter) -> Adapter:
        """The adapter without the triplets that do nothing, once the job is done."""
        weights = {p: w for p, w in adapter.weights.items() if isinstance(w, AdaLoraWeights)}
        kept = {AdaLoraRecipe.key_of(path): w.kept for path, w in weights.items()}
        recipe = self._recipe
        if all(bool(which.all()) for which in kept.values()):
            return dataclasses.replace(adapter, recipe=recipe)
        pattern = {key: tuple(which.tolist()) for key, which in kept.items()}
        return dataclasses.replace(
            adapter,
            recipe=dataclasses.replace(recipe, kept=pattern),
            weights={path: found.pruned() for path, found in weights.items()},
        )
