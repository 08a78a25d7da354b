"""The executor that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pcg.runtime.executor import Executor


@pytest.fixture
def executor(shared: Executor) -> Iterator[Executor]:
    """The file's `shared` executor, without adapters before and after."""
    yield shared
    for name in shared.adapters:
        shared.remove_adapter(name)
