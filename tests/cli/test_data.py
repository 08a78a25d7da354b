"""`pcg data FILE`: what is learned of rows, counts, and the faults of every row."""

import json

import pytest
from transformers import AutoTokenizer

from pcg.runtime.data.dataset import load_examples
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support.command_line import assert_one_error, output_of, run

ROWS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1} and so on"} for i in range(5)]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, ROWS[0]]))
    return path


def test_counts_are_those_of_training(model, rows):
    read = load_examples(rows, Tokenizer.load(model), max_length=8, empty="drop")
    options = ("--model", model, "--max-length", "8")
    found = json.loads(output_of("data", rows, *options, "--examples", "2", "--json"))
    assert (found["format"], found["rows"], found["duplicates"]) == ("prompt-completion", 6, 1)
    assert found["truncated"] == read.truncated > 0
    assert found["learned"] == read.targets
    assert [row["ids"] for row in found["examples"]] == [list(e.ids) for e in read.examples[:2]]
    text = output_of("data", rows, *options)
    assert text.count("── ") == 3
    assert "0 + 1 =" in text
    assert "«" in text


def test_columns_have_the_names_of_the_data(model, rows, tmp_path):
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(rows.read_text().replace('"prompt"', '"q"').replace('"completion"', '"a"'))
    shown = [
        json.loads(output_of("data", path, "--model", model, "--json", *options))["examples"]
        for path, options in ((rows, ()), (renamed, ("--columns", "prompt=q,completion=a")))
    ]
    assert [row["ids"] for row in shown[0]] == [row["ids"] for row in shown[1]]


def test_every_fault_has_its_line(model, rows):
    with rows.open("a") as file:
        file.write('{"prompt": 1}\n{"prompt": "x", "completion": "y"}\n{"prompt": "x"}\n{no\n[]\n')
    result = run("data", rows, "--model", model, "--examples", "0")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if "rows.jsonl" in line]
    assert [line.partition(" line ")[2].split()[0].strip(",:") for line in lines] == [
        "7",
        "9",
        "10",
    ]
    assert lines[-1].endswith("rows behind it were not read")
    assert_one_error(run("data", rows, "--model", rows.parent), "no tokenizer.json")


def test_preferences_show_both_outputs(model, tmp_path):
    path, labelled = tmp_path / "pairs.jsonl", tmp_path / "labelled.jsonl"
    pair = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3 or 4"}
    path.write_text(json.dumps(pair) + "\n" + json.dumps({**pair, "chosen": " 3 or 4"}) + "\n")
    result = run("data", path, "--model", model, "--json")
    found = json.loads(result.stdout)
    assert (found["format"], found["rows"]) == ("preference", 2)
    (fault,) = found["faults"]  # as of training: outputs that do not differ
    assert "line 2" in fault
    tokenizer = Tokenizer.load(model)
    for part, example in zip(("chosen", "rejected"), found["examples"], strict=True):
        row = {"prompt": pair["prompt"], "completion": pair[part]}
        (trained,) = load_examples([row], tokenizer).examples
        assert example["part"] == part
        assert (example["ids"], example["labels"]) == ([*trained.ids], [*trained.labels])
    rows = [{**row, "label": place < 2} for place, row in enumerate(ROWS)]
    labelled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = output_of("data", labelled, "--model", model, "--examples", "5")
    assert text.count(" · undesirable · ") == 3


def test_chats_are_rendered_by_the_template_that_is_given(model, tmp_path):
    path, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    template.write_text(
        "{{ mark }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    options = ("--chat-template", template, "--chat-template-kwargs", "mark=%")
    found = json.loads(output_of("data", path, "--model", model, *options, "--json"))
    theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(
        messages, chat_template=template.read_text(), mark="%", tokenize=False
    )
    (example,) = found["examples"]
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(example["ids"], skip_special_tokens=False) == theirs
    learned = [label for label in example["labels"] if label != -100]
    assert tokenizer.decode(learned, skip_special_tokens=False).strip() == "yes<|im_end|>"
