"""Sources of finetuning data: files, tables and splits, and what is none of them."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from pcg.errors import DataError, FinetuneError, PcgError
from pcg.runtime.data.dataset import Dataset, ReadOptions, load_examples
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.sources import UNLIMITED, DataLimits, choose_splits, gather
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.data.tokenizing_worker import Task
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.training_data import load_here
from tests.support import text_model
from tests.support import toy_tokenizers as toys
from tests.support.tables import Array, ArrowTable, Frame, PolarsFrame, Splits, Stored
from tests.support.waiting import until

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
    with pytest.raises(DataError, match="has no data files; pcg reads"):
        load_examples(tmp_path, tokenizer)


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
    found = gather(choose_splits(kind(filled), None, 2).train[0])
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


def test_columns_of_preferences_and_of_prompts_are_rows() -> None:
    for row in ({"chosen": "a", "rejected": "b"}, {"prompt": "a", "answer": 1}):
        assert gather({name: [value] * 2 for name, value in row.items()}) == [row, row]


class Lazy:
    """A query that is not run yet, as polars' LazyFrame: it is sliced, and has no rows."""

    def __getitem__(self, index: object) -> object:
        raise TypeError("not subscriptable")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"text": "a"}, "data is one dict, and not of columns; give a list of rows"),
        ({"messages": CHATS[0]}, "data is one dict, and not of columns"),
        ({"chosen": CHATS[0], "rejected": CHATS[1]}, "data is one dict, and not of columns"),
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
    assert (chosen.train, chosen.evaluation) == ([train], validation)
    assert chosen.chosen == (
        "'train' (3 rows) is learned; 'validation' (1 row) evaluates; 'test' not used"
    )


def test_evaluation_data_that_is_given_comes_first() -> None:
    both = Splits(train=Stored(ROWS), validation=Stored(ROWS[:1]))
    chosen = choose_splits(both, "eval.jsonl")
    assert (chosen.train, chosen.evaluation) == ([both["train"]], "eval.jsonl")
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


# -------------------------------------------------------------------- tokenizing in another process

SIZES = ModelSizes(512, 512, 64)


