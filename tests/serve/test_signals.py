"""`pcg serve` as a process: signals and kills under load, with and without a job."""

import fcntl
import os
import pty
import signal
import termios
from contextlib import contextmanager, nullcontext, suppress

import pytest

from tests.support import serving
from tests.support.server_process import LONG, Load, running, started
from tests.support.serving_job import DATA
from tests.support.training_server import HELD, HOLD, JOB, OPTIONS, STEPS
from tests.support.waiting import until


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing_that_was_begun():
    with running() as server:
        load = Load()
        load.begin(server, 2)
        os.killpg(server.process.pid, signal.SIGHUP)  # all processes, as a service manager does
        until(lambda: "reloaded\nAPI keys: 1 key" in server.errors())
        with held(server) as client:
            os.killpg(server.process.pid, signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503)
            refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        load.join()
        assert server.process.wait(60) == 0
    load.assert_whole()


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_drains_but_under_nohup(ignored):
    """It tells the shell alone, as that does its jobs."""
    terminal, other = pty.openpty()

    def take_terminal():
        fcntl.ioctl(other, termios.TIOCSCTTY, 0)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with running(preexec_fn=take_terminal) as server:
        os.close(other)
        load = Load()
        load.begin(server, 2)
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: "reloaded" in server.errors())
        with nullcontext(server.client()) if ignored else held(server) as client:
            os.close(terminal)
            os.killpg(server.process.pid, signal.SIGHUP)
            if ignored:
                until(lambda: server.errors().count("reloaded") > 1)
            else:
                until(lambda: client.get("/health").status_code == 503)
        load.join()
        if not ignored:
            assert server.process.wait(60) == 0
    load.assert_whole()


@pytest.mark.slow
def test_a_second_signal_ends_at_once():
    with running() as server:
        load = Load()
        load.begin(server, 4)
        with held(server) as client:
            os.killpg(server.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
            until(lambda: client.get("/health").status_code == 503)
            os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(60) == 1
        load.join()


@pytest.mark.slow
def test_a_kill_under_load_and_a_start_at_the_same_port(tmp_path):
    """The models are there again with their texts and versions, and every page is free."""
    serving.make_executor().save_adapter("lora-0", tmp_path / "lora")
    module = ["--lora-modules", f"mine={tmp_path / 'lora'}"]
    with running(*module) as server:
        before = served(server)
        load = Load()
        load.begin(server, 2)
        load.begin(server, 1, model="mine")
        with held(server):
            server.process.kill()
        load.join()
        assert "data: [DONE]" not in load.lines[-1]
        with running(*module, port=server.port) as again:
            assert served(again) == before
            until(lambda: free_pages(again) == before["free_pages"])


@contextmanager
def held(server):
    """A client of a server whose engine stands still meanwhile."""
    (engine,) = server.engine_pids
    os.kill(engine, signal.SIGSTOP)
    try:
        with server.client() as client:
            yield client
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


def served(server):
    """What the server serves: texts, versions with digests, and its pages."""
    status = server.status()
    assert status["engine"]["free_pages"] == status["engine"]["pages"]
    found = {name: server.text(name) for name in (serving.MODEL, "mine")}
    assert found["mine"] != found[serving.MODEL]
    versions = [(one["name"], one["version"], one["digest"]) for one in status["adapters"]]
    return {**found, "versions": versions, "free_pages": status["engine"]["free_pages"]}


def free_pages(server):
    return int(server.status()["engine"]["free_pages"])


def training(checkpoints, port="0"):
    module = ["-m", "tests.support.training_server"]
    return started([*module, str(serving.model_directory()), str(checkpoints), port])


def job_of(server):
    """The job as /status shows it; an empty one before it is there."""
    return next((job for job in server.status()["jobs"] if job["name"] == JOB), {"step": 0})


@contextmanager
def held_job(checkpoints):
    """The job stands still meanwhile, and the engine with it."""
    (checkpoints / HOLD).touch()
    until((checkpoints / HELD).exists)
    try:
        yield
    finally:
        (checkpoints / HOLD).unlink()


def check_resumed(checkpoints, least):
    """The job goes on from a checkpoint, and ends as if nothing had happened."""
    whole = serving.make_executor(adapters=0).finetune(DATA, JOB, **{**OPTIONS, "save_every": None})
    options = {**OPTIONS, "checkpoint_dir": checkpoints, "resume": True}
    resumed = serving.make_executor(adapters=0).finetune(DATA, JOB, **options)
    assert resumed.resumed_from is not None
    assert least <= resumed.resumed_from < STEPS
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-3)


@pytest.mark.slow
def test_sigterm_ends_requests_and_leaves_a_checkpoint(tmp_path):
    with training(tmp_path) as server:
        until(lambda: job_of(server)["step"] >= 2)
        job = job_of(server)
        assert 0 < job["time_share"] <= 1
        assert job["tokens_per_second"] > 0
        assert job["remaining_s"] > 0
        load = Load()
        load.begin(server, 1, max_tokens=10)
        with held_job(tmp_path), server.client() as client:
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
def test_kill_under_load_and_a_start_that_goes_on(tmp_path):
    """The job goes on from what it had saved, beside requests, and no page is lost."""
    with training(tmp_path) as server:
        until(lambda: job_of(server)["step"] >= 5)
        load = Load()
        load.begin(server, 2)
        with held_job(tmp_path):
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
