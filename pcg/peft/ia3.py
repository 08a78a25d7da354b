"""(IA)³: scales the outputs of linear modules, or the inputs of feedforward modules.

    y = l ⊙ (W x + b),  l: [out];   at a feedforward module  y = W (l ⊙ x) + b,  l: [in]

    base_model.model.<module>.ia3_l      [out, 1], or [1, in] at a feedforward module

Source: `IA3Config`, `IA3Model` and `IA3Layer` of peft 0.21.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from re import fullmatch
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import did_you_mean, name_list
from pcg.ir.shapes import Shapes
from pcg.peft.method import Bypass, Place, Shape
from pcg.peft.recipe import Json, Names, saved_as
from pcg.peft.targets import TargetedRecipe, check_modules
from pcg.peft.weights import FACTOR, AdapterWeight, Around, Draw, ModuleWeights, ParameterKind

if TYPE_CHECKING:
    from torch import Tensor

# The decoders among TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING and
# TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING in peft 0.21.2 (peft/utils/constants.py).
_LLAMA = ("gemma", "gemma2", "gemma3_text", "qwen2", "qwen3")
FAMILY_TARGETS: Mapping[str, Names] = {
    **dict.fromkeys(_LLAMA, ("q_proj", "v_proj", "down_proj")),
    **dict.fromkeys(("llama", "mistral"), ("k_proj", "v_proj", "down_proj")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn", "mlp.c_proj")),
    **dict.fromkeys(
        ("RefinedWeb", "RefinedWebModel", "falcon", "gpt_neox"),
        ("query_key_value", "dense_4h_to_h"),
    ),
    "bloom": ("query_key_value", "mlp.dense_4h_to_h"),
    "gpt_neo": ("q_proj", "v_proj", "c_proj"),
    "gptj": ("q_proj", "v_proj", "fc_out"),
    "mixtral": ("k_proj", "v_proj"),  # and w2, which is no linear module in transformers 5
    "opt": ("q_proj", "k_proj", "fc2"),
    "phi": ("q_proj", "v_proj", "fc2"),
}
FAMILY_FEEDFORWARD: Mapping[str, Names] = {
    **{of: names[-1:] for of, names in FAMILY_TARGETS.items()},
    "mixtral": (),
}


@dataclass(frozen=True)
class Ia3Bypass(Bypass):
    """(IA)³ at a module: scale(y, l), or scale(x, l) before a feedforward module."""

    behind_bias: ClassVar[bool] = True

    is_feedforward: bool

    @property
    def kind(self) -> object:
        return Ia3Bypass, self.is_feedforward

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        return ((in_ if self.is_feedforward else out,),)

    def __str__(self) -> str:
        return f"(IA)³ on the {'input' if self.is_feedforward else 'output'}"

    def union(self, other: Self) -> Self:
        return self

    def read(self, at: Place) -> None:
        if self.is_feedforward:
            x = at.inputs[0]
            vector = at.adapter("ia3_l_in", *at.features(x)[-1:])
            at.set_input(0, at.add("scale", "scaled_x", x, vector))

    def attach(self, at: Place, y: str) -> str:
        if self.is_feedforward:
            return y
        return at.add("scale", "scaled", y, at.adapter("ia3_l", *at.features(y)[-1:]))


@dataclass(frozen=True, eq=False)
class Ia3Weights(ModuleWeights):
    """(IA)³'s vector of a module: [in] at a feedforward module, else [out]."""

    suffixes: ClassVar[tuple[str, ...]] = ("ia3_l",)
    kinds: ClassVar[Mapping[str, ParameterKind]] = {"ia3_l": FACTOR, "ia3_l_in": FACTOR}

    vector: Tensor
    is_feedforward: bool

    @classmethod
    def fresh(
        cls, recipe: IA3Config, bypass: Ia3Bypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        size = shape[bypass.is_feedforward]
        vector = draw.full(1.0, size) if recipe.init_ia3_weights else draw.normal(size)
        return cls(vector, bypass.is_feedforward)

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: IA3Config) -> Self:
        (vector,) = parts.values()
        is_feedforward = recipe.bypass_at(path).is_feedforward
        if vector.ndim != 2 or vector.shape[not is_feedforward] != 1:
            expected, role = ("[1, in]", "is") if is_feedforward else ("[out, 1]", "is not")
            raise AdapterError(
                f"{path} has ia3_l {list(vector.shape)}; expected {expected}, as it {role} among "
                "feedforward_modules"
            )
        return cls(vector.flatten(), is_feedforward)

    @property
    def bypass(self) -> Ia3Bypass:
        return Ia3Bypass(self.is_feedforward)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        shape = (1, -1) if self.is_feedforward else (-1, 1)
        return {"ia3_l": self.vector.reshape(shape)}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {self._kind: AdapterWeight(self.vector)}

    @property
    def can_merge(self) -> bool:
        return True

    def merged(self, weight: Tensor, around: Around) -> Tensor:
        return weight * (self.vector if self.is_feedforward else self.vector.unsqueeze(1))

    def merged_bias(self, bias: Tensor) -> Tensor:
        return bias if self.is_feedforward else bias * self.vector

    @property
    def _kind(self) -> str:
        return "ia3_l_in" if self.is_feedforward else "ia3_l"

    @property
    def module_shape(self) -> tuple[int | None, int | None]:
        size = len(self.vector)
        return (None, size) if self.is_feedforward else (size, None)