def apart(source: object, tokenizer: Tokenizer, options: ReadOptions) -> Dataset:
    return load_apart(pickle.dumps(tokenizer), Cancelling("job"), gather(source), options, SIZES)


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Odd:
    """A value that no format reads, and that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("an open door")


RENAMED = {"prompt": "q", "completion": "a"}
GOOD: dict[str, tuple[Any, ReadOptions]] = {
    "rows": (text_model.ROWS * 50, ReadOptions()),
    "chats": (text_model.CHATS, ReadOptions()),
    "texts": (["Hello, how are you", "dog"], ReadOptions(max_length=4)),
    "dropped": ([*text_model.ROWS, {"prompt": "a", "completion": ""}], ReadOptions(empty="drop")),
    "extras": ([{**row, "extra": Odd()} for row in text_model.ROWS], ReadOptions(append_eos=False)),
    "columns": ({"prompt": ["a", "b"], "completion": [" c", " d"]}, ReadOptions()),
    "renamed": ([{"q": "a", "a": " b", "extra": Odd()}], ReadOptions(columns=RENAMED)),
}


def test_columns_are_those_of_datasets_rename_columns(tokenizer: Tokenizer) -> None:
    rows = [{"q": row["prompt"], "a": row["completion"], "id": 7} for row in text_model.ROWS]
    renamed = datasets.Dataset.from_list(rows).rename_columns({"q": "prompt", "a": "completion"})
    expected = load_examples(renamed, tokenizer)
    options = ReadOptions(columns=RENAMED)
    by_column = {name: [row[name] for row in rows] for name in rows[0]}
    functions = ReadOptions(
        formatting_func=lambda row: {"prompt": row["q"], "completion": row["a"]}
    )
    for source, read in ((rows, options), (by_column, options), (rows, functions)):
        found = load_here(tokenizer, gather(source, columns=read.columns), read, SIZES)
        assert found.examples == expected.examples
    texts = ReadOptions(formatting_func=lambda row: row["q"] + row["a"])
    whole = load_examples([row["q"] + row["a"] for row in rows], tokenizer)
    assert load_here(tokenizer, rows, texts, SIZES).examples == whole.examples


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {"promt": "q"}}, "did you mean 'prompt'"),
        ({"columns": {"prompt": "asked"}}, r"data\[0\] has no 'asked' \(has 'q'\)"),
        ({"formatting_func": lambda row: row["x"]}, r"data\[0\]: .* raised KeyError: 'x'"),
        ({"formatting_func": lambda row: [row["q"]]}, r"data\[0\]: .* returned a list"),
    ],
)
def test_rows_that_cannot_be_converted(tokenizer: Tokenizer, options: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_here(tokenizer, [{"q": "a"}], ReadOptions(**options), SIZES)


@pytest.mark.parametrize("case", GOOD)
def test_examples_are_those_of_this_process(case: str, tokenizer: Tokenizer) -> None:
    source, options = GOOD[case]
    found = apart(source, tokenizer, options)
    expected = load_here(tokenizer, gather(source), options, SIZES)
    assert [(list(e.ids), list(e.labels)) for e in found] == [(e.ids, e.labels) for e in expected]
    for name in ("format", "truncated", "dropped", "places", "checked"):
        assert getattr(found, name) == getattr(expected, name)


def test_files_are_read_there(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By paths relative to this process' directory, in which no file is taken for a module."""
    monkeypatch.chdir(tmp_path)
    Path("tokenizers.py").write_text("raise SystemExit('not this one')")
    for path in (written(Path("a.jsonl"), text_model.ROWS), Path("a.txt")):
        path.with_suffix(".txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
        options = ReadOptions(max_length=32)
        found = apart(path, tokenizer, options)
        expected = load_here(tokenizer, (path,), options, SIZES)
        assert [list(example.ids) for example in found] == [e.ids for e in expected]
        assert found.format == expected.format
        assert [Path(place).name for place in found.places] == list(expected.places)


def test_processes_divide_the_rows_of_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": f"dog {i}", "completion": " fox" * (i % 9)} for i in range(300)]
    files = gather([written(tmp_path / f"{i}.jsonl", rows[i::2]) for i in range(2)])
    options = ReadOptions(max_length=8, empty="drop")
    expected = load_here(tokenizer, files, options, SIZES)
    given = pickle.dumps(tokenizer), Cancelling("job"), files
    found = load_apart(*given, options, SIZES, processes=2)
    assert [list(each.ids) for each in found] == [each.ids for each in expected]
    for name in ("format", "truncated", "dropped", "places"):
        assert getattr(found, name) == getattr(expected, name)
    with pytest.raises(DataError, match=r"0\.jsonl line 1: nothing to learn"):
        load_apart(*given, ReadOptions(max_length=8), SIZES, processes=2)
    empty = gather(written(tmp_path / "empty.jsonl", [{"prompt": "a", "completion": ""}]))
    with pytest.raises(DataError, match="all 1 rows were dropped"):
        load_apart(*given[:2], empty, options, SIZES, processes=2)


LIMITED = {
    "rows": DataLimits(rows=2),
    "row_bytes": DataLimits(row_bytes=30),
    "total_bytes": DataLimits(total_bytes=100),
    "tokens": DataLimits(tokens=5),
}
BAD: dict[str, tuple[Any, ReadOptions, str]] = {
    "no row": ([], ReadOptions(), "no examples in the data"),
    "format": ([{"a": 1}], ReadOptions(), r"data\[0\]: a row with 'a' is of no known format"),
    "surrogate": (["half \ud83d"], ReadOptions(), r"data\[0\]: .* surrogate, U\+D83D, at .* 5;"),
    "surrogate in a chat": (
        [{"messages": [{"role": "assistant", "content": "\udc00"}]}],
        ReadOptions(),
        r"data\[0\]: .* lone surrogate, U\+DC00",
    ),
    "long": (["dog " * 200], ReadOptions(), r"data\[0\] has \d+ tokens, more than .* 64 positions"),
    "object": ([{"text": Odd()}], ReadOptions(), r"data\[0\] .* pickled \(TypeError: an open door"),
    **{
        name: (
            text_model.ROWS,
            ReadOptions(limits=limits),
            rf"data\[\d\].* DataLimits\({name}=…\) raised",
        )
        for name, limits in LIMITED.items()
    },
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str, tokenizer: Tokenizer) -> None:
    source, options, message = BAD[case]
    with pytest.raises(DataError, match=message):
        apart(source, tokenizer, options)
    if case != "object":
        with pytest.raises(DataError, match=message):
            load_here(tokenizer, gather(source), options, SIZES)


LINES = {
    "nested": (b"[" * 100_000, "line 1: JSON nested too deeply"),
    "digits": (b'{"text": ' + b"1" * 5000 + b"}", "line 1: a number has too many digits"),
    "long line": (b'{"text": "' + b"a" * 10**6 + b'"}', r"line 1 has more than 1,000 bytes"),
    "cut in a character": (b'"' + "ä".encode() * 10**6 + b'"', r"line 1 has more than 1,000"),
}


@pytest.mark.parametrize("case", LINES)
def test_lines_that_are_refused(case: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    content, message = LINES[case]
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    limits = DataLimits(row_bytes=1000) if "1,000" in message else UNLIMITED
    with pytest.raises(DataError, match=message):
        load_here(tokenizer, (path,), ReadOptions(limits=limits), SIZES)


def test_a_document_is_bounded_in_all_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the quick brown fox jumps. " * 20)
    small = ReadOptions(max_length=16, limits=DataLimits(row_bytes=10, tokens=4))
    assert len(load_here(tokenizer, (path,), small, SIZES)) > 5
    little = ReadOptions(max_length=16, limits=DataLimits(total_bytes=100))
    with pytest.raises(DataError, match="more than 100 bytes, the most of a job here"):
        load_here(tokenizer, (path,), little, SIZES)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "1"])
