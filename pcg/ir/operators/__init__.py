"""The operator table: everything there is to know of each operator, in one place."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pcg.errors import IrError
from pcg.ir.operators import (
    activations,
    arithmetic,
    attention,
    bypass,
    collectives,
    deferred,
    linear,
    lora,
    lora_groups,
    lora_variants,
    lossy,
    norms,
    reductions,
    rope,
    shape,
    vectors,
    virtual_tokens,
    vocabulary,
)
from pcg.ir.operators.base import Gradient, Operator

__all__ = ["OPERATORS", "Gradient", "Operator", "operator"]


def _entries() -> Iterator[Operator]:
    """An entry for each class of these modules that has a name of its own, and the transitions."""
    for module in (
        *(activations, arithmetic, attention, bypass, collectives, deferred, linear),
        *(
            lora,
            lora_groups,
            lora_variants,
            lossy,
            norms,
            reductions,
            rope,
            shape,
            vectors,
            virtual_tokens,
        ),
        *(vocabulary,),
    ):
        for found in vars(module).values():
            is_own = isinstance(found, type) and found.__module__ == module.__name__
            if is_own and issubclass(found, Operator) and "name" in vars(found):
                yield found()
    yield from collectives.TRANSITIONS


OPERATORS: dict[str, Operator] = {
    entry.name: entry for entry in sorted(_entries(), key=lambda entry: entry.name)
}


def operator(name: str) -> Operator:
    """The table's entry of that name. IrError: there is none; the message names the closest."""
    try:
        return OPERATORS[name]
    except KeyError:
        close = difflib.get_close_matches(name, OPERATORS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise IrError(f"the operator table has no operator {name!r}{hint}") from None
