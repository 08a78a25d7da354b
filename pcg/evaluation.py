"""Evaluation of a base and its adapters on the same data, side by side in the batches of an engine.

    loss         mean of -log p over the learned tokens of all rows
    perplexity   exp(loss)
    accuracy     share of questions whose right choice has the largest log-probability

Rows of questions have a text under `question`, `query` or `prompt`, texts under `choices`,
and under `answer` the index or the text of the right choice. A space joins a question and a choice,
as in lm-eval. `accuracy_norm` divides the log-probability of a choice by its characters, which is
lm-eval's acc_norm. Rows of a sequence classifier have a text and its label. Rows of all other
formats are those of finetuning, without their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from pcg.errors import DataError, GenerationError
from pcg.ir.program.program import labels_of
from pcg.keywords import takes
from pcg.runtime.data.dataset import ExampleReader, ReadOptions, tokenize
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.formats import TextSample, check_mapping
from pcg.runtime.data.sources import Placed, Row, Source, gather, holds_documents, read_rows
from pcg.runtime.executor import NO_TOKENIZER, Executor
from pcg.runtime.requests.request import classifying
from pcg.runtime.text.chat import kind_of, require_list, require_string
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import ChatOptions
from pcg.units import shown

_ASKED = ("question", "query", "prompt")


@dataclass(frozen=True)
class Scores:
    """The scores of a model.

    Attributes:
        model: the adapter's name; "base" without an adapter.
        rows: the number of rows or questions.
        tokens: the number of learned tokens or labels, or of all choices' tokens.
        loss: None for questions.
        perplexity: None for questions and labels.
        accuracy: None for rows without questions and labels.
        accuracy_norm: None for rows without questions.
    """

    model: str
    rows: int
    tokens: int
    loss: float | None = None
    perplexity: float | None = None
    accuracy: float | None = None
    accuracy_norm: float | None = None


@dataclass(frozen=True)
class EvaluateArguments(ChatOptions):
    """Arguments of `evaluate`.

    Attributes:
        executor: the executor.
        data: the rows, in any form of `Executor.finetune`'s data.
        adapters: names of adapters, and None for the base; by default the base and all adapters.
        batch_size: rows of a batch; each row runs once for each model.
        max_length: the maximum number of tokens of a row; longer rows are truncated, and questions
            refused. By default the model's positions, and longer rows are refused.
        columns: the data's name of a column, by the name that is read.
        chat_template: the chat template, instead of that of each adapter or of the model: a file,
            or the template's text.
    """

    executor: Executor
    data: Source
    adapters: Sequence[str | None] | None = None
    batch_size: int = field(default=8, kw_only=True)
    max_length: int | None = field(default=None, kw_only=True)
    columns: Mapping[str, str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_mapping({name: x for name, x in self.renamed.items() if name not in _OF_QUESTIONS})
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise DataError(f"batch_size={shown(self.batch_size)}; use an int of at least 1")

    @property
    def renamed(self) -> Mapping[str, str]:
        return self.columns or {}

    @property
    def models(self) -> list[str | None]:
        return [None, *self.executor.adapters] if self.adapters is None else [*self.adapters]


_OF_QUESTIONS = ("choices", "answer", *_ASKED)


@dataclass(frozen=True)
class Question:
    """A question as an example for each choice.

    Attributes:
        lengths: the characters of each choice.
        right: the index of the right choice.
    """

    examples: Sequence[Example]
    lengths: Sequence[int]
    right: int


@takes(EvaluateArguments, DataError)
def evaluate(arguments: EvaluateArguments) -> list[Scores]:
    """Return the scores of the base and of adapters on data.

    Raises:
        AdapterError: no adapter has a name.
        DataError: a row cannot be read.
        GenerationError: the model has no tokenizer, or a row has too many tokens.
    """
    tokenizer = arguments.executor.tokenizer
    if tokenizer is None:
        raise GenerationError(NO_TOKENIZER)
    positions = arguments.executor.state.max_positions
    most = min(filter(None, (arguments.max_length, positions)), default=None)
    data = gather(arguments.data, columns=arguments.renamed)
    labels = labels_of(arguments.executor.program.config)
    if labels:
        options = ReadOptions(
            arguments.max_length,
            template=arguments.template(),
            variables=arguments.variables(),
            columns=arguments.renamed,
            labels=labels,
        )
        reader = ExampleReader(data, tokenizer, options)
        return _by_labels(arguments, _fitting(reader, positions, label=1), len(labels))
    first = next(read_rows(data), None)
    if first is None:
        raise DataError("no rows to evaluate")
    if (
        isinstance(first.value, Mapping)
        and arguments.renamed.get("choices", "choices") in first.value
    ):
        questions = (
            question_of(row, tokenizer, arguments.renamed, most) for row in read_rows(data)
        )
        return _by_choices(arguments, questions)
    cuts = most if arguments.max_length is not None or holds_documents(data) else None
    options = ReadOptions(
        max_length=cuts,
        may_drop=False,
        columns=arguments.renamed,
        variables=arguments.variables(),
    )
    scores = dict[str, Scores]()
    for tokenizer, models in _tokenizers(arguments):
        some = replace(arguments, adapters=models)
        examples = _fitting(ExampleReader(data, tokenizer, options), positions)
        scores |= {score.model: score for score in _by_loss(some, examples)}
    return [scores[model or "base"] for model in arguments.models]


def _tokenizers(arguments: EvaluateArguments) -> list[tuple[Tokenizer, list[str | None]]]:
    """Return the tokenizers that render chats of the models, each with its models."""
    chats, groups = arguments.executor.chat_tokenizer, dict[str, Any]()
    for model in arguments.models:
        tokenizer = chats(model, arguments.chat_template)
        template = tokenizer.chat_template
        key = "" if template is None else repr(template.sources)
        groups.setdefault(key, (tokenizer, []))[1].append(model)
    return list(groups.values())


def _fitting(
    placed: Iterable[Placed], positions: int | None, *, label: int = 0
) -> Iterator[Example]:
    """Yield examples. DataError: names an example that is longer than the model's positions.

    Args:
        label: 1 if an example's last token is a label, which takes no position.
    """
    for example, place in placed:
        length = len(example.ids) - label
        if positions is not None and length > positions:
            raise DataError(
                f"{place} has {length} tokens, and the model {positions} positions; "
                f"truncate such rows with max_length={positions}, or split them"
            )
        yield example


def question_of(
    row: Row, tokenizer: Tokenizer, columns: Mapping[str, str], most: int | None
) -> Question:
    """Return a row's question. DataError: the row has no question, or too many tokens."""
    if not isinstance(row.value, Mapping):
        raise DataError(f"{row.where}: the row is {kind_of(row.value)}; expected a question")
    value = {**row.value, **{name: row.value.get(column) for name, column in columns.items()}}
    name = next((name for name in _ASKED if value.get(name) is not None), None)
    if name is None:
        raise DataError(f"{row.where} has no {', '.join(map(repr, _ASKED))}; give the question")
    asked = require_string(value[name], repr(name), row.where)
    choices = require_list(value.get("choices"), "'choices'", row.where)
    texts = [require_string(choice, "a choice", row.where) for choice in choices]
    answer = value.get("answer")
    right = texts.index(answer) if answer in texts else answer
    if type(right) is not int or not 0 <= right < len(texts):
        raise DataError(
            f"{row.where} has the answer {shown(answer)}; give the index or the text of one of the "
            f"{len(texts)} choices"
        )
    space = "" if asked.endswith((" ", "\n")) else " "
    examples = [
        tokenize(TextSample(asked, space + text), tokenizer, row.where, append_eos=False)
        for text in texts
    ]
    longest = max(len(example.ids) for example in examples)
    if most is not None and longest > most:
        raise DataError(f"{row.where} has {longest} tokens, and the most are {most}; shorten it")
    return Question(examples, [len(text) for text in texts], right)


