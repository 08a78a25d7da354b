"""The house rules: short files, small rooms, and docstrings that name what they describe."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("pcg", "cli") for path in (ROOT / folder).rglob("*.py"))
LINES_OF_A_FILE = 700
FILES_OF_A_ROOM = 20
WITHOUT_A_NOUN = {"How", "Of", "That", "Those", "What", "Where", "Whether", "Which", "Who"}
"""Words that a docstring does not begin with: they say of whom or how, and not what."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_a_file_can_be_read_at_once() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > LINES_OF_A_FILE}
    assert FILES
    assert long == {}


def test_a_room_can_be_seen_at_once() -> None:
    rooms = {path.parent for path in FILES}
    counts = {str(room.relative_to(ROOT)): len(list(room.glob("*.py"))) for room in rooms}
    assert {room: n for room, n in counts.items() if n > FILES_OF_A_ROOM} == {}


def test_a_docstring_begins_with_what_it_describes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        for line, text in docstrings(path)
        if text.split()[0] in WITHOUT_A_NOUN
    ]
    assert found == []


def test_long_tests_are_tests_that_there_are() -> None:
    """Names of functions alone, as what cases there are is known once all files are imported."""
    listed = (ROOT / "tests/long_tests.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    names = {tuple(line.partition("[")[0].split("::")) for line in listed}
    missing = [
        f"{file}::{name}"
        for file, name in sorted(names)
        if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
