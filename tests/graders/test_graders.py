"""Graders of texts: templates, checks, formulas of them, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pcg.errors import GraderError, GradingError
from pcg.graders.grader import Answer, Grade, Question
from pcg.graders.reader import grader_from
from pcg.graders.sample import Sample, Template

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
    [
        ("eq", (1, 0, 0, 0)),
        ("ne", (0, 1, 1, 1)),
        ("like", (1, 0, 1, 0)),
        ("ilike", (1, 1, 1, 0)),
    ],
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
        (
            {**JUDGE, "sampling_params": {"top_k": 1}},
            "contains unknown field `top_k`",
        ),
        ({**JUDGE, "sampling_params": {"seed": 0.5}}, "seed: Expected `int | null`"),
        ({**JUDGE, "sampling_params": {"seed": True}}, "got `bool`"),
        ({**JUDGE, "input": []}, "grader.input: Expected `array` of length >= 1"),
        (
            {**JUDGE, "input": [{"role": "tool", "content": "x"}]},
            "input[0]: role='tool'; use user",
        ),
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
