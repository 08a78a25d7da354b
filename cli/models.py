"""`pcg models`: the configs that ship, which explain and compile take without a network."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from typing import Any

from .options.arguments import Json
from .options.console import out, plain, print_json, table
from .options.executors import FIELDS


# What the families call one thing.
def models_command(json: Json = False) -> None:
    """List the models whose configs ship with pcg.

    They explain and compile offline.
    """
    from pcg.source import ALIASES, SHIPPED, shipped

    models = []
    for name in shipped():
        config = json_module.loads((SHIPPED / (name.replace("/", "--", 1) + ".json")).read_text())
        aliases = sorted(alias for alias, target in ALIASES.items() if target == name)
        models.append({"model": name, **_shape(config), "also": aliases})
    if json:
        print_json({"models": models})
        return
    columns = ("model", "type", "layers", "hidden", "heads", "context")
    rows = table(*columns, right=columns[2:])
    for model in models:
        values = {**model, "heads": _heads(model), "context": model["positions"]}
        rows.add_row(*(plain(values[column]) for column in columns))
    out().print(rows)
    out().print("\nAny other model: its directory, or its hub id.", style="dim")


def _heads(model: Mapping[str, Any]) -> str:
    """`64`, or `64/8` with fewer heads of keys and values."""
    heads, kv_heads = model["heads"], model["kv_heads"]
    return str(heads) if kv_heads in (None, heads) else f"{heads}/{kv_heads}"


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    shape = {
        name: next((config[key] for key in keys if key in config), None)
        for name, keys in FIELDS.items()
    }
    # gpt_bigcode's and falcon's flag; falcon's newer architecture goes by the number instead.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        shape["kv_heads"] = 1
    return shape
