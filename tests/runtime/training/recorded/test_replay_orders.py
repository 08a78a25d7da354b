"""Jobs whose graphs share memory as on a GPU, in any order in which an engine replays them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.interpreter.tape import Tape
from tests.support.recorded_jobs import Job

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=3)
JOBS = st.builds(
    Job,
    widths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    steps=st.lists(st.lists(LENGTHS, min_size=1, max_size=5), min_size=1, max_size=3),
    evaluations=st.one_of(st.just([]), LENGTHS),
    warm=st.sampled_from([0, 0, 16, 32, 64]),
    windows=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    seed=st.integers(0, 2**32),
)


def check(job: Job) -> None:
    tape = Tape()
    found, expected = job.adapters(tape), job.adapters(None)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


# Of two layers and two windows, which one pool for all would train wrong, warm or not.
TWO = Job((8, 8), [[[32]] * 4], (), 0, (16,), "sgd", 0)
WARM = Job((8, 8), [[[32]] * 2, [[20, 40]]], (17,), 16, (16, 40), "adamw", 0)


@settings(max_examples=30)
@example(TWO)
@example(WARM)
@given(JOBS)
def test_recorded_jobs_train_what_eager_ones_do(job: Job) -> None:
    check(job)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500)
@given(JOBS)
def test_many_recorded_jobs_train_what_eager_ones_do(job: Job) -> None:
    check(job)


def test_these_jobs_are_replayed() -> None:
    for job in (TWO, WARM):
        tape = Tape()
        job.adapters(tape)
        assert tape.replayed > tape.recorded > 10
