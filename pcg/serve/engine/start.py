"""The start of an engine's process, which imports nothing before the garbage collector rests.

Next to nothing of what is imported, traced and loaded becomes garbage; going through all of it
again and again took a fifth of the processor time of a start (`benchmarks/bench_startup.py`).
"""

from __future__ import annotations

import gc
from typing import Any


def start(*arguments: Any) -> None:
    """Run an engine; arguments as of `pcg.serve.engine.worker.run`, which has it collect again."""
    gc.disable()
    from pcg.serve.engine.worker import run

    run(*arguments)