def _by_loss(arguments: EvaluateArguments, examples: Iterator[Example]) -> list[Scores]:
    models = arguments.models
    sums, rows, tokens = [0.0] * len(models), 0, 0
    while lot := [*islice(examples, arguments.batch_size)]:
        rows += len(lot)
        tokens += sum(example.targets for example in lot)
        for at, values in enumerate(_logprobs(arguments, lot)):
            sums[at] -= math.fsum(values)
    losses = [total / tokens for total in sums]
    return [
        Scores(model or "base", rows, tokens, loss, math.exp(min(loss, 700.0)))
        for model, loss in zip(models, losses, strict=True)
    ]


def _by_labels(
    arguments: EvaluateArguments, examples: Iterator[Example], labels: int
) -> list[Scores]:
    models = arguments.models
    sums, hits, rows = [0.0] * len(models), [0] * len(models), 0
    while lot := [*islice(examples, arguments.batch_size)]:
        rows += len(lot)
        prompts = [list(example.ids[:-1]) for example in lot]
        names = [model for model in models for _ in prompts]
        completions: list[Any] = arguments.executor.generate(
            prompts * len(models), names, **classifying(labels)
        )
        for index, completion in enumerate(completions):
            at, example = index // len(lot), lot[index % len(lot)]
            logprobs = dict(completion.logprobs[0].top)
            sums[at] -= logprobs[example.ids[-1]]
            hits[at] += max(logprobs, key=lambda label: logprobs[label]) == example.ids[-1]
    return [
        Scores(model or "base", rows, rows, loss=total / rows, accuracy=hit / rows)
        for model, total, hit in zip(models, sums, hits, strict=True)
    ]


def _by_choices(arguments: EvaluateArguments, questions: Iterator[Question]) -> list[Scores]:
    models = arguments.models
    hits, hits_norm = [0] * len(models), [0] * len(models)
    rows = tokens = 0
    while lot := [*islice(questions, arguments.batch_size)]:
        rows += len(lot)
        examples = [example for question in lot for example in question.examples]
        tokens += sum(example.targets for example in examples)
        for at, values in enumerate(_logprobs(arguments, examples)):
            begin = 0
            for question in lot:
                scores = values[begin : begin + len(question.examples)]
                begin += len(question.examples)
                norm = [x / max(n, 1) for x, n in zip(scores, question.lengths, strict=True)]
                hits[at] += scores.index(max(scores)) == question.right
                hits_norm[at] += norm.index(max(norm)) == question.right
    return [
        Scores(model or "base", rows, tokens, accuracy=hit / rows, accuracy_norm=norm / rows)
        for model, hit, norm in zip(models, hits, hits_norm, strict=True)
    ]


def _logprobs(arguments: EvaluateArguments, examples: Sequence[Example]) -> list[list[float]]:
    """Return the summed log-probability of each example's targets, by model."""
    models = arguments.models
    prompts = [list(example.ids) for example in examples]
    names = [model for model in models for _ in prompts]
    completions: list[Any] = arguments.executor.generate(
        prompts * len(models), names, max_new_tokens=0, prompt_logprobs=0
    )
    sums = []
    for example, completion in zip([*examples] * len(models), completions, strict=True):
        pairs = zip(example.labels[1:], completion.prompt_logprobs[1:], strict=True)
        sums.append(math.fsum(each.logprob for label, each in pairs if label != IGNORED))
    return [sums[begin : begin + len(prompts)] for begin in range(0, len(sums), len(prompts))]
