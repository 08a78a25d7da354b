"""Sources of finetuning data: files, tables and splits, and what is none of them."""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import DataError
from pcg.runtime.data.dataset import Dataset, load_examples
from pcg.runtime.data.sources import choose_splits, gather
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import toy_tokenizers as toys
from tests.support.tables import Array, ArrowTable, Frame, PolarsFrame, Splits, Stored

ROWS = [
    {"prompt": "Hello, ", "completion": "you"},
    {"prompt": "add 1", "completion": "2"},
    {"prompt": "a", "completion": "b"},
]
COLUMNS = {key: [row[key] for row in ROWS] for key in ROWS[0]}
CHATS = [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(toys.save_chatml(tmp_path_factory.mktemp("chatml")))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", [str, Path])
def test_a_list_of_paths_reads_the_files(
    tmp_path: Path, tokenizer: Tokenizer, kind: Callable[[Path], str | Path]
) -> None:
    one, two = write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.json", ROWS[2:])
    for paths in ([kind(one), kind(two)], (kind(one), kind(two)), map(kind, (one, two))):
        data = load_examples(paths, tokenizer)  # type: ignore[arg-type]
        assert list(data) == list(load_examples(ROWS, tokenizer))
        assert data.places == (f"{one} line 1", f"{one} line 2", f"{two} line 1")


def test_text_files_are_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(paths, ("Hello, how are you?", "The dog."), strict=True):
        path.write_text(text)
    data = load_examples(paths, tokenizer, max_length=8)
    apart = [load_examples(path, tokenizer, max_length=8) for path in paths]
    assert data == Dataset(
        (*apart[0], *apart[1]), "document", places=(*apart[0].places, *apart[1].places)
    )
    with pytest.raises(DataError, match=r"a\.txt is plain text, .* 1 of 2 files are not"):
        load_examples([paths[0], write(tmp_path / "c.jsonl", ROWS)], tokenizer)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["missing.jsonl", "b.jsonl"], "no data file missing.jsonl"),
        (["a.csv", "b.csv"], r"no data file a\.csv"),
        ([Path("missing")], "no data file missing"),
        ([Path("missing.jsonl"), {"text": "a"}], "data has 1 paths, as 'missing.jsonl', among 2"),
        ([__file__, "some text"], "data has 1 paths, .* give paths alone, or rows alone"),
    ],
)
def test_names_of_files_are_never_learned(
    tokenizer: Tokenizer, paths: list[Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        load_examples(paths, tokenizer)


def test_a_directory_is_no_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="it is a directory, give its files"):
        load_examples(tmp_path, tokenizer)


def test_texts_that_speak_of_files_are_rows(tokenizer: Tokenizer) -> None:
    rows = ["Read notes.txt first.", "data.json", "3.5"]
    assert gather(rows) == rows
    assert len(load_examples(rows, tokenizer)) == 3


# ------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "source",
    [
        Stored(ROWS), Frame(ROWS), PolarsFrame(ROWS), ArrowTable(ROWS), COLUMNS,
        {key: tuple(column) for key, column in COLUMNS.items()}, iter(ROWS), tuple(ROWS),
    ],
    ids=["dataset", "pandas", "polars", "arrow", "columns", "tuples", "iterator", "rows"],
)  # fmt: skip
def test_frames_and_columns_are_rows(tokenizer: Tokenizer, source: Any) -> None:
    data = load_examples(source, tokenizer)
    assert list(data) == list(load_examples(list(ROWS), tokenizer))
    assert data.places == ("data[0]", "data[1]", "data[2]")


@pytest.mark.parametrize("kind", [Stored, Frame, PolarsFrame, ArrowTable])
def test_chats_in_tables(tokenizer: Tokenizer, kind: Callable[[Any], Any]) -> None:
    rows = [{"messages": chat} for chat in CHATS]
    expected = list(load_examples(rows, tokenizer))
    assert list(load_examples(kind(rows), tokenizer)) == expected
    assert list(load_examples({"messages": CHATS}, tokenizer)) == expected


