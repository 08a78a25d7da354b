"""`pcg train`: SFT and DPO by a file, GRPO by reward functions; it resumes and refuses by name."""

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from pcg.records.run import read_run
from pcg.train.config_file import read_config
from pcg.train.grpo.train import GRPO_KEYS
from pcg.train.preference.dpo import DPO_KEYS
from pcg.train.preference.kto import KTO_KEYS
from pcg.train.sft import SFT_KEYS
from tests.support.command_line import ROOT, SAVED, assert_one_error, output_of, run

EXAMPLES = ROOT / "examples" / "configs"
WEIGHTS = "adapter_model.safetensors"


def write(folder, model, data, *lines):
    path = folder / "sft.yaml"
    peft = "peft: {peft_type: LORA, r: 2, lora_alpha: 4, target_modules: [q_proj, down_proj]}"
    given = (f"model: {model}", f"data: {data}", "adapter: sums", peft)
    path.write_text("\n".join((*given, "batch_size: 4", "learning_rate: 5e-3", *lines)))
    return path


def test_training_by_a_file_is_finetuning(model, data, tmp_path):
    config = write(tmp_path, model, data, "output: sums", "epochs: 1", "schedule: constant")
    summary = json.loads(output_of("train", "sft", config, "--json"))
    assert summary["steps"] == 3
    options = ("--data", data, "--adapter", "sums", "--r", "2", "--targets", "q_proj,down_proj")
    more = ("--batch-size", "4", "--lr", "5e-3", "--alpha", "4", "-o", tmp_path / "other")
    output_of("finetune", model, *options, *more, "--epochs", "1", "--schedule", "constant")
    files = [tmp_path / name / WEIGHTS for name in ("sums", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {path.name for path in (tmp_path / "sums").iterdir()} == SAVED
    again = run("train", "sft", config)
    assert_one_error(again, "has a saved adapter; give another directory, overwrite: true")
    further = ("--set", f"start_from={tmp_path / 'sums'}", "--set", "peft=null")
    text = run("train", "sft", config, *further, "--set", f"output={tmp_path / 'more'}")
    assert text.exit_code == 0, text.stderr
    assert "sums: 3 steps" in text.stderr


def test_the_printed_command_runs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats = [
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    ]
    pairs = [{"prompt": "add(1,", "chosen": " 2)", "rejected": " 3)"}] * 4
    texts = [{"prompt": "1+1? Say", "completion": "2"}]
    for command, rows, words in (
        ("sft", [{"prompt": "it's 1+1=", "completion": "2"}] * 4, ["it's 1+1="]),
        ("sft", chats * 4, ["--chat", "1+1?"]),
        ("sft", texts * 4, ["--chat", "1+1? Say"]),
        ("dpo", pairs, ["add(1,"]),
    ):
        folder = tmp_path / f"{command} {words[-1]}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        where = Path(os.path.relpath(model, folder))
        config = write(
            folder, where, "rows.jsonl", "output: ../out", "max_steps: 1", "overwrite: true",
            "data_format: chat" if rows[:1] == texts else "",
        )  # fmt: skip
        result = run("train", command, config.relative_to(tmp_path))
        assert result.exit_code == 0, result.stderr
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("use it: pcg ")]
        asked = shlex.split(line.removeprefix("use it: pcg "))
        assert [word for word in words if word in asked] == words
        assert "sums=out" in asked
        assert words[-1] in output_of(*asked, "--max-new-tokens", "2")


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo"])
def test_a_commented_configuration_is_read(kind, model, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    path, data = tmp_path / "new/train.yaml", tmp_path / "rows.jsonl"
    path.parent.mkdir()
    output_of("init", kind, "--model", model, "--data", data, "-o", path)
    keys = {"sft": SFT_KEYS, "dpo": DPO_KEYS, "kto": KTO_KEYS, "grpo": GRPO_KEYS}[kind]
    text = path.read_text().replace("rewards: null", "rewards: rewards.py:score")
    path.write_text(text)
    given = read_config(path, keys)
    assert given.near(given.values["model"]) == str(model)
    assert given.values["data"] == (data,)
    # Each default can be given.
    path.write_text(re.sub(r"^#(?=\w)", "", text, flags=re.MULTILINE))
    names = {field.name for owner in keys for field in dataclasses.fields(owner)}
    assert read_config(path, keys).values.keys() == names
    assert_one_error(run("init", kind, "--model", "m", "--data", "d", "-o", path), "exists")


def test_training_by_a_file_goes_on(model, data, tmp_path):
    config = write(tmp_path, model, data, "checkpoint_dir: job", "schedule: constant")
    output_of("train", "sft", config, "--set", f"output={tmp_path / 'a'}", "--set", "max_steps=2")
    resumed = ("--set", "max_steps=4", "--set", "resume=true", "--json")
    summary = json.loads(
        output_of("train", "sft", config, "--set", f"output={tmp_path / 'a'}", *resumed)
    )
    assert summary["resumed_from"] == 2
    assert summary["steps"] == 4


def test_what_is_refused(model, data, tmp_path):
    config = write(tmp_path, model, data, "output: out")
    assert_one_error(run("train", "sft", config, "--set", "lr=1"), "unknown option 'lr'")
    assert_one_error(run("train", "sft", config, "--set", "tp=2"), "runs on one rank")
    assert_one_error(run("train", "sft", config, "--set", "peft=lorra"), "peft='lorra'")
    assert_one_error(run("train", "sft", config, "--set", "learning_rate=-1"), "learning_rate=-1")
    assert_one_error(run("train", "sft", config, "--set", "weights=x"), "weights is for compiled")
    assert_one_error(run("train", "sft", tmp_path / "no.yaml"), "no.yaml cannot be read")
    assert not (tmp_path / "out").exists()


def test_preferences_are_trained_by_a_file(model, tmp_path):
    rows = [{"prompt": f"is {i}?", "chosen": " yes, it is", "rejected": " no"} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write(tmp_path, model, Path("pairs.jsonl"), "output: agree", "max_steps: 3")
    summary = json.loads(output_of("train", "dpo", config, "--json"))
    assert summary["steps"] == 3
    assert summary["history"][2]["rewards/margins"] > summary["history"][0]["rewards/margins"]
    assert (tmp_path / "agree" / WEIGHTS).exists()
    further = ("--set", f"output={tmp_path / 'more'}", "--set", "loss_type=[ipo, sft]")
    same = ("--set", f"reference_adapter={tmp_path / 'agree'}", "--set", "start_from=null")
    result = run("train", "dpo", config, *further, *same)
    assert "margin" in result.stderr
    assert result.exit_code == 0
    assert_one_error(run("train", "dpo", config, "--set", "loss_type=kto"), "use sigmoid or hinge")
    assert_one_error(run("train", "dpo", config, "--set", "rpo_alpha=1"), "option 'rpo_alpha'")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_options_need_nothing_that_a_run_by_a_file_has(tmp_path, name, monkeypatch):
    """Options of checkpoints and of a record are no error, as a run by a file has both."""
    monkeypatch.setattr("pcg.runtime.training.options.check_sinks", lambda names: None)
    config = write(tmp_path, Path("no-model"), Path("rows.jsonl"), "output: out")
    for option in ("report_to=[tensorboard]", "save_every=2"):
        assert_one_error(run("train", name, config, "--set", option), "no-model")


@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_examples_run(tmp_path, name):
    options = ("--set", f"output={tmp_path / 'out'}", "--set", "max_steps=2", "--json")
    config = EXAMPLES / f"{name}.yaml"
    summary = json.loads(output_of("train", name, config, *options, "--set", "epochs=null"))
    assert summary["steps"] == 2


REWARDS = """
from dataclasses import dataclass

@dataclass
class Bonus:
    size: float

def short(completions, answer, **columns):
    assert len(answer) == len(completions)
    return [Bonus(1 / (1 + len(text))).size for text in completions]

number = 3
"""


def write_rewards(folder, model, *lines):
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": text, "answer": text[0]} for text in ("Hello, how", "the quick")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "grpo.yaml"
    peft = "peft: {peft_type: LORA, r: 2, lora_alpha: 4, target_modules: [q_proj, down_proj]}"
    sizes = "num_generations: 2\nbatch_size: 4\nmax_completion_length: 3\nmax_steps: 2"
    given = (f"model: {model}", "data: prompts.jsonl", "rewards: rewards.py:short", "output: out")
    path.write_text("\n".join((*given, peft, sizes, "learning_rate: 1e-3", *lines)))
    return path


def test_an_adapter_is_trained_saved_and_trained_further(model, tmp_path):
    config = write_rewards(tmp_path, model)
    tests = ("--set", f"eval_data={tmp_path / 'prompts.jsonl'}", "--set", "eval_every=1")
    summary = json.loads(output_of("train", "grpo", config, *tests, "--json"))
    assert summary["steps"] == 2
    assert all(0 < numbers["eval_reward"] <= 1 for numbers in summary["history"])
    assert [one["staleness"] for one in summary["history"]] == [0, 0]
    assert (tmp_path / "out" / "adapter_config.json").exists()
    assert not (tmp_path / "out" / "pcg-checkpoints").exists()
    rewards = read_run(tmp_path / "out" / "record").series["reward"]
    assert [y for _, y in rewards] == [x["reward"] for x in summary["history"]]
    table = (tmp_path / "out" / "record" / "samples.jsonl").read_text().splitlines()
    assert {"step", "prompt", "completion", "reward", "advantage"} == set(json.loads(table[0]))
    assert_one_error(run("train", "grpo", config), "has a saved adapter")
    further = ("--set", f"start_from={tmp_path / 'out'}", "--set", "peft=null", "--set", "beta=0.1")
    text = run("train", "grpo", config, *further, "--set", f"output={tmp_path / 'more'}")
    assert text.exit_code == 0, text.stderr
    assert "step 2: reward" in text.stderr
    assert "kl" in text.stderr


def test_rewards_and_data_that_are_none_are_refused(model, tmp_path):
    config = write_rewards(tmp_path, model)
    for value, message in (
        ("short", "use module:function"),
        ("gone.py:short", "there is no file"),
        ("rewards.py:number", "has no function 'number'"),
        ("json:gone", "has no function 'gone'"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
    ):
        assert_one_error(run("train", "grpo", config, "--set", f"rewards={value}"), message)
    assert_one_error(run("train", "grpo", config, "--set", "lr=1"), "unknown option 'lr'")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    assert_one_error(run("train", "grpo", config), "line 1 has no 'prompt', but ['text']")
