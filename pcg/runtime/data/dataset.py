"""Finetuning data: rows of text become tokens and labels.

    files or rows (`sources`) → samples (`formats`) → Example(ids, labels)

`labels[i]` belongs to the token at position i, as in transformers: `ids[i]` if the token is learned
and -100 if not. The loss shifts the labels: logits at position i are compared with `labels[i + 1]`,
and `labels[0]` is never used.

A token is learned if it covers a learned character. Text is tokenized as a whole, and characters
are mapped by the tokenizer's offsets, so that labels never depend on tokenizing a part of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, overload

from pcg.errors import DataError, GenerationError, PcgError
from pcg.runtime.data.example import IGNORED, Example, ModelSizes
from pcg.runtime.data.formats import (
    FORMATS,
    OPENAI_OUTPUTS,
    TRL_OUTPUTS,
    ChatSample,
    FormattingFunc,
    Sample,
    TextSample,
    TokenSample,
    check_mapping,
    detect,
    parse,
    parse_labelled,
    parse_pair,
    rename_columns,
    take_label,
    weight_of,
)
from pcg.runtime.data.sources import (
    UNLIMITED,
    DataLimits,
    Gathered,
    Placed,
    Row,
    Source,
    check_tokens,
    gather,
    holds_documents,
    read_rows,
)
from pcg.runtime.text.chat import ChatTemplate, Message, Span, kind_of
from pcg.runtime.text.chat_spans import assistant_spans, check_context
from pcg.runtime.text.tokenizer import Encoding, Tokenizer
from pcg.units import counted

RowKind = Literal["samples", "pairs", "labelled"]
BLOCK = 64
"""Rows per block, and examples per frame, so that reading a frame holds the GIL for a fraction of a
millisecond."""


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
        parts: the number of examples of each source of a mixture, or of each named source.
        names: the names of the sources of evaluation data; empty for a single source.
        duplicates: number of rows that equal an earlier row, of streamed data; None to count
            equal examples.
    """

    examples: Sequence[Example]
    format: str
    truncated: int = 0
    dropped: int = 0
    places: Sequence[str] = ()
    checked: ModelSizes | None = None
    parts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    duplicates: int | None = None

    @classmethod
    def joined(cls, sources: Sequence[Dataset], names: tuple[str, ...] = ()) -> Dataset:
        """Return the examples of several sources; a single source without a name as it is."""
        if len(sources) == 1 and not names:
            return sources[0]
        return cls(
            tuple(example for each in sources for example in each.examples),
            ", ".join(dict.fromkeys(each.format for each in sources)),
            sum(each.truncated for each in sources),
            sum(each.dropped for each in sources),
            tuple(place for each in sources for place in each.places),
            sources[0].checked,
            tuple(map(len, sources)),
            names,
        )

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

    def counts(self) -> str:
        """Return the numbers of truncated examples, dropped rows and duplicates; empty for none."""
        if self.duplicates is not None:
            return (
                f"{counted(len(self), 'row')}, {counted(self.duplicates, 'duplicate')}; the rows "
                "stream, so that truncated and dropped rows are counted at the end"
            )
        distinct = {hash((_packed(e.ids), _packed(e.labels))) for e in self.examples}
        duplicates = len(self) - len(distinct)
        if not (self.truncated or self.dropped or duplicates):
            return ""
        return (
            f"{counted(len(self), 'example')}, {self.truncated:,} truncated, {self.dropped:,} "
            f"dropped, {counted(duplicates, 'duplicate')}"
        )

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
        may_drop: False if the caller has no such option, for errors.
        limits: the limits of data.
        rows: samples; pairs, rows with a preferred and another output, which become two examples,
            the preferred output first; or labelled, samples of KTO.
        template: the chat template, instead of the tokenizer's.
        variables: the default variables of the chat template.
        columns: the data's name of a column, by the name that a format reads.
        formatting_func: converts each row before it is parsed.
        labels: the names of a sequence classifier's labels; rows are texts with labels.
    Raises:
        DataError: a value is out of range.
    """

    max_length: int | None = None
    format: str = "auto"
    append_eos: bool = True
    empty: Literal["error", "drop"] = "error"
    may_drop: bool = True
    limits: DataLimits = UNLIMITED
    rows: RowKind = "samples"
    template: ChatTemplate | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    formatting_func: FormattingFunc | None = None
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.labels and (self.rows != "samples" or self.format != "auto"):
            what = "preferences" if self.rows != "samples" else f"format={self.format!r}"
            raise DataError(
                f"{what} of a sequence classifier; it learns rows of 'text' and 'label' (pcg train "
                "sft)"
            )
        if self.labels and (self.template is not None or self.variables):
            raise DataError(
                "a chat template has no effect on a sequence classifier, whose texts are learned "
                "as they are; leave it and its variables out"
            )
        if self.max_length is not None and self.max_length < 2:
            raise DataError(f"max_length={self.max_length}; an example needs at least 2 tokens")
        if self.empty not in ("error", "drop"):
            raise DataError(f"empty={self.empty!r}; use 'error' or 'drop'")
        check_mapping(self.columns, self.format)

    @property
    def examples_each(self) -> int:
        """The number of examples of a row."""
        return 2 if self.rows == "pairs" else 1

    @property
    def converts(self) -> str:
        """The name of the option that converts rows; empty without."""
        names = ("columns", "formatting_func")
        return next((name for name in names if getattr(self, name)), "")


def load_examples(
    source: Source,
    tokenizer: Tokenizer,
    *,
    max_length: int | None = None,
    format: str = "auto",
    append_eos: bool = True,
    empty: Literal["error", "drop"] = "error",
    limits: DataLimits = UNLIMITED,
    labels: Sequence[str] = (),
) -> Dataset:
    """Read and tokenize finetuning data.

    Args:
        source: paths of .jsonl or .txt files, or rows in memory; see `sources` for all kinds.
        max_length, format, append_eos, empty, limits, labels: see `ReadOptions`.
    Raises:
        DataError: the data cannot be read (names file and line), or has no examples.
    """
    options = ReadOptions(max_length, format, append_eos, empty, limits=limits, labels=labels)
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

    def __post_init__(self) -> None:
        if self.options.template is not None:
            self.tokenizer = replace(self.tokenizer, chat_template=self.options.template)

    def __iter__(self) -> Iterator[tuple[Example, str]]:
        """Yield each example with its place. DataError: see `load_examples`."""
        is_empty = True
        for block in self.blocks():
            for placed in block:
                is_empty = False
                yield placed
        if is_empty:
            raise no_examples(self.data, self.dropped)

    def blocks(self, share: int = 0, shares: int = 1) -> Iterator[list[Placed]]:
        """Yield the examples of blocks of rows: of each `shares`-th block, from number `share`.

        Plain text files are of the first share alone.
        """
        rows = read_rows(self.data, self.options.limits)
        if (
            self.options.rows == "samples"
            and not self.options.labels
            and holds_documents(self.data)
        ):
            if self.options.converts:
                raise DataError(
                    f"{self.options.converts} has no effect on {_named(self.data)}, which is plain "
                    "text; leave it out"
                )
            examples = self._documents(rows if share == 0 else iter(()))
            yield from iter(lambda: [*islice(examples, BLOCK)], [])
            return
        for number, block in enumerate(iter(lambda: [*islice(rows, BLOCK)], [])):
            if number % shares == share:
                yield [*self.examples(block)]
            elif not number:  # whose first row sets the format of all
                next(self.examples(block[:1]), None)
                self.truncated = self.dropped = 0

    def examples(self, rows: Iterable[Row]) -> Iterator[Placed]:
        """Yield the examples of rows. DataError: names the row."""
        if self.options.converts:
            steps = self.options.columns, self.options.formatting_func
            rows = (Row(row.where, converted(row.value, row.where, *steps)) for row in rows)
        if self.options.labels:
            return self._classes(rows)
        return self._pairs(rows) if self.options.rows == "pairs" else self._rows(rows)

    def _classes(self, rows: Iterable[Row]) -> Iterator[Placed]:
        """Yield texts, each with its label as the token after it; a long text loses its end."""
        self.format, most = "label", self.options.max_length
        for row in rows:
            text, label = parse_labelled(row.value, self.options.labels, row.where)
            ids = tokenize(TextSample("", text), self.tokenizer, row.where, False).ids
            check_tokens(len(ids), row.where, self.options.limits)
            if not ids and self.options.empty == "drop":
                self.dropped += 1
                continue
            if not ids:
                raise DataError(f"{row.where}: 'text' is empty; leave the row out")
            self.truncated += most is not None and len(ids) > most
            ids = [*ids[:most], label]
            labels = [*[IGNORED] * (len(ids) - 1), label]
            yield Example(ids, labels, weight=weight_of(row.value, row.where)), row.where

    def _rows(self, rows: Iterable[Row]) -> Iterator[tuple[Example, str]]:
        for row in rows:
            is_desirable = True
            if self.options.rows == "labelled":
                value, is_desirable = take_label(row.value, row.where)
                row = Row(row.where, value)
            chosen = FORMATS.get(self.format or self.options.format)
            if chosen is None:
                chosen = detect(row.value, row.where)
            self.format = chosen.name
            example = self._example(parse(chosen, row.value, row.where), row)
            if example is None:
                self.dropped += 1
            else:
                yield example if is_desirable else replace(example, is_desirable=False), row.where

    def _pairs(self, rows: Iterable[Row]) -> Iterator[tuple[Example, str]]:
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
        if options.variables and isinstance(sample, ChatSample):
            sample = replace(sample, variables={**options.variables, **sample.variables})
        example = tokenize(sample, self.tokenizer, row.where, options.append_eos)
        weight = weight_of(row.value, row.where)
        if weight != 1.0:
            example = replace(example, weight=weight)
        whole_targets, length = example.targets, len(example.ids)
        check_tokens(length, row.where, options.limits)
        if options.max_length is not None and length > options.max_length:
            example = example.cut(options.max_length)
            self.truncated += 1
        if example.targets:
            return example
        if options.empty == "drop":
            return None
        raise _nothing_to_learn(row, sample, whole_targets, length, options)

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


def kind_of_rows(value: Any) -> RowKind:
    """Return the kind of rows that the first row has; a row with another format is a sample."""
    filled = {k for k, v in value.items() if v is not None} if isinstance(value, Mapping) else set()
    if any(filled >= {*format.keys} for format in FORMATS.values()):
        is_labelled = "prompt" in filled and "label" in filled and value["label"] in (True, False)
        return "labelled" if is_labelled else "samples"
    is_pair = any(filled.issuperset(outputs) for outputs in (TRL_OUTPUTS, OPENAI_OUTPUTS))
    return "pairs" if is_pair else "samples"


def converted(
    value: Any,
    where: str,
    columns: Mapping[str, str] | None,
    formatting_func: FormattingFunc | None = None,
) -> Any:
    """Return a row after `columns` and `formatting_func`.

    Raises:
        DataError: the row lacks a column, or the function fails or returns another type.
    """
    if columns and isinstance(value, Mapping):
        value = rename_columns(value, columns, where)
    if formatting_func is None:
        return value
    try:
        value = formatting_func(value)
    except PcgError as error:
        raise DataError(f"{where}: {error}") from error
    except Exception as error:  # of the caller's function
        raise DataError(
            f"{where}: formatting_func raised {type(error).__name__}: {error}; correct the "
            "function, or the row"
        ) from error
    if not isinstance(value, Mapping | str):
        raise DataError(
            f"{where}: formatting_func returned {kind_of(value)}; return the row's text, or a dict "
            "with the keys of a known format"
        )
    return value


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


def no_examples(data: Gathered, dropped: int) -> DataError:
    """Return the error of data without examples."""
    left = f"; all {dropped} rows were dropped: none has a token to learn"
    return DataError(f"no examples in {_named(data)}{left if dropped else ''}")


def _packed(values: Sequence[int]) -> bytes:
    return (values if isinstance(values, array) else array("q", values)).tobytes()


def _named(data: Gathered) -> str:
    return "the data" if isinstance(data, list) else ", ".join(map(str, data))


def _nothing_to_learn(
    row: Row, sample: Sample, targets: int, length: int, options: ReadOptions
) -> DataError:
    fix = "remove the row"
    if targets:
        bound = f"max_length={options.max_length}"
        why = f"all {targets} target tokens lie beyond {bound}, the row has {length}"
        fix = "raise it"
    elif isinstance(sample, ChatSample):
        why = "no assistant message of weight 1 with a text"
    elif isinstance(sample, TokenSample):
        why = "no label but -100 behind the first"
    else:
        why = "no target tokens, the text to learn is empty"
    drop = ", or pass empty='drop'" if options.may_drop and options.rows != "labelled" else ""
    return DataError(f"{row.where}: nothing to learn: {why}; {fix}{drop}")
