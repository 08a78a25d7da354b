"""The host of graders: what asks judges, runs source, and takes work that lasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from pcg.graders.sample import Sample

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Question:
    """A question to a judge.

    Attributes:
        model: its name.
        messages: a chat, each with `role` and `content`.
        sampling: `max_new_tokens`, `temperature`, `top_p` and `seed`, those that are given.
        schema: the JSON schema of the answer.
        choices: in place of it, the answers that there are.
        reasoning_effort: a word for the chat template; None to leave it out.
    """

    model: str
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] | None = None
    reasoning_effort: str | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of a judge; `tokens` are those of question and answer."""

    text: str
    tokens: int


class GradingHost(Protocol):
    """Does what a grader cannot do by itself."""

    async def beside(
        self,
        act: Callable[Arguments, Result],
        *args: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Run a function that takes time, so that others go on meanwhile."""
        ...

    async def ask(self, question: Question) -> Answer:
        """Ask a judge. GradingError: it cannot answer."""
        ...

    async def run(self, source: str, sample: Sample) -> float:
        """Run the `grade(sample, item)` of a source in a sandbox.

        GradingError: it fails, or is not allowed to run.
        """
        ...