@dataclass(frozen=True, kw_only=True)
class IA3Config(TargetedRecipe):
    """An (IA)³ configuration, with peft's fields and defaults.

    Attributes:
        exclude_modules: names or a regex, as the targets, of modules to leave out.
        feedforward_modules: names or a regex for the whole path; matching targets are scaled at
            their input. A name matches any path with this suffix, as in peft, even without a dot.
            None uses the family's default.
        init_ia3_weights: True, vectors of ones, which change nothing; False, normal vectors.
    """

    method: ClassVar[str] = "(IA)³"
    peft_type: ClassVar[str] = "IA3"
    weights: ClassVar[type[ModuleWeights]] = Ia3Weights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {"ia3": {}}
    family_targets: ClassVar[Mapping[str, Names]] = FAMILY_TARGETS

    exclude_modules: Names | str | None = None
    feedforward_modules: Names | str | None = None
    init_ia3_weights: bool = saved_as("init", True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_modules("feedforward_modules", self.feedforward_modules)
        self._check_flags("init_ia3_weights")

    def bypass_at(self, path: str) -> Ia3Bypass:
        names = self.feedforward_modules
        if names is None:
            raise AdapterError("feedforward_modules is not given; name them, or () for none")
        if isinstance(names, str):
            return Ia3Bypass(fullmatch(names, path) is not None)
        return Ia3Bypass(path.endswith(tuple(names)))

    def bypasses(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> dict[str, Bypass]:
        adapted = super().bypasses(paths, output_layer, model_type)
        names = self.feedforward_modules
        if isinstance(names, str) and not any(fullmatch(names, path) for path in adapted):
            raise AdapterError(
                f"feedforward_modules={names!r}, a regex for the whole path, matches none of the "
                f"{len(adapted)} adapted modules; {name_list(adapted)}"
            )
        for name in names if isinstance(names, tuple) else ():
            if not any(path.endswith(name) for path in adapted):
                raise AdapterError(
                    f"feedforward_modules has {name!r}, which none of the {len(adapted)} adapted "
                    f"modules is named{did_you_mean(name, adapted)}; {name_list(adapted)}"
                )
        return adapted

    def for_family(self, model_type: str | None) -> Self:
        recipe = super().for_family(model_type)
        if recipe.feedforward_modules is not None:
            return recipe
        usual = self._usual("feedforward_modules", FAMILY_FEEDFORWARD, model_type)
        if isinstance(recipe.target_modules, tuple):
            usual = tuple(name for name in usual if name in recipe.target_modules)
        return dataclasses.replace(recipe, feedforward_modules=usual)

    def config_fields(
        self, target_modules: Names | str | None, base_model_name: str, notes: Json
    ) -> dict[str, Any]:
        fields = super().config_fields(target_modules, base_model_name, notes)
        targets, names = self.target_modules, self.feedforward_modules
        if isinstance(targets, tuple) and isinstance(names, tuple) and not {*names} <= {*targets}:
            # peft writes paths for "all-linear", and then refuses other names.
            fields["feedforward_modules"] = [name for name in targets if name.endswith(names)]
        return fields
