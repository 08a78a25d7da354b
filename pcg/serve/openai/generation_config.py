"""Defaults of sampling: what a model's generation_config.json says, as vLLM's servers take it.

    --generation-config auto     the file beside the model
                        vllm     none: temperature 1, and neither filters nor penalties
                        PATH     a folder with such a file, or the file

As in vLLM, six fields count, and `do_sample` does not. A field of a request comes before them. In
vLLM `max_new_tokens` of some configurations is a bound for everyone; here it is a default alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pcg.errors import ConfigError
from pcg.files import expanded, is_file, read_json, shown_path
from pcg.serve.openai.sampling_fields import SamplingDefaults

FILE = "generation_config.json"
AUTO, NONE = "auto", "vllm"


@dataclass(frozen=True)
class GenerationConfig:
    """The defaults of a server, and where they come from.

    Attributes:
        source: the file; None where there is none, or it says nothing of sampling.
        defaults: the fields that it has.
    """

    source: str | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    def __str__(self) -> str:
        """Return the defaults as a server prints them when it is ready."""
        if self.source is None:
            return "temperature=1"
        found = self.defaults.model_dump(exclude_none=True)
        return f"{', '.join(f'{name}={value:g}' for name, value in found.items())} ({self.source})"


def read_generation_config(asked: str, model: Path | None) -> GenerationConfig:
    """Return the defaults that `--generation-config` asks for.

    Args:
        model: the directory of the model; None where it has none.
    Raises:
        ConfigError: there is no such file, or a value is none that requests may have.
    """
    if asked == NONE or (asked == AUTO and model is None):
        return GenerationConfig()
    is_auto = asked == AUTO
    folder = model if is_auto and model is not None else expanded(asked)
    path = folder if folder.suffix == ".json" else folder / FILE
    if not is_file(path):
        if is_auto:
            return GenerationConfig()
        raise ConfigError(
            f"no {shown_path(path)}; generation_config is {AUTO!r}, {NONE!r}, or a folder with a "
            f"{FILE}"
        )
    defaults = _defaults(path, read_json(path, ConfigError))
    says_nothing = defaults == SamplingDefaults()
    return GenerationConfig(None if says_nothing else FILE if is_auto else asked, defaults)


def _defaults(path: Path, content: Mapping[str, Any]) -> SamplingDefaults:
    known = SamplingDefaults.model_fields
    found = {name: content[name] for name in known if content.get(name) is not None}
    try:
        return SamplingDefaults.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(
            f"{shown_path(path)} has {name}={found[name]!r}: {first['msg']}; repair it, or use "
            f"--generation-config {NONE}"
        ) from error
