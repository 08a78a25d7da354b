"""Streamed data: rows of JSON lines by an index, in bounded memory, resumable anywhere."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import DataError, FinetuneError, FinetuneInterrupted
from pcg.runtime.data.dataset import Dataset, ReadOptions, load_examples
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.order import Mixture
from pcg.runtime.data.sources import read_rows
from pcg.runtime.data.streaming import StreamedBatches, StreamedRows, streamed
from pcg.runtime.executor import Executor
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import FinetuneOptions, JobArguments, StepRecord
from tests.support import compiled, text_model

SIZES = ModelSizes(512, 512, 128)
OPTIONS = ReadOptions(max_length=12)
ROWS = [{"prompt": f"the dog {i}", "completion": " is a fox" * (i % 5)} for i in range(1, 90)]
DROPPED = [number for number, row in enumerate(ROWS) if not row["completion"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model.save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files, with blank lines within and at the end, and without a last line break."""
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps(row) for row in ROWS]
    first, second = folder / "a.jsonl", folder / "b.ndjson"
    first.write_text("\n" + "\n".join(lines[:40]) + "\n \n\n")
    second.write_text(lines[40] + "\n\n" + "\r\n".join(lines[41:]))
    return first, second


def rows_of(data: Dataset) -> StreamedRows:
    assert isinstance(data.examples, StreamedRows)
    return data.examples


def tokens(examples: Any) -> list[tuple[list[int], list[int]]]:
    return [(list(example.ids), list(example.labels)) for example in examples]


def test_examples_and_places_are_those_of_reading_all(
    tokenizer: Tokenizer, files: tuple[Path, Path]
) -> None:
    options = ReadOptions(max_length=12, empty="drop")
    data = streamed([files], tokenizer, options, SIZES)
    expected = load_examples(list(files), tokenizer, max_length=12, empty="drop")
    assert (len(data), data.format) == (len(ROWS), expected.format)
    assert "89 rows, 0 duplicates" in data.counts()
    for workers in (0, 2):
        rows = rows_of(streamed([files], tokenizer, options, SIZES))
        examples = [*rows.read_ahead(rows_order(len(rows)), workers)]
        assert [at for at, each in enumerate(examples) if not each.ids] == DROPPED
        assert tokens(each for each in examples if each.ids) == tokens(expected)
        assert (rows.truncated, rows.dropped) == (expected.truncated, expected.dropped)
    places = [place for at, place in enumerate(data.places) if at not in DROPPED]
    assert places == [*expected.places]


def test_a_classifiers_rows_stream(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"the dog {i}", "label": "yes" if i % 2 else 0} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = streamed([(path,)], tokenizer, ReadOptions(max_length=4, labels=("no", "yes")), SIZES)
    expected = load_examples(path, tokenizer, max_length=4, labels=("no", "yes"))
    assert (data.format, tokens(data.examples)) == (expected.format, tokens(expected))


def rows_order(count: int) -> Any:
    import numpy as np

    return np.arange(count)


