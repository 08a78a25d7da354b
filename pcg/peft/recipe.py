"""The base of every recipe: a PEFT method's configuration, and its interface.

A method is a file of this folder and a line of the registry. The file holds
    a recipe        its fields, which have peft's names; their checks; its adapter_config.json
    a bypass        the recipe at a module: the operators of training and of serving
    weights         the tensors of a module, in files and in memory
and the part of training that is outside the program, if there is any.

A field of adapter_config.json is of four kinds: the recipe's; a note that changes nothing and is
written back as it was read; a field that only matters with another field that is refused; or a
feature that pcg lacks, which is refused by name unless it is off, as is an unknown field.
"""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from pcg.errors import AdapterError, UnsupportedError
from pcg.ir.shapes import Shapes
from pcg.peft.method import Bypass, Shards, TrainingBeside
from pcg.peft.prompt_encoder import PromptEncoder
from pcg.peft.weights import ModuleWeights
from pcg.units import is_finite, shown

if TYPE_CHECKING:
    from pcg.ir.graph import Parameter
    from pcg.ir.program.program import ModelGraph

ALL_LINEAR = "all-linear"
CAUSAL_LM, SEQ_CLS = TASKS = ("CAUSAL_LM", "SEQ_CLS")
"""peft's names of the tasks: a causal LM, and a sequence classifier."""
HEADS_OF_LABELS = ("classifier", "score")
"""The modules that peft saves with a sequence classifier, of which a model has one."""

Json: TypeAlias = Mapping[str, Any]
Names: TypeAlias = Sequence[str]


@dataclass(frozen=True)
class OtherField:
    """A field of adapter_config.json that the recipe does not have.

    Attributes:
        default: the value that peft writes.
        feature: in words, the feature that it turns on, which pcg lacks; empty for none.
        is_note: True if it changes nothing, and is written back unchanged.
        is_written: True if peft writes it.
    """

    default: Any = None
    feature: str = ""
    is_note: bool = False
    is_written: bool = True


def note(default: Any = None) -> OtherField:
    """Return a field that changes nothing."""
    return OtherField(default, is_note=True)


def refused(feature: str, default: Any = None) -> OtherField:
    """Return a field that turns on a feature that pcg lacks."""
    return OtherField(default, feature)


COMMON: Mapping[str, OtherField] = {
    "auto_mapping": note(),
    "base_model_name_or_path": OtherField(),
    "inference_mode": note(True),
    "peft_version": note("0.21.2"),
    "revision": note(),
    "task_type": note(),
}
"""The fields of all peft methods."""
OF_LAYERS: Mapping[str, OtherField] = {
    **COMMON,
    "fan_in_fan_out": note(False),  # the base's weight layout: peft needs it to merge
    "modules_to_save": refused("whole modules trained beside the adapter"),
}
"""The fields of most peft methods that adapt modules."""
OF_PCG: Mapping[str, OtherField] = {
    "base_model_name_or_path": OtherField(),
    "inference_mode": note(True),
}
"""The fields of methods that peft lacks."""


def saved_as(name: str, default: Any) -> Any:
    """Declare a field that a program's manifest has under another name than peft."""
    return field(default=default, metadata={"saved": name})


