"""A server with a job beside its requests: SIGTERM and kill -9 lose nothing of what was saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import serving
from tests.support.server_process import LONG, Load, Running, started
from tests.support.serving_job import DATA
from tests.support.training_server import HELD, HOLD, JOB, OPTIONS, STEPS
from tests.support.waiting import until


def training(checkpoints: Path, port: str = "0") -> AbstractContextManager[Running]:
    module = ["-m", "tests.support.training_server"]
    return started([*module, str(serving.model_directory()), str(checkpoints), port])


def job_of(server: Running) -> Any:
    """The job as /status shows it; an empty one before it is there."""
    return next((job for job in server.status()["jobs"] if job["name"] == JOB), {"step": 0})


@contextmanager
def held(checkpoints: Path) -> Iterator[None]:
    """The job stands still meanwhile, and the engine with it."""
    (checkpoints / HOLD).touch()
    until((checkpoints / HELD).exists)
    try:
        yield
    finally:
        (checkpoints / HOLD).unlink()


def check_resumed(checkpoints: Path, least: int) -> None:
    """The job goes on from a checkpoint, and ends as if nothing had happened."""
    whole = serving.make_executor(adapters=0).finetune(DATA, JOB, **{**OPTIONS, "save_every": None})
    options = {**OPTIONS, "checkpoint_dir": checkpoints, "resume": True}
    resumed = serving.make_executor(adapters=0).finetune(DATA, JOB, **options)
    assert resumed.resumed_from is not None
    assert least <= resumed.resumed_from < STEPS
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-3)


def test_sigterm_ends_requests_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    with training(tmp_path) as server:
        until(lambda: job_of(server)["step"] >= 2)
        job = job_of(server)
        assert 0 < job["time_share"] <= 1
        assert job["tokens_per_second"] > 0
        assert job["remaining_s"] > 0
        load = Load()
        load.begin(server, 1, max_tokens=10)
        with held(tmp_path), server.client() as client:
            step = job_of(server)["step"]
            server.process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503)
            refused = client.post("/v1/completions", json=LONG)
        assert refused.json()["error"]["code"] == "shutting_down"
        load.join()
        assert server.process.wait(60) == 0
    load.assert_whole()
    check_resumed(tmp_path, step)


@pytest.mark.slow
def test_kill_under_load_and_a_start_that_goes_on(tmp_path: Path) -> None:
    """The job goes on from what it had saved, beside requests, and no page is lost."""
    with training(tmp_path) as server:
        until(lambda: job_of(server)["step"] >= 5)
        load = Load()
        load.begin(server, 2)
        with held(tmp_path):
            step = job_of(server)["step"]
            server.process.kill()
        load.join()
        assert "data: [DONE]" not in load.lines[-1]
        with training(tmp_path, server.port) as again:
            until(lambda: job_of(again)["step"] > step)
            load = Load()
            load.begin(again, 1, max_tokens=40)
            load.join()
            load.assert_whole()
            again.process.send_signal(signal.SIGTERM)
            assert again.process.wait(60) == 0
    check_resumed(tmp_path, step)
