"""TRL's GRPOTrainer on this machine, which runs a step for each line on its standard input.

It runs in an environment with trl; `grpo_trl` of benchmarks/rl.py starts it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(x in "aeiou" for x in text) / max(len(text), 1) for text in completions]


class Turns(TrainerCallback):
    """Waits for a turn before each step, and prints its seconds and its tokens after it."""

    def __init__(self) -> None:
        self._began = self._processor_began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self._began, self._processor_began = time.perf_counter(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "completions/mean_length" in (logs or {}):
            said = {
                "seconds": time.perf_counter() - self._began,
                "processor_s": time.process_time() - self._processor_began,
                "length": logs["completions/mean_length"],
            }
            print(f"STEP {json.dumps(said)}", flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    config = GRPOConfig(
        tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=given["batch"],
        num_generations=given["group"],
        max_completion_length=given["length"],
        learning_rate=given["rate"],
        lr_scheduler_type="constant",
        max_steps=given["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=given["model"],
        reward_funcs=vowels,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": given["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
