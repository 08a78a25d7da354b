"""Files of data in every format have the rows of JSON lines; damage is named by its line."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from pcg.errors import DataError
from pcg.runtime.data.sources import DataLimits, gather, read_rows

ROWS = [
    {"prompt": 'say "hi", twice\nplease', "completion": "hi, hi"},
    {"prompt": "käse\tund brot", "completion": "ja"},
    {"prompt": "a" * 200_000, "completion": "long"},
]


def values_of(path: Any) -> list[Any]:
    return [row.value for row in read_rows(gather(path))]


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_array(path: Path) -> None:
    path.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")


def write_table(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": write_lines,
    "a.ndjson": write_lines,
    "lines.json": write_lines,
    "array.json": write_array,
    "line.json": lambda path: path.write_text(json.dumps(ROWS)) and None,
    "a.csv": write_table,
    "a.tsv": lambda path: write_table(path, "\t"),
    "a.parquet": lambda path: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "file.arrow": write_arrow,
    "stream.arrow": write_stream,
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "splits": lambda path: datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:1])
    ).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    assert values_of(path) == ROWS
    assert values_of(str(path)) == ROWS
    if path.is_file() and path.suffix not in (".parquet", ".arrow"):
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert values_of(packed) == ROWS
        packed.write_bytes(packed.read_bytes()[:-9])
        with pytest.raises(DataError, match="is not whole gzip data"):
            values_of(packed)


def test_folders_and_globs_are_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv"):
        WRITERS[name.replace("b", "a")](tmp_path / name)
    (tmp_path / "notes.md").write_text("no data")
    assert values_of(tmp_path) == values_of(tmp_path / "*.[jc]s*") == ROWS * 2
    assert values_of([tmp_path / "*.csv", tmp_path / "b.jsonl"]) == ROWS * 2
    with pytest.raises(DataError, match=r"no file matches .*\*\.tsv"):
        values_of(tmp_path / "*.tsv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no data files; pcg reads"):
        values_of(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"prompt,completion\nx,y\nx,y,z\n", "line 3 has 3 cells, and the header has 2"),
        ("a.csv", b"a,a\nx,y\n", "line 1: a header names each column once"),
        ("a.csv", b"", "line 1: a header names each column once"),
        ("a.csv", b'a,b\n"x,y\n', "line 2: unexpected end of data"),
        ("a.csv", b"a,b\nx,\xff\n", r"after line 1: invalid start byte \(0xff\)"),
        ("a.json", b'[\n{"a": 1},\n{"a" 2}]', "line 3, column 6: not JSON"),
        ("a.parquet", b"PAR1 no", "cannot be read"),
        ("a.arrow", b"no arrow", "cannot be read"),
        ("a.xlsx", b"", r"ends in \.xlsx; use one of \.jsonl"),
    ],
)
def test_damage_is_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        values_of(path)


def test_limits_hold_for_tables(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv")
    for limits, words in (
        (DataLimits(row_bytes=1000), "has more than 1,000 bytes|field larger than"),
        (DataLimits(rows=1), "row 2, and a job here takes 1 rows"),
    ):
        with pytest.raises(DataError, match=words):
            list(read_rows(gather(tmp_path / "a.csv"), limits))


def test_a_dataset_of_the_hub_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="the dataset user/none cannot be loaded"):
        values_of("user/none")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs datasets: pip install 'pcg\[data\]'"):
        values_of("user/none")
