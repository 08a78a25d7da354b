"""`pcg finetune`: what it trains, saves, resumes and refuses."""

import json
import logging
import signal

import pytest
from safetensors.torch import load_file

from tests.support import tiny_llama
from tests.support.command_line import SAVED, assert_one_error, output_of, python, run


def test_finetune_and_run(program, data, tmp_path):
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
    assert files == SAVED
    assert PeftConfig.from_pretrained(tmp_path / "sums").r == 4  # the program's recipe
    place = f"sums={tmp_path / 'sums'}"
    assert output_of("run", program, "--adapter", place, "-p", "add 1", "-n", "3")


def test_finetune_prints_one_object(model, data, tmp_path):
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


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("shares", [(), ("--shard-base",)], ids=["whole", "parts"])
def test_replicas_give_the_losses_of_one_process(model, data, tmp_path, shares):
    command = ("finetune", model, "--data", data, "--adapter", "sums", "--json", "--max-steps", "3")
    options = ("--batch-size", "3", "--lr", "5e-3", "--dtype", "float32")
    over = (*command, *options, "--dp", "2", *shares, "-o", tmp_path / "two")
    started = python(*over)
    one = json.loads(output_of(*command, *options, "-o", tmp_path / "one"))
    output, errors = started.communicate(timeout=400)
    assert started.returncode == 0, errors
    assert json.loads(output)["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert (tmp_path / "two" / "adapter_model.safetensors").exists()


def test_finetune_that_is_interrupted_goes_on_exactly(program, data, tmp_path):
    def command(name):
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
        ('{"prompt": "a", "completion": ""}', "is empty; remove the row, or pass --empty drop"),
    ],
)
def test_bad_data(program, tmp_path, line, message):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    options = ("--data", path, "--adapter", "a", "-o", tmp_path / "a")
    assert_one_error(run("finetune", program, *options), message)
    assert not (tmp_path / "a").exists()


def test_loss_that_is_no_number(program, data, tmp_path):
    options = ("--data", data, "--adapter", "a", "-o", tmp_path / "a", "--max-steps", "4")
    rate = ("--lr", "3e38", "--schedule", "constant", "--no-progress")
    result = run("finetune", program, *options, *rate)
    assert_one_error(result, "lower --learning-rate=3e+38")
    assert not (tmp_path / "a" / "adapter_model.safetensors").exists()


def test_bad_finetuning_options(tmp_path):
    """Said before a model is looked for."""
    options = ("--data", "x.jsonl", "--adapter", "a", "-o", tmp_path / "a")
    result = run("finetune", "nothing", *options, "--lr", "-1")
    assert_one_error(result, "--learning-rate=-1.0")
    quantized = run("finetune", "examples/checkpoint", "--quantization", "q9", *options)
    assert_one_error(quantized, "--quantization q9; use one of none, nf4")
    sgd = (*options, "--optimizer", "SGD", "--optimizer-option")
    assert_one_error(run("finetune", "nothing", *sgd, "nesterov=true"), "'sgd': Nesterov momentum")
    assert_one_error(run("finetune", "nothing", *sgd, "momentun=0.9"), "did you mean 'momentum'?")
    for value, message in (("momentum", "use NAME=VALUE"), ("momentum=", "use NAME=VALUE")):
        result = run("finetune", "nothing", *sgd, value)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())


