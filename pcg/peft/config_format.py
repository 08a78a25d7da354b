"""How one PEFT method's configuration stands in adapter_config.json.

A field of peft's is one of four: the recipe's; a note that changes nothing here and is written back
as it was read; one that only matters with another one that is refused; or a feature that pcg does
not do, which is refused by name unless it is off. A field that is not known is the last.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pcg.errors import AdapterError, UnsupportedError
from pcg.peft.registry import Recipe

Json: TypeAlias = Mapping[str, Any]

# fan_in_fan_out is how the base stores its weight: peft needs it to merge, we never merge.
NOTES = (
    "auto_mapping",
    "fan_in_fan_out",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)

_NAMES = ("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern")


@dataclass(frozen=True)
class ConfigFormat:
    """The fields of a method's configuration.

    Attributes:
        recipe: class of the recipe.
        defaults: what `save_pretrained` of peft 0.21.2 writes for a default configuration.
        fields: peft's field -> the recipe's.
        inert: fields without effect but with a feature that is refused.
        features: fields of features that pcg does not do, in words.
        notes: fields of this method alone that change nothing here, beside `NOTES`.
    """

    recipe: type[Recipe]
    defaults: Json
    fields: Mapping[str, str]
    inert: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def read(self, config: Json, *, saved: bool) -> Recipe:
        """The recipe of a configuration.

        Args:
            config: fields as in adapter_config.json.
            saved: it belongs to saved weights.
        Raises:
            UnsupportedError: a feature that pcg does not do, by name.
            AdapterError: a value out of its range.
        """
        self.check(config, saved=saved)
        values: dict[str, Any] = {}
        for name, own_name in self.fields.items():
            default = self.defaults[name]
            value = config.get(name, default)
            value = default if value is None and default is not None else value
            values[own_name] = _plain(name, value)
        return self.recipe(**values)

    def check(self, config: Json, *, saved: bool, allowed: tuple[str, ...] = ()) -> None:
        """Refuse what is on and is neither ours nor allowed."""
        ours = {*self.fields, *NOTES, *self.notes, *self.inert, *allowed}
        ours |= {"peft_type", "base_model_name_or_path"}
        off: tuple[object, ...] = ({}, [], (), "", set())
        for name, value in config.items():
            if name in ours or value is None or value is False or value in off:
                continue
            known = name in self.features
            feature = f" ({self.features[name]})" if known else ", a field it does not know"
            raise UnsupportedError(
                f"the adapter's configuration has {name}={_short(value)}{feature}, which pcg does "
                "not do; train without it, or merge the adapter into its base with peft's "
                "merge_and_unload"
            )

    def written(self, recipe: Recipe) -> dict[str, Any]:
        """The recipe's fields as peft writes them."""
        return {name: _to_json(getattr(recipe, own)) for name, own in self.fields.items()}


def _plain(name: str, value: Any) -> Any:
    """A field's value as a recipe takes it."""
    if name == "layers_pattern" and isinstance(value, str):
        value = [value] if value else []
    if name in _NAMES and not (isinstance(value, str) and name != "layers_pattern"):
        return _names(name, value)
    if name == "layers_to_transform":
        value = [value] if type(value) is int else value
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, enum.Enum):
        return value.value
    if name in ("rank_pattern", "alpha_pattern") and value is not None:
        if not isinstance(value, Mapping):
            raise AdapterError(f"{name}={value!r}; use an object")
        return dict(value)
    return value


def _names(name: str, value: object) -> tuple[str, ...] | None:
    """A list or set of names; a set has no order, so that it is sorted."""
    if value is None:
        return None
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise AdapterError(f"{name}={value!r}; use a list of names")
    return tuple(value)


def _to_json(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
