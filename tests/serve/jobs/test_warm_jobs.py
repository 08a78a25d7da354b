"""Jobs that a server is told of when it starts."""

from __future__ import annotations

import pytest

from pcg.errors import ServeError
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.serve.engine.options import ServeOptions
from pcg.serve.jobs.settings import DEFAULT_PEFT


def test_an_engine_is_told_of_jobs() -> None:
    own = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    given = (
        '{"batch": 4, "seq": 512}',
        '{"peft": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}}',
    )
    expected = (WarmJob(DEFAULT_PEFT, 4, 512), WarmJob(own))
    assert ServeOptions(warm_jobs=given).engine(1).warm_jobs == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora", "lora is not JSON"),
        ("[1]", 'use {"batch": …, "seq": …}'),
        ('{"steps": 4}', 'use {"batch": …, "seq": …}'),
        ('{"batch": 0}', "batch=0 of a warm job; use an int of at least 1"),
        ('{"seq": true}', "seq=True of a warm job"),
        ('{"peft": {"peft_type": "XLORA"}}', "XLORA"),
    ],
)
def test_what_is_no_job_is_refused_before_a_model_is_loaded(text: str, message: str) -> None:
    with pytest.raises(ServeError, match=message):
        ServeOptions(warm_jobs=(text,)).engine(1)


def test_jobs_need_a_warm_up() -> None:
    with pytest.raises(ServeError, match="warm_jobs are recorded by warm_up"):
        ServeOptions(warm_jobs=("{}",), warm_up=False)
