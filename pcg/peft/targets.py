"""What all recipes have: which modules get a bypass network, and which biases are trained.

Modules are matched by their full path, such as `model.layers.3.self_attn.q_proj`, as peft matches
them (peft 0.21.2: `check_target_module_exists`, `get_pattern_key`), so that a recipe means the same
modules here and there. What peft lets pass with a warning or without one, a name or a pattern that
matches nothing, is an error here.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from pcg.errors import AdapterError
from pcg.ir.module_paths import did_you_mean, ends_in, matches_end, name_list
from pcg.ir.shapes import Shapes
from pcg.peft.virtual_token_encoder import PromptEncoder

ALL_LINEAR = "all-linear"

SiteT = TypeVar("SiteT")
"""What a method does at one module."""


@dataclass(frozen=True)
class TargetRecipe(ABC, Generic[SiteT]):
    """The compiler's view of a configuration of one PEFT method; the defaults are peft's.

    Attributes:
        target_modules: names, each matching modules whose path is it or ends in `.name`; or one
            regex for the whole path; or "all-linear", all but the output layer; or None, what is
            usual for the family (`family_targets`).
        exclude_modules: names or one regex, as above; wins over the targets.
        layers_to_transform: only modules of these layers; None is all. Not with a regex.
        layers_pattern: names of the module list that the index of a layer follows; None is any.
        bias: which biases of the base are trained too: one of `biases`. "all", or those of the
            adapted modules alone.
        dropout: probability that an element of a bypass network's input is dropped in training.
    Raises:
        AdapterError: a value is out of its range, or a regex is none.
    """

    method: ClassVar[str]
    """The method's name, for people."""
    peft_type: ClassVar[str]
    biases: ClassVar[tuple[str, ...]] = ("none",)
    family_targets: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """model_type -> the modules adapted where a recipe names none."""
    patterns: ClassVar[tuple[str, ...]] = ()
    """Fields whose keys are regexes for the end of an adapted module's path."""

    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] | None = None
    bias: str = "none"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_targets(self)
        if self.bias not in self.biases:
            raise AdapterError(f"bias={self.bias!r}; use one of {', '.join(self.biases)}")
        dropout = self.dropout
        is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
        if not is_number or not 0 <= dropout <= 1:
            raise AdapterError(f"dropout={dropout!r}; use a probability in [0, 1]")

    @property
    def prompt_tokens(self) -> int:
        """Virtual tokens that stand before each sequence."""
        return 0

    @property
    def learns_first_token(self) -> bool:
        """Whether the last virtual token predicts a sequence's first."""
        return False

    @property
    def encoder(self) -> PromptEncoder | None:
        """What is trained in place of the sites' numbers, which it makes; None for most methods."""
        return None

    @abstractmethod
    def site_of_target(self, path: str) -> SiteT:
        """What the method does at `path`, taking for granted that it is a target."""

    def trained_shapes(
        self, sites: Mapping[str, SiteT], shapes: Mapping[str, tuple[int, int]]
    ) -> Shapes:
        """Shapes of what is trained of the method's own.

        Args:
            sites: as of `sites`.
            shapes: as `ModelGraph.module_shapes`.
        """
        found: Mapping[str, Any] = sites
        trained = (site.trained_shapes(*shapes[path]) for path, site in found.items())
        return tuple(shape for of_site in trained for shape in of_site)

    @property
    def is_all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR

    def site(
        self, path: str, *, output_layer: str | None = None, model_type: str | None = None
    ) -> SiteT | None:
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

    def sites(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
        others: Collection[str] = (),
    ) -> dict[str, SiteT]:
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
        for name in recipe.patterns:
            _check_pattern(name, getattr(recipe, name), found)
        return found

    def for_family(self, model_type: str | None) -> Self:
        """The recipe with the family's usual targets where it names none.

        Raises:
            AdapterError: it names none, and nothing is usual for that model_type.
        """
        if self.target_modules is not None:
            return self
        targets = self._usual("target_modules", self.family_targets, model_type)
        return dataclasses.replace(self, target_modules=targets)

    @staticmethod
    def _usual(
        name: str, usual: Mapping[str, tuple[str, ...]], model_type: str | None
    ) -> tuple[str, ...]:
        if model_type is None or model_type not in usual:
            hint = f', or use target_modules="{ALL_LINEAR}"' if name == "target_modules" else ""
            raise AdapterError(
                f"{name} is not given, and no modules are usual for model_type={model_type!r}; "
                f"name them{hint}"
            )
        return usual[model_type]

    def resolved(
        self,
        paths: Sequence[str],
        output_layer: str | None = None,
        model_type: str | None = None,
    ) -> Self:
        """The recipe with its targets as names, which mean the same modules without the model.

        The names are last components of paths where those select the same of `paths`, else paths.
        """
        recipe = self.for_family(model_type)
        if not recipe.is_all_linear:
            return recipe
        adapted = list(recipe.sites(paths, output_layer))
        names = tuple(sorted({path.rpartition(".")[2] for path in adapted}))
        short = dataclasses.replace(recipe, target_modules=names)
        selected = [path for path in paths if short.site(path) is not None]
        # A number names an entry of a list: layers as well as linear modules.
        if selected == adapted and not any(name.isdigit() for name in names):
            return short
        return dataclasses.replace(recipe, target_modules=tuple(adapted))

    def trains_bias(self, module: str, adapted: Collection[str]) -> bool:
        """Whether the bias of a module of the base is trained.

        Args:
            module: its path, or its site.
            adapted: paths, or sites, of the modules with a bypass.
        """
        return self.bias == "all" or (self.bias != "none" and module in adapted)

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


def _check_targets(recipe: TargetRecipe[SiteT]) -> None:
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


def _regexes(recipe: TargetRecipe[SiteT]) -> Iterable[tuple[str, str]]:
    if isinstance(recipe.target_modules, str):
        yield "target_modules", recipe.target_modules
    if isinstance(recipe.exclude_modules, str):
        yield "exclude_modules", recipe.exclude_modules
    for name in ("layers_pattern", *recipe.patterns):
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
