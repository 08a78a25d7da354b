"""Loss, accuracy and lm-eval tasks of a base and an adapter are those of transformers and peft."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pcg
from pcg.errors import DataError
from pcg.evaluation import evaluate
from pcg.runtime.data.dataset import load_examples
from tests.support.command_line import assert_one_error, output_of, run

ROOT = Path(__file__).parents[1]
CHECKPOINT, ADAPTER = ROOT / "examples/checkpoint", ROOT / "examples/adapters/typed"
ROWS = [
    {"prompt": "def copy_file(path", "completion": ", recursive=True):\n"},
    {"prompt": "import os\n\nfor name in", "completion": " os.listdir(path):\n    print(name)\n"},
    {"prompt": "class Error(", "completion": "Exception):\n"},
]
QUESTIONS = [
    {
        "question": "def copy_file(path):\n",
        "choices": ["return None", "raise", "ä, é"],
        "answer": 0,
    },
    {"question": "import os\nfor name in", "choices": ["3", "os.listdir(path):"], "answer": 1},
    {"question": "class Error(", "choices": ["import):", "Exception):"], "answer": "Exception):"},
    {"question": "x = [1, 2, 3]\nprint(", "choices": ["len(x))", "😀)"], "answer": 1},
]


@pytest.fixture(scope="module")
def executor() -> Any:
    return pcg.compile(str(CHECKPOINT), {"typed": str(ADAPTER)}, dtype="float32")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The base and the adapter in peft."""
    load = AutoModelForCausalLM.from_pretrained
    base, other = (load(CHECKPOINT, dtype=torch.float32).eval() for _ in range(2))
    return {"base": base, "typed": peft.PeftModel.from_pretrained(other, ADAPTER).eval()}


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> list[float]:
    """The log-probability of each token but the first."""
    rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def test_losses_are_those_of_transformers(executor: Any, models: dict[str, Any]) -> None:
    data = load_examples(ROWS, executor.tokenizer)
    for score in evaluate(executor, ROWS, batch_size=2):
        values = [
            value
            for example in data
            for value, label in zip(
                logprobs(models[score.model], list(example.ids)), example.labels[1:], strict=True
            )
            if label != -100
        ]
        assert (score.rows, score.tokens) == (3, len(values))
        assert score.loss == pytest.approx(-sum(values) / len(values), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(score.loss))
        assert score.accuracy is None


def test_accuracies_are_those_of_transformers(executor: Any, models: dict[str, Any]) -> None:
    for score in evaluate(executor, QUESTIONS, batch_size=3):
        hits, hits_norm = [], []
        for row in QUESTIONS:
            asked, choices = str(row["question"]), [*map(str, row["choices"])]  # type: ignore[call-overload]
            texts = [("" if asked.endswith("\n") else " ") + choice for choice in choices]
            known = executor.tokenizer.encode(asked)
            sums = [
                sum(
                    logprobs(models[score.model], executor.tokenizer.encode(asked + text))[
                        len(known) - 1 :
                    ]
                )
                for text in texts
            ]
            right = (
                row["answer"] if isinstance(row["answer"], int) else choices.index(row["answer"])
            )  # type: ignore[arg-type]
            norm = [total / len(choice) for total, choice in zip(sums, choices, strict=True)]
            hits.append(sums.index(max(sums)) == right)
            hits_norm.append(norm.index(max(norm)) == right)
        assert (score.accuracy, score.accuracy_norm) == (sum(hits) / 4, sum(hits_norm) / 4)
        assert score.loss is None


def test_the_command_shows_models_side_by_side(tmp_path: Path, executor: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = ("eval", CHECKPOINT, "--dtype", "float32", "--adapter", f"typed={ADAPTER}")
    found = json.loads(output_of(*given, "--data", path, "--json"))["models"]
    expected = evaluate(executor, path)
    assert [(row["model"], row["loss"]) for row in found] == [
        (score.model, pytest.approx(score.loss)) for score in expected
    ]
    for given, words in (
        (("--tasks", "a"), "give one of"),
        (("--limit", "3"), "no effect without --tasks"),
        (("--adapter", f"base={ADAPTER}"), "base is the model"),
    ):
        refused = run("eval", CHECKPOINT, "--data", path, *given)
        assert refused.exit_code == 2
        assert words in refused.stderr
    path.write_text('{"question": "a", "choices": ["b"], "answer": 3}\n')
    assert_one_error(run("eval", CHECKPOINT, "--data", path), "line 1 has the answer 3")
    path.write_text(json.dumps({"prompt": "a b c d", "completion": "e"}) + "\n")
    refused = run("eval", CHECKPOINT, "--data", path, "--max-length", "2")
    assert_one_error(refused, "lie beyond --max-length=2, the row has")
    assert refused.stderr.endswith("; raise it\n")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"choices": ["a"], "answer": 0}, r"data\[0\] has no 'question', 'query', 'prompt'"),
        ({"question": "a", "choices": "b", "answer": 0}, "'choices' is a string"),
        ({"question": "a" * 9000, "choices": ["b"], "answer": 0}, "tokens, and the most are"),
        ({"text": "a " * 1100}, r"data\[0\] has \d+ tokens, .* truncate .* max_length=1024"),
    ],
)
def test_rows_that_cannot_be(executor: Any, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        evaluate(executor, [row])


CHOICE_TASK = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
OTHER_TASKS = """
task: %s
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: %s
doc_to_text: %s
doc_to_target: "{{question}}"
metric_list: [{metric: %s}]
"""


@pytest.mark.slow
def test_tasks_are_those_of_lm_evals_hf(
    executor: Any, models: dict[str, Any], tmp_path: Path
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from pcg.lm_eval_model import ExecutorLM, evaluate_tasks

    rows = tmp_path / "rows.jsonl"
    answers = (
        row["choices"].index(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        for row in QUESTIONS
    )  # type: ignore[attr-defined]
    documents = [{**row, "answer": x} for row, x in zip(QUESTIONS, answers, strict=True)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in documents))
    (tmp_path / "choice.yaml").write_text(CHOICE_TASK % rows)
    rolling = ("rolling", rows, "loglikelihood_rolling", '""', "word_perplexity")
    (tmp_path / "rolling.yaml").write_text(OTHER_TASKS % rolling)
    tasks = ["choice", "rolling"]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for name, model in models.items():
        hf = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
        manager = TaskManager(include_path=str(tmp_path))
        expected = lm_eval.simple_evaluate(
            model=hf, tasks=tasks, task_manager=manager, bootstrap_iters=0
        )["results"]
        adapter = None if name == "base" else name
        found = evaluate_tasks(executor, tasks, adapter, include_path=str(tmp_path))
        for task in tasks:
            numbers = {k: v for k, v in expected[task].items() if isinstance(v, float)}
            assert numbers
            assert {k: found[task][k] for k in numbers} == pytest.approx(numbers, rel=1e-4)
        ours = ExecutorLM(executor, adapter)
        requests = [
            type("R", (), {"args": ("def main(", {"until": ["\n"], "max_gen_toks": 12})})(),
        ]
        assert ours.generate_until(requests) == hf.generate_until(requests)
        for text in ("def main():\n", "Größe 中文"):
            assert ours.tok_encode(text) == hf.tok_encode(text)
