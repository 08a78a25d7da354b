"""The graders `score_model` and `label_model`: a served model is the judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pcg.errors import GradingError
from pcg.graders.grader import Grade, Grader, GradingHost, Question
from pcg.graders.sample import Sample, Template
from pcg.graders.text_graders import require_word

MOST_MESSAGES = 64
MOST_CHARACTERS = 2**20
"""Characters of all messages, filled in."""
MOST_ANSWER_TOKENS = 4096
_ANSWER_TOKENS = 64
"""Tokens of an answer by default: an object with one number, or a label."""
_STEP = 0.001
"""Scores of a range of 1 or more are multiples of it: some judges write digits without end."""
_ROLES = ("user", "assistant", "system", "developer")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_Bound = Annotated[float, Meta(ge=-1e6, le=1e6)]
_ModelName = Annotated[str, Meta(max_length=512)]
_Labels = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=128)], ...],
    Meta(min_length=1, max_length=64),
]


class _TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str


class Content:
    """The content of a message: a text or parts of it, which are joined.

    Raises:
        ValueError: it cannot be.
    """

    def __init__(self, value: object) -> None:
        parts = value if isinstance(value, list) else [value]
        if not 0 < len(parts) <= MOST_MESSAGES:
            raise ValueError(f"use a list of 1 to {MOST_MESSAGES}")
        self.parts = tuple(map(_text, parts))


def _text(part: Any) -> Template:
    if isinstance(part, dict):
        kind = part.get("type")
        if kind not in ("input_text", "output_text"):
            shown = repr(kind)[:64]
            raise ValueError(f"it has a part of the type {shown}; judges read texts alone")
        part = msgspec.convert(part, _TextPart).text
    return Template(part)


class ModelMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the chat with a judge."""

    role: str
    content: Content
    type: str | None = None

    def __post_init__(self) -> None:
        require_word("role", self.role, _ROLES)
        if self.type is not None:
            require_word("type", self.type, ("message",))


_Messages = Annotated[list[ModelMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]


def fill_messages(messages: Sequence[ModelMessage], sample: Sample) -> list[dict[str, str]]:
    """Return the chat for a sample. GradingError: a name is not there, or it is too long."""
    chat = []
    length = 0
    for message in messages:
        content = "".join(part.fill(sample) for part in message.content.parts)
        length += len(content)
        if length > MOST_CHARACTERS:
            text = f"the judge's chat has more than {MOST_CHARACTERS} characters; use shorter items"
            raise GradingError(text, "other_error")
        chat.append({"role": message.role, "content": content})
    return chat


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a judge's request."""

    max_completions_tokens: Annotated[int, Meta(ge=1, le=MOST_ANSWER_TOKENS)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
    reasoning_effort: str | None = None

    def __post_init__(self) -> None:
        if self.reasoning_effort is not None:
            require_word("reasoning_effort", self.reasoning_effort, _EFFORTS)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields as `Question` has them."""
        fields = {
            "max_new_tokens": self.max_completions_tokens or _ANSWER_TOKENS,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "seed": self.seed,
            "top_p": self.top_p,
        }
        return {name: value for name, value in fields.items() if value is not None}


class ScoreModel(Grader, tag="score_model", frozen=True, kw_only=True):
    """A judge that gives a number within a range, as the field `result` of a JSON object.

    Attributes:
        range: the least and the greatest score; 0 and 1 by default.
    """

    model: _ModelName
    input: _Messages
    range: tuple[_Bound, _Bound] | None = None
    sampling_params: Sampling | None = None

    def __post_init__(self) -> None:
        low, high = self._bounds
        if not low < high:
            raise ValueError(f"range is {low:g} to {high:g}; use a lesser number first")

    @property
    def _bounds(self) -> tuple[float, float]:
        return self.range or (0.0, 1.0)

    @property
    def judge(self) -> str:
        return self.model

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        low, high = self._bounds
        result: dict[str, object] = {"type": "number", "minimum": low, "maximum": high}
        if high - low >= 1:
            result["multipleOf"] = _STEP
        schema = {
            "type": "object",
            "properties": {"result": result},
            "required": ["result"],
            "additionalProperties": False,
        }
        messages = await host.beside(fill_messages, self.input, sample)
        sampling = self.sampling_params or Sampling()
        effort = sampling.reasoning_effort
        answer = await host.ask(
            Question(self.model, messages, sampling.fields, schema, reasoning_effort=effort)
        )
        try:
            score = float(json.loads(answer.text)["result"])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            raise GradingError(
                f"the judge's answer is no object with a number 'result': {answer.text[:128]!r}; "
                "give more sampling_params.max_completions_tokens if it was cut",
                "model_grader_parse_error",
            ) from None
        if not low <= score <= high:
            message = f"the judge's score {score} is not from {low:g} to {high:g}"
            raise GradingError(message, "model_grader_parse_error")
        return Grade(self, score, tokens={self.model: answer.tokens})


class LabelModel(Grader, tag="label_model", frozen=True, kw_only=True):
    """A judge that picks a label: 1 for a passing label, else 0."""

    model: _ModelName
    input: _Messages
    labels: _Labels
    passing_labels: _Labels

    def __post_init__(self) -> None:
        for name, labels in (("labels", self.labels), ("passing_labels", self.passing_labels)):
            if len(set(labels)) < len(labels):
                raise ValueError(f"{name} has a text twice; name each once")
        if not set(self.passing_labels) <= set(self.labels):
            raise ValueError("passing_labels has some that are not in labels")

    @property
    def judge(self) -> str:
        return self.model

    async def score(self, sample: Sample, host: GradingHost) -> Grade:
        messages = await host.beside(fill_messages, self.input, sample)
        sampling = {"temperature": 0.0, "max_new_tokens": MOST_ANSWER_TOKENS}
        answer = await host.ask(Question(self.model, messages, sampling, choices=self.labels))
        if answer.text not in self.labels:
            message = f"the judge's answer {answer.text[:128]!r} is none of the labels"
            raise GradingError(message, "model_grader_parse_error")
        passes = answer.text in self.passing_labels
        return Grade(self, float(passes), tokens={self.model: answer.tokens})
