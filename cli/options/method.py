"""Options of PEFT methods: `--peft`, and the fields of all methods' configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, get_type_hints

import typer

from pcg.files import expanded, is_directory
from pcg.keywords import field_docs

from .fields import Option, OptionGroup, flags_of, help_text, kind_of

if TYPE_CHECKING:
    from pcg.peft.recipe import Recipe

TITLE = "Method"
ALIASES = ("alpha", "dropout", "rank")
"""Manifest names that are shared by fields with different names in different methods."""


@dataclass(frozen=True)
class Method(OptionGroup):
    """A PEFT method chosen by options.

    Attributes:
        peft: the value of `--peft`; None if absent.
        fields: fields of the method's configuration, as typer has read them.
    """

    peft: str | None
    fields: Mapping[str, Any]

    @classmethod
    def options(cls) -> list[Option]:
        from pcg.peft.registry import SHORTHANDS

        help_peft = (
            f"Method: {', '.join(SHORTHANDS)}, or none; or the directory of an adapter whose "
            "configuration to take."
        )
        return [Option("peft", str, help_peft, title=TITLE), *_fields()]

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        return cls(values.get("peft"), {key: values[key] for key in values if key != "peft"})

    @property
    def is_given(self) -> bool:
        return self.peft is not None or bool(self.fields)

    @property
    def first_flag(self) -> str:
        """The first option that is set."""
        return flags_of("peft" if self.peft is not None else next(iter(self.fields)))[0]

    @property
    def words(self) -> tuple[str, ...]:
        """The options that choose the method, as typed on the command line."""
        words = [] if self.peft is None else [flags_of("peft")[0], self.peft]
        for name, value in self.fields.items():
            flag = flags_of(name)[-1]
            for each in value if isinstance(value, list) else [value]:
                if each is False:
                    words.append(f"--no-{flag.removeprefix('--')}")
                else:
                    words += [flag] if each is True else [flag, str(each)]
        return tuple(words)

    def one(self) -> Any:
        """Return the single chosen configuration, for `Executor.add_adapter`."""
        from pcg.peft.adapter_files import recipes_of

        recipes = recipes_of(self.configuration())
        if not recipes:
            raise typer.BadParameter("name a method", param_hint="--peft")
        return next(iter(recipes.values()))

    def configuration(self) -> Any:
        """Return the chosen configuration, for `pcg.compile`; LoRA by default.

        Raises:
            typer.BadParameter: incompatible options.
            AdapterError: a value is out of range.
        """
        from pcg.peft.registry import SHORTHANDS

        peft = "lora" if self.peft is None else self.peft
        if peft.lower() in SHORTHANDS:
            return self._recipe(peft.lower()) if self.fields else peft.lower()
        if self.fields:
            raise typer.BadParameter(
                f"it has no effect with --peft {peft}",
                param_hint=flags_of(next(iter(self.fields)))[0],
            )
        return adapter_or_none(peft)

    def _recipe(self, word: str) -> Recipe:
        from pcg.peft.registry import SHORTHANDS

        recipe = SHORTHANDS[word]
        hints = get_type_hints(type(recipe))
        named = {name: field.name for field in dataclasses.fields(recipe) for name in _names(field)}
        values: dict[str, Any] = {}
        for name, value in self.fields.items():
            if name not in named:
                known = ", ".join(flags_of(field.name)[0] for field in dataclasses.fields(recipe))
                raise typer.BadParameter(
                    f"--peft {word} does not have it; it has {known or 'no options'}",
                    param_hint=flags_of(name)[0],
                )
            if named[name] in values:
                raise typer.BadParameter("it is given twice", param_hint=flags_of(name)[0])
            values[named[name]] = Option(name, hints[named[name]], "").value(value)
        if recipe.rank_field in values and "lora_alpha" in recipe.shorthands[word]:
            values.setdefault("lora_alpha", 2 * values[recipe.rank_field])
        return dataclasses.replace(recipe, **values)


def adapter_or_none(peft: str, option: str = "--peft") -> Any:
    """Return no configuration, a method's word, or a directory's adapter keyed by its name."""
    from pcg.peft.registry import SHORTHANDS

    if peft.lower() == "none":
        return None
    if peft.lower() in SHORTHANDS:
        return peft.lower()
    path = expanded(peft)
    if not is_directory(path):
        raise typer.BadParameter(
            f"{peft!r} is neither none nor one of {', '.join(SHORTHANDS)}, nor the directory of an "
            "adapter",
            param_hint=option,
        )
    return {path.resolve().name: path}


def _names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return a field's name, and the name that it shares with fields of other methods."""
    saved = field.metadata.get("saved")
    return (field.name, saved) if saved in ALIASES else (field.name,)


def _fields() -> Iterator[Option]:
    """Yield an option per field name of all methods; fields whose types differ read text."""
    from pcg.peft.registry import RECIPES

    first: dict[str, tuple[Any, Any]] = {}  # type and default of the first method with the field
    methods: dict[str, dict[str, list[str]]] = {}
    for recipe in RECIPES.values():
        hints, docs = get_type_hints(recipe), field_docs(recipe)
        for field in dataclasses.fields(recipe):
            for name in _names(field):
                text = docs[field.name] if name == field.name else f"another name of `{field.name}`"
                hint, default = first.setdefault(name, (hints[field.name], field.default))
                if kind_of(hint).reads != kind_of(hints[field.name]).reads:
                    first[name] = str, default
                methods.setdefault(name, {}).setdefault(text, []).append(recipe.method)
    for name, by_text in methods.items():
        texts = [f"{help_text(text, methods)} ({', '.join(of)})" for text, of in by_text.items()]
        hint, default = first[name]
        # Help shows no other default, as defaults differ between methods.
        yield Option(name, hint, " ".join(texts), False if default is False else None, TITLE)
