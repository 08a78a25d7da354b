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
from tinker_cookbook.distillation import train_off_policy, train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

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


@chz.chz
class Prompts(RLDatasetBuilder):
    """Questions alone: what a teacher says of the answers is all that is learned."""

    async def __call__(self) -> tuple[PromptOnlyDataset, None]:
        tokenizer = get_tokenizer(MODEL)
        questions = [question for question, _ in PAIRS[:4]]
        renderer = renderers.get_renderer(RENDERER, tokenizer)
        return PromptOnlyDataset(questions, 2, 4, renderer, tokenizer), None


def conversations(home: Path) -> FromConversationFileBuilder:
    """Conversations of a file."""
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
    return FromConversationFileBuilder(file_path=str(file), common_config=common(4), test_size=0)


def shared(home: Path, name: str) -> dict:
    """Options that all trainers have."""
    return {
        "log_path": str(home / name),
        "model_name": MODEL,
        "recipe_name": "local",
        "renderer_name": RENDERER,
        "lora_rank": 8,
        "base_url": URL,
    }


def supervised(home: Path) -> None:
    """Train on conversations."""
    config = supervised_train.Config(
        **shared(home, "supervised"),
        dataset_builder=conversations(home),
        learning_rate=5e-3,
        num_epochs=5,
        save_every=4,
    )
    asyncio.run(supervised_train.main(config))


def reinforcement(home: Path, name: str = "rl", **options: object) -> None:
    """Train on sums that the model is asked for."""
    config = rl_train.Config(
        **shared(home, name),
        learning_rate=1e-3,
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=2,
            model_name_for_tokenizer=MODEL,
            renderer_name=RENDERER,
            n_batches=2,
            group_size=4,
        ),
        max_tokens=8,
        eval_every=0,
        save_every=1,
        **options,
    )
    asyncio.run(rl_train.main(config))


def preference(home: Path) -> None:
    """Train on comparisons."""
    config = train_dpo.Config(
        **shared(home, "dpo"),
        dataset_builder=DPODatasetBuilderFromComparisons(
            comparison_builder=Comparisons(), common_config=common(4)
        ),
        learning_rate=2e-3,
        num_epochs=3,
        save_every=0,
        eval_every=0,
        infrequent_eval_every=0,
    )
    train_dpo.main(config)


def distillation(home: Path, teacher: TeacherConfig) -> None:
    """Learn from a teacher: from what it says of own answers, then of a file's."""
    config = train_on_policy.Config(
        **shared(home, "on-policy"),
        learning_rate=1e-3,
        dataset_configs=[
            DistillationDatasetConfig(
                dataset_builder=Prompts(), teacher_config=teacher, groups_per_batch=2
            )
        ],
        max_tokens=8,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train_on_policy.main(config))
    taught = train_off_policy.DatasetWithTeacher(
        dataset_builder=conversations(home), teacher_config=teacher
    )
    off_policy = train_off_policy.Config(
        **shared(home, "off-policy"),
        learning_rate=5e-3,
        dataset_configs=[taught],
        batch_size=4,
        eval_every=0,
        save_every=0,
    )
    asyncio.run(train_off_policy.main(off_policy))


def metrics(folder: Path) -> list[dict]:
    """Return what a trainer logged of its steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run the trainers, one after the other."""
    home = Path.cwd()
    supervised(home)
    file = home / "supervised" / "checkpoints.jsonl"
    saved = [json.loads(one) for one in file.read_text().splitlines()]
    reinforcement(home)
    stale = rl_train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=2, loss_fn="ppo")
    reinforcement(home, "async", async_config=stale)
    preference(home)
    teacher = TeacherConfig(base_model=MODEL, load_checkpoint_path=saved[-1]["sampler_path"])
    distillation(home, teacher)
    names = ("supervised", "rl", "async", "dpo", "on-policy", "off-policy")
    found = {name: metrics(home / name) for name in names}
    print(json.dumps({"metrics": found, "checkpoints": saved}))


if __name__ == "__main__":
    main()
