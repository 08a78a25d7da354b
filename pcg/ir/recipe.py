"""A LoRA recipe: which linear modules get a bypass, and each one's rank and scale.

    y = W x + scale · B (A x),   A: [rank, in],  B: [out, rank]
    scale = alpha / rank,  or alpha / √rank with rsLoRA

Modules are matched by their full path, such as `model.layers.3.self_attn.q_proj`, as peft matches
them (peft 0.21.2: `check_target_module_exists`, `get_pattern_key`), so that a recipe means the same
modules, ranks and scales here and there. What peft lets pass with a warning or without one, a name
or a pattern that matches nothing, is an error here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pcg.errors import AdapterError
from pcg.ir.module_paths import did_you_mean, ends_in, first_match, matches_end, name_list

ALL_LINEAR = "all-linear"
BIASES = ("none", "all", "lora_only")

# model_type -> the modules adapted where a recipe names none; the decoders among
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING in peft 0.21.2 (peft/utils/constants.py).
FAMILY_TARGETS: Mapping[str, tuple[str, ...]] = {
    "RefinedWeb": ("query_key_value",),
    "RefinedWebModel": ("query_key_value",),
    "bloom": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "falcon": ("query_key_value",),
    "gemma": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neo": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "gptj": ("q_proj", "v_proj"),
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "mpt": ("Wqkv",),
    "opt": ("q_proj", "v_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "stablelm": ("q_proj", "v_proj"),
}


@dataclass(frozen=True, slots=True)
class Site:
    """The bypass of one module: y += scale · B (A x)."""

    rank: int
    scale: float


@dataclass(frozen=True)
class LoraRecipe:
    """The compiler's view of a LoRA configuration; the defaults are peft's.

    Attributes:
        rank: r of a module that no key of `rank_pattern` matches.
        alpha: numerator of the scale of a module that no key of `alpha_pattern` matches.
        target_modules: names, each matching modules whose path is it or ends in `.name`; or one
            regex for the whole path; or "all-linear", all but the output layer; or None, what is
            usual for the family (`FAMILY_TARGETS`).
        exclude_modules: names or one regex, as above; wins over the targets.
        rank_pattern: regexes for the end of a path -> rank; the first that matches counts.
        alpha_pattern: the same for alpha.
        use_rslora: scale is alpha / √rank.
        bias: which biases of the base are trained too: "none", "all", or "lora_only", those of the
            adapted modules.
        dropout: probability that an element of A's input is dropped in training.
        layers_to_transform: only modules of these layers; None is all. Not with a regex.
        layers_pattern: names of the module list that the index of a layer follows; None is any.
        lora_bias: B has a bias, which is scaled as B is.
        init: True, A uniform as in nn.Linear and B zero; "gaussian", A normal and B zero; False,
            both uniform; other names of peft's stay names.
    Raises:
        AdapterError: a value is out of its range, or a regex is none.
    """

    rank: int = 8
    alpha: float = 8
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    use_rslora: bool = False
    bias: str = "none"
    dropout: float = 0.0
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] | None = None
    lora_bias: bool = False
    init: bool | str = True

    def __post_init__(self) -> None:
        _check_ranks(self)
        _check_choices(self)
        _check_targets(self)

    @classmethod
    def default(cls) -> LoraRecipe:
        """What `peft="lora"` means: rank 16, alpha 32, all linear modules."""
        return cls(rank=16, alpha=32, target_modules=ALL_LINEAR)

    @property
    def is_all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR

    def site(
        self, path: str, *, output_layer: str | None = None, model_type: str | None = None
    ) -> Site | None:
        """The bypass of the linear module at `path`; None where it gets none.

        Args:
            path: full path of a linear module.
            output_layer: path of the head, which "all-linear" leaves out.
            model_type: of config.json; needed where `target_modules` is None.
        Raises:
            AdapterError: `target_modules` is None, and nothing is usual for that model_type.
        """
        recipe = self.for_family(model_type)
        if not recipe._wants(path, output_layer) or recipe._is_excluded(path):
            return None
        return recipe.site_of_target(path)

    def site_of_target(self, path: str) -> Site:
        """Rank and scale at `path`, taking for granted that it is a target."""
        rank = first_match(self.rank_pattern, path, self.rank)
        alpha = first_match(self.alpha_pattern, path, self.alpha)
        return Site(rank, alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, Site]:
        """The bypasses of a model, by path in the order of `paths`.

        Args:
            paths: of all linear modules of the model.
            output_layer: path of the head, which "all-linear" leaves out.
            model_type: of config.json; needed where `target_modules` is None.
            others: paths of modules with weights that are not linear, such as embeddings.
        Raises:
            AdapterError: a target, a pattern or a layer matches no module, or no module is left,
                or a target matches one of `others`.
        """
        recipe = self.for_family(model_type)
        recipe._check_names(paths)
        for path in () if recipe.is_all_linear else others:
            if recipe.site(path) is not None:
                raise AdapterError(
                    f"target_modules={recipe.target_modules!r} matches {path}, which is not a "
                    "linear module; pcg adapts linear modules alone"
                )
        found = {}
        for path in paths:
            site = recipe.site(path, output_layer=output_layer)
            if site is not None:
                found[path] = site
        if not found:
            raise AdapterError(
                f"target_modules={recipe.target_modules!r} with exclude_modules="
                f"{recipe.exclude_modules!r} and layers_to_transform={recipe.layers_to_transform} "
                f"leave none of the {len(paths)} linear modules; {name_list(paths)}"
            )
        recipe._check_layers(paths)
        for name in ("rank_pattern", "alpha_pattern"):
            _check_pattern(name, getattr(recipe, name), found)
        return found

    def for_family(self, model_type: str | None) -> LoraRecipe:
        """The recipe with the family's usual targets where it names none.

        Raises:
            AdapterError: it names none, and nothing is usual for that model_type.
        """
        if self.target_modules is not None:
            return self
        if model_type is None or model_type not in FAMILY_TARGETS:
            raise AdapterError(
                f"target_modules is not given, and no modules are usual for model_type="
                f'{model_type!r}; name them, or use target_modules="{ALL_LINEAR}"'
            )
        return dataclasses.replace(self, target_modules=FAMILY_TARGETS[model_type])

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> LoraRecipe:
        """The recipe with its targets as names, which mean the same modules without the model.

        The names are last components of paths where those select the same of `paths`, else paths.
        """
        if self.target_modules is None:
            return self.for_family(model_type)
        if not self.is_all_linear:
            return self
        adapted = list(self.sites(paths, output_layer))
        names = tuple(sorted({path.rpartition(".")[2] for path in adapted}))
        short = dataclasses.replace(self, target_modules=names)
        selected = [path for path in paths if short.site(path) is not None]
        # A number names an entry of a list: layers as well as linear modules.
        if selected == adapted and not any(name.isdigit() for name in names):
            return short
        return dataclasses.replace(self, target_modules=tuple(adapted))

    # --------------------------------------------------------------------------------- matching

    def _wants(self, path: str, output_layer: str | None) -> bool:
        targets = self.target_modules
        if isinstance(targets, str):
            if self.is_all_linear:
                return path != output_layer
            return re.fullmatch(targets, path) is not None
        if targets is None or path in targets:
            return targets is not None
        if not ends_in(path, targets):
            return False
        return not self.layers_to_transform or self._layer(path) in self.layers_to_transform

    def _is_excluded(self, path: str) -> bool:
        if not self.exclude_modules:
            return False
        if isinstance(self.exclude_modules, str):
            return re.fullmatch(self.exclude_modules, path) is not None
        return path in self.exclude_modules or ends_in(path, self.exclude_modules)

    def _layer(self, path: str) -> int | None:
        """Index of the layer that the module is in: the first number, not that of an expert."""
        if not self.layers_pattern:
            found = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", path)
            return int(found["index"]) if found else None
        for pattern in self.layers_pattern:
            found = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", path)
            if found:
                return int(found["index"])
        return None

    # ----------------------------------------------------------------------------------- checks

    def _check_names(self, paths: Sequence[str]) -> None:
        """Refuse a target that matches no module."""
        if self.is_all_linear or self.target_modules is None:
            return
        if isinstance(self.target_modules, str):
            if not any(re.fullmatch(self.target_modules, path) for path in paths):
                raise AdapterError(
                    f"target_modules={self.target_modules!r}, a regex for the whole path, matches "
                    f"none of the {len(paths)} linear modules, such as {''.join(paths[:1])}; "
                    + name_list(paths)
                )
            return
        for name in self.target_modules:
            if not any(path == name or path.endswith(f".{name}") for path in paths):
                raise AdapterError(
                    f"target_modules has {name!r}, which no linear module is named"
                    f"{did_you_mean(name, paths)}; {name_list(paths)}"
                )

    def _check_layers(self, paths: Sequence[str]) -> None:
        """Refuse a layer that holds no module of that name."""
        if not self.layers_to_transform:
            return
        names = self.target_modules or ()
        targets = [path for path in paths if path in names or ends_in(path, names)]
        layers = {self._layer(path) for path in targets} - {None}
        missing = [index for index in self.layers_to_transform if index not in layers]
        if missing:
            there = ", ".join(map(str, sorted(index for index in layers if index is not None)))
            raise AdapterError(
                f"layers_to_transform has {missing[0]}, but the target modules are in layers "
                f"{there or '(none)'}"
            )


# ----------------------------------------------------------------------------------- construction


def _check_ranks(recipe: LoraRecipe) -> None:
    ranks = {"rank": recipe.rank}
    ranks |= {f"rank_pattern[{key!r}]": rank for key, rank in recipe.rank_pattern.items()}
    for name, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise AdapterError(f"{name}={rank!r}; a rank is an int of at least 1")
    alphas = {"alpha": recipe.alpha}
    alphas |= {f"alpha_pattern[{key!r}]": alpha for key, alpha in recipe.alpha_pattern.items()}
    for name, alpha in alphas.items():
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not math.isfinite(alpha):
            raise AdapterError(f"{name}={alpha!r}; use a finite number")


def _check_choices(recipe: LoraRecipe) -> None:
    if recipe.bias not in BIASES:
        raise AdapterError(f"bias={recipe.bias!r}; use one of {', '.join(BIASES)}")
    dropout = recipe.dropout
    is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    if not is_number or not 0 <= dropout <= 1:
        raise AdapterError(f"dropout={dropout!r}; use a probability in [0, 1]")
    for name in ("use_rslora", "lora_bias"):
        if not isinstance(getattr(recipe, name), bool):
            raise AdapterError(f"{name}={getattr(recipe, name)!r}; use True or False")
    if not isinstance(recipe.init, bool | str):
        raise AdapterError(f'init={recipe.init!r}; use True, False or "gaussian"')
    if recipe.lora_bias and not isinstance(recipe.init, bool):
        raise AdapterError(f"lora_bias goes with init True or False only, not {recipe.init!r}")


def _check_targets(recipe: LoraRecipe) -> None:
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = getattr(recipe, name)
        if value is None or (isinstance(value, str) and name != "layers_pattern"):
            continue
        if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
            raise AdapterError(f"{name}={value!r}; use a tuple of names that are not empty")
    layers = recipe.layers_to_transform
    if layers is not None and not (
        isinstance(layers, tuple) and all(type(index) is int and index >= 0 for index in layers)
    ):
        raise AdapterError(f"layers_to_transform={layers!r}; use a tuple of layer indices")
    if isinstance(recipe.target_modules, str) and (
        layers is not None or recipe.layers_pattern is not None
    ):
        raise AdapterError(
            f"target_modules={recipe.target_modules!r} is matched against whole paths and does not "
            "go with layers_to_transform or layers_pattern; name the modules in a list, or write "
            "the layers into the regex"
        )
    if recipe.layers_pattern and layers is None:
        raise AdapterError(
            f"layers_pattern={recipe.layers_pattern!r} needs layers_to_transform, the layers it "
            "selects"
        )
    for name, pattern in _regexes(recipe):
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{name} has {pattern!r}, which is not a regex: {error}") from error


def _regexes(recipe: LoraRecipe) -> Iterable[tuple[str, str]]:
    if isinstance(recipe.target_modules, str):
        yield "target_modules", recipe.target_modules
    if isinstance(recipe.exclude_modules, str):
        yield "exclude_modules", recipe.exclude_modules
    for name in ("layers_pattern", "rank_pattern", "alpha_pattern"):
        for pattern in getattr(recipe, name) or ():
            yield name, pattern


def _check_pattern(name: str, patterns: Mapping[str, object], adapted: Collection[str]) -> None:
    """Refuse a key that matches no adapted module, which peft ignores with a warning."""
    for pattern in patterns:
        if not any(matches_end(pattern, path) for path in adapted):
            raise AdapterError(
                f"{name} has {pattern!r}, which matches none of the {len(adapted)} adapted modules"
                f"{did_you_mean(pattern, adapted)}; {name_list(adapted)}"
            )
