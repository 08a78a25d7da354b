"""oneDNN's caches of compiled products, told to keep no more than a few hundred.

oneDNN compiles a product for each number of tokens and shape of a weight, and torch and oneDNN each
keep the last 1,024 of them: up to 0.3 MiB each, hundreds of MiB once requests of all lengths have
come. A product that is compiled again takes 0.1 ms, once for all layers of a step, so the caches
are bounded to those that come back: the steps that decode, of any number of requests, and common
chunks of prompts.

`tests/runtime/memory/test_shape_caches.py` measures what a new shape takes.
"""

from __future__ import annotations

import os

KEPT_PRODUCTS = 256
"""About five shapes of weights times fifty numbers of tokens."""

CAPACITIES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""The variables of torch (ideep) and oneDNN, both read at the process's first product by oneDNN."""


def bound_shape_caches() -> None:
    """Bound the caches, unless the environment does or oneDNN has computed something already.

    Processes that this one starts have the same bounds.
    """
    for name in CAPACITIES:
        os.environ.setdefault(name, str(KEPT_PRODUCTS))
