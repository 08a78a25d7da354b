"""Data for schemathesis: models that are there, and few enough tokens for a small model.

Values keep their types, so that what is valid by the schema stays valid.
"""

import os
from typing import Any

import schemathesis

MODEL = os.environ["PCG_MODEL"]
MOST = {"best_of": 3, "max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 2}


@schemathesis.hook
def map_body(_: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    changed = dict(body)
    if isinstance(body.get("model"), str):
        changed["model"] = MODEL
    for name, most in MOST.items():
        value = body.get(name)
        if type(value) is int and value > most:
            changed[name] = most
    return changed
