"""Graders of texts: templates, checks, formulas of them, and what is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneError, GraderError, GradingError
from pcg.graders.formula import Formula
from pcg.graders.grader import Answer, Grade, Question
from pcg.graders.reader import grader_from
from pcg.graders.sample import Sample, Template
from pcg.graders.sandbox_runner import check_sandbox, run_grader
from pcg.graders.text_graders import METRICS, MOST_COMPARED
from pcg.train.grpo.rollouts import Rewards, Scored
from pcg.train.grpo.train import reward_function

CHECK = {
    "type": "string_check",
    "name": "same",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
ALIKE = {
    "type": "text_similarity",
    "name": "alike",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
}
JUDGE = {
    "type": "score_model",
    "name": "judge",
    "model": "m",
    "input": [{"role": "user", "content": "Rate {{sample.output_text}} for {{item.answer}}"}],
    "range": [0, 10],
    "sampling_params": {"max_completions_tokens": 9, "temperature": 0, "seed": 3},
}
LABELS = {
    "type": "label_model",
    "name": "label",
    "model": "m",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Is it?"}]}],
    "labels": ["yes", "no", "perhaps"],
    "passing_labels": ["yes", "perhaps"],
}


@dataclass
class Host:
    """A host whose judge says what it is told to, and that runs no source."""

    says: Sequence[str] = ()
    asked: list[Question] = field(default_factory=list)

    async def beside(self, act: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        return act(*args, **keywords)

    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        return Answer(self.says[len(self.asked) - 1], 5)

    async def run(self, source: str, sample: Sample) -> float:
        raise GradingError("no sandbox", "python_grader_server_error")


def graded(grader: Any, text: str, item: Any = None, host: Host | None = None) -> Grade:
    sample = Sample(text, {"answer": "Paris"} if item is None else item)
    return asyncio.run(grader_from(grader).grade(sample, host or Host()))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{sample.output_text}}", '{"a": {"b": [1, "x"]}}'),
        ("<{{ item.answer }}|{{item.n}}>", "<{{item.n}}|2.5>"),
        ("{{sample.output_json.a.b.1}}", "x"),
        ("{{sample.output_json.a.b[0]}}", "1"),
        ("{{sample.output_json}}", '{"a": {"b": [1, "x"]}}'),
        ("{{item.deep}}", '{"ü": null}'),
        ("{{sample.output_tools}}", "[]"),
        ("{ {item.n}} {item.n}", "{ {item.n}} {item.n}"),
    ],
)
def test_templates(template: str, text: str) -> None:
    item = {"answer": "{{item.n}}", "n": 2.5, "deep": {"ü": None}}
    assert Template(template).fill(Sample('{"a": {"b": [1, "x"]}}', item)) == text


@pytest.mark.parametrize(
    "name",
    [
        "item",
        "sample",
        "sample.output_audio",
        "item.__class__()",
        "item.a|upper",
        "item.a + 1",
        "other.x",
        "item..a",
        "item.a b",
        "",
    ],
)
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match=r"use item\.COLUMN"):
        Template("{{" + name + "}}")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{item.nothing}}", "invalid_variable_error"),
        ("{{item.answer.__class__}}", "invalid_variable_error"),
        ("{{item.answer.0}}", "invalid_variable_error"),
        ("{{sample.output_json.a}}", "sample_parse_error"),
        ("{{sample.output_tools.0}}", "invalid_variable_error"),
        ("{{item.long}}" * 5, "other_error"),
        ("{{item.half}}", "other_error"),
    ],
)
def test_names_that_are_not_there(template: str, kind: str) -> None:
    item = {"answer": "a", "long": "x" * 2**16, "half": "\ud800"}
    grade = graded({**CHECK, "input": template}, "no json", item)
    assert (grade.reward, [one.kind for one in grade.failures]) == (0.0, [kind])


@pytest.mark.parametrize(
    ("operation", "rewards"),
    [("eq", (1, 0, 0, 0)), ("ne", (0, 1, 1, 1)), ("like", (1, 0, 1, 0)), ("ilike", (1, 1, 1, 0))],
)
def test_string_checks(operation: str, rewards: tuple[int, ...]) -> None:
    texts = ("Paris", "PARIS", "It is Paris.", "Lyon")
    found = [graded({**CHECK, "operation": operation}, text).reward for text in texts]
    assert found == list(rewards)


def test_formulas_of_graders() -> None:
    multi = {
        "type": "multi",
        "name": "both",
        "graders": {"same": CHECK, "alike": ALIKE},
        "calculate_output": "(same + 3 * alike) / 4",
    }
    grade = graded(multi, "Pari")
    assert grade.reward == pytest.approx(3 / 4 * 8 / 9)
    assert {name: one.reward for name, one in grade.subs.items()} == {
        "same": 0.0,
        "alike": pytest.approx(8 / 9),
    }
    alone = {**multi, "graders": ALIKE, "calculate_output": "alike ^ 2"}
    assert graded(alone, "Pari").reward == pytest.approx((8 / 9) ** 2)
    # What fails is not taken for a reward of 0, of which a formula could make anything.
    failed = graded({**multi, "calculate_output": "1 - same"}, "x", {"answer": 1, "b": 2})
    assert failed.reward == 1.0
    failed = graded({**multi, "calculate_output": "1 - same"}, "x", {"b": 2})
    assert failed.reward == 0.0
    assert {one.kind for one in failed.failures} == {"invalid_variable_error"}


def test_judges() -> None:
    host = Host(['{"result": 7.5}', '{"result": 11}', '{"result": ', "perhaps", "no", "never"])
    assert graded(JUDGE, "Rome", host=host).reward == 7.5
    (asked,) = host.asked
    assert asked.messages == [{"role": "user", "content": "Rate Rome for Paris"}]
    assert asked.sampling == {"max_new_tokens": 9, "temperature": 0.0, "seed": 3}
    for _ in range(2):
        failed = graded(JUDGE, "Rome", host=host)
        assert [one.kind for one in failed.failures] == ["model_grader_parse_error"]
    assert [graded(LABELS, "x", host=host).reward for _ in range(2)] == [1.0, 0.0]
    assert graded(LABELS, "x", host=host).failures[0].kind == "model_grader_parse_error"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operation": "regex"}, "grader: operation='regex'; use eq, ne, like, ilike"),
        ({"name": None}, "grader.name: Expected `str`, got `null`"),
        ({"input": 5}, "grader.input: a value of the type int; use a text"),
        ({"input": "x" * 2**17}, "use at most 65536"),
        ({"extra": 1}, "contains unknown field `extra`"),
        ({"type": "magic"}, "grader.type='magic'"),
        ({"type": ["eq"]}, "grader.type="),
        ({"input": "{{item.a}}" * 300}, "300 names; use at most 256"),
    ],
)
def test_graders_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GraderError) as refused:
        grader_from({**CHECK, **change})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ({**ALIKE, "evaluation_metric": "cosine"}, "'cosine' needs embeddings"),
        ({**JUDGE, "range": [1, 0]}, "use a lesser number first"),
        ({**JUDGE, "range": [0, float("nan")]}, "grader.range[1]: Expected `float`"),
        ({**JUDGE, "range": [0]}, "grader.range: Expected `array` of length 2"),
        ({**JUDGE, "sampling_params": {"top_k": 1}}, "contains unknown field `top_k`"),
        ({**JUDGE, "sampling_params": {"seed": 0.5}}, "seed: Expected `int | null`"),
        ({**JUDGE, "sampling_params": {"seed": True}}, "got `bool`"),
        ({**JUDGE, "input": []}, "grader.input: Expected `array` of length >= 1"),
        ({**JUDGE, "input": [{"role": "tool", "content": "x"}]}, "input[0]: role='tool'; use user"),
        (
            {**JUDGE, "input": [{"role": "user", "content": {"type": "input_image", "u": "x"}}]},
            "judges read texts alone",
        ),
        ({**LABELS, "passing_labels": ["maybe"]}, "that are not in labels"),
        ({**LABELS, "labels": ["a", "a"]}, "has a text twice"),
        ({"type": "python", "name": "p", "source": "x", "image_tag": "y"}, "image_tag is not"),
        ({"type": "python", "name": "p", "source": "\ud800"}, "characters that no source has"),
        ({"type": "multi", "name": "m", "graders": {}, "calculate_output": "1"}, "1 to 16"),
        (
            {"type": "multi", "name": "m", "graders": {"a b": CHECK}, "calculate_output": "1"},
            "which no formula can have",
        ),
        (
            {"type": "multi", "name": "m", "graders": {"a": CHECK}, "calculate_output": "b"},
            "grader.calculate_output names 'b'",
        ),
        ([], "has to be an object"),
    ],
)
def test_other_graders_that_cannot_be(grader: Any, said: str) -> None:
    with pytest.raises(GraderError) as refused:
        grader_from(grader)
    assert said in str(refused.value)


def test_a_multi_grader_in_another_is_refused() -> None:
    multi = {"type": "multi", "name": "m", "graders": {"a": CHECK}, "calculate_output": "a"}
    with pytest.raises(GraderError, match="multi grader in another one"):
        grader_from({**multi, "graders": {"b": multi}})


# ----------------------------------------------------------------------------------------- formulas

NAMES = ("a", "b")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5 * a + b", 3.5),
        ("2 * a ^ b", 2 * 3**2),
        ("2 ** -1", 0.5),
        ("-a ^ 2", -9),
        ("min(a, b, 1) + max(a)", 4),
        ("sqrt(abs(-9)) + floor(1.5) + ceil(1.5)", 6),
        ("exp(log(a)) / b", 1.5),
        (" (a) ", 3),
    ],
)
def test_formulas(text: str, value: float) -> None:
    assert Formula.of(text, "f", NAMES).compute({"a": 3.0, "b": 2.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "a / (b - 2)",
        "10 ^ 1000",
        "9 ^ 9 ^ 9 ^ 9 ^ 9",
        "log(0)",
        "sqrt(-1)",
        "(-8) ^ 0.5",
        "exp(1e3)",
        "1e300 * 1e300",
    ],
)
def test_what_has_no_value(text: str) -> None:
    formula = Formula.of(text, "f", NAMES)
    with pytest.raises(GradingError, match="cannot be computed") as failed:
        formula.compute({"a": 3.0, "b": 2.0})
    assert failed.value.kind == "formula_parse_error"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("c + a", "f names 'c'; its graders are a, b"),
        ("__import__('os')", "no arithmetic: Call"),
        ("a.real", "no arithmetic: Attribute"),
        ("a[0]", "no arithmetic: Subscript"),
        ("[a for a in b]", "no arithmetic: ListComp"),
        ("(lambda: a)()", "no arithmetic: Call"),
        ("'a' * 9", "no arithmetic: Constant"),
        ("True + a", "no arithmetic: Constant"),
        ("a if b else 1", "no arithmetic: IfExp"),
        ("a // b", "no arithmetic: BinOp"),
        ("(a := 1)", "no arithmetic: NamedExpr"),
        ("abs(a, b)", "give abs 1 argument"),
        ("max()", "give max at least one argument"),
        ("max(*a)", "no arithmetic: Starred"),
        ("f'{a}'", "no arithmetic"),
        ("1e999", "no arithmetic: Constant"),
        ("a +", "is no formula"),
        ("", "is no formula"),
        ("a\0b", "is no formula"),
        ("(" * 500 + "a" + ")" * 500, "is no formula"),
        ("-" * 1000 + "a", "f is"),
        ("+".join("a" * 500), "too large"),
        ("a+" * 600 + "a", "use at most 1024"),
    ],
)
def test_what_is_no_formula(text: str, said: str) -> None:
    with pytest.raises(GraderError) as refused:
        Formula.of(text, "f", NAMES)
    assert said in str(refused.value)


def test_numbers_are_floats() -> None:
    assert math.isclose(Formula.of("7 ^ 300", "f", ()).compute({}), 7.0**300)


# ---------------------------------------------------------------------- graders as reward functions


def rewards_of(folder: Path, grader: Any, *answers: Any) -> list[float]:
    (folder / "grader.json").write_text(json.dumps(grader))
    rewards = Rewards(reward_function("grader:grader.json", folder))
    assert rewards.names == [grader["name"]]
    scored = Scored(
        ["Which?", [{"role": "user", "content": "Which?"}]],
        ["Paris", [{"role": "assistant", "content": "Rome"}]],
        [[1], [2]],
        {"answer": answers},
    )
    found: list[float] = rewards.score(scored, {"global_step": 1})[:, 0].tolist()
    return found


def test_a_grader_is_a_reward_function(tmp_path: Path) -> None:
    assert rewards_of(tmp_path, CHECK, "Paris", "Paris") == [1.0, 0.0]
    source = "def grade(sample, item):\n    return len(sample['output_text'] + item['answer'])\n"
    python = {"type": "python", "name": "length", "source": source}
    assert rewards_of(tmp_path, python, "a", "bc") == [6.0, 6.0]


def test_a_completion_that_cannot_be_graded_has_no_reward(tmp_path: Path) -> None:
    nested = {**CHECK, "reference": "{{item.answer.name}}"}
    assert rewards_of(tmp_path, nested, {"name": "Paris"}, "Paris") == [1.0, 0.0]
    with pytest.raises(FinetuneError, match="no completion can be graded: the template names"):
        rewards_of(tmp_path, nested, "Paris", "Paris")


def test_graders_that_cannot_reward(tmp_path: Path) -> None:
    judge = {
        "type": "score_model",
        "name": "judge",
        "model": "m",
        "input": [{"role": "user", "content": "Rate it"}],
    }
    for content, said in (
        (json.dumps(judge), "asks the judge 'm', and there is no server to ask"),
        (json.dumps({**CHECK, "operation": "x"}), "grader.json: operation='x'"),
        ("{", "grader.json"),
    ):
        (tmp_path / "grader.json").write_text(content)
        with pytest.raises(GraderError) as refused:
            reward_function("grader:grader.json", tmp_path)
        assert said in str(refused.value)
    with pytest.raises(GraderError, match="nothing"):
        reward_function("grader:nothing.json", tmp_path)


# --------------------------------------------------------------------------------------- similarity

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "other_peoples_metrics.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_the_value_of_its_package(name: str) -> None:
    assert len(ROWS) == 32
    for row in ROWS:
        value = METRICS[name](row["text"], row["reference"])
        assert value == pytest.approx(row[name], abs=1e-9), row
        assert 0 <= value <= 1


@pytest.mark.parametrize("name", METRICS)
def test_the_longest_texts_take_no_time(name: str) -> None:
    text, reference = ("ab cd ef y" * 2**12)[:MOST_COMPARED], "ba dc y" * (MOST_COMPARED // 7)
    METRICS[name]("a", "b")  # imports
    began = time.perf_counter()
    assert 0 <= METRICS[name](text, reference) <= 1
    assert 0 <= METRICS[name]("y" * MOST_COMPARED, "yt" * (MOST_COMPARED // 2)) <= 1
    assert time.perf_counter() - began < 5


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    alike = {"type": "text_similarity", "name": "a", "input": "a", "reference": "b"}
    with pytest.raises(GraderError, match=r"pip install 'pcg\[graders\]'"):
        grader_from({**alike, "evaluation_metric": "bleu"})


# ------------------------------------------------------------------- the sandbox of python graders

SAMPLE = Sample('{"a": 3}', {"b": 4})


def test_a_source_computes() -> None:
    check_sandbox()
    source = (
        "import re, difflib\n"
        "def grade(sample, item):\n"
        "    print('not a score')\n"
        "    return sample['output_json']['a'] + item['b'] + len(re.findall('a', 'aa'))\n"
    )
    assert run_grader(source, SAMPLE) == 9.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return open(FILE).read()", "PermissionError"),
        ("import os; return os.open(FILE, 0)", "PermissionError"),
        ("import os; return os.fork()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("import socket", "No module named 'socket'"),
        ("import pcg", "No module named 'pcg'"),
        ("import _socket; return _socket.socket()", "No module named"),
        ("return len(bytearray(2**31))", "MemoryError"),
        ("import os\n    while True: os.write(1, b'x' * 65536)", "wrote more than"),
        ("import os; os._exit(0)", "ended without a score"),
        ("return float('nan')", "grade returned nan"),
        ("return 'much'", "ValueError"),
        ("return 10 ** 400", "OverflowError"),
        ("raise SystemExit", "SystemExit"),
        ("(((", "SyntaxError"),
    ],
)
def test_a_source_gets_nothing_else(body: str, said: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    os.environ["PCG_SECRET"] = "1"
    try:
        with pytest.raises(GradingError) as failed:
            run_grader(f"FILE = {str(secret)!r}\ndef grade(sample, item):\n    {body}\n", SAMPLE)
    finally:
        del os.environ["PCG_SECRET"]
    assert said in str(failed.value)
    assert failed.value.kind == "python_grader_runtime_error"


def test_a_source_sees_no_environment_and_no_other_file() -> None:
    source = (
        "import os\n"
        "def grade(sample, item):\n"
        "    count = 0\n"
        "    for number in range(3, 64):\n"
        "        try:\n"
        "            os.fstat(number)\n"
        "            count += 1\n"
        "        except OSError:\n"
        "            pass\n"
        "    return count + 100 * ('PCG_SECRET' in os.environ)\n"
    )
    os.environ["PCG_SECRET"] = "1"
    try:
        assert run_grader(source, SAMPLE) == 0
    finally:
        del os.environ["PCG_SECRET"]


def test_a_source_that_lasts_is_ended() -> None:
    source = "import time\ndef grade(sample, item):\n    time.sleep(1000)\n"
    with pytest.raises(GradingError, match=r"took more than 0\.2 s"):
        run_grader(source, SAMPLE, wall_s=0.2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('half \\ud800')", "half ?"),
        ('import os; os.write(1, b\'{"error": "\\\\ud800"}\'); os._exit(0)', "?"),
        ("import os; os.write(1, b'{\"score\": 1' + b'0' * 400 + b'}'); os._exit(0)", None),
    ],
)
def test_what_a_source_writes_can_be_sent_on(body: str, said: str | None) -> None:
    source = f"def grade(sample, item):\n    {body}\n"
    if said is None:  # which a grade refuses
        assert run_grader(source, SAMPLE) == float("inf")
        return
    with pytest.raises(GradingError) as failed:
        run_grader(source, SAMPLE)
    assert said in str(failed.value)
    assert str(failed.value).encode()
