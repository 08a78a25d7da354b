"""The facts that a base tells of itself, checked before a client believes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pcg.errors import SplitError
from pcg.ir.types import DTYPE_BYTES
from pcg.parallel.costs.accelerators import known_name
from pcg.parallel.costs.sheets import SHEETS
from pcg.split.messages import DTYPES, MOST_DIMS

_MOST_SIZE = 2**31
_MOST_RATE = 1e18


def checked_facts(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a base's facts. SplitError: one is missing, or is no such fact.

    Args:
        where: the base's address.
    """
    for name, is_fact in _FACTS.items():
        if name not in fields or not is_fact(fields[name]):
            shown = "nothing" if name not in fields else repr(fields[name])[:100]
            raise SplitError(
                f"what answers at {where} says {shown} as its {name}; it is damaged, or no base "
                "executor of this version of pcg"
            )
    return fields


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and value in DTYPES


def _is_device(value: object) -> bool:
    # A name of a sheet, and no path: a cost model may be read of a file, too.
    return isinstance(value, str) and known_name(value.partition(":")[0], SHEETS) is not None


def _are_rates(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"product_flops_per_s", "memory_bytes_per_s"}:
        return False
    products = value["product_flops_per_s"]
    return (
        isinstance(products, dict)
        and "f32" in products
        and products.keys() <= DTYPE_BYTES.keys()
        and all(map(_is_rate, (*products.values(), value["memory_bytes_per_s"])))
    )


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and 1 <= value <= _MOST_RATE


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _are_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def _are_shapes(value: object) -> bool:
    return isinstance(value, dict) and all(_is_shape(one, MOST_DIMS) for one in value.values())


def _are_matrices(value: object) -> bool:
    return _are_shapes(value) and all(len(one) == 2 for one in value.values())  # type: ignore[attr-defined]


def _is_shape(value: object, most_dims: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= most_dims
        and all(type(size) is int and 0 < size < _MOST_SIZE for size in value)
    )


_FACTS: Mapping[str, Callable[[object], bool]] = {
    "name": _is_text,
    "config": _is_object,
    "dtype": _is_dtype,
    "digest": _is_text,
    "device": _is_device,
    "rates": _are_rates,
    "graphs": _is_flag,
    "pieces": _are_matrices,
    "fetched": _are_shapes,
    "absent": _are_names,
    "digests": _are_texts,
    "files": _are_texts,
    "rows": _is_flag,
    "most_bytes": _is_size,
    "instance": _is_text,
}
