"""`pcg data FILE`: what is learned of rows, counts, and the faults of every row."""

import json

import pytest

from pcg.runtime.data.dataset import load_examples
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support.command_line import assert_one_error, output_of, run

ROWS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1} and so on"} for i in range(5)]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    return path


def test_counts_are_those_of_training(model, rows):
    read = load_examples(rows, Tokenizer.load(model), max_length=8, empty="drop")
    options = ("--model", model, "--max-length", "8")
    found = json.loads(output_of("data", rows, *options, "--examples", "2", "--json"))
    assert (found["format"], found["rows"], found["duplicates"]) == ("prompt-completion", 6, 1)
    assert found["truncated"] == read.truncated > 0
    assert found["learned"] == read.targets
    assert [row["ids"] for row in found["examples"]] == [list(e.ids) for e in read.examples[:2]]
    text = output_of("data", rows, *options)
    assert text.count("── ") == 3
    assert "0 + 1 =" in text
    assert "«" in text


def test_columns_have_the_names_of_the_data(model, rows, tmp_path):
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(rows.read_text().replace('"prompt"', '"q"').replace('"completion"', '"a"'))
    shown = [
        json.loads(output_of("data", path, "--model", model, "--json", *options))["examples"]
        for path, options in ((rows, ()), (renamed, ("--columns", "prompt=q,completion=a")))
    ]
    assert [row["ids"] for row in shown[0]] == [row["ids"] for row in shown[1]]


def test_every_fault_has_its_line(model, rows):
    with rows.open("a") as file:
        file.write('{"prompt": 1}\n{"prompt": "x", "completion": "y"}\n{"prompt": "x"}\n{no\n[]\n')
    result = run("data", rows, "--model", model, "--examples", "0")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if "rows.jsonl" in line]
    assert [line.partition(" line ")[2].split()[0].strip(",:") for line in lines] == [
        "7",
        "9",
        "10",
    ]
    assert lines[-1].endswith("rows behind it were not read")
    assert_one_error(run("data", rows, "--model", rows.parent), "no tokenizer.json")
