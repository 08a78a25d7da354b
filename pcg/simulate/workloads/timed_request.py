"""A request of a workload: its time, its adapter and its lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.checks import require_count


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, without its text.

    Attributes:
        time_s: the time of its arrival from the workload's start, seconds.
        adapter: the adapter's name; None for the base model.
        prompt_tokens: the number of tokens of its prompt, at least 1.
        output_tokens: the number of tokens that are generated, at least 1.
        tenant: the tenant's name; None where there are no tenants.
    Raises:
        BenchmarkError: a value is out of its range.
    """

    time_s: float
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf:
            raise BenchmarkError(f"time_s={self.time_s}; use a finite number of at least 0")
        require_count("prompt_tokens", self.prompt_tokens)
        require_count("output_tokens", self.output_tokens)
