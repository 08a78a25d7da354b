"""The graders `score_model` and `label_model`: a served model is the judge.

Messages of model graders: a chat with templates, for a judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pcg.errors import GraderError, GradingError
from pcg.graders.fields import MOST_TEXT, Fields, number
from pcg.graders.grader import Grader, Score
from pcg.graders.host import GradingHost, Question
from pcg.graders.sample import Sample
from pcg.graders.template import Template

# ----------------------------------------------------------------------------------------- messages


MOST_MESSAGES = 64
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text")
MOST_CHARACTERS = 2**20
"""The most characters of all messages, filled in."""


@dataclass(frozen=True)
class ModelMessage:
    """A message of a chat; the texts of its parts are joined."""

    role: str
    parts: tuple[Template, ...]


def read_messages(given: Fields) -> tuple[ModelMessage, ...]:
    """Return the messages of `input`. GraderError: they cannot be."""
    found = []
    for index, one in enumerate(given.items("input", MOST_MESSAGES)):
        where = f"{given.where}.input.{index}"
        message = Fields.of(one, where, ("role", "content", "type"))
        if "type" in message:
            message.one_of("type", ("message",))
        role = message.one_of("role", _ROLES)
        content = message.required("content")
        parts = content if isinstance(content, list) else [content]
        if not 0 < len(parts) <= MOST_MESSAGES:
            raise GraderError(f"{where}.content: use a list of 1 to {MOST_MESSAGES}")
        texts = (_text(part, f"{where}.content") for part in parts)
        found.append(ModelMessage(role, tuple(Template.of(text, where) for text in texts)))
    return tuple(found)


def fill_messages(messages: Sequence[ModelMessage], sample: Sample) -> list[dict[str, str]]:
    """Return the chat for a sample. GradingError: a name is not there, or it is too long."""
    made = []
    length = 0
    for message in messages:
        content = "".join(part.fill(sample) for part in message.parts)
        length += len(content)
        if length > MOST_CHARACTERS:
            raise GradingError(
                f"the judge's chat has more than {MOST_CHARACTERS} characters; use shorter items",
                "other_error",
            )
        made.append({"role": message.role, "content": content})
    return made


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        text: Any = part
    else:
        fields = Fields.of(part, where, _part_fields(part))
        kind = fields.text("type", 64)
        if kind not in _TEXTS:
            raise GraderError(f"{where} has a part of the type {kind!r}; judges read texts alone")
        text = fields.text("text")
    if len(text) > MOST_TEXT:
        raise GraderError(f"{where} has {len(text)} characters; use at most {MOST_TEXT}")
    return str(text)


def _part_fields(part: Any) -> tuple[str, ...]:
    """Return the fields that a part may have: those of images and audio are refused by type."""
    if isinstance(part, dict) and part.get("type") not in _TEXTS:
        return tuple(map(str, part))
    return ("type", "text")


# ------------------------------------------------------------------------------------ model graders


MOST_ANSWER_TOKENS = 4096
_ANSWER_TOKENS = 64
"""The tokens of an answer by default: an object with one number, or a label."""
_MOST_LABELS = 64
_WIDEST = 1e6
_STEP = 0.001
"""What scores of a range of 1 or more are multiples of: some judges write digits without end."""
_MOST_NAME = 512
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SAMPLING = ("max_completions_tokens", "seed", "temperature", "top_p", "reasoning_effort")


@dataclass(frozen=True)
class ScoreModel(Grader):
    """A judge that gives a number, within a range, as the field `result` of a JSON object.

    Attributes:
        model: the judge's name.
        messages: what it is asked.
        range: the least and the greatest score.
        sampling: fields of its request.
        effort: a word for its chat template; None to leave it out.
    """

    type: ClassVar[str] = "score_model"
    fields: ClassVar[tuple[str, ...]] = (
        "type",
        "name",
        "model",
        "input",
        "range",
        "sampling_params",
    )

    name: str
    model: str
    messages: tuple[ModelMessage, ...]
    range: tuple[float, float]
    sampling: Mapping[str, Any]
    effort: str | None

    @classmethod
    def read(cls, given: Fields) -> ScoreModel:
        """Return the grader of some fields. GraderError: it cannot be."""
        low, high = 0.0, 1.0
        if "range" in given:
            bounds = given.items("range", 2)
            if len(bounds) != 2:
                raise GraderError(f"{given.where}.range has {len(bounds)} numbers; use two")
            low, high = (number(one, f"{given.where}.range", -_WIDEST, _WIDEST) for one in bounds)
            if low >= high:
                raise GraderError(f"{given.where}.range is {low:g} to {high:g}; use a lesser first")
        sampling, effort = _read_sampling(given)
        model = given.text("model", _MOST_NAME)
        return cls(given.name(), model, read_messages(given), (low, high), sampling, effort)

    @property
    def judge(self) -> str:
        return self.model

    async def score(self, sample: Sample, host: GradingHost) -> Score:
        low, high = self.range
        asked: dict[str, object] = {"type": "number", "minimum": low, "maximum": high}
        if high - low >= 1:
            asked["multipleOf"] = _STEP
        schema = {
            "type": "object",
            "properties": {"result": asked},
            "required": ["result"],
            "additionalProperties": False,
        }
        messages = await host.beside(fill_messages, self.messages, sample)
        answer = await host.ask(
            Question(self.model, messages, self.sampling, schema, reasoning_effort=self.effort)
        )
        tokens = {self.model: answer.tokens}
        try:
            result = float(json.loads(answer.text)["result"])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            raise GradingError(
                f"the judge's answer is no object with a number 'result': {answer.text[:128]!r}; "
                "give more sampling_params.max_completions_tokens if it was cut",
                "model_grader_parse_error",
            ) from None
        if not low <= result <= high:
            said = f"the judge's score {result} is not from {low:g} to {high:g}"
            raise GradingError(said, "model_grader_parse_error")
        return Score(result, tokens=tokens)


@dataclass(frozen=True)
class LabelModel(Grader):
    """A judge that picks a label: 1 if it is a passing one, else 0."""

    type: ClassVar[str] = "label_model"
    fields: ClassVar[tuple[str, ...]] = (
        "type",
        "name",
        "model",
        "input",
        "labels",
        "passing_labels",
    )

    name: str
    model: str
    messages: tuple[ModelMessage, ...]
    labels: tuple[str, ...]
    passing: frozenset[str]

    @classmethod
    def read(cls, given: Fields) -> LabelModel:
        """Return the grader of some fields. GraderError: it cannot be."""
        labels = given.texts("labels", _MOST_LABELS)
        passing = given.texts("passing_labels", _MOST_LABELS)
        if not set(passing) <= set(labels):
            raise GraderError(f"{given.where}.passing_labels has some that are not in labels")
        model = given.text("model", _MOST_NAME)
        return cls(given.name(), model, read_messages(given), labels, frozenset(passing))

    @property
    def judge(self) -> str:
        return self.model

    async def score(self, sample: Sample, host: GradingHost) -> Score:
        messages = await host.beside(fill_messages, self.messages, sample)
        sampling = {"temperature": 0.0, "max_new_tokens": MOST_ANSWER_TOKENS}
        answer = await host.ask(Question(self.model, messages, sampling, choices=self.labels))
        if answer.text not in self.labels:
            said = f"the judge's answer {answer.text[:128]!r} is none of the labels"
            raise GradingError(said, "model_grader_parse_error")
        return Score(float(answer.text in self.passing), tokens={self.model: answer.tokens})


def _read_sampling(given: Fields) -> tuple[dict[str, Any], str | None]:
    found: dict[str, Any] = {"max_new_tokens": _ANSWER_TOKENS, "temperature": 1.0}
    if "sampling_params" not in given:
        return found, None
    where = f"{given.where}.sampling_params"
    fields = Fields.of(given.given["sampling_params"], where, _SAMPLING)
    if "max_completions_tokens" in fields:
        most = fields.whole("max_completions_tokens", 1, MOST_ANSWER_TOKENS)
        found["max_new_tokens"] = most
    if "seed" in fields:
        found["seed"] = fields.whole("seed", 0, 2**53)
    if "temperature" in fields:
        found["temperature"] = fields.number("temperature", 0, 2)
    if "top_p" in fields:
        found["top_p"] = fields.number("top_p", 1e-6, 1)
    is_set = "reasoning_effort" in fields
    return found, fields.one_of("reasoning_effort", _EFFORTS) if is_set else None
