"""The operator table: everything there is to know of each operator, in one place."""

from __future__ import annotations

import difflib

from pcg.errors import IrError
from pcg.ir.operators import (
    bypass,
    collective,
    elementwise,
    joined,
    linear,
    model,
    parts,
    shape,
    virtual,
)
from pcg.ir.operators.operator import Gradient, Operator

OPERATORS: dict[str, Operator] = {
    entry.name: entry
    for entry in sorted(
        (
            *bypass.OPERATORS,
            *collective.OPERATORS,
            *elementwise.OPERATORS,
            *joined.OPERATORS,
            *linear.OPERATORS,
            *model.OPERATORS,
            *parts.OPERATORS,
            *shape.OPERATORS,
            *virtual.OPERATORS,
        ),
        key=lambda entry: entry.name,
    )
}

__all__ = ["OPERATORS", "Gradient", "Operator", "operator"]


def operator(name: str) -> Operator:
    """The table's entry of that name.

    Raises:
        IrError: there is none; the message names the closest.
    """
    try:
        return OPERATORS[name]
    except KeyError:
        close = difflib.get_close_matches(name, OPERATORS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise IrError(f"the operator table has no operator {name!r}{hint}") from None