class Streamed:
    """An IterableDataset of `datasets`: it has no length."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows
        self.column_names = list(rows[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


@pytest.mark.parametrize("kind", [Stored, Streamed, Frame, PolarsFrame, ArrowTable])
def test_nulls_that_a_table_fills_in_are_not_learned(kind: Callable[[Any], Any]) -> None:
    """A call of one tool has the arguments of every other in a table, and so have schemas."""

    def row(name: str, arguments: dict[str, Any], **other: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {"name": name, "parameters": {"properties": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call, call]}
        return {"messages": [message], "tools": [schema], "score": None, "tags": [None, 1], **other}

    filled = [row("f", {"a": 1, "b": None}), row("g", {"a": None, "b": [{"c": None, "d": 2}]})]
    found = gather(choose_splits(kind(filled), None, 2).train)
    for one, name, arguments in zip(found, "fg", ({"a": 1}, {"b": [{"d": 2}]}), strict=True):
        expected = row(name, arguments)
        del expected["messages"][0]["content"]
        assert one == expected
    # Nulls that a row of JSON lines has are its own.
    assert gather(filled) == filled


def test_missing_values_and_arrays_of_pandas(tokenizer: Tokenizer) -> None:
    NAType = type("NAType", (), {})  # pandas.NA: comparing it gives neither True nor False
    rows = [
        {"instruction": "add", "input": missing, "output": "3"}
        for missing in (float("nan"), NAType(), None)
    ]
    expected = list(load_examples([{"instruction": "add", "output": "3"}] * 3, tokenizer))
    assert list(load_examples(Frame(rows), tokenizer)) == expected
    chats = [{"messages": Array([{**message} for message in chat])} for chat in CHATS]
    plain = [{"messages": chat} for chat in CHATS]
    assert list(load_examples(Frame(chats), tokenizer)) == list(load_examples(plain, tokenizer))


class Lazy:
    """A query that is not run yet, as polars' LazyFrame: it is sliced, and has no rows."""

    def __getitem__(self, index: object) -> object:
        raise TypeError("not subscriptable")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"text": "a"}, "data is one dict, and not of columns; give a list of rows"),
        ({"messages": CHATS[0]}, "data is one dict, and not of columns"),
        ({"prompt": CHATS[0][:1], "completion": CHATS[0][1:]}, "data is one dict"),
        ({}, "data is one dict"),
        ({"train": ROWS, "test": ROWS}, "a dict of 'train', 'test', which are the columns of no"),
        ({"prompt": ["a", "b"], "completion": ["c"]}, "numbers of rows: 'prompt' 2, 'completion'"),
        (Splits(train=Stored(ROWS), test=Stored(ROWS)), "data has the splits 'train', 'test'"),
        ({"some text", "other text"}, "data is a set; give a list of rows, or a path"),
        (b"some text", "data is a bytes; give a list of rows"),
        (io.StringIO('{"text": "a"}\n'), "data is an open file; give its path"),
        (7, "data is a number; give paths, a list of rows"),
        (Lazy(), "data is a Lazy; give paths, a list of rows, a dataset, a frame"),
        ([*ROWS, "more.jsonl"], "data has 1 paths, as 'more.jsonl', among"),
        (None, "data is null or missing; give paths"),
        ([7], r"data\[0\]: a row is a number; expected an object or a string"),
        ([("a", "b")], r"data\[0\]: a row is a tuple"),
        ([Frame(ROWS)], r"data\[0\]: a row is a Frame"),
        ([None], r"data\[0\]: a row is null"),
    ],
)
def test_all_else_is_refused(tokenizer: Tokenizer, source: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_examples(source, tokenizer)


# ------------------------------------------------------------------------------- splits


def test_train_is_learned_and_validation_evaluates() -> None:
    train, validation, test = Stored(ROWS), Stored(ROWS[:1]), Stored(ROWS[1:])
    chosen = choose_splits(Splits(train=train, validation=validation, test=test), None)
    assert (chosen.train, chosen.evaluation) == (train, validation)
    assert chosen.chosen == (
        "'train' (3 rows) is learned; 'validation' (1 row) evaluates; 'test' not used"
    )


def test_evaluation_data_that_is_given_comes_first() -> None:
    both = Splits(train=Stored(ROWS), validation=Stored(ROWS[:1]))
    chosen = choose_splits(both, "eval.jsonl")
    assert (chosen.train, chosen.evaluation) == (both["train"], "eval.jsonl")
    assert chosen.chosen == "'train' (3 rows) is learned; 'validation' not used"
    assert choose_splits("train.jsonl", both).evaluation is both["validation"]
    assert choose_splits("train.jsonl", None).chosen == ""


@pytest.mark.parametrize(
    ("data", "eval_data", "words"),
    [
        (Splits(test=Stored(ROWS)), None, "data has the splits 'test', no 'train'"),
        (ROWS, Splits(train=Stored(ROWS)), "eval_data has the splits 'train', no 'validation'"),
    ],
)
def test_a_split_that_is_missing_is_named(data: Any, eval_data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        choose_splits(data, eval_data)


def test_a_dict_of_rows_is_not_one_of_splits() -> None:
    rows: list[Mapping[str, Any]] = [{"train": "a"}]
    assert choose_splits(rows, None).train is rows


def test_a_map_style_dataset_has_as_many_rows_as_it_says(tokenizer: Tokenizer) -> None:
    """One that repeats its rows for any index would never end."""

    class Repeating:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, str]:
            return ROWS[index % len(ROWS)]

    expected = load_examples([*ROWS, ROWS[0]], tokenizer)
    assert list(load_examples(Repeating(), tokenizer)) == list(expected)
