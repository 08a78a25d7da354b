"""Finetuning data: rows of text become tokens and labels.

    files or rows (`sources`) → samples (`formats`) → Example(ids, labels)

`labels[i]` belongs to the token at position i, as in transformers: `ids[i]` if the token is learned
and -100 if not. The loss shifts the labels: logits at position i are compared with `labels[i + 1]`,
and `labels[0]` is never used.

A token is learned if it covers a learned character. Text is tokenized as a whole, and characters
are mapped by the tokenizer's offsets, so that labels never depend on tokenizing a part of the text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, overload

from pcg.errors import DataError, GenerationError
from pcg.runtime.data.example import IGNORED, Example, ModelSizes
from pcg.runtime.data.formats import (
    FORMATS,
    ChatSample,
    Format,
    Sample,
    TextSample,
    TokenSample,
    detect,
    parse,
    parse_pair,
)
from pcg.runtime.data.sources import (
    UNLIMITED,
    DataLimits,
    Gathered,
    Row,
    Source,
    check_tokens,
    gather,
    holds_documents,
    read_rows,
)
from pcg.runtime.text.chat import Message, Span
from pcg.runtime.text.chat_spans import assistant_spans, check_context
from pcg.runtime.text.tokenizer import Encoding, Tokenizer


@dataclass(frozen=True)
class Dataset(Sequence[Example]):
    """The examples of a data set, and facts of reading it.

    Attributes:
        examples: the examples in the order of the rows.
        format: name of the rows' format; "document" for a plain text file.
        truncated: number of examples that were cut to the maximum length.
        dropped: number of rows without target tokens.
        places: the place of each example, such as "train.jsonl line 7"; empty if unknown.
        checked: the model sizes that all examples fit; None if unchecked.
    """

    examples: tuple[Example, ...]
    format: str
    truncated: int = 0
    dropped: int = 0
    places: tuple[str, ...] = ()
    checked: ModelSizes | None = None

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        return self.examples[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def targets(self) -> int:
        return sum(example.targets for example in self.examples)


@dataclass(frozen=True)
class ReadOptions:
    """Options for converting rows to examples.

    Attributes:
        max_length: the maximum number of tokens of an example; longer examples are truncated at the
            end, and plain text files are cut into consecutive examples of this length. None for no
            maximum.
        format: a name of `formats.FORMATS`; "auto" detects the format from the first row.
        append_eos: append the end-of-sequence token as a target to text other than chats.
        empty: "error" to raise for a row without target tokens; "drop" to drop and count it.
        limits: the limits of data.
        pairs: rows have a preferred and another output; each row becomes two examples, the
            preferred output first.
    Raises:
        DataError: a value is out of range.
    """

    max_length: int | None = None
    format: str = "auto"
    append_eos: bool = True
    empty: Literal["error", "drop"] = "error"
    limits: DataLimits = UNLIMITED
    pairs: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise DataError(f"max_length={self.max_length}; an example needs at least 2 tokens")
        if self.format != "auto" and self.format not in FORMATS:
            raise DataError(f"unknown data format {self.format!r}; use auto, {', '.join(FORMATS)}")
        if self.empty not in ("error", "drop"):
            raise DataError(f"empty={self.empty!r}; use 'error' or 'drop'")


def load_examples(
    source: Source,
    tokenizer: Tokenizer,
    *,
    max_length: int | None = None,
    format: str = "auto",
    append_eos: bool = True,
    empty: Literal["error", "drop"] = "error",
    limits: DataLimits = UNLIMITED,
) -> Dataset:
    """Read and tokenize finetuning data.

    Args:
        source: paths of .jsonl or .txt files, or rows in memory; see `sources` for all kinds.
        max_length, format, append_eos, empty, limits: see `ReadOptions`.
    Raises:
        DataError: the data cannot be read (names file and line), or has no examples.
    """
    options = ReadOptions(max_length, format, append_eos, empty, limits)
    reader = ExampleReader(gather(source), tokenizer, options)
    placed = list(reader)
    examples, places = tuple(e for e, _ in placed), tuple(place for _, place in placed)
    return Dataset(examples, reader.format, reader.truncated, reader.dropped, places)


@dataclass
class ExampleReader:
    """Iterates over the examples of data, each with its place, and counts dropped rows.

    Attributes:
        format: name of the rows' format, after reading the first row.
        truncated, dropped: current counts; see `Dataset`.
    """

    data: Gathered
    tokenizer: Tokenizer
    options: ReadOptions
    format: str = field(default="", init=False)
    truncated: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[Example, str]]:
        """Yield each example with its place. DataError: see `load_examples`."""
        rows = read_rows(self.data, self.options.limits)
        if self.options.pairs:
            examples = self._pairs(rows)
        else:
            examples = self._documents(rows) if holds_documents(self.data) else self._rows(rows)
        is_empty = True
        for placed in examples:
            is_empty = False
            yield placed
        if is_empty:
            dropped = self.dropped
            left = f"; all {dropped} rows were dropped: none has a token to learn"
            raise DataError(f"no examples in {_named(self.data)}{left if dropped else ''}")

    def _rows(self, rows: Iterator[Row]) -> Iterator[tuple[Example, str]]:
        options = self.options
        chosen: Format | None = FORMATS.get(options.format)
        for row in rows:
            if chosen is None:
                chosen = detect(row.value, row.where)
            self.format = chosen.name
            example = self._example(parse(chosen, row.value, row.where), row)
            if example is None:
                self.dropped += 1
            else:
                yield example, row.where

    def _pairs(self, rows: Iterator[Row]) -> Iterator[tuple[Example, str]]:
        """Yield two examples per row; drop a row if an example has no target tokens."""
        self.format = "preference"
        for row in rows:
            chosen, rejected = (
                self._example(half, row) for half in parse_pair(row.value, row.where)
            )
            if chosen is None or rejected is None:
                self.dropped += 1
            else:
                yield chosen, row.where
                yield rejected, row.where

    def _example(self, sample: Sample, row: Row) -> Example | None:
        options = self.options
        example = tokenize(sample, self.tokenizer, row.where, options.append_eos)
        whole_targets, length = example.targets, len(example.ids)
        check_tokens(length, row.where, options.limits)
        if options.max_length is not None and length > options.max_length:
            example = example.cut(options.max_length)
            self.truncated += 1
        if example.targets:
            return example
        if options.empty == "drop":
            return None
        raise _nothing_to_learn(row, sample, whole_targets, length, options.max_length)

    def _documents(self, rows: Iterator[Row]) -> Iterator[tuple[Example, str]]:
        """Cut texts into consecutive examples; all tokens except each first are learned."""
        self.format, options = "document", self.options
        for row in rows:
            sample = TextSample("", row.value)
            whole = tokenize(sample, self.tokenizer, row.where, options.append_eos)
            size = options.max_length or max(len(whole.ids), 1)
            # A last part with a single token has no target.
            starts = range(0, len(whole.ids) - 1, size)
            if not starts or not row.value.strip():
                raise DataError(f"{row.where} is empty; there is nothing to learn")
            for start in starts:
                ids = whole.ids[start : start + size]
                yield Example(ids, list(ids)), f"{row.where} from token {start}"


def tokenize(sample: Sample, tokenizer: Tokenizer, where: str, append_eos: bool = True) -> Example:
    """Return the tokens and labels of a sample; `append_eos` applies to a `TextSample`.

    Raises:
        DataError: a chat cannot be rendered, or a text cannot be encoded; `where` names the row.
    """
    if isinstance(sample, TokenSample):
        return Example(sample.ids, sample.labels)
    try:
        if isinstance(sample, ChatSample):
            return _tokenize_chat(sample, tokenizer)
        return _tokenize_text(sample, tokenizer, append_eos)
    except (DataError, GenerationError) as error:
        raise DataError(f"{where}: {error}") from error


def _tokenize_text(sample: TextSample, tokenizer: Tokenizer, append_eos: bool) -> Example:
    text = sample.prompt + sample.completion
    encoding = tokenizer.encode_with_offsets(text)
    ids = list(encoding.ids)
    if not sample.completion:
        return Example(ids, [IGNORED] * len(ids))
    if sample.prompt:
        labels = _labels(encoding, [(len(sample.prompt), len(text))])
        if ids[-1:] == [tokenizer.eos_id]:  # from the post-processor; the completion ends here
            labels[-1] = ids[-1]
    else:
        labels = list(ids)
    if append_eos and tokenizer.eos_id is not None and ids[-1:] != [tokenizer.eos_id]:
        ids.append(tokenizer.eos_id)
        labels.append(tokenizer.eos_id)
    return Example(ids, labels)


def _tokenize_chat(sample: ChatSample, tokenizer: Tokenizer) -> Example:
    variables = {**tokenizer.special_tokens, **sample.variables}
    template = tokenizer.template().training

    def render(
        messages: Sequence[Message], prompt: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        return template.render(messages, add_generation_prompt=prompt, tools=tools, **variables)

    with_tools = partial(render, tools=sample.tools)
    text, spans = assistant_spans(
        sample.messages,
        sample.learn,
        with_tools,
        template.marked_spans(sample.messages, tools=sample.tools, **variables),
        tokenizer.end_texts(),
        tokenizer.stop_texts(),
    )
    check_context(text, sample.messages, with_tools)
    if sample.tools and render(sample.messages, False) == with_tools(sample.messages, False):
        raise DataError(
            "the chat template shows no tools, so the model would not learn to call those of "
            "'tools'; give a chat template that shows them, or leave 'tools' out"
        )
    encoding = tokenizer.encode_with_offsets(text, add_special_tokens=False)
    return Example(list(encoding.ids), _labels(encoding, spans))


def _labels(encoding: Encoding, spans: Sequence[Span]) -> list[int]:
    """Label the tokens that cover a character in any span, and other tokens -100.

    An empty token is a space with offsets trimmed to its end, or has no text; it belongs to the
    character before it.
    """
    labels = [IGNORED] * len(encoding.ids)
    for index, (start, end) in enumerate(encoding.offsets):
        first = start if start < end else start - 1
        if any(first < span_end and end > span_start for span_start, span_end in spans):
            labels[index] = encoding.ids[index]
    return labels


def _named(data: Gathered) -> str:
    return "the data" if isinstance(data, list) else ", ".join(map(str, data))


def _nothing_to_learn(
    row: Row, sample: Sample, targets: int, length: int, max_length: int | None
) -> DataError:
    if targets:
        why = (
            f"all {targets} target tokens lie beyond max_length={max_length}, the row has "
            f"{length}; raise it, or pass empty='drop'"
        )
    elif isinstance(sample, ChatSample):
        why = "no assistant message of weight 1 with a text; remove the row, or pass empty='drop'"
    elif isinstance(sample, TokenSample):
        why = "no label but -100 behind the first; remove the row, or pass empty='drop'"
    else:
        why = "no target tokens, the text to learn is empty; remove the row, or pass empty='drop'"
    return DataError(f"{row.where}: nothing to learn: {why}")
