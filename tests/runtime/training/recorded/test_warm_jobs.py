"""Jobs that an engine is told of, as far as they need no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pcg.errors import FinetuneError
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.warm_jobs import KeptRunners, record_jobs


def test_a_job_that_no_cache_holds_is_refused() -> None:
    options = SimpleNamespace(names_step=False)
    state: Any = SimpleNamespace(program=SimpleNamespace(options=options))
    cache: Any = SimpleNamespace(pool=SimpleNamespace(size=100))
    with pytest.raises(FinetuneError, match=r"batch=4 and seq=1024 takes \d+ pages.* has 100;"):
        record_jobs(state, cache, 512, KeptRunners(), [WarmJob("lora", 4, 1024)])


@pytest.mark.parametrize("field", [{"batch": 0}, {"seq": 1.5}, {"batch": True}])
def test_numbers_of_a_job_are_checked(field: dict[str, Any]) -> None:
    with pytest.raises(FinetuneError, match="of a warm job; use an int of at least 1"):
        WarmJob("lora", **field)
