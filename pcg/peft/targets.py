"""Recipes that name modules; each named module gets a bypass network.

Modules are matched by their full path, such as `model.layers.3.self_attn.q_proj`, as peft matches
them (peft 0.21.2: `check_target_module_exists`, `get_pattern_key`), so that a recipe selects the
same modules in both. A name or a pattern without a match is an error, where peft may only warn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from pcg.errors import AdapterError
from pcg.ir.module_paths import (
    did_you_mean,
    ends_in,
    first_match,
    is_embedding,
    is_plain,
    match_start,
    matches_end,
    matches_whole,
    module_name,
    name_list,
    parameter_of,
)
from pcg.peft.method import Bypass
from pcg.peft.recipe import ALL_LINEAR, Names, Recipe
from pcg.units import is_finite

if TYPE_CHECKING:
    from pcg.ir.program.program import ModelGraph

# model_type -> the default modules of most methods; the decoders among
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING in peft 0.21.2 (peft/utils/constants.py).
_QUERY_AND_VALUE = (
    "gemma", "gemma2", "gemma3_text", "gpt_neo", "gptj", "llama", "mistral", "mixtral", "opt",
    "qwen2", "qwen3", "stablelm",
)  # fmt: skip
_FUSED = ("RefinedWeb", "RefinedWebModel", "bloom", "falcon", "gpt_neox")
FAMILY_TARGETS: Mapping[str, Names] = {
    **dict.fromkeys(_QUERY_AND_VALUE, ("q_proj", "v_proj")),
    **dict.fromkeys(_FUSED, ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "codegen": ("qkv_proj",),
    "mpt": ("Wqkv",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}


_MOST_ENTRIES = 16_384
"""Maximum number of names, patterns or layers in a field; models have fewer linear modules."""
_MOST_REGEXES = 256
"""Maximum number of patterns in a field that are not plain paths: each tests all modules."""


@dataclass(frozen=True, kw_only=True)
class TargetedRecipe(Recipe):
    """A configuration of a method that adapts modules by their names.

    Attributes:
        target_modules: names, each matching modules with the path `name` or `….name`; or a regex
            for the whole path; or "all-linear", all except the output layer; or None, the default
            modules of the family.
    """

    biases: ClassVar[Names] = ("none",)
    family_targets: ClassVar[Mapping[str, Names]] = {}
    """model_type -> the adapted modules if a recipe names none."""
    patterns: ClassVar[Names] = ()
    """Fields whose keys are regexes for the end of an adapted module's path."""
    adapts_embeddings: ClassVar[bool] = False
    """True if it may adapt token embeddings."""

    target_modules: Names | str | None = None

    @property
    def target_parameters(self) -> Names | str | None:
        """Names of parameters that are adapted as such, each matching paths as a module's does."""
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_targets(self)
        self._check_choice("bias", self.biases)
        if self.dropout_field:
            self._check_probabilities(self.dropout_field)

    def bypass(self, path: str, output_layer: str | None = None) -> Bypass | None:
        recipe = self.for_family(None)
        if not recipe._wants(path, output_layer) or recipe._is_excluded(path):
            return None
        return recipe.bypass_at(path)

    def adapts(self, parameter: str) -> bool:
        return _matches(parameter, self.target_parameters or ())

    def bypasses(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> dict[str, Bypass]:
        recipe = self.for_model(paths, output_layer, model_type)
        modules = [
            module_name(path)
            for path in paths
            if parameter_of(path) is None and (self.adapts_embeddings or not is_embedding(path))
        ]
        parameters = [each[0] for path in paths if (each := parameter_of(path)) is not None]
        recipe._check_names(modules, parameters)
        recipe._check_parameters(parameters)
        every = {path: recipe.bypass(path, output_layer) for path in paths}
        adapted = {path: bypass for path, bypass in every.items() if bypass is not None}
        if not adapted:
            raise AdapterError(
                f"target_modules={recipe.target_modules!r} with exclude_modules="
                f"{recipe.exclude_modules!r} and layers_to_transform={recipe.layers_to_transform} "
                f"leave none of the {len(paths)} linear modules; {name_list(paths)}"
            )
        recipe._check_layers(modules)
        for name in recipe.patterns:
            _check_pattern(name, getattr(recipe, name), adapted)
        return adapted

    def check_embeddings(self, model: ModelGraph) -> None:
        if self.target_modules is None or self.is_all_linear:
            return
        adapted = {module_name(site) for site in model.embedding_sites()}
        for path in model.embedding_modules():
            is_target = self._wants(path, None) and not self._is_excluded(path)
            if is_target and not (self.adapts_embeddings and path in adapted):
                what = "and token embeddings " if self.adapts_embeddings else ""
                raise AdapterError(
                    f"target_modules={self.target_modules!r} includes {path}, an embedding, and "
                    f"{self.title} adapts linear modules {what}alone; leave it out of "
                    "target_modules"
                )

    @property
    def exclude_modules(self) -> Names | str | None:
        return None

    @property
    def layers_to_transform(self) -> Sequence[int] | None:
        return None

    @property
    def layers_pattern(self) -> Names | None:
        return None

    def for_family(self, model_type: str | None) -> Self:
        """Return the recipe with the family's default targets if it names none.

        Raises:
            AdapterError: it names none, and the model_type has no defaults.
        """
        if self.target_modules is not None:
            return self
        targets = self._usual("target_modules", self.family_targets, model_type)
        return dataclasses.replace(self, target_modules=targets)

    def for_model(self, paths: Names, output_layer: str | None, model_type: str | None) -> Self:
        """Return the recipe with targets for a model; the arguments are those of `bypasses`."""
        return self.for_family(model_type)

    @staticmethod
    def _usual(name: str, usual: Mapping[str, Names], model_type: str | None) -> Names:
        if model_type is None or model_type not in usual:
            hint = f', or use target_modules="{ALL_LINEAR}"' if name == "target_modules" else ""
            raise AdapterError(
                f"{name} is not given, and no modules are usual for model_type={model_type!r}; "
                f"name them{hint}"
            )
        return usual[model_type]

    def resolved(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> Self:
        """Return the recipe with names as targets, which select the same modules without the model.

        The names are last components of paths if those select the same of `paths`, else paths.
        """
        recipe = self.for_model(paths, output_layer, model_type)
        if not recipe.is_all_linear:
            return recipe
        adapted = [p for p in recipe.bypasses(paths, output_layer) if parameter_of(p) is None]
        names = tuple(sorted({path.rpartition(".")[2] for path in adapted}))
        short = dataclasses.replace(recipe, target_modules=names)
        modules = (path for path in paths if parameter_of(path) is None)
        selected = [path for path in modules if short.bypass(path) is not None]
        # A number names a list's entry: layers as well as linear modules.
        if selected == adapted and not any(name.isdigit() for name in names):
            return short
        return dataclasses.replace(recipe, target_modules=tuple(adapted))

    # --------------------------------------------------------------------------------- matching

    def _wants(self, path: str, output_layer: str | None) -> bool:
        if (parameter := parameter_of(path)) is not None:
            return self.adapts(parameter[0])
        targets = () if self.target_modules is None else self.target_modules
        if self.is_all_linear or (is_embedding(path) and not self.adapts_embeddings):
            return path != output_layer and not is_embedding(path)
        path = module_name(path)
        if isinstance(targets, str) or path in targets or not self.layers_to_transform:
            return _matches(path, targets)
        return ends_in(path, targets) and self._layer(path) in self.layers_to_transform

    def _is_excluded(self, path: str) -> bool:
        is_parameter = parameter_of(path) is not None
        return not is_parameter and _matches(module_name(path), self.exclude_modules or ())

    def _layer(self, path: str) -> int | None:
        """Return the index of the module's layer: the first number, not that of an expert."""
        if not self.layers_pattern:
            usual = re.match(r".*?\.[^.]*\.(\d+)\.", path)
            return None if usual is None else int(usual[1])
        for pattern in self.layers_pattern:
            if match := match_start(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", path):
                return int(match["index"])
        return None

    # ----------------------------------------------------------------------------------- checks

    def _check_names(self, paths: Names, parameters: Names) -> None:
        targets = () if self.target_modules is None else self.target_modules
        if isinstance(targets, str):
            if not self.is_all_linear and not any(_matches(path, targets) for path in paths):
                raise AdapterError(
                    f"target_modules={targets!r}, a regex for the whole path, matches none of the "
                    f"{len(paths)} linear modules, such as {''.join(paths[:1])}; {name_list(paths)}"
                )
            return
        for name in targets:
            if not any(_matches(path, (name,)) for path in paths):
                around = [parameter for parameter in parameters if f".{name}." in f".{parameter}."]
                raise AdapterError(
                    f"target_modules has {name!r}, which no linear module is named"
                    + (
                        f"; name parameters in target_parameters: {', '.join(_ends(around))}"
                        if around
                        else f"{did_you_mean(name, paths)}; {name_list(paths)}"
                    )
                )

    def _check_parameters(self, parameters: Names) -> None:
        for name in self.target_parameters or ():
            if not any(_matches(path, (name,)) for path in parameters):
                raise AdapterError(
                    f"target_parameters has {name!r}, and pcg adapts weights of experts, each with "
                    f"a dim of the experts, and of routers{did_you_mean(name, parameters)}; "
                    f"{name_list(parameters)}"
                )

    def _check_layers(self, paths: Names) -> None:
        if not self.layers_to_transform:
            return
        indices = {self._layer(path) for path in paths if _matches(path, self.target_modules or ())}
        layers = sorted(index for index in indices if index is not None)
        missing = [index for index in self.layers_to_transform if index not in layers]
        if missing:
            raise AdapterError(
                f"layers_to_transform has {missing[0]}, but the target modules are in layers "
                f"{', '.join(map(str, layers)) or '(none)'}"
            )


@dataclass(frozen=True, kw_only=True)
class LayeredRecipe(TargetedRecipe):
    """A configuration that can leave out modules, and layers.

    Attributes:
        exclude_modules: names or a regex, as the targets, of modules to leave out.
        layers_to_transform: the only adapted layers; None is all. Not with a regex.
        layers_pattern: names of the module list that a layer's index follows; None is any.
    """

    exclude_modules: Names | str | None = None
    layers_to_transform: Sequence[int] | None = None
    layers_pattern: Names | None = None


@dataclass(frozen=True, kw_only=True)
class PatternedRecipe(LayeredRecipe):
    """A configuration with a rank and an alpha, which some modules may override.

    Attributes:
        rank_pattern: regexes for the end of a path -> rank; the first match counts.
        alpha_pattern: regexes for the end of a path -> alpha; the first match counts.
    """

    patterns: ClassVar[Names] = ("rank_pattern", "alpha_pattern")
    alpha_field: ClassVar[str]

    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = {f"rank_pattern[{key!r}]": rank for key, rank in self.rank_pattern.items()}
        for name, rank in {self.rank_field: self.rank, **ranks}.items():
            if type(rank) is not int or rank < 1:
                raise AdapterError(f"{name}={rank!r}; a rank is an int of at least 1")
        alphas = {f"alpha_pattern[{key!r}]": alpha for key, alpha in self.alpha_pattern.items()}
        for name, alpha in {self.alpha_field: self._alpha, **alphas}.items():
            if not is_finite(alpha):
                raise AdapterError(f"{name}={alpha!r}; use a finite number")

    @property
    def _alpha(self) -> float:
        return getattr(self, self.alpha_field)  # type: ignore[no-any-return]

    def rank_and_alpha(self, path: str) -> tuple[int, float]:
        name, _ = parameter_of(path) or (module_name(path), 1)
        rank = first_match(self.rank_pattern, name, getattr(self, self.rank_field))
        return rank, first_match(self.alpha_pattern, name, self._alpha)


def _ends(parameters: Names) -> list[str]:
    """Return the last two components of parameters' names, as `target_parameters` names them."""
    return sorted({".".join(name.split(".")[-2:]) for name in parameters})


def _matches(path: str, targets: Names | str) -> bool:
    if isinstance(targets, str):
        return matches_whole(targets, path)
    return path in targets or ends_in(path, targets)


# ----------------------------------------------------------------------------------- construction


def check_modules(name: str, value: object) -> None:
    """Raise an error unless a value is None, a regex, or names."""
    if isinstance(value, str):
        _check_regex(name, value)
    elif value is not None and not (
        isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)
    ):
        raise AdapterError(f"{name}={value!r}; use a list of names that are not empty")


def _check_regex(name: str, pattern: str) -> None:
    try:
        matches_whole(pattern, "")
    except AdapterError as error:
        raise AdapterError(f"{name}: {error}") from error


def _check_counts(recipe: TargetedRecipe) -> None:
    """Raise an error for fields that take minutes to match."""
    lists = ("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform")
    for name in (*lists, *recipe.patterns):
        value = getattr(recipe, name)
        if isinstance(value, tuple | Mapping) and len(value) > _MOST_ENTRIES:
            raise AdapterError(f"{name} has {len(value)} entries; use at most {_MOST_ENTRIES}")
    for name in ("layers_pattern", *recipe.patterns):
        regexes = [pattern for pattern in getattr(recipe, name) or () if not is_plain(str(pattern))]
        if len(regexes) > _MOST_REGEXES:
            raise AdapterError(
                f"{name} has {len(regexes)} regexes that are more than paths; use at most "
                f"{_MOST_REGEXES}"
            )


def _check_targets(recipe: TargetedRecipe) -> None:
    check_modules("target_modules", recipe.target_modules)
    check_modules("exclude_modules", recipe.exclude_modules)
    check_modules("layers_pattern", recipe.layers_pattern)
    layers = recipe.layers_to_transform
    if layers is not None and not (
        isinstance(layers, tuple) and all(type(index) is int and index >= 0 for index in layers)
    ):
        raise AdapterError(f"layers_to_transform={layers!r}; use a list of layer indices")
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
    _check_counts(recipe)
    for name in ("layers_pattern", *recipe.patterns):
        patterns = getattr(recipe, name)
        if name in recipe.patterns and not isinstance(patterns, Mapping):
            raise AdapterError(f"{name}={patterns!r}; use an object")
        for pattern in patterns or ():
            if not is_plain(pattern):
                _check_regex(name, pattern)


def _check_pattern(name: str, patterns: Mapping[str, object], adapted: Collection[str]) -> None:
    """Raise an error for a key that matches no adapted module; peft only warns."""
    for pattern in patterns:
        names = [(parameter_of(path) or (module_name(path),))[0] for path in adapted]
        if not any(matches_end(pattern, path) for path in names):
            raise AdapterError(
                f"{name} has {pattern!r}, which matches none of the {len(adapted)} adapted modules"
                f"{did_you_mean(pattern, adapted)}; {name_list(adapted)}"
            )
