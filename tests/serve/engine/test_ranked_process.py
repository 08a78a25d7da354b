"""A server's engine over ranks: its process is the first one, and has started the others."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pcg.compiler import compile as compile_model
from pcg.errors import EngineError
from pcg.serve.engine.process import process_client
from pcg.serve.options import ServeOptions
from tests.support import oracle, serving, tiny_llama

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PROMPT = [5, 6, 7, 8, 9]
NEW = 8


def test_an_engine_over_ranks_serves_and_ends_with_one_that_is_killed(tmp_path: Path) -> None:
    model = tiny_llama.save(tmp_path / "tiny")
    load = functools.partial(compile_model, str(model), device="cpu", tp=2)
    fields: Any = {"max_new_tokens": NEW, "ignore_eos": True}
    with process_client(load, ServeOptions(**serving.OPTIONS), 1, degree=2) as client:
        stream = client.submit(client.request(PROMPT, None, fields))
        while not stream.is_over:
            client.wait(client.taken())
        expected = oracle.greedy(AutoModelForCausalLM.from_pretrained(model).eval(), PROMPT, NEW)
        assert list(stream.wait(0).token_ids) == list(expected)
        (follower,) = _children(_children(os.getpid())[-1])
        os.kill(follower, signal.SIGKILL)
        while client.ended is None:
            with suppress(EngineError):
                client.wait(client.taken())
        assert "rank 1 of 2" in str(client.ended)


def _children(process: int) -> list[int]:
    """The processes that a process has started to run functions in."""
    listed = subprocess.run(
        ["ps", "--ppid", str(process), "-o", "pid=,args="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 1) for line in listed.splitlines()]
    return [int(pid) for pid, command in rows if "spawn_main" in command]