def test_limits_are_checked(value: Any) -> None:
    with pytest.raises(DataError, match=r"rows=.* of DataLimits; use an int of at least 1"):
        DataLimits(rows=value)


# ------------------------------------------------------------------------------- ends


def endless(tokenizer: Tokenizer) -> bytes:
    return pickle.dumps(tokenizer.with_template(text_model.ENDLESS))


def children() -> Iterator[int]:
    """The processes that threads of this one started."""
    for task in Path("/proc/self/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text().split())
        except FileNotFoundError:  # the thread has ended
            continue


def tokenizing() -> list[int]:
    command = b"tokenizing_worker"
    return [c for c in children() if command in Path(f"/proc/{c}/cmdline").read_bytes()]


def until_there_is_one() -> int:
    until(lambda: bool(tokenizing()))
    return tokenizing()[0]


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_a_process_that_never_ends_is_ended(how: str, tokenizer: Tokenizer) -> None:
    cancelling, errors = Cancelling("mine"), list[PcgError]()

    def read() -> None:
        try:
            load_apart(endless(tokenizer), cancelling, text_model.CHATS, ReadOptions(), SIZES)
        except PcgError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    process = until_there_is_one()
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    until(lambda: os.getpriority(os.PRIO_PROCESS, process) == nice)  # steps go first
    if how == "cancelled":
        cancelling.cancel()
    else:
        os.kill(process, 9)
    thread.join(60)
    (error,) = errors
    if how == "cancelled":
        assert isinstance(error, FinetuneError)
        assert str(error) == "job 'mine' was cancelled"
    else:
        assert "was killed, as the system does where memory runs out" in str(error)
    assert not tokenizing()


STARTER = """
import os, subprocess, sys
command = [sys.executable, "-P", "-m", "pcg.runtime.data.tokenizing_worker", str(os.getpid())]
with open(sys.argv[1], "rb") as task:
    print(subprocess.Popen(command, stdin=task, stdout=subprocess.PIPE).pid, flush=True)
sys.stdin.read()
"""


def test_it_does_not_outlive_a_process_that_is_killed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = Task(endless(tokenizer), ReadOptions(), SIZES, None)
    (tmp_path / "task").write_bytes(pickle.dumps(task) + pickle.dumps(text_model.CHATS))
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "task")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as starter:  # fmt: skip
        assert starter.stdout is not None
        worker = int(starter.stdout.readline())
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
        until(lambda: os.getpriority(os.PRIO_PROCESS, worker) == nice)  # it runs
        starter.kill()
    until(lambda: not runs(worker))


def runs(process: int) -> bool:
    """Whether a process is there that is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_columns_of_one_name_are_refused(tokenizer: Tokenizer) -> None:
    """Rows would keep one of them."""
    for kind in (Frame, ArrowTable):
        data = kind([{"text": "a"}])
        setattr(data, "columns" if kind is Frame else "column_names", ["text", "text"])
        with pytest.raises(DataError, match="data has several columns 'text'; rename or drop"):
            load_examples(data, tokenizer)
