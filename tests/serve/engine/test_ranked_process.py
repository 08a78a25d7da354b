"""A server's engine over ranks: its process is the first one, and has started the others."""

import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from pcg.compiler import compile as compile_model
from pcg.runtime.engine.commands import Taken
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.process import process_client
from pcg.serve.server import LEAST_S
from tests.support import oracle, serving, tiny_llama
from tests.support.server_process import is_engine, started
from tests.support.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PROMPT = [5, 6, 7, 8, 9]
NEW = 8


def test_an_engine_over_ranks_serves_what_transformers_generates(tmp_path):
    model = tiny_llama.save(tmp_path / "tiny")
    load = functools.partial(compile_model, str(model), device="cpu", tp=2)
    fields = {"max_new_tokens": NEW, "ignore_eos": True}
    with process_client(load, ServeOptions(**serving.OPTIONS), 1, degree=2) as client:
        stream = client.submit(client.request(PROMPT, None, fields))
        while not stream.is_over:
            client.wait(client.call(Taken()))
        expected = oracle.greedy(AutoModelForCausalLM.from_pretrained(model).eval(), PROMPT, NEW)
        assert list(stream.wait(0).token_ids) == list(expected)


def test_a_server_whose_rank_ends_starts_all_again(tmp_path):
    """At the same port, with the same answers; what the library of messages said is not told."""
    model = tiny_llama.save(tmp_path / "tiny")
    command = ["-m", "pcg_cli", "serve", str(model), "--port", "0", "--tp", "2", "--device", "cpu"]
    command += ["--api-key", serving.KEY, "--served-model-name", serving.MODEL]
    command += ["--kv-cache-gib", "0.05"]
    body = {"model": serving.MODEL, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}

    def answer():
        with server.client() as client:
            reply = client.post("/v1/completions", json=body)
        return reply.json().get("choices")

    with started(command) as server:
        before = answer()
        assert before
        time.sleep(LEAST_S)
        (engine,) = server.engine_pids
        children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        os.kill(next(int(one) for one in children if is_engine(int(one))), signal.SIGKILL)
        until(lambda: server.engine_pids not in ([], [engine]), 120)
        until(lambda: answer() == before, 120)
        assert "The engine starts again" in server.errors()
        assert not re.search(r"gloo|\.cc:", server.errors())
