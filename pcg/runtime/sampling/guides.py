"""Guides: a request's descriptions of its output; without imports of torch or the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pcg.errors import GenerationError
from pcg.units import shown
from pcg.value_checks import require_at_most, require_bool, require_texts, require_unicode

LONGEST_GUIDE = 32_768
"""Maximum characters of a schema, a choice or a grammar: the worst compile for seconds."""
LONGEST_REGEX = 4_096
MOST_CHOICES = 1_024
LONGEST_CHOICE = 1_024

OPTIONS = "x-guidance"
"""llguidance's keyword of options, valid only at the top of a schema."""
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most a single space after a comma or a colon, as models may produce endless white space."""
_SPACING = ("whitespace_flexible", "whitespace_pattern")
_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas"}) | {
    "patternProperties",
    "properties",
}
"""Keywords with an object of schemas as the value."""
_VALUES = frozenset({"const", "default", "enum", "examples"})


@dataclass(frozen=True)
class Guide:
    """A description of an output.

    Attributes:
        kind: the request's field: guided_json, guided_regex, guided_choice or guided_grammar.
        text: the schema, the regex, a JSON list of choices, or the grammar.
    """

    kind: str
    text: str


def guide_of(
    json_schema: str | Mapping[str, Any] | None,
    json_object: bool,
    regex: str | None,
    choice: tuple[str, ...],
    grammar: str | None,
) -> Guide | None:
    """Return the guide of a request; None without a guide.

    Raises:
        GenerationError: several guides, or a guide of the wrong type, or a guide that is too long.
    """
    require_bool("guided_json_object", json_object)
    guides = {
        "guided_json": json_schema is not None,
        "guided_json_object": json_object,
        "guided_regex": regex is not None,
        "guided_choice": choice != (),
        "guided_grammar": grammar is not None,
    }
    names = [name for name, is_given in guides.items() if is_given]
    if len(names) > 1:
        raise GenerationError(f"{' and '.join(names)} are given; an output follows one of them")
    if json_schema is not None:
        return Guide("guided_json", _schema_text(json_schema))
    if json_object:
        return Guide("guided_json", '{"type": "object"}')
    if regex is not None:
        return Guide("guided_regex", _checked("guided_regex", regex, LONGEST_REGEX))
    if choice != ():
        require_texts("guided_choice", choice, MOST_CHOICES, LONGEST_CHOICE)
        text = json.dumps(choice, ensure_ascii=False)
        return Guide("guided_choice", _checked("guided_choice", text, LONGEST_GUIDE))
    if grammar is not None:
        return Guide("guided_grammar", _checked("guided_grammar", grammar, LONGEST_GUIDE))
    return None


def each_schema(schema: Any, act: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a schema with `act` applied to every schema in it, the innermost first.

    Values, such as those of `const` and `enum`, and other objects stay unchanged.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    if isinstance(schema, list):
        return [each_schema(part, act) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            changed[key] = {name: each_schema(part, act) for name, part in value.items()}
        else:
            changed[key] = value if key in _VALUES else each_schema(value, act)
    return act(changed)


def json_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return llguidance's options of a schema: its own `x-guidance` over compact JSON.

    A schema with white space options also gets the library's separators.

    ValueError: the options are not at the top, not an object, or drop keywords.
    """
    options = schema.get(OPTIONS, {})
    if not isinstance(options, Mapping):
        raise ValueError(f"{OPTIONS}={shown(options)}; use an object of options")
    if options.get("lenient"):
        raise ValueError(
            f"{OPTIONS} has lenient={shown(options['lenient'])}, with which outputs would not "
            "follow keywords that the library does not know; leave it out, and those keywords"
        )
    each_schema({key: part for key, part in schema.items() if key != OPTIONS}, _refuse_options)
    has_own = any(options.get(name) is not None for name in _SPACING)
    return {**({} if has_own else _COMPACT), **options}


def _refuse_options(schema: dict[str, Any]) -> None:
    if OPTIONS in schema:
        raise ValueError(
            f"{OPTIONS} is within the schema, and holds at its top alone; move it there"
        )


def _checked(name: str, text: object, longest: int) -> str:
    if not isinstance(text, str) or not text:
        raise GenerationError(f"{name}={shown(text)}; use a text that is not empty")
    require_at_most(name, text, longest, "characters")
    require_unicode(name, text)
    return text


def _schema_text(schema: object) -> str:
    try:
        text = json.dumps(schema) if isinstance(schema, Mapping) else schema
        text = _checked("guided_json", text, LONGEST_GUIDE)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise GenerationError(f"guided_json is no JSON: {error}") from error
    if not is_object:
        raise GenerationError(f"guided_json={shown(schema)}; use a JSON schema, which is an object")
    return text