def test_duplicates_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}, {"text": "a"}, {"text": "a"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = streamed([(path,)], tokenizer, OPTIONS, SIZES)
    assert found.duplicates == 2
    assert (
        "4 examples, 0 truncated, 0 dropped, 2 duplicates"
        in load_examples(path, tokenizer).counts()
    )


@pytest.mark.parametrize("mixture", [None, Mixture((40, 49), (0.3, 0.7), "all_exhausted")])
def test_batches_go_on_anywhere(
    tokenizer: Tokenizer, files: tuple[Path, Path], mixture: Mixture | None
) -> None:
    options = ReadOptions(max_length=12, empty="drop")
    rows = rows_of(streamed([files[:1], files[1:]], tokenizer, options, SIZES))

    def make() -> StreamedBatches:
        return StreamedBatches(rows, batch_size=4, seed=3, mixture=mixture, workers=0)

    batches, states, seen = make(), [], []
    for _ in range(2):
        for batch in batches:
            states.append(batches.state_dict())
            seen.append(batch)
    if mixture is None:
        for epoch in range(2):
            order = [row for indexes in batches.plan(epoch) for row in indexes]
            assert sorted(order) == [*range(len(ROWS))] != order
    for position in (0, 9, 22, len(seen) - 3):
        resumed = make()
        resumed.load_state_dict(states[position])
        following = [batch for _ in range(2) for batch in resumed]
        assert [each.indexes for each in following[:2]] == [
            each.indexes for each in seen[position + 1 : position + 3]
        ]
    count, most = batches.largest()
    assert max(map(len, seen)) <= count
    assert max(sum(len(each.ids) for each in batch) for batch in seen) <= most


def test_memory_does_not_grow_with_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path, row = tmp_path / "large.jsonl", json.dumps({"text": "a dog " * 330}) + "\n"
    path.write_text(row * 8_000)
    most = 1_700_000

    def peak(read: Any) -> int:
        tracemalloc.start()
        try:
            read()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def stream() -> None:
        rows = rows_of(streamed([(path,)], tokenizer, OPTIONS, SIZES))
        batches = StreamedBatches(rows, batch_size=8, workers=0)
        assert next(iter(batches))

    assert path.stat().st_size > 9 * most
    assert peak(stream) < most
    assert peak(lambda: [*read_rows((path,))]) > most


def test_a_run_is_that_of_data_in_memory_and_goes_on(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor: Executor = compiled.executor(model, None)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS if row["completion"]))
    options: dict[str, Any] = {
        "data": path, "max_length": 12, "shuffle": False, "max_steps": 4, "batch_size": 4,
        "progress": False, "peft": "lora",
    }  # fmt: skip
    together = executor.finetune(adapter="a", **options).losses
    options["streaming"] = True
    kept = {"formatting_func": lambda row: row}  # which cannot be pickled
    with caplog.at_level("INFO", "pcg.finetuning"):
        for name, more in (("b", {}), ("e", kept)):
            assert executor.finetune(adapter=name, **options, **more).losses == together
    assert caplog.text.count("truncated, 0 dropped") == 2
    monkeypatch.setattr("pcg.runtime.data.streaming.cores", lambda: 0)
    options |= {"shuffle": True}
    whole = executor.finetune(adapter="c", **options).losses

    def stop(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    again = {**options, "adapter": "d", "checkpoint_dir": tmp_path / "c"}
    with pytest.raises(FinetuneInterrupted):
        executor.finetune(**again, on_step=stop)
    result = executor.finetune(**again)
    assert result.resumed_from == 2
    assert result.losses == whole


def test_what_is_refused(tokenizer: Tokenizer, files: tuple[Path, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": 1}\n{no\n')
    rows = rows_of(streamed([(bad,)], tokenizer, OPTIONS, SIZES))
    for at, words in ((1, "line 2: 'text' is a number"), (2, "line 3, column 2: not JSON")):
        for workers in (0, 1):
            with pytest.raises(DataError, match=words):
                list(rows.read_ahead(rows_order(3)[at:], workers))
    for source, words in (
        (tmp_path / "a.csv", r"a\.csv cannot be streamed; give files of \.jsonl, \.ndjson"),
        (tmp_path / "none.jsonl", "no data file"),
    ):
        with pytest.raises(DataError, match=words):
            streamed([(source,)], tokenizer, OPTIONS, SIZES)
    with pytest.raises(DataError, match="streaming reads files"):
        streamed([ROWS], tokenizer, OPTIONS, SIZES)
    for options in ({}, {"max_length": 8, "max_tokens": 64}):
        with pytest.raises(FinetuneError, match="give max_length, and leave max_tokens out"):
            FinetuneOptions(streaming=True, **options)  # type: ignore[arg-type]
    with pytest.raises(FinetuneError, match=r"or use executor\.finetune"):
        JobArguments(files[0], streaming=True, max_length=8)
