"""Bottleneck adapters: small networks after, or parallel to, a layer's parts.

    h = σ(D x + d),   y' = y + scaling · (U h + u),   D: [size, in],  U: [out, size]

`houlsby` has a network after the attention's output and another after the MLP's, before the
residual is added (Houlsby et al. 2019); `pfeiffer` only the latter (Pfeiffer et al. 2020); in both
x is y. `parallel` has a network parallel to the MLP, with the MLP's input (He et al. 2022).

peft lacks them; the configuration and the keys are pcg's.

    base_model.model.<module>.adapter_down.weight      [size, in]
    base_model.model.<module>.adapter_down.bias        [size]
    base_model.model.<module>.adapter_up.weight        [out, size]
    base_model.model.<module>.adapter_up.bias          [out]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import UnsupportedError
from pcg.ir.shapes import Shapes
from pcg.peft.method import Bypass, Place, Shape
from pcg.peft.recipe import OF_PCG, Names, OtherField, Recipe, saved_as
from pcg.peft.targets import TargetedRecipe
from pcg.peft.weights import (
    DOWN,
    SUMMAND,
    UP,
    AdapterWeight,
    Around,
    Draw,
    ModuleWeights,
    ParameterKind,
)

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION_OUTPUTS = (
    "self_attn.o_proj", "self_attn.out_proj", "attn.c_proj", "attn.out_proj", "attention.dense",
    "self_attention.dense", "conv.out_proj", "linear_attn.out_proj",
)  # fmt: skip
MLP_OUTPUTS = (
    "mlp.down_proj", "mlp.c_proj", "mlp.fc_out", "mlp.dense_4h_to_h", "ffn.down_proj", "fc2",
    "feed_forward.w2",
)  # fmt: skip
MLP_INPUTS = ("up_proj", "gate_up_proj", "c_fc", "fc_in", "dense_h_to_4h", "fc1", "w1")
"""Modules that read the MLP's input; another module computes its output."""

VARIANTS = {
    "houlsby": (*ATTENTION_OUTPUTS, *MLP_OUTPUTS),
    "parallel": MLP_OUTPUTS,
    "pfeiffer": MLP_OUTPUTS,
}
NON_LINEARITIES = ("gelu", "gelu_new", "relu", "silu", "tanh")


@dataclass(frozen=True)
class BottleneckBypass(Bypass):
    """The adapter of a module, from the module's outputs to its outputs.

        h = activate(shrink(x, D), d);  z = bias_add(expand_add(y, h, U), u)

    Attributes:
        size: the size of the bottleneck; None for serving.
        non_linearity: σ, a name of `NON_LINEARITIES`.
        scaling: the factor on the adapter's summand.
        is_parallel: True if it reads the input of the MLP that the module ends, not y.
    """

    behind_bias: ClassVar[bool] = True

    size: int | None
    non_linearity: str
    scaling: float = 1.0
    is_parallel: bool = False

    @property
    def kind(self) -> object:
        return BottleneckBypass, self.prefix

    @property
    def prefix(self) -> str:
        return f"{self.non_linearity}{'_parallel' * self.is_parallel}_adapter"

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        assert self.size is not None
        return (self.size, out), (self.size,), (out, self.size), (out,)

    def __str__(self) -> str:
        place = "beside" if self.is_parallel else "behind"
        return (
            f"a {self.non_linearity} bottleneck of {self.size} {place} it, {self.scaling:g} of it"
        )

    def union(self, other: Self) -> Self:
        return max(self, other, key=lambda bypass: bypass.size or 0)

    def served(self) -> Self:
        return dataclasses.replace(self, size=None)

    def attach(self, at: Place, y: str) -> str:
        (out,), prefix, size = at.features(y), self.prefix, self.size
        x = at.module_input(MLP_INPUTS) if self.is_parallel else y
        if x is None:
            raise UnsupportedError(
                f"{at.site} ends no MLP whose input pcg knows, beside which a parallel adapter "
                f"would be; its first module is named {', '.join(MLP_INPUTS)}"
            )
        down = at.adapter(f"{prefix}_down", size, *at.features(x))
        up = at.adapter(f"{prefix}_up", out, size)
        biases = at.adapter(f"{prefix}_down_bias", size), at.adapter(f"{prefix}_up_bias", out)
        s = at.add("shrink", f"{prefix}_s", x, down)
        h = at.add("activate", f"{prefix}_h", s, biases[0], function=self.non_linearity)
        z = at.add("expand_add", f"{prefix}_z", y, h, up)
        return at.add("bias_add", f"{prefix}_b", z, biases[1])


