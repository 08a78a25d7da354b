"""Weight formats by name, and the format that a checkpoint's quantization_config describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.errors import UnsupportedError
from pcg.formats.blocks4 import Blocks4
from pcg.formats.format import Format
from pcg.formats.int8 import Int8

FORMATS: Mapping[str, Format] = {
    format_.name: format_
    for format_ in (
        Blocks4("nf4", nests=True),
        Blocks4("nf4", nests=False),
        Blocks4("fp4", nests=True),
        Blocks4("fp4", nests=False),
        Int8("int8", rounds_inputs=True),
        Int8("int8_weight", rounds_inputs=False),
    )
}


def find_format(name: str) -> Format:
    """Return the format of a name. UnsupportedError: there is none; names the known."""
    if name not in FORMATS:
        raise UnsupportedError(f"quantization={name!r}; use one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True)
class StoredFormat:
    """The format of a quantized checkpoint.

    Attributes:
        name: of the format.
        skipped: names of modules, or ends of their paths, that are stored in floating point.
    """

    name: str
    skipped: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Return whether a linear module, by its path, is stored in the format."""
        return not any(
            re.search(rf"(^|\.){re.escape(name)}($|\.)", module) for name in self.skipped
        )


def stored_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """Return the format of a model's checkpoint by its config.json; None for a float checkpoint.

    Raises:
        UnsupportedError: pcg does not read the format; names it.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else ""))
    skipped = tuple(settings.get("modules_to_not_convert") or ("lm_head",))
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        nests = bool(settings.get("bnb_4bit_use_double_quant"))
        code = settings.get("bnb_4bit_quant_type", "fp4")
        return StoredFormat(code if nests else f"{code}_single", skipped)
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return StoredFormat("int8_weight", tuple(settings.get("llm_int8_skip_modules") or skipped))
    raise UnsupportedError(
        f"this checkpoint is quantized by {method or 'an unnamed method'} "
        f"(quantization_config={dict(settings)}), which pcg does not read; use one of "
        f"{', '.join(FORMATS)}, or float weights with quantization=FORMAT"
    )
