"""tinker-cookbook's own trainers, unchanged, with local data; prints their metrics as JSON.

PCG_URL is the server's, PCG_MODEL the base's name there, which is the folder of its tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import chz
import datasets
from tinker_cookbook import renderers
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

URL, MODEL = os.environ["PCG_URL"], os.environ["PCG_MODEL"]
RENDERER = "role_colon"
PAIRS = [(f"What is {i} + {i}?", f"It is {2 * i}.") for i in range(8)]


def common(batch_size: int) -> ChatDatasetBuilderCommonConfig:
    """The tokenizer, the renderer and the batches of a data set."""
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL,
        renderer_name=RENDERER,
        max_length=128,
        batch_size=batch_size,
        train_on_what=renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )


@chz.chz
class Comparisons(ComparisonDatasetBuilder):
    """Answers, of which the one with the right number is preferred."""

    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, None]:
        rows = [{"question": question, "answer": answer} for question, answer in PAIRS]
        return datasets.Dataset.from_list(rows), None

    def example_to_labeled_comparison(self, example: dict) -> LabeledComparison:
        comparison = Comparison(
            prompt_conversation=[{"role": "user", "content": example["question"]}],
            completion_A=[{"role": "assistant", "content": example["answer"]}],
            completion_B=[{"role": "assistant", "content": "No."}],
        )
        return LabeledComparison(comparison=comparison, label="A")


def supervised(home: Path) -> None:
    """Train on conversations of a file."""
    file = home / "conversations.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in PAIRS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = supervised_train.Config(
        log_path=str(home / "supervised"),
        model_name=MODEL,
        recipe_name="local",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(
            file_path=str(file), common_config=common(4), test_size=0
        ),
        learning_rate=5e-3,
        num_epochs=5,
        lora_rank=8,
        base_url=URL,
        save_every=4,
    )
    asyncio.run(supervised_train.main(config))


def reinforcement(home: Path) -> None:
    """Train on sums that the model is asked for."""
    config = rl_train.Config(
        learning_rate=1e-3,
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=2,
            model_name_for_tokenizer=MODEL,
            renderer_name=RENDERER,
            n_batches=2,
            group_size=4,
        ),
        model_name=MODEL,
        recipe_name="local",
        renderer_name=RENDERER,
        max_tokens=8,
        log_path=str(home / "rl"),
        lora_rank=8,
        base_url=URL,
        eval_every=0,
        save_every=1,
    )
    asyncio.run(rl_train.main(config))


def preference(home: Path) -> None:
    """Train on comparisons."""
    config = train_dpo.Config(
        log_path=str(home / "dpo"),
        model_name=MODEL,
        recipe_name="local",
        renderer_name=RENDERER,
        dataset_builder=DPODatasetBuilderFromComparisons(
            comparison_builder=Comparisons(), common_config=common(4)
        ),
        learning_rate=2e-3,
        num_epochs=3,
        lora_rank=8,
        base_url=URL,
        save_every=0,
        eval_every=0,
        infrequent_eval_every=0,
    )
    train_dpo.main(config)


def metrics(folder: Path) -> list[dict]:
    """Return what a trainer logged of its steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run the trainers, one after the other."""
    home = Path.cwd()
    supervised(home)
    reinforcement(home)
    preference(home)
    found = {name: metrics(home / name) for name in ("supervised", "rl", "dpo")}
    saved = (home / "supervised" / "checkpoints.jsonl").read_text().splitlines()
    print(json.dumps({"metrics": found, "checkpoints": [json.loads(one) for one in saved]}))


if __name__ == "__main__":
    main()
