"""`pcg plan`: its tables, its errors, and commands that start what it chose."""

import json
import shlex
from pathlib import Path

import pytest

from tests.support.command_line import assert_one_error, output_of, run


def test_plan_prints_machines_and_what_starts_them(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = ["--workload", "train:4x64,serve:2req/s:32x32", "--gpus", "H100,L40S"]
    options += ["--price", "h100=2.5,L40S=1", "--max-gpus", "2"]
    text = output_of("plan", model, *options, "--html", page)
    assert max(map(len, text.partition("start it")[0].splitlines())) <= 100
    assert "→ 1×L40S" in text
    assert "data sheets, not measured" in text
    html = page.read_text()
    assert '<h2 id="front-title">' in html
    assert "dollars an hour" in html
    found = json.loads(output_of("plan", model, *options, "--json"))
    chosen = found["front"][found["chosen"]]
    assert (chosen["gpu"], chosen["dollars_per_hour"]) == ("L40S", 1.0)
    assert f"  {chosen['command']}\n" in text
    assert found["costs"].keys() == {"H100", "L40S"}


@pytest.mark.parametrize("workload", ["train:4x64", "serve:2req/s:32x32"])
def test_the_command_runs(model: Path, data: Path, tmp_path: Path, workload: str) -> None:
    options = ["--workload", workload, "--rank", "4", "--targets", "q_proj,v_proj", "--gpu", "A10G"]
    options += ["--optimizer", "sgd", "--optimizer-option", "momentum=0.9"]
    found = json.loads(output_of("plan", model, *options, "--max-gpus", "1", "--json"))
    program, name, *words = shlex.split(found["front"][found["chosen"]]["command"])
    assert program == "pcg"
    words = [str(data) if word == "train.jsonl" else word for word in words]
    words = [str(tmp_path / word) if word in ("mine", "program") else word for word in words]
    words = [str(model) if word == found["model"] else word for word in words]
    if name == "finetune":
        assert words[words.index("--r" if "--r" in words else "--rank") + 1] == "4"
        assert "--optimizer sgd --optimizer-option momentum=0.9" in " ".join(words)
        words += ["--max-steps", "1", "--max-length", "64"]
        words[words.index("--adapter") + 1] = "mine"
    output_of(name, *words)
    assert (tmp_path / ("mine" if name == "finetune" else "program")).is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "train:4"], "workload 'train:4'; use train:BATCHxTOKENS"),
        (["--workload", "train:1x64", "--gpus", "H1"], "no GPU is known as 'H1'"),
        (["--workload", "train:1x64", "--price", "H100=-1"], "use dollars an hour above 0"),
        (["--workload", "train:1x64", "--tp", "3"], "tp=3 does not divide"),
        (["--workload", "train:1x64", "--html", "nowhere/plan.html"], "no directory nowhere"),
        (["--workload", "train:1x64", "--peft", "none"], "and there is none; name one"),
    ],
)
def test_mistakes_are_one_line(model: Path, options: list[str], message: str) -> None:
    assert_one_error(run("plan", model, *options), message)


def test_a_price_without_a_number(model: Path) -> None:
    refused = run("plan", model, "--workload", "train:1x64", "--price", "H100")
    assert refused.exit_code == 2
    assert "use NAME=X" in refused.stderr
