"""A model, a program, an adapter and data that the tests of commands share."""

import json
from pathlib import Path

import pytest

import pcg
from tests.support import tiny_llama
from tests.support.command_line import output_of


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def program(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "program"
    output_of("compile", model, "--rank", "4", "--targets", "q_proj,down_proj", "-o", folder)
    return folder


@pytest.fixture(scope="session")
def adapter(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that says something else than the base."""
    path = tmp_path_factory.mktemp("adapters") / "loud"
    executor = pcg.load(program)
    made = executor.add_adapter("loud", "lora")
    for weights in made.weights.values():
        weights.b.normal_()
    executor.save_adapter("loud", path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"add {i} and {i}: ", "completion": f"{2 * i}"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path
