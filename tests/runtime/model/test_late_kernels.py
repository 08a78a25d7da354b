"""Nothing is compiled or recorded while requests wait, once an engine was warmed up."""

from __future__ import annotations

import pytest

from tests.support.interpreter.late_kernels import late_kernels


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing_for_requests() -> None:
    """Of a mixed load: prompts, adapters of several ranks, ways to choose tokens."""
    found = late_kernels()
    assert found["warm"] > 10
    assert found["replayed"] > 12
    assert found["eager"] == {}
    assert found["kernels"] == {}
    assert found["late"] == {"kernels": 0, "steps": 0}
