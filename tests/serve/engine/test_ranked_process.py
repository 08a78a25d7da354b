"""A server's engine over ranks: its process is the first one, and has started the others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pcg.compiler import compile as compile_model
from pcg.serve.engine.process import process_client
from pcg.serve.options import ServeOptions
from tests.support import oracle, serving, tiny_llama

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PROMPT = [5, 6, 7, 8, 9]
NEW = 8


def test_an_engine_over_ranks_serves_what_transformers_generates(tmp_path: Path) -> None:
    model = tiny_llama.save(tmp_path / "tiny")
    load = functools.partial(compile_model, str(model), device="cpu", tp=2)
    fields: Any = {"max_new_tokens": NEW, "ignore_eos": True}
    with process_client(load, ServeOptions(**serving.OPTIONS), 1, degree=2) as client:
        stream = client.submit(client.request(PROMPT, None, fields))
        while not stream.is_over:
            client.wait(client.taken())
        expected = oracle.greedy(AutoModelForCausalLM.from_pretrained(model).eval(), PROMPT, NEW)
        assert list(stream.wait(0).token_ids) == list(expected)
