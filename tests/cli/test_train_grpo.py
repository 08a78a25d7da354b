"""`pcg train grpo`: an adapter by a file and reward functions of its folder."""

from __future__ import annotations

import json
from pathlib import Path

from pcg.records.run import read_run
from tests.support.command_line import assert_one_error, output_of, run

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


def write(folder: Path, model: Path, *lines: str) -> Path:
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": text, "answer": text[0]} for text in ("Hello, how", "the quick")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "grpo.yaml"
    peft = "peft: {peft_type: LORA, r: 2, lora_alpha: 4, target_modules: [q_proj, down_proj]}"
    sizes = "num_generations: 2\nbatch_size: 4\nmax_completion_length: 3\nmax_steps: 2"
    given = (f"model: {model}", "data: prompts.jsonl", "rewards: rewards.py:short", "output: out")
    path.write_text("\n".join((*given, peft, sizes, "learning_rate: 1e-3", *lines)))
    return path


def test_an_adapter_is_trained_saved_and_trained_further(model: Path, tmp_path: Path) -> None:
    config = write(tmp_path, model)
    summary = json.loads(output_of("train", "grpo", config, "--json"))
    assert summary["steps"] == 2
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


def test_rewards_and_data_that_are_none_are_refused(model: Path, tmp_path: Path) -> None:
    config = write(tmp_path, model)
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
    assert_one_error(run("train", "grpo", config), "use an object with a 'prompt'")
