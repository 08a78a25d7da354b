"""`pcg finetune`: what it trains, saves, resumes and refuses."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.command_line import assert_one_error, output_of, python, run


def test_finetune_and_run(program: Path, data: Path, tmp_path: Path) -> None:
    from peft import PeftConfig

    result = run(
        *("finetune", program, "--data", data, "--adapter", "sums", "-o", tmp_path / "sums"),
        *("--epochs", "2", "--lr", "5e-3", "--eval-data", data),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "sums: 4 steps" in result.stderr
    assert "evaluation loss" in result.stderr
    files = {path.name for path in (tmp_path / "sums").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert PeftConfig.from_pretrained(tmp_path / "sums").r == 4  # the program's recipe
    place = f"sums={tmp_path / 'sums'}"
    assert output_of("run", program, "--adapter", place, "-p", "add 1", "-n", "3")


def test_finetune_prints_one_object(model: Path, data: Path, tmp_path: Path) -> None:
    options = ("--data", data, "--adapter", "sums", "--max-steps", "2", "--rank", "2", "--json")
    summary = json.loads(output_of("finetune", model, *options, "-o", tmp_path / "sums"))
    assert summary["steps"] == len(summary["losses"]) == 2
    assert summary["output"] == str(tmp_path / "sums")
    more = ("--data", data, "--adapter", "sums", "--max-steps", "1", "--json")
    go_on = (*more, "--start-from", tmp_path / "sums", "-o", tmp_path / "more")
    json.loads(output_of("finetune", model, *go_on))
    before, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sums", "more")
    )
    assert {k: t.shape for k, t in before.items()} == {k: t.shape for k, t in after.items()}


def test_finetune_that_is_interrupted_goes_on_exactly(
    program: Path, data: Path, tmp_path: Path
) -> None:
    def command(name: str) -> tuple[str | Path, ...]:
        start = ("finetune", program, "--data", data, "--adapter", "sums", "-o", tmp_path / name)
        return (*start, "--epochs", "20", "--batch-size", "2", "--log-every", "1")

    process = python(*command("one"))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("sums step 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    last = rest.splitlines()[-1]
    assert "interrupted after step" in last
    assert "Traceback" not in rest
    assert not (tmp_path / "one" / "adapter_model.safetensors").exists()
    assert "resumed from step" in run(*command("one")).stderr
    assert run(*command("two")).exit_code == 0
    one, two = (tmp_path / name / "adapter_model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "completion": "b"', "train.jsonl line 2"),
        ('{"prompt": "a"}', "train.jsonl line 2"),
    ],
)
def test_bad_data(program: Path, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    options = ("--data", path, "--adapter", "a", "-o", tmp_path / "a")
    assert_one_error(run("finetune", program, *options), message)
    assert not (tmp_path / "a").exists()


def test_loss_that_is_no_number(program: Path, data: Path, tmp_path: Path) -> None:
    options = ("--data", data, "--adapter", "a", "-o", tmp_path / "a", "--max-steps", "4")
    result = run("finetune", program, *options, "--lr", "1e30", "--schedule", "constant")
    assert_one_error(result, "lower learning_rate=1e+30")
    assert not (tmp_path / "a" / "adapter_model.safetensors").exists()


def test_bad_finetuning_options(tmp_path: Path) -> None:
    """Said before a model is looked for."""
    options = ("--data", "x.jsonl", "--adapter", "a", "-o", tmp_path / "a")
    result = run("finetune", "nothing", *options, "--lr", "-1")
    assert_one_error(result, "learning_rate=-1.0")
    sgd = (*options, "--optimizer", "SGD", "--optimizer-option")
    assert_one_error(run("finetune", "nothing", *sgd, "nesterov=true"), "'sgd': Nesterov momentum")
    assert_one_error(run("finetune", "nothing", *sgd, "momentun=0.9"), "did you mean 'momentum'?")
    for value, message in (("momentum", "use NAME=VALUE"), ("momentum=", "use NAME=VALUE")):
        result = run("finetune", "nothing", *sgd, value)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())
