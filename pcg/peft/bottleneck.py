"""A bottleneck adapter's recipe: small networks behind, or beside, a layer's parts.

    h = σ(D x + d),   y' = y + scaling · (U h + u),   D: [size, in],  U: [out, size]

`houlsby` has one behind the output of attention and one behind that of the MLP, before the residual
is added (Houlsby et al. 2019); `pfeiffer` the latter alone (Pfeiffer et al. 2020); there x is y.
`parallel` has one beside the MLP, whose input it reads (He et al. 2022).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.shapes import Shapes
from pcg.peft.targets import TargetRecipe

ATTENTION_OUTPUTS = (
    "self_attn.o_proj", "self_attn.out_proj", "attn.c_proj", "attn.out_proj", "attention.dense",
    "self_attention.dense",
)  # fmt: skip
MLP_OUTPUTS = (
    "mlp.down_proj", "mlp.c_proj", "mlp.fc_out", "mlp.dense_4h_to_h", "ffn.down_proj", "fc2",
)  # fmt: skip
MLP_INPUTS = ("up_proj", "gate_up_proj", "c_fc", "fc_in", "dense_h_to_4h", "fc1")
"""Modules that read the MLP's input, beside the one that makes its output."""

VARIANTS = {
    "houlsby": (*ATTENTION_OUTPUTS, *MLP_OUTPUTS),
    "parallel": MLP_OUTPUTS,
    "pfeiffer": MLP_OUTPUTS,
}
NON_LINEARITIES = ("gelu", "gelu_new", "relu", "silu", "tanh")


@dataclass(frozen=True, slots=True)
class BottleneckSite:
    """The adapter of one module."""

    size: int
    non_linearity: str
    scaling: float
    is_parallel: bool

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        """Of what is trained at a module [out, in]; the adapter goes from `out` to `out`."""
        return (self.size, out), (self.size,), (out, self.size), (out,)

    def __str__(self) -> str:
        place = "beside" if self.is_parallel else "behind"
        return (
            f"a {self.non_linearity} bottleneck of {self.size} {place} it, {self.scaling:g} of it"
        )


@dataclass(frozen=True)
class BottleneckRecipe(TargetRecipe[BottleneckSite]):
    """What pcg takes for `"peft_type": "BOTTLENECK"`, which peft does not know.

    Attributes:
        variant: a name of `VARIANTS`.
        size: of the bottleneck.
        non_linearity: σ, a name of `NON_LINEARITIES`; gelu_new is GELU's tanh form.
        scaling: of what the adapter adds.
    """

    method: ClassVar[str] = "bottleneck adapters"
    peft_type: ClassVar[str] = "BOTTLENECK"

    variant: str = "pfeiffer"
    size: int = 64
    non_linearity: str = "relu"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("variant", VARIANTS), ("non_linearity", NON_LINEARITIES)):
            value = getattr(self, name)
            if value not in known:
                raise AdapterError(f"{name}={value!r}; use one of {', '.join(known)}")
        if type(self.size) is not int or self.size < 1:
            raise AdapterError(f"bottleneck_size={self.size!r}; use an int of at least 1")
        scaling = self.scaling
        is_number = isinstance(scaling, int | float) and not isinstance(scaling, bool)
        if not is_number or not math.isfinite(scaling):
            raise AdapterError(f"scaling={scaling!r}; use a finite number")

    def site_of_target(self, path: str) -> BottleneckSite:
        is_parallel = self.variant == "parallel"
        return BottleneckSite(self.size, self.non_linearity, self.scaling, is_parallel)

    def for_family(self, model_type: str | None) -> Self:
        """The recipe with the outputs of all families; a model has those of its own."""
        if self.target_modules is not None:
            return self
        return dataclasses.replace(self, target_modules=VARIANTS[self.variant])

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> Self:
        recipe = super().resolved(paths, output_layer, model_type)
        if self.target_modules is not None:
            return recipe
        names = [n for n in VARIANTS[self.variant] if any(p.endswith(f".{n}") for p in paths)]
        return dataclasses.replace(recipe, target_modules=tuple(names))

    def _check_names(self, paths: Sequence[str]) -> None:
        if self.target_modules != VARIANTS[self.variant]:
            super()._check_names(paths)
