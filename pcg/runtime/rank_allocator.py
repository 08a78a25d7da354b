"""AdaLoRA's training beside the data's gradients: orthogonality, and which triplets are kept.

With P = A or Bᵀ of each of n matrices, the loss has R added, once a step:

    R = weight / n · Σ ||P Pᵀ - I||                                            (§3.1, eq. 4)

After step t of AdamW, with each parameter w and its gradient g as it was clipped,

    I = |w g|;   Ī = β₁ Ī + (1 - β₁) I;   U = β₂ U + (1 - β₂) |I - Ī|          (§3.2, eq. 8-10)
    score of a triplet = Ī U of its E + the means of Ī U of its row of A and column of B

and where t is due, E of the triplets outside the budget, those with the lowest scores, is zero:

    budget(t) = target + (start - target) (1 - (t - before) / (steps - after - before))³   (§3.3)

From step `steps - after` on the same triplets stay zero. E of the others may grow again until then.

Source: "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning" (Zhang et al. 2023);
`RankAllocator`, `AdaLoraModel.forward` and `.update_and_allocate` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.ir.adalora_recipe import AdaLoraRecipe
from pcg.runtime.adalora_weights import AdaLoraWeights
from pcg.runtime.adapters import Adapter

_IMPORTANCE, _UNCERTAINTY, _MASK = "importance/", "uncertainty/", "mask/"


class RankAllocator:
    """What a job on an AdaLoRA adapter does beside AdamW."""

    def __init__(
        self, recipe: AdaLoraRecipe, parameters: Mapping[str, Tensor], total_steps: int
    ) -> None:
        """Take an adapter of the recipe's ranks.

        Args:
            recipe: its configuration.
            parameters: its tensors by the names of `trained_tensors`.
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
        kinds = (".adalora_A", ".adalora_B", ".adalora_E")
        self._parameters = {n: p for n, p in parameters.items() if n.endswith(kinds)}
        self._modules = [
            n.removesuffix(".adalora_E") for n in parameters if n.endswith(".adalora_E")
        ]
        self._importance: dict[str, Tensor] = {}
        self._uncertainty: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}

    @classmethod
    def of(
        cls, adapter: Adapter, parameters: Mapping[str, Tensor], total_steps: int
    ) -> Self | None:
        """The allocator of an adapter; None where it is no AdaLoRA."""
        recipe = adapter.recipe
        if not isinstance(recipe, AdaLoraRecipe):
            return None
        return cls(recipe, parameters, total_steps)

    # ----------------------------------------------------------------------- orthogonality

    def regularize(self) -> float:
        """Add R's gradient to each parameter's, and return R."""
        matrices = {n: p for n, p in self._parameters.items() if not n.endswith(".adalora_E")}
        total = 0.0
        for name, parameter in matrices.items():
            matrix = parameter.detach().requires_grad_()
            rows = matrix if name.endswith(".adalora_A") else matrix.t()
            gram = rows @ rows.t()
            distance = torch.linalg.matrix_norm(
                gram - torch.eye(len(gram), out=torch.empty_like(gram))
            )
            loss = self._recipe.orthogonality / len(matrices) * distance
            (gradient,) = torch.autograd.grad(loss, matrix)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            total += float(loss.detach())
        return total

    # -------------------------------------------------------------------------- allocation

    @torch.no_grad()
    def allocate(self, step: int) -> None:
        """Update the scores and zero what is beyond the budget.

        Args:
            step: that AdamW has just done, from 1; its gradients are still there.
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
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            now = (parameter * parameter.grad).abs()
            before = self._importance.get(name, torch.zeros_like(now))
            importance = beta1 * before + (1 - beta1) * now
            before = self._uncertainty.get(name, torch.zeros_like(now))
            self._importance[name] = importance
            self._uncertainty[name] = beta2 * before + (1 - beta2) * (now - importance).abs()

    def _choose(self, budget: int) -> None:
        """Keep the triplets of the highest scores."""
        scores = {module: self._scores(module) for module in self._modules}
        beyond = self._recipe.rank * len(self._modules) - budget
        if beyond < 1:
            return
        threshold = torch.cat([*scores.values()]).kthvalue(beyond).values
        self._masks = {module: found <= threshold for module, found in scores.items()}

    def _scores(self, module: str) -> Tensor:
        """Of a module's triplets, [rank]."""
        a, b, e = (
            self._importance[name] * self._uncertainty[name]
            for name in (f"{module}.adalora_A", f"{module}.adalora_B", f"{module}.adalora_E")
        )
        return e[:, 0] + (a.mean(1) + b.mean(0))

    def _mask(self) -> None:
        for module, mask in self._masks.items():
            self._parameters[f"{module}.adalora_E"][mask] = 0.0

    # ------------------------------------------------------------------------------- state

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state, for a checkpoint."""
        parts = ((_IMPORTANCE, self._importance), (_UNCERTAINTY, self._uncertainty))
        named = {f"{head}{name}": t for head, part in parts for name, t in part.items()}
        return {**named, **{f"{_MASK}{module}": mask for module, mask in self._masks.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the state of a checkpoint."""
        device = next(iter(self._parameters.values())).device
        found: dict[str, dict[str, Tensor]] = {_IMPORTANCE: {}, _UNCERTAINTY: {}, _MASK: {}}
        for key, tensor in tensors.items():
            head, _, name = key.partition("/")
            found[f"{head}/"][name] = tensor.to(device)
        self._importance, self._uncertainty, self._masks = found.values()

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
