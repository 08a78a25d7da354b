"""The model card of a saved adapter: README.md with the metadata that the hub reads."""

from __future__ import annotations

import re
from pathlib import Path

from pcg.files import is_there
from pcg.peft.adapter import Adapter

NAME = "README.md"
_HUB_ID = r"[\w.-]+/[\w.-]+"


def model_card(adapter: Adapter) -> str:
    """Return the card of an adapter, as peft writes it; only a base on the hub is metadata."""
    base, recipe = adapter.base_model_name, adapter.recipe
    metadata = ["library_name: peft", "pipeline_tag: text-generation", "tags:"]
    if re.fullmatch(_HUB_ID, base) and not is_there(Path(base)):
        metadata = [f"base_model: {base}", *metadata, f"- base_model:adapter:{base}"]
    metadata.append(f"- {recipe.method.lower()}")
    named = f"`{base}`" if base else "a model in memory"
    return "\n".join(
        [
            "---",
            *metadata,
            "---",
            "",
            f"# {adapter.name}",
            "",
            f"{recipe.method} adapter of {named}, trained with pcg and stored in peft's format.",
            "",
            "```python",
            "from peft import AutoPeftModelForCausalLM",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained("the directory of this file")',
            "```",
            "",
        ]
    )
