"""docs/serving.md names every option, and its blocks of Python run against a server."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import openai
import pytest

import pcg.compiler as compiler
from pcg.serve.engine.options import ServeOptions
from tests.support import tinker_client

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
KEY = "tml-my-own-key"
ROWS = [{"prompt": f"def load_{n}(path):", "completion": f" return {n}"} for n in range(4)]


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    options = {
        "api_key": (KEY,),
        "served_model_name": ("checkpoint",),
        "lora_modules": ("typed=examples/adapters/typed",),
        "tinker_tokenizer": "examples/checkpoint",
        "max_body_mib": 4.0,
    }

    def load():
        return compiler.compile("examples/checkpoint", dtype="float32")

    with tinker_client.server(tmp_path / "data", load, **options) as served:
        yield served


def test_the_document_names_every_option_of_the_server():
    options = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(ServeOptions)}
    # The page has their --no-….
    options -= {"--adapter-self-test", "--enable-prefix-caching", "--restart", "--warm-up"}
    assert {option for option in options if f"`{option}" not in TEXT} == set()


def test_blocks_of_the_document_run(server, capsys):
    names = {}
    for block in BLOCKS:
        code = block.replace("http://127.0.0.1:8000", server.url).replace('"…"', f'"{KEY}"')
        exec(compile(code, "serving.md", "exec"), names)
    jobs, job = names["client"].fine_tuning.jobs, names["job"].id
    with contextlib.suppress(openai.BadRequestError):  # on a fast machine it has ended
        jobs.cancel(job)
    assert jobs.retrieve(job).status in ("cancelled", "succeeded")
    names["client"].close()
    service = names["service"]
    service.holder.run_coroutine_threadsafe(service.holder.aclose()).result(60)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["checkpoint", "typed"]
    assert "1.0" in lines  # the grade
    assert names["model"].model_id in next(line for line in lines if line.startswith("tinker://"))
