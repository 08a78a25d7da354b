"""Templates of graders: text with `{{item.x}}` and `{{sample.output_text}}` in it.

A name is a path of keys and places in lists; nothing is computed, and what is filled in is not
looked at for further names. A text is filled in as it is, and every other value as JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pcg.errors import GraderError, GradingError
from pcg.graders.sample import Sample

MOST_CHARACTERS = 2**18
"""The most characters of a text that a template makes."""
MOST_NAMES = 256
"""The most names in a template."""
_NAME = re.compile(r"\{\{([^{}]{0,256})\}\}")
_STEP = re.compile(r"[\w-]+|\[\d+\]")
_OF_SAMPLE = ("output_text", "output_json", "output_tools")


@dataclass(frozen=True)
class Template:
    """A template that was read.

    Attributes:
        parts: texts, and paths of names between them.
    """

    parts: tuple[str | tuple[str, ...], ...]

    @classmethod
    def of(cls, text: str, where: str) -> Template:
        """Read a template.

        Args:
            where: the field that it is given in, which errors name.
        Raises:
            GraderError: a name in it cannot be.
        """
        pieces = _NAME.split(text)
        if len(pieces) // 2 > MOST_NAMES:
            raise GraderError(f"{where} has {len(pieces) // 2} names; use at most {MOST_NAMES}")
        parts = [_path(piece, where) if index % 2 else piece for index, piece in enumerate(pieces)]
        return cls(tuple(part for part in parts if part))

    def fill(self, sample: Sample) -> str:
        """Return the text for a sample.

        Raises:
            GradingError: a name is not there, or the text would be too long.
        """
        made, length = [], 0
        for part in self.parts:
            made.append(part if isinstance(part, str) else _shown(sample.value(part)))
            length += len(made[-1])
            if length > MOST_CHARACTERS:
                raise GradingError(
                    f"a template makes a text of more than {MOST_CHARACTERS} characters; "
                    "use shorter items, or fewer names",
                    "other_error",
                )
        text = "".join(made)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise GradingError(
                "a template makes a text with half a character", "other_error"
            ) from None
        return text


def _path(name: str, where: str) -> tuple[str, ...]:
    path = tuple(one.strip("[]") for one in _STEP.findall(name))
    spelled = re.sub(r"\[(\d+)\]", r".\1", name.strip())
    known = (path[:1] == ("item",) and len(path) > 1) or (
        path[:1] == ("sample",) and path[1:2] and path[1] in _OF_SAMPLE
    )
    if not known or ".".join(path) != spelled:
        raise GraderError(
            f"{where} names {{{{{name.strip()[:64]}}}}}; use item.COLUMN, "
            + ", ".join(f"sample.{one}" for one in _OF_SAMPLE)
            + ", and paths in them"
        )
    return path


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
