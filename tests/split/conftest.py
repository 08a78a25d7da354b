"""The undivided executor that the tests of split execution share."""

from __future__ import annotations

import pytest

from pcg.runtime.executor import Executor
from tests.support.split_base import undivided


@pytest.fixture(scope="session")
def whole() -> Executor:
    """The model of one layer; a test removes the adapters that it adds."""
    return undivided()