_INTS = 2**31
"""Exclusive upper bound of tensor sizes."""


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """A configuration of a PEFT method; the defaults are peft's.

    Raises:
        AdapterError: a value is out of its range, or fields do not go together.
    """

    method: ClassVar[str]
    """The method's name, for people."""
    peft_type: ClassVar[str]
    """The method's name in adapter_config.json."""
    weights: ClassVar[type[ModuleWeights]]
    shorthands: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Words for recipes with the usual sizes, and their fields."""
    other_fields: ClassVar[Mapping[str, OtherField]] = OF_LAYERS
    rank_field: ClassVar[str] = ""
    """The field that is the rank of modules."""
    dropout_field: ClassVar[str] = ""
    """The field that is `dropout`."""

    def __post_init__(self) -> None:
        """Convert lists, which peft has, to tuples."""
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, _plain(each.name, getattr(self, each.name)))

    @property
    def title(self) -> str:
        return self.method

    # ---------------------------------------------------------------- fields that not all have

    @property
    def target_modules(self) -> Names | str | None:
        return None

    @property
    def is_all_linear(self) -> bool:
        """True if all linear modules except the output layer are adapted."""
        targets = self.target_modules
        return isinstance(targets, str) and targets.lower() == ALL_LINEAR

    @property
    def bias(self) -> str:
        """The trained biases of the base: "none", "all", or a word of the method."""
        return "none"

    @property
    def modules_to_save(self) -> Names | str | None:
        """Ends of paths of modules that are trained whole, beside the bypass networks."""
        return None

    @property
    def dropout(self) -> float:
        """The probability that an element of a bypass network's input is dropped in training."""
        probability: float = getattr(self, self.dropout_field) if self.dropout_field else 0.0
        return probability

    @property
    def rank(self) -> int | None:
        """The rank of modules that no pattern overrides; None for methods without ranks."""
        rank: int | None = getattr(self, self.rank_field) if self.rank_field else None
        return rank

    @property
    def one_rank(self) -> int | None:
        """The rank of all modules; None if ranks differ or the method has none."""
        return self.rank

    def with_rank(self, rank: int) -> Self:
        return dataclasses.replace(self, **{self.rank_field: rank})

    # ---------------------------------------------------------------------------- virtual tokens

    @property
    def prompt_tokens(self) -> int:
        """The number of virtual tokens before each sequence."""
        return 0

    @property
    def learns_first_token(self) -> bool:
        return False

    @property
    def encoder(self) -> PromptEncoder | None:
        """The network that is trained instead of its output; None for most methods."""
        return None

    # ------------------------------------------------------------------------------------- sites

    @abstractmethod
    def bypass_at(self, path: str) -> Bypass:
        """Return the bypass network of the module at `path`, assuming that it is adapted."""

    def bypass(self, path: str, output_layer: str | None = None) -> Bypass | None:
        """Return the bypass network of the linear module at `path`, or None."""
        return None

    def adapts(self, parameter: str) -> bool:
        """Return whether a parameter is adapted as such, and not as a module's weight."""
        return False

    @abstractmethod
    def bypasses(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> dict[str, Bypass]:
        """Return the bypass networks of a model, by path in the order of `paths`.

        Args:
            paths: the paths of all linear modules of the model.
            output_layer: path of the head, which "all-linear" leaves out.
            model_type: the model's, of config.json; needed if the recipe names no modules.
        Raises:
            AdapterError: the recipe does not fit the model.
        """

    def bypasses_in(self, model: ModelGraph, model_type: str) -> dict[str, Bypass]:
        """Return the bypass networks of a folded model; errors are those of `bypasses`."""
        self.check_embeddings(model)
        paths = *model.linear_modules(), *model.embedding_sites()
        return self.bypasses(paths, model.output_module, model_type)

    def check_embeddings(self, model: ModelGraph) -> None:  # noqa: B027  most name no modules
        """Raise an AdapterError if the targets include an embedding that it does not adapt."""

    def resolved(
        self, paths: Names, output_layer: str | None = None, model_type: str | None = None
    ) -> Self:
        """Return the recipe with module names that select the same modules without the model."""
        return self

    def replaces(self, parameter: str, adapted: Collection[str]) -> bool:
        """Return whether the base's parameter is trained itself, given the adapted modules."""
        module, _, kind = parameter.rpartition(".")
        is_bias = self.bias == "all" or (self.bias != "none" and module in adapted)
        return (kind == "bias" and is_bias) or self.saves(module)

    def replaced_in(
        self, model: ModelGraph, adapted: Collection[str]
    ) -> dict[str, tuple[str, Parameter]]:
        """Return the parameters of a folded model that it replaces, by name.

        Each has its name in a checkpoint, which is another one for a tied head.
        """
        named = [(source.format(layer=i), p, i) for source, p, i in model.frozen()]
        replaced = {
            name: (parameter.source.format(layer=layer), parameter)
            for name, parameter, layer in named
            if self.replaces(name, adapted)
        }
        self.check_saved(replaced)
        return replaced

    def check_saved(self, replaced: Iterable[str]) -> None:
        """Raise an error for a name of `modules_to_save` that no module has; peft ignores it.

        peft adds the names of classifiers' heads itself.
        """
        modules = [name.rpartition(".")[0] for name in replaced]
        for name in self.modules_to_save or ():
            if name not in HEADS_OF_LABELS and not any(
                f"{name}." in f"{module}." for module in modules
            ):
                raise AdapterError(
                    f"modules_to_save has {name!r}, which no module's path ends in; name modules "
                    "such as lm_head, embed_tokens or norm"
                )

    def saves(self, module: str) -> bool:
        """Return whether `modules_to_save` has the module, or a module around it.

        As in peft, a name is any end of a path (peft 0.21.2, `_set_trainable`).
        """
        parts = module.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(path.endswith(tuple(self.modules_to_save or ())) for path in around)

    def trained_shapes(
        self, bypasses: Mapping[str, Bypass], shapes: Mapping[str, tuple[int, int]]
    ) -> Shapes:
        """Return the shapes of all trained tensors except those that replace the base's."""
        trained = (bypass.trained_shapes(*shapes[path]) for path, bypass in bypasses.items())
        return tuple(chain.from_iterable(trained))

    # ---------------------------------------------------------------------------------- training

    trains_beside: ClassVar[bool] = False
    """True if a job has work outside the program: `training_beside`."""

    def for_job(self, total_steps: int) -> Self:
        """Return the recipe with the values that a job of `total_steps` fixes."""
        return self

    @property
    def schedule(self) -> Mapping[str, object]:
        """The numbers of a job, other than those of modules, by peft's names."""
        return {}

    def training_beside(self, shards: Shards, total_steps: int) -> TrainingBeside | None:
        """Return the part of a job outside the program; None for most methods.

        Raises:
            FinetuneError: such an adapter cannot be trained.
        """
        return None

    # ----------------------------------------------------------------------- adapter_config.json

    @classmethod
    def from_config(cls, config: Json, *, saved: bool) -> Self:
        """Return the recipe of fields as in adapter_config.json; `saved` if they belong to weights.

        Raises:
            UnsupportedError: a feature that pcg lacks, by name.
            AdapterError: a value out of its range.
        """
        cls.check_config(config, saved=saved)
        values = {name: value for name, value in config.items() if value is not None}
        return cls(**{name: values.get(name, default) for name, default in cls._defaults().items()})

    @classmethod
    def check_config(cls, config: Json, *, saved: bool, allowed: Names = ()) -> None:
        """Raise an error for a field that is on and is neither the recipe's nor allowed."""
        others = {**cls.other_fields, **COMMON}
        ours = {"peft_type", "fan_in_fan_out", *cls._defaults(), *allowed}
        ours.update(name for name, other in others.items() if not other.feature)
        off: tuple[object, ...] = ({}, [], (), "", set())
        for name, value in config.items():
            if name in ours or value is None or value is False or value in off:
                continue
            known = f" ({others[name].feature})" if name in others else ""
            feature = known or ", a field it does not know"
            raise UnsupportedError(
                f"the adapter's configuration has {name}={shown(value)}{feature}, which pcg does "
                "not do; train without it, or merge the adapter into its base with peft's "
                "merge_and_unload"
            )

    def config_fields(
        self, target_modules: Names | str | None, base_model_name: str, notes: Json
    ) -> dict[str, Any]:
        """Return the fields of adapter_config.json, as peft writes them.

        Args:
            target_modules: names or a regex; peft writes no "all-linear" and no null.
            base_model_name: the base's name; empty is null.
            notes: the result of `notes_of`.
        """
        others = {n: other.default for n, other in self.other_fields.items() if other.is_written}
        fields = {
            "peft_type": self.peft_type,
            **others,
            **{name: notes[name] for name in _note_names(type(self)) if name in notes},
            **{name: to_json(getattr(self, name)) for name in self._defaults()},
            "inference_mode": True,
            "base_model_name_or_path": base_model_name or None,
        }
        is_targeted = "target_modules" in self._defaults()
        return fields | ({"target_modules": to_json(target_modules)} if is_targeted else {})

    @classmethod
    def notes_of(cls, config: Json) -> dict[str, Any]:
        """Return the fields of adapter_config.json that change nothing."""
        return {name: config[name] for name in _note_names(cls) if name in config}

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        return {
            each.name: each.default
            if each.default_factory is dataclasses.MISSING
            else each.default_factory()
            for each in dataclasses.fields(cls)
        }

    # ------------------------------------------------------------------------------------ checks

    def _check(self, names: Names, expected: str, is_good: Callable[[Any], bool]) -> None:
        for name in names:
            if not is_good(getattr(self, name)):
                raise AdapterError(f"{name}={shown(getattr(self, name))}; use {expected}")

    def _check_ints(self, least: int, *names: str, optional: bool = False) -> None:
        def is_good(value: Any) -> bool:
            is_int = type(value) is int and least <= value < _INTS
            return (optional and value is None) or is_int

        self._check(names, f"an int of at least {least} and below 2³¹", is_good)

    def _check_flags(self, *names: str) -> None:
        self._check(names, "True or False", lambda value: isinstance(value, bool))

    def _check_choice(self, name: str, choices: Collection[str]) -> None:
        self._check([name], f"one of {', '.join(choices)}", choices.__contains__)

    def _check_finite(self, *names: str) -> None:
        self._check(names, "a finite number", is_finite)

    def _check_probabilities(self, *names: str) -> None:
        self._check(names, "a probability in [0, 1]", lambda p: is_finite(p) and 0 <= p <= 1)


def _note_names(cls: type[Recipe]) -> list[str]:
    # peft's field may be present even if the method's own configuration lacks it.
    others = {**COMMON, "fan_in_fan_out": note(), **cls.other_fields}
    return [name for name, other in others.items() if other.is_note]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if name == "layers_pattern" and isinstance(value, str):
        return (value,) if value else ()
    if name == "layers_to_transform" and type(value) is int:
        return (value,)
    if isinstance(value, set | frozenset):  # sets have no order
        return tuple(sorted(value))
    return tuple(value) if isinstance(value, list) else value


def to_json(value: object) -> object:
    """Return the value with lists for tuples."""
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return value
