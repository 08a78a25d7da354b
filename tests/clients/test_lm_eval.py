"""lm-eval's `local-completions` over the server gives transformers' and peft's log-likelihoods."""

import functools
import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.other_clients import (
    ADAPTERS,
    BASE,
    CHECKPOINT,
    KEY,
    client_program,
    run_client,
    served,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
LORA = "typed"
MAX_LENGTH = 128
"""The most tokens of a window, so few that the longest text is read in several."""
CHOICES = [
    {
        "question": "def copy_file(path, recursive=True):\n",
        "choices": ['    """Copy the file."""', "    return None", "    raise ValueError(path)"],
        "answer": 0,
    },
    {"question": "import os\n\nfor name in", "choices": [" os.listdir(path):", " 3"], "answer": 0},
    {"question": "class Error(", "choices": ["Exception):", "import):", "😀):"], "answer": 0},
    {"question": "x = [1, 2, 3]\nprint(", "choices": ["len(x))", "ä, é)"], "answer": 1},
    {
        "question": "def read_table(path, limit=20):\n",
        "choices": ["def read_table(path, limit: int = 20):", "    pass"],
        "answer": 0,
    },
]
TEXTS = [
    {"text": "def main():\n    parser = argparse.ArgumentParser()\n    return parser\n"},
    {"text": "# Größe in Metern, 中文 and 😀\nsize = 3\n"},
    {"text": "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n" * 12},
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
"""
CHOICE_TASK = """
task: pcg_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT_TASK = """
task: pcg_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    client_program("lm-eval", "lm_eval")
    with served(tmp_path_factory.mktemp("server") / "log", (LORA,)) as running:
        yield running


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows, task in (("choice", CHOICES, CHOICE_TASK), ("text", TEXTS, TEXT_TASK)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.lstrip() + COMMON.lstrip() % data)
    return folder


@functools.cache
def oracle(model):
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    return (
        base if model == BASE else peft.PeftModel.from_pretrained(base, ADAPTERS / model)
    ).eval()


@functools.cache
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)


def log_likelihood(model, context, continuation):
    """The sum over the continuation, and whether each of its tokens is the likeliest."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.inference_mode():
        logits = oracle(model)(input_ids=ids).logits[0, len(context) - 1 : -1].float()
    chosen = torch.tensor(continuation)
    found = torch.log_softmax(logits, -1).gather(-1, chosen[:, None]).sum()
    return float(found), bool((logits.argmax(-1) == chosen).all())


def rolled(model, text):
    """The log-likelihood of a text in windows: each token is predicted once, from a full window."""
    ids = tokenizer().encode(text, add_special_tokens=False)
    most, done, total = MAX_LENGTH - 2, 0, 0.0
    while done < len(ids):
        new = ids[done : done + most]
        before = [tokenizer().eos_token_id, *ids[:done]][-(most + 1 - len(new)) :]
        total += log_likelihood(model, before, new)[0]
        done += len(new)
    return total


def evaluated(server, tasks, home, model, batch_size, **arguments):
    """lm-eval's results by task, and its samples by task in the order of the documents."""
    given = {
        "model": model,
        "base_url": f"{server.openai_url}/completions",
        "tokenizer_backend": "remote",
        "auth_token": KEY,
        "max_length": MAX_LENGTH,
        **arguments,
    }
    words = ",".join(f"{name}={value}" for name, value in given.items())
    program = client_program("lm-eval", "lm_eval")
    command = [program, "run", "--model", "local-completions", "--model_args", words]
    command += ["--tasks", "pcg_choice,pcg_text", "--include_path", str(tasks)]
    command += ["--output_path", str(home / "out"), "--log_samples"]
    command += ["--batch_size", str(batch_size)]
    run_client(command, home, OPENAI_API_KEY=KEY)
    (results,) = (home / "out").rglob("results_*.json")
    samples = {}
    for task in ("pcg_choice", "pcg_text"):
        (path,) = (home / "out").rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(rows, key=lambda row: row["doc_id"])
    return json.loads(results.read_text())["results"], samples


@pytest.mark.parametrize(
    ("batch_size", "arguments"),
    [(1, {}), (1, {"num_concurrent": 4}), (4, {})],
    ids=["single", "at once", "batch"],
)
@pytest.mark.parametrize("model", [BASE, LORA])
def test_log_likelihoods_and_accuracy_are_those_of_transformers_and_peft(
    server, tasks, tmp_path, model, batch_size, arguments
):
    results, samples = evaluated(server, tasks, tmp_path, model, batch_size, **arguments)
    encode = functools.partial(tokenizer().encode, add_special_tokens=False)
    right = 0
    for row, sample in zip(CHOICES, samples["pcg_choice"], strict=True):
        # lm-eval counts white space at the end of a question to the answers.
        context = encode(row["question"].rstrip())
        wanted = []
        for choice in row["choices"]:
            continuation = encode(row["question"] + choice)[len(context) :]
            wanted.append(log_likelihood(model, context, continuation))
        got = [(float(value), greedy in (True, "True")) for ((value, greedy),) in sample["resps"]]
        assert [g for _, g in got] == [g for _, g in wanted]
        assert [v for v, _ in got] == pytest.approx([v for v, _ in wanted], abs=TOLERANCE)
        likeliest = max(range(len(wanted)), key=lambda i: wanted[i][0])
        right += likeliest == row["answer"]
    assert results["pcg_choice"]["acc,none"] == pytest.approx(right / len(CHOICES))
    for row, sample in zip(TEXTS, samples["pcg_text"], strict=True):
        ((value,),) = sample["resps"]
        assert float(value) == pytest.approx(rolled(model, row["text"]), abs=TOLERANCE)
