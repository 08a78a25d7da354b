"""Tokenizing in another process gives what this one gives: examples, facts and errors."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import DataError, FinetuneError, PcgError
from pcg.runtime.data.dataset import Dataset, ReadOptions
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.sources import UNLIMITED, DataLimits, gather
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.data.tokenizing_worker import Task
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.training_data import load_here
from tests.support import toy_tokenizers
from tests.support.text_model import CHATS, ENDLESS, ROWS
from tests.support.waiting import until

SIZES = ModelSizes(512, 64)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(toy_tokenizers.save_chatml(tmp_path_factory.mktemp("model")))


def apart(source: object, tokenizer: Tokenizer, options: ReadOptions) -> Dataset:
    return load_apart(pickle.dumps(tokenizer), Cancelling("job"), gather(source), options, SIZES)


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Odd:
    """A value that no format reads, and that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("an open door")


GOOD: dict[str, tuple[Any, ReadOptions]] = {
    "rows": (ROWS * 50, ReadOptions()),
    "chats": (CHATS, ReadOptions()),
    "texts": (["Hello, how are you", "dog"], ReadOptions(max_length=4)),
    "dropped": ([*ROWS, {"prompt": "a", "completion": ""}], ReadOptions(empty="drop")),
    "extras": ([{**row, "extra": Odd()} for row in ROWS], ReadOptions(append_eos=False)),
    "columns": ({"prompt": ["a", "b"], "completion": [" c", " d"]}, ReadOptions()),
}


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
    for path in (written(Path("a.jsonl"), ROWS), Path("a.txt")):
        path.with_suffix(".txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
        options = ReadOptions(max_length=32)
        found = apart(path, tokenizer, options)
        expected = load_here(tokenizer, (path,), options, SIZES)
        assert [list(example.ids) for example in found] == [e.ids for e in expected]
        assert found.format == expected.format
        assert [Path(place).name for place in found.places] == list(expected.places)


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
        name: (ROWS, ReadOptions(limits=limits), rf"data\[\d\].* DataLimits\({name}=…\) raised")
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
    return pickle.dumps(tokenizer.with_template(ENDLESS))


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
            load_apart(endless(tokenizer), cancelling, CHATS, ReadOptions(), SIZES)
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
    (tmp_path / "task").write_bytes(pickle.dumps(task) + pickle.dumps(CHATS))
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


def test_what_was_cancelled_before_starts_nothing(tokenizer: Tokenizer) -> None:
    cancelling = Cancelling("mine")
    cancelling.cancel()
    with pytest.raises(FinetuneError, match="job 'mine' was cancelled"):
        load_apart(endless(tokenizer), cancelling, CHATS, ReadOptions(), SIZES)