def test_several_files_of_data(program, data, tmp_path):
    rows = data.read_text().splitlines(keepends=True)
    for name, part in (("one", rows[:5]), ("two", rows[5:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    both = ("--data", tmp_path / "one.jsonl", "--data", tmp_path / "two.jsonl")
    options = ("--adapter", "sums", "--max-steps", "2", "--json")
    apart = json.loads(output_of("finetune", program, *both, *options, "-o", tmp_path / "a"))
    whole = output_of("finetune", program, "--data", data, *options, "-o", tmp_path / "b")
    assert apart["losses"] == json.loads(whole)["losses"]


def test_a_finished_adapter_is_replaced_only_on_demand(program, data, tmp_path):
    output = tmp_path / "sums"
    command = ("finetune", program, "--data", data, "--adapter", "sums", "-o", output)
    options = ("--max-steps", "2")
    assert run(*command, *options).exit_code == 0
    weights = output / "adapter_model.safetensors"
    before = weights.read_bytes()
    # Before the model is looked for.
    again = ("finetune", "nothing", *command[2:], "--max-steps", "3")
    result = run(*again)
    assert result.exit_code == 2
    words = " ".join(result.stderr.replace("│", " ").split())
    assert "has a saved adapter; give another directory, --overwrite to replace it" in words
    assert "trains it further" in words
    assert weights.read_bytes() == before
    result = run(*command, "--max-steps", "3", "--overwrite")
    assert result.exit_code == 0, result.output
    assert "in place of the adapter there" in result.stderr
    assert weights.read_bytes() != before


@pytest.mark.parametrize("kept", [("--checkpoint-dir", "job"), ("--keep-checkpoints",)])
def test_a_finished_job_is_extended_by_resuming(program, data, tmp_path, monkeypatch, kept):
    """The adapter is that of a job with all steps, bit for bit."""
    monkeypatch.chdir(tmp_path)
    command = ("finetune", program, "--data", data, "--adapter", "sums", "--schedule", "constant")
    extended, whole = ("-o", tmp_path / "sums"), ("-o", tmp_path / "whole")
    assert run(*command, *extended, *kept, "--max-steps", "2").exit_code == 0
    assert run(*command, *extended, *kept, "--max-steps", "4").exit_code == 2
    result = run(*command, *extended, *kept, "--max-steps", "4", "--resume")
    assert "resumed from step 2" in result.stderr
    assert result.exit_code == 0
    assert run(*command, *whole, "--max-steps", "4").exit_code == 0
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("sums", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("place", ["file/sums", "file"])
def test_an_output_that_cannot_be_written_is_known_before_the_model_is_read(data, tmp_path, place):
    (tmp_path / "file").touch()
    options = ("--data", data, "--adapter", "sums", "-o", tmp_path / place)
    result = run("finetune", "nothing", *options)
    if place == "file":
        assert result.exit_code == 2
        assert "is a file; give a directory" in " ".join(result.stderr.replace("│", " ").split())
    else:
        assert_one_error(result, f"adapter 'sums' cannot be saved in {tmp_path / place}: Not a dir")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_collapsed_adapter_is_not_saved(data, tmp_path):
    model = tiny_llama.save(tmp_path / "model", initializer_range=0.2)
    command = ("finetune", model, "--data", data, "--adapter", "sums")
    options = ("--max-steps", "60", "--lr", "3e-2", "-o", tmp_path / "good", "--json")
    losses = json.loads(output_of(*command, *options))["losses"]
    assert losses[-1] < losses[0] - 1
    bad = ("--lr", "3", "--schedule", "constant", "--max-steps", "4", "-o", tmp_path / "bad")
    result = run(*command, *bad, "--start-from", tmp_path / "good", "--no-progress")
    assert_one_error(result, f"sums has collapsed and is not saved in {tmp_path / 'bad'}")
    assert "lower the learning rate (--lr) or warm up longer, and start at step 0" in result.stderr
    assert {path.name for path in (tmp_path / "bad").iterdir()} == {"pcg-checkpoints", "record"}
    checkpoint = tmp_path / "bad" / "pcg-checkpoints" / "step-00000004"
    assert f"The adapter is in {checkpoint}\n" in result.stderr
    files = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files


def test_the_losses_at_the_end_are_means(program, data, tmp_path):
    command = ("finetune", program, "--data", data, "--adapter", "sums", "--eval-data", data)
    options = ("--max-steps", "12", "--batch-size", "2", "--eval-every", "6", "--eval-at-start")
    result = run(*command, *options, "-o", tmp_path / "a")
    summary = output_of(*command, *options, "-o", tmp_path / "b", "--json")
    losses = json.loads(summary)["losses"]
    first, last = (sum(part) / 5 for part in (losses[:5], losses[-5:]))
    assert f"loss {first:.4f} → {last:.4f}, means of 5 steps each\n" in result.stderr
    (_, start), *_, (_, end) = json.loads(summary)["eval_losses"]
    assert f"evaluation loss {start:.4f} at step 0 → {end:.4f} at step 12, best" in result.stderr
    one = run(*command, "--max-steps", "1", "-o", tmp_path / "c")
    assert one.exit_code == 0
    assert " → " not in one.stderr


def test_off_a_terminal_lines_say_how_it_goes(model, data, tmp_path):
    """The first step, the last one and each evaluation; more with time, or by `--log-every`."""
    files = ("--data", data, "--eval-data", data, "--adapter", "sums", "-o", tmp_path / "sums")
    steps = ("--max-steps", "9", "--eval-every", "4", "--eval-at-start", "--batch-size", "2")
    result = run("finetune", model, *files, *steps, "--r", "2", "--targets", "q_proj")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("sums ")]
    assert lines[0].startswith("sums before the first step: eval loss ")
    said = {line.split(":")[0]: "eval loss" in line for line in lines[1:]}
    assert [step for step, evaluated in said.items() if evaluated] == [
        "sums step 4/9",
        "sums step 8/9",
        "sums step 9/9",
    ]
    assert lines[1].startswith("sums step 1/9: loss ")
    assert "tokens/s" in lines[1]
    assert logging.getLogger("pcg.finetuning").handlers == []


@pytest.mark.parametrize(
    ("options", "step"),
    [
        (("--max-length", "64"), (8, 64)),
        (("--max-length", "64", "--batch-size", "3"), (3, 64)),
        (("--max-length", "64", "--max-tokens", "200"), (3, 64)),
        (("--max-length", "64", "--max-tokens", "20"), (1, 64)),
        (("--max-length", "64", "--seq", "32"), (None, 32)),
        (("--batch-size", "3"), (None, None)),
    ],
)
def test_layouts_over_ranks_are_planned_for_the_jobs_own_step(
    options, step, model, data, tmp_path, monkeypatch
):
    started = {}

    def keep(degree, act):
        started.update(act.args[1])  # the options of compiling

    monkeypatch.setattr("cli.train.on_ranks", keep)
    command = ("finetune", model, "--data", data, "--adapter", "sums", "-o", tmp_path / "sums")
    output_of(*command, "--tp", "2", "--gradient-accumulation-steps", "4", *options)
    assert (started.get("batch"), started.get("seq")) == step
    assert (started["tp"], started["gradient_accumulation_steps"]) == (2, 4)
