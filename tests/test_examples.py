"""Adapters that ship answer signatures that they never saw, in pcg and in peft; examples run."""

import asyncio
import inspect
import math
import runpy
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import pcg

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("docstring", "javascript", "typed")
COUNT = 20


@pytest.fixture(scope="module")
def rows():
    sys.path.insert(0, str(EXAMPLES))
    try:
        from signature_tasks import examples
    finally:
        sys.path.remove(str(EXAMPLES))
    return {name: examples(name, COUNT, held_out=True) for name in NAMES}


def test_shipped_adapters_answer_held_out_signatures(rows):
    paths = {name: EXAMPLES / "adapters" / name for name in NAMES}
    executor = pcg.compile(EXAMPLES / "checkpoint", paths, dtype="float32")
    asked = [(name, row) for name in NAMES for row in rows[name]]
    completions = executor.generate(
        [row["prompt"] for _, row in asked], [name for name, _ in asked], max_new_tokens=48
    )
    right = dict.fromkeys(NAMES, 0)
    for (name, row), completion in zip(asked, completions, strict=True):
        right[name] += completion.text == row["completion"]
    assert all(count >= 0.9 * COUNT for count in right.values()), right


# peft warns of AdaLoRA's own pattern of ranks, which has keys of another form than LoRA's.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("name", [*NAMES[:2], pytest.param(NAMES[2], marks=pytest.mark.slow)])
def test_peft_answers_the_same(name, rows):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EXAMPLES / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "checkpoint", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, EXAMPLES / "adapters" / name)
    executor = pcg.compile(
        EXAMPLES / "checkpoint", {name: EXAMPLES / "adapters" / name}, dtype="float32"
    )
    for row in rows[name][:3]:
        inputs = tokenizer(row["prompt"], return_tensors="pt", return_token_type_ids=False)
        tokens = adapted.generate(**inputs, max_new_tokens=48, do_sample=False)[0]
        length = inputs["input_ids"].shape[1]
        completion = executor.generate(row["prompt"], name, max_new_tokens=48)
        assert list(completion.token_ids) == tokens[length:].tolist()


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_loops_train(name):
    train = runpy.run_path(str(EXAMPLES / f"loops/{name}.py"))["train"]
    executor = pcg.compile(EXAMPLES / "checkpoint", dtype="float32")
    trained = train(executor, 3)
    numbers = asyncio.run(trained) if inspect.iscoroutine(trained) else trained
    assert len(numbers) == 3
    if name == "grpo":
        assert all(map(math.isfinite, numbers))
    else:
        assert numbers[-1] < numbers[0]
    (adapter,) = executor.adapters
    assert executor.generate([[5, 8]], adapter, max_new_tokens=2)[0].token_ids


@pytest.mark.slow
def test_two_clients_of_one_base_finetune_and_generate():
    command = [sys.executable, str(EXAMPLES / "split_client.py"), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    for task in ("typed", "docstring"):
        assert f"{task}: loss" in done.stdout, done.stderr
    assert done.stdout.count("in 2 steps") == 2
