"""LoRA, rsLoRA and DoRA: a product of two low-rank matrices, parallel to a linear module.

    y = W x + scale · B (A x),   A: [rank, in],  B: [out, rank]
    scale = alpha / rank,  or alpha / √rank with rsLoRA

With DoRA, each output of W + scale · B A has its own trained length, the magnitude m: [out],

    y = m / ||W + scale · B A|| ⊙ (W + scale · B A) x + b

and training treats the replaced length as a constant, as in peft.

    base_model.model.<module>.lora_A.weight      [rank, in]
    base_model.model.<module>.lora_B.weight      [out, rank]
    base_model.model.<module>.lora_B.bias        [out]   with lora_bias
    base_model.model.<module>.lora_magnitude_vector      [out]   with DoRA

A token embedding is a linear module of one-hot ids. Its matrices have other names and start as
A = 0, B normal:

    base_model.model.<module>.lora_embedding_A    [rank, vocabulary]
    base_model.model.<module>.lora_embedding_B    [width, rank]

The weights of experts are parameters [E, out, in], which `target_parameters` names. Each expert has
a pair of matrices of rank r: A is [E r, in], B is [out, r E], with the rows and columns of
`pcg.ir.operators.experts`. Of parameters [E, in, out] whose modules lack `is_transposed`, as Llama
4's, peft takes the inputs for outputs: its A is [E r, out], its B [in, r E], and files have these.

Source: `LoraConfig`, `LoraLayer`, `Embedding` and `DoraLinearLayer` of peft 0.21.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.module_paths import ends_in, is_embedding, is_swapped, module_name, parameter_of
from pcg.ir.shapes import Shapes
from pcg.peft.method import Bypass, Place, Shape, low_rank
from pcg.peft.recipe import ALL_LINEAR, OF_LAYERS, Json, Names, OtherField, refused, saved_as
from pcg.peft.targets import FAMILY_TARGETS, PatternedRecipe, check_modules
from pcg.peft.weights import (
    DOWN,
    SUMMAND,
    UP,
    AdapterWeight,
    Around,
    Draw,
    LowRankWeights,
    ModuleWeights,
    ParameterKind,
    partners,
)

if TYPE_CHECKING:
    from torch import Tensor

_MAGNITUDE = "lora_magnitude_vector"
_OF_EMBEDDING = "lora_embedding_A", "lora_embedding_B"


@dataclass(frozen=True)
class LoraBypass(Bypass):
    """LoRA at a module.

        s = shrink(x, A)         [T, rank]
        z = expand_add(y, s, B)  [T, out]

    DoRA scales z, but not the base's bias b, by a factor that training computes from the weights,
    and serving has as an adapter's parameter,

        n = column_norm(W, A, B);  f = column_factor(m, n);  scale(z, f, b)

    Attributes:
        rank: the rank; None for serving.
        scale: the factor on the product.
        use_dora: True if magnitudes are trained, too.
        has_bias: True if B has a bias.
        experts: number of experts that share the rank equally.
        embeds: True at an embedding.
        is_swapped: True if peft's A is of the outputs, and its B of the inputs.
    """

    rank: int | None
    scale: float = 1.0
    use_dora: bool = False
    has_bias: bool = False
    experts: int = 1
    embeds: bool = False
    is_swapped: bool = False

    def trained_shapes(self, out: int, in_: int) -> Shapes:
        assert self.rank is not None
        vectors = ((out,),) * (self.use_dora + self.has_bias)
        return (self.rank, in_), (out, self.rank), *vectors

    def __str__(self) -> str:
        extra = " and DoRA" * self.use_dora + " and lora_bias" * self.has_bias
        experts = f" of {self.experts} experts together" * (self.experts > 1)
        return f"rank {self.rank}{experts} with scale {self.scale:g}{extra}"

    def union(self, other: Self) -> Self:
        rank = max(self.rank or 0, other.rank or 0) or None
        dora, bias = self.use_dora or other.use_dora, self.has_bias or other.has_bias
        return replace(self, rank=rank, use_dora=dora, has_bias=bias)

    def served(self) -> LoraBypass:
        return replace(self, rank=None)

    def attach(self, at: Place, y: str) -> str:
        out, in_ = at.shape
        a = at.adapter("lora_A", self.rank, in_, experts=self.experts)
        b = at.adapter("lora_B", out, self.rank, experts=self.experts)
        if self.experts > 1:
            x, indices = at.inputs[:2]
            s = at.add("expert_shrink", "s", x, indices, a, experts=self.experts)
            return at.add("expert_expand_add", "z", y, s, indices, b, experts=self.experts)
        if self.embeds:  # dropout is of inputs, which ids are not
            padding = {k: v for k, v in at.attributes.items() if k == "padding"}
            s = at.add("embedding_shrink", "s", at.inputs[1], a, **padding)
            return at.add("expand_add", "z", y, s, b)
        x = at.dropped(keeps_dtype=self.use_dora)
        adapted = y
        if self.use_dora and x != at.inputs[0]:
            # The base's product also reads the dropped input (peft 0.21.2, DoraLinearVariant).
            adapted = at.add("linear", "dropped", x, at.inputs[1])
        z = low_rank(at, adapted, x, a, b)
        if self.has_bias:
            z = at.add("bias_add", "b", z, at.adapter("lora_B_bias", out))
        if not self.use_dora:
            return z
        if at.serving:
            factor = at.adapter("lora_factor", out)
        else:
            norm = at.add("column_norm", "norm", at.inputs[1], a, b)
            factor = at.add("column_factor", "factor", at.adapter(_MAGNITUDE, out), norm)
        if adapted == y:
            return at.add("scale", "dora", z, factor, *at.inputs[2:])
        change = at.add("sub", "change", at.add("scale", "dora", z, factor), adapted)
        return at.add("add", "changed", y, change)


@dataclass(frozen=True)
class MadeLoraBypass(Bypass):
    """A network that is LoRA, with A and B that training computes from other parameters."""

    rank: int

    def union(self, other: Self) -> Self:
        return max(self, other, key=lambda bypass: bypass.rank)

    def served(self) -> LoraBypass:
        return LoraBypass(None)


@dataclass(frozen=True, eq=False)
class LoraWeights(LowRankWeights):
    """LoRA's weights of a module: y += scale · (B (A x) + bias).

    Attributes:
        bias: B's bias (`lora_bias`), [out]; most adapters have none.
        magnitude: DoRA's magnitude, [out].
        experts: number of experts that share the rank.
        embeds: True for those of an embedding.
        is_swapped: True if peft's A is of the outputs, and its B of the inputs.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        "lora_A.weight", "lora_B.weight", "lora_B.bias", _MAGNITUDE, *_OF_EMBEDDING,
    )  # fmt: skip
    kinds: ClassVar[Mapping[str, ParameterKind]] = {
        "lora_A": DOWN,
        "lora_B": UP,
        "lora_B_bias": SUMMAND,
        "lora_factor": ParameterKind(fill=1.0, is_costly=True),
        _MAGNITUDE: ParameterKind(),
    }

    bias: Tensor | None = None
    magnitude: Tensor | None = None
    experts: int = 1
    embeds: bool = False
    is_swapped: bool = False

    @classmethod
    def fresh(
        cls, recipe: LoraConfig, bypass: LoraBypass, shape: Shape, draw: Draw, around: Around
    ) -> Self:
        (out, in_), rank = reversed(shape) if bypass.is_swapped else shape, bypass.rank
        assert rank is not None
        if bypass.embeds:
            a = draw.normal(rank, in_) * (not recipe.init_lora_weights)
            return cls(a, draw.normal(out, rank), bypass.scale, embeds=True)
        if isinstance(recipe.init_lora_weights, str):
            _check_init(recipe.init_lora_weights)
            a = draw.normal(rank, in_) / (rank // bypass.experts)
        else:
            a = draw.linear(rank, in_)
        bound = 0.0 if recipe.init_lora_weights else rank**-0.5
        b = draw.uniform(bound, out, rank)
        bias = draw.uniform(bound, out) if recipe.lora_bias else None
        fresh = cls(a, b, bypass.scale, bias, experts=bypass.experts)
        fresh = fresh.swapped() if bypass.is_swapped else fresh
        return fresh if not bypass.use_dora else replace(fresh, magnitude=fresh._norm(around))

    @classmethod
    def read(cls, path: str, parts: Mapping[str, Tensor], recipe: LoraConfig) -> Self:
        bypass = recipe.bypass_at(path)
        names = _OF_EMBEDDING if bypass.embeds else cls.suffixes[:4]
        if others := parts.keys() - names:
            raise AdapterError(f"{path} has {min(others)} beside {', '.join(names[:2])}")
        a, b = partners(path, parts, names[:2])
        vectors = parts.get("lora_B.bias"), parts.get(_MAGNITUDE)
        counts = bypass.experts, bypass.embeds
        return cls(a, b, bypass.scale, *vectors, *counts).checked(path, recipe)

    @property
    def bypass(self) -> LoraBypass:
        kinds = self.magnitude is not None, self.bias is not None
        return LoraBypass(
            self.inner_size, self.scale, *kinds, self.experts, self.embeds, self.is_swapped
        )

    @property
    def rank(self) -> int:
        # Tables of ranks do not hold LoRA on experts.
        return self.inner_size if self.experts == 1 else 0

    @property
    def inner_size(self) -> int:
        return len(self.a)

    @property
    def stored(self) -> Mapping[str, Tensor]:
        return self.swapped()._by_suffix if self.is_swapped else self._by_suffix

    def swapped(self) -> Self:
        """Return experts' weights with inputs for outputs, B^T A^T of each: as peft's, or back."""
        down = self.b.unflatten(1, (-1, self.experts)).permute(2, 1, 0).flatten(0, 1)
        up = self.a.unflatten(0, (self.experts, -1)).permute(2, 1, 0).flatten(1)
        return replace(self, a=down, b=up, is_swapped=not self.is_swapped)

    @property
    def _by_suffix(self) -> Mapping[str, Tensor]:
        if self.embeds:
            return dict(zip(_OF_EMBEDDING, (self.a, self.b), strict=True))
        pairs = zip(self.suffixes[:4], (self.a, self.b, self.bias, self.magnitude), strict=True)
        return {suffix: tensor for suffix, tensor in pairs if tensor is not None}

    @property
    def parameters(self) -> Mapping[str, AdapterWeight]:
        return {
            suffix.removesuffix(".weight").replace(".", "_").replace("_embedding", ""): (
                AdapterWeight(tensor, self.scale)
            )
            for suffix, tensor in self._by_suffix.items()
        }

    @property
    def served(self) -> Mapping[str, Callable[[Around], Tensor]]:
        makers: dict[str, Callable[[Around], Tensor]] = {
            "lora_A": lambda around: self._served_a(),
            "lora_B": lambda around: self.b.t() * self.scale,
        }
        bias, magnitude = self.bias, self.magnitude
        if bias is not None:
            makers["lora_B_bias"] = lambda around: (bias * self.scale).unsqueeze(0)
        if magnitude is not None:
            makers["lora_factor"] = lambda around: (magnitude / self._norm(around)).unsqueeze(0)
        return makers

    @property
    def can_merge(self) -> bool:
        return True

    def merged(self, weight: Tensor, around: Around) -> Tensor:
        # In peft's order of operations, for equal rounding.
        if self.experts > 1:
            down = self.a.unflatten(0, (self.experts, -1))
            up = self.b.unflatten(1, (-1, self.experts)).permute(2, 0, 1)
            of_experts: Tensor = weight + (up @ down) * self.scale
            return of_experts
        change = (self.b @ self.a) * self.scale
        merged: Tensor = weight + (change.t() if self.embeds else change)
        if self.magnitude is not None:
            merged = (self.magnitude / merged.norm(dim=1)).unsqueeze(1) * merged
        return merged

    def merged_bias(self, bias: Tensor) -> Tensor:
        return bias if self.bias is None else bias + self.bias * self.scale

    def _served_a(self) -> Tensor:
        """Return A; that of experts in the order of B's columns, so that ranks can be padded."""
        if self.experts == 1:
            return self.a
        by_expert: Tensor = self.a.unflatten(0, (self.experts, -1))
        return by_expert.transpose(0, 1).flatten(0, 1)

    def _norm(self, around: Around) -> Tensor:
        """Return ||W + scale · B A|| of each output, [out], in the adapter's dtype."""
        base = around.base()
        stand_in: Any = getattr(base, "stand_in", None)  # of `pcg.kernels.torch.products`
        if stand_in is not None:
            return stand_in.adapted_lengths(self.a, self.b, self.scale)  # type: ignore[no-any-return]
        a, b = self.a.to(base.device), self.b.to(base.device)
        length: Tensor = base.to(a.dtype).addmm(b, a, alpha=self.scale).norm(dim=1)
        return length.to(self.a.device)


_GATE_AND_UP = "gate_up_proj"
_OF_MIXTRAL = {"gate": "gate.weight", "w1": _GATE_AND_UP, "w3": _GATE_AND_UP, "w2": "down_proj"}
_OF_QWEN = {
    "gate": "gate.weight",
    "gate_proj": _GATE_AND_UP,
    "up_proj": _GATE_AND_UP,
    "down_proj": "down_proj",
}
_LIKE_QWEN = (
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen3_moe", "qwen3_next", "sarvam_mla",
    "solar_open",
)  # fmt: skip
_ALSO_LIKE_QWEN = (
    "axk1", "axk2", "bailing_hybrid", "flint", "hy_v3", "jamba", "kolibri1", "laguna",
    "mimo_v2_flash", "qwen2_moe", "qwen3_5_moe_text", "sarvam_moe",
)  # fmt: skip
_OLD_MODULES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _OF_MIXTRAL),
    **dict.fromkeys(_LIKE_QWEN, _OF_QWEN),
}
"""model_type -> names of experts' and routers' modules, and the parameters that they became."""
SAVED_MODULES: Mapping[str, Mapping[str, str]] = {
    **_OLD_MODULES,
    **dict.fromkeys(("kimi_linear", "lfm2_moe", "minimax_m3_vl_text", "phimoe"), _OF_MIXTRAL),
    **dict.fromkeys(_ALSO_LIKE_QWEN, _OF_QWEN),
    "nemotron_h": {"gate": "gate.weight", "up_proj": "experts.up_proj", "down_proj": "down_proj"},
}
"""The same for files with a module for each expert, of which peft reads fewer."""
LORA_FIELDS: Mapping[str, OtherField] = {
    **OF_LAYERS,
    "alora_invocation_tokens": refused("activated LoRA"),
    "arrow_config": refused("Arrow routing"),
    "corda_config": refused("CorDA initialisation"),
    "ensure_weight_tying": refused("tied adapters", False),
    "eva_config": refused("EVA initialisation"),
    "kasa_config": refused("KaSA"),
    "layer_replication": refused("replicated layers"),
    "loftq_config": refused("LoftQ initialisation", {}),
    "lora_ga_config": refused("LoRA-GA initialisation"),
    "megatron_config": refused("Megatron layers"),
    "megatron_core": OtherField("megatron.core"),  # of megatron_config
    "monteclora_config": refused("MonteCLoRA"),
    "qalora_group_size": OtherField(16),  # of use_qalora
    "runtime_config": OtherField(is_written=False),  # of use_dora
    "trainable_token_indices": refused("trained token embeddings"),
    "use_bdlora": refused("block-diagonal LoRA"),
    "use_qalora": refused("QA-LoRA", False),
    "velora_config": refused("VeLoRA"),
}
PLAIN_INITS = ("eva", "gaussian", "mica", "orthogonal")
"""Initialisations that keep the base's weights; others change them without a trace in the file."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(PatternedRecipe):
    """A LoRA, rsLoRA or DoRA configuration, with peft's fields and defaults.

    Attributes:
        bias: trained biases of the base: "none", "all", or "lora_only", those of the adapted
            modules.
        r: the rank of modules that no key of `rank_pattern` matches.
        lora_alpha: numerator of the scale of modules that no key of `alpha_pattern` matches.
        lora_dropout: probability that an element of a module's input is dropped in training.
        use_rslora: use the scale alpha / √rank.
        use_dora: also train magnitudes (DoRA).
        lora_bias: give B a bias, which is scaled like B.
        modules_to_save: ends of paths of modules of which the adapter has copies, which are trained
            whole: linear modules, token embeddings and norms, such as `lm_head`.
        target_parameters: names of parameters to adapt, such as `mlp.experts.down_proj`: weights of
            experts, and of routers.
        init_lora_weights: True, A uniform as in nn.Linear and B zero; "gaussian", A normal and B
            zero; False, both uniform; of a saved adapter also peft's other names.
    """

    method: ClassVar[str] = "LoRA"
    peft_type: ClassVar[str] = "LORA"
    weights: ClassVar[type[ModuleWeights]] = LoraWeights
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR},
        "dora": {"r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR, "use_dora": True},
    }
    other_fields: ClassVar[Mapping[str, OtherField]] = LORA_FIELDS
    rank_field: ClassVar[str] = "r"
    dropout_field: ClassVar[str] = "lora_dropout"
    biases: ClassVar[Names] = ("none", "all", "lora_only")
    family_targets: ClassVar[Mapping[str, Names]] = FAMILY_TARGETS
    alpha_field: ClassVar[str] = "lora_alpha"
    adapts_embeddings: ClassVar[bool] = True

    bias: str = "none"
    lora_dropout: float = saved_as("dropout", 0.0)
    r: int = saved_as("rank", 8)
    lora_alpha: float = saved_as("alpha", 8)
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str = saved_as("init", True)
    # A text is refused, and split by the command line.
    target_parameters: Names | str | None = None
    modules_to_save: Names | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flags("use_rslora", "use_dora", "lora_bias")
        init = self.init_lora_weights
        if not isinstance(init, bool | str):
            raise AdapterError(f'init_lora_weights={init!r}; use True, False or "gaussian"')
        if self.lora_bias and not isinstance(init, bool):
            raise AdapterError(f"lora_bias goes with init_lora_weights True or False, not {init!r}")
        if self.lora_bias and self.use_dora:
            raise AdapterError("lora_bias=True does not go with use_dora=True; set one to False")
        check_modules("target_parameters", self.target_parameters)
        check_modules("modules_to_save", self.modules_to_save)
        for field in ("target_parameters", "modules_to_save"):
            if isinstance(getattr(self, field), str):
                raise AdapterError(f"{field}={getattr(self, field)!r}; use a list of names")
        others = self.lora_dropout, self.lora_bias, self.use_dora
        if self.target_parameters and any(others):
            raise AdapterError(
                "target_parameters does not go with lora_dropout, lora_bias or use_dora; leave "
                "them out, or adapt modules alone"
            )

    @property
    def title(self) -> str:
        return "DoRA" if self.use_dora else self.method

    @property
    def one_rank(self) -> int | None:
        return None if self.rank_pattern else self.r

    def _is_excluded(self, path: str) -> bool:
        around = f".{module_name(path)}."
        is_saved = any(f".{name}." in around for name in self.modules_to_save or ())
        return is_saved or super()._is_excluded(path)

    def bypass_at(self, path: str) -> LoraBypass:
        rank, alpha = self.rank_and_alpha(path)
        scale = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        _, experts = parameter_of(path) or (path, 1)
        embeds = is_embedding(path)
        if embeds and (self.use_dora or self.lora_bias):
            raise UnsupportedError(
                f"target_modules includes {module_name(path)}, an embedding, where pcg does LoRA "
                "without use_dora and lora_bias; leave it out, or set them to False"
            )
        at = experts, embeds, is_swapped(path)
        return LoraBypass(rank * experts, scale, self.use_dora, self.lora_bias, *at)

    def for_family(self, model_type: str | None) -> Self:
        # As in peft, where `target_parameters` stand alone, but in families with default modules.
        is_alone = model_type in _OLD_MODULES or model_type not in self.family_targets
        if self.target_modules is None and self.target_parameters and is_alone:
            return replace(self, target_modules=())
        return super().for_family(model_type)

    def for_model(
        self,
        paths: Names,
        output_layer: str | None,
        model_type: str | None,
        modules: Mapping[str, Mapping[str, str]] = _OLD_MODULES,
    ) -> Self:
        """Return the recipe with the targets that peft gives it for a model.

        Names of experts' and routers' modules in old files become `target_parameters`, and so does
        "all-linear"; gate and up, which are one parameter, have the ranks of both (peft 0.21.2,
        `_convert_peft_config_moe`).

        Args:
            modules: the names of each model_type, and the parameters.
        """
        recipe = self.for_family(model_type)
        names = modules.get(model_type or "")
        targets = recipe.target_modules
        parameters_of = [each[0] for path in paths if (each := parameter_of(path)) is not None]
        if names is None or not parameters_of:
            return recipe
        if recipe.is_all_linear:
            # A router that is a linear module, as AFMoE's, is no parameter.
            names = {n: p for n, p in names.items() if any(ends_in(e, (p,)) for e in parameters_of)}
            linear = (p for p in paths if parameter_of(p) is None and not is_embedding(p))
            # Not a set, whose order differs between processes: ranks have to agree.
            ends = dict.fromkeys(p.rpartition(".")[2] for p in linear if p != output_layer)
            targets = (*ends, *names)
        if not isinstance(targets, tuple):
            return recipe
        linear_modules = {*paths}  # A dense layer's may have these names, which a path names.
        parameters = {
            name: None if name in linear_modules else names.get(name.rpartition(".")[2])
            for name in targets
        }
        fused = [name for name, parameter in parameters.items() if parameter == _GATE_AND_UP]
        if not any(parameters.values()):
            return recipe
        if len(fused) == 1:
            raise AdapterError(
                f"target_modules has {fused[0]!r}, and gate and up of experts are one parameter; "
                "name both"
            )
        added = [name for name in dict.fromkeys(parameters.values()) if name is not None]
        key = rf".*\.{_GATE_AND_UP}"
        doubled = {key: 2} if fused else {}
        return replace(
            recipe,
            target_modules=tuple(sorted({n for n in targets if parameters[n] is None})),
            target_parameters=tuple(dict.fromkeys((*(recipe.target_parameters or ()), *added))),
            rank_pattern=dict(recipe.rank_pattern) | {k: n * recipe.r for k, n in doubled.items()},
            alpha_pattern=dict(recipe.alpha_pattern)
            | {k: n * recipe.lora_alpha for k, n in doubled.items()},
        )

    @classmethod
    def check_config(cls, config: Json, *, saved: bool, allowed: Names = ()) -> None:
        init = config.get("init_lora_weights", True)
        if isinstance(init, str):
            _check_init(init, saved)
        ours = (*allowed, "eva_config") if saved and init == "eva" else allowed
        super().check_config(config, saved=saved, allowed=ours)

    def config_fields(
        self, target_modules: Names | str | None, base_model_name: str, notes: Json
    ) -> dict[str, Any]:
        init = self.init_lora_weights
        # The initialisation of trained weights is irrelevant; peft would prepare for it again.
        is_plain = isinstance(init, bool) or init.lower() == "gaussian"
        fields = super().config_fields(target_modules, base_model_name, notes)
        return fields | {"init_lora_weights": init if is_plain else True}


def _check_init(init: str, saved: bool = False) -> None:
    """Raise an error for an initialisation that pcg lacks, or that changed the base."""
    if saved and init.lower() not in PLAIN_INITS:
        raise UnsupportedError(
            f"init_lora_weights={init!r}: it changed the base's weights, so that the adapter is "
            "none for the base as it was; save it from peft with "
            "path_initial_model_for_weight_conversion"
        )
    if not saved and init.lower() != "gaussian":
        raise UnsupportedError(
            f'init_lora_weights={init!r}: pcg starts an adapter with True, False or "gaussian"; or '
            "let peft make and save one, and load that"
        )
