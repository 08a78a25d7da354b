"""The operator table: all properties of each operator, one class per operator in this folder."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterator

from pcg.errors import IrError
from pcg.ir.operators.base import Gradient, Operator
from pcg.ir.operators.collectives import TRANSITIONS

__all__ = ["OPERATORS", "Gradient", "Operator", "operator"]


def _entries() -> Iterator[Operator]:
    """Instantiate each class of this folder's modules with a name, and the transitions."""
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            is_local = isinstance(value, type) and value.__module__ == module.__name__
            if is_local and issubclass(value, Operator) and "name" in vars(value):
                yield value()
    yield from TRANSITIONS


OPERATORS: dict[str, Operator] = {
    entry.name: entry for entry in sorted(_entries(), key=lambda entry: entry.name)
}


def operator(name: str) -> Operator:
    """Return the table's entry of a name; IrError has the closest names."""
    try:
        return OPERATORS[name]
    except KeyError:
        close = difflib.get_close_matches(name, OPERATORS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise IrError(f"the operator table has no operator {name!r}{hint}") from None
