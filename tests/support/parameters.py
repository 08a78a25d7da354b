"""Parameters of tests of which only some run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *default: Any) -> list[Any]:
    """Parameters that run with `-m slow`, but for the default ones.

    Args:
        values: parameters, tuples of parameters, or results of `pytest.param`.
        default: parameters, tuples, or ids of those that run without a marker.
    """
    found = []
    for value in values:
        param = value if hasattr(value, "marks") else None
        own = param.values if param else value if isinstance(value, tuple) else (value,)
        is_default = value in default or own in default or (param and param.id in default)
        marks = [*(param.marks if param else ()), *([] if is_default else [pytest.mark.slow])]
        found.append(pytest.param(*own, id=param.id if param else None, marks=marks))
    return found