_KINDS = {"down": DOWN, "down_bias": ParameterKind(), "up": UP, "up_bias": SUMMAND}


@dataclass(frozen=True, eq=False)
class BottleneckWeights(ModuleWeights):
    """The adapter's weights of a module: y += scaling · (up σ(down x + down_bias) + up_bias).

    Attributes:
        does: σ, the scaling, and the choice of x, the MLP's input or the module's output.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        "adapter_down.weight", "adapter_down.bias", "adapter_up.weight", "adapter_up.bias",
    )  # fmt: skip
    kinds: ClassVar[Mapping[str, ParameterKind]] = {
        f"{BottleneckBypass(None, name, is_parallel=is_parallel).prefix}_{part}": kind
        for name in NON_LINEARITIES
        for is_parallel in (False, True)
        for part, kind in _KINDS.items()
    }

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor
    does: BottleneckBypass

    @classmethod
    def fresh(cls, recipe: Recipe, bypass: Any, shape: Shape, draw: Draw, around: Around) -> Self:
        """Return weights as nn.Linear's going down, and zeros going up.

        x has as many features as y, as a layer's residuals have.
        """
        out, size = shape[0], bypass.size
        down, down_bias = draw.linear(size, out), draw.uniform(out**-0.5, size)
        return cls(down, down_bias, draw.zeros(out, size), draw.zeros(out), bypass)

    @classmethod
    def of(cls, bypass: BottleneckBypass, *tensors: Tensor) -> Self:
        down, down_bias, up, up_bias = tensors
        return cls(down, down_bias, up, up_bias, bypass)

    @property
    def bypass(self) -> BottleneckBypass:
        return self.does

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        scales = (1.0, 1.0, self.does.scaling, self.does.scaling)
        parts = zip(_KINDS, self.tensors, scales, strict=True)
        return {f"{self.does.prefix}_{part}": AdapterWeight(t, scale) for part, t, scale in parts}

    @property
    def inner_size(self) -> int:
        return len(self.down)

    @property
    def module_shape(self) -> tuple[int, None]:
        return len(self.up_bias), None


@dataclass(frozen=True, kw_only=True)
class BottleneckConfig(TargetedRecipe):
    """A configuration of bottleneck adapters.

    Attributes:
        variant: a name of `VARIANTS`: houlsby, parallel or pfeiffer.
        bottleneck_size: features between the two matrices.
        non_linearity: σ, a name of `NON_LINEARITIES`; gelu_new is GELU's tanh form.
        scaling: the factor on an adapter's summand.
    """

    method: ClassVar[str] = "bottleneck adapters"
    peft_type: ClassVar[str] = "BOTTLENECK"
    weights: ClassVar[type[ModuleWeights]] = BottleneckWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        variant: {"variant": variant} for variant in ("houlsby", "pfeiffer", "parallel")
    }
    other_fields: ClassVar[Mapping[str, OtherField]] = OF_PCG

    variant: str = "pfeiffer"
    bottleneck_size: int = saved_as("size", 64)
    non_linearity: str = "relu"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("variant", VARIANTS)
        self._check_choice("non_linearity", NON_LINEARITIES)
        self._check_ints(1, "bottleneck_size")
        self._check_finite("scaling")

    def bypass_at(self, path: str) -> BottleneckBypass:
        is_parallel = self.variant == "parallel"
        return BottleneckBypass(self.bottleneck_size, self.non_linearity, self.scaling, is_parallel)

    def for_family(self, model_type: str | None) -> Self:
        """Return the recipe with the outputs of all families; a model has some of them."""
        if self.target_modules is not None:
            return self
        return dataclasses.replace(self, target_modules=VARIANTS[self.variant])

    def resolved(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> Self:
        recipe = super().resolved(paths, output_layer, model_type)
        if self.target_modules is not None:
            return recipe
        names = [n for n in VARIANTS[self.variant] if any(p.endswith(f".{n}") for p in paths)]
        return dataclasses.replace(recipe, target_modules=tuple(names))

    def _check_names(self, paths: Names, parameters: Names) -> None:
        if self.target_modules != VARIANTS[self.variant]:
            super()._check_names(paths, parameters)
