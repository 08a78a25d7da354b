"""The house rules: short files, budgets of rooms, imports in one direction, docstrings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("pcg", "cli") for path in (ROOT / folder).rglob("*.py"))
LINES_OF_A_FILE = 700
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


def test_rooms_keep_within_their_budgets() -> None:
    """A commit that raises a budget says why."""
    budgets = {}
    for line in (ROOT / "tests/line_budgets.txt").read_text().splitlines():
        room, lines = line.split()
        budgets[room] = int(lines)
    counts: Counter[str] = Counter()
    for path in FILES:
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[: 2 if parts[0] == "pcg" and len(parts) > 2 else 1])
        counts[room] += len(path.read_text(encoding="utf-8").splitlines())
    assert counts.keys() == budgets.keys()
    assert {room: n for room, n in counts.items() if n > budgets[room]} == {}


def test_folders_import_in_one_direction() -> None:
    folders = networkx.DiGraph()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                folders.add_edges_from((folder_of(path), other) for other in imported(path, node))
    circles = [sorted(c) for c in networkx.strongly_connected_components(folders) if len(c) > 1]
    assert folders.number_of_edges() > 100
    assert circles == []


def folder_of(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def imported(path: Path, node: ast.ImportFrom) -> Iterator[str]:
    """Yield the other folders that an import reads; the package itself is of all of them."""
    base = path.parents[node.level - 1] if node.level else ROOT
    target = base.joinpath(*(node.module or "").split("."))
    for alias in node.names:
        candidates = target / f"{alias.name}.py", target / alias.name, target.with_suffix(".py")
        for file in (*candidates, target):
            if file.exists():
                folder = file if file.is_dir() else file.parent
                name = str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else ""
                if name not in ("", ".", "pcg", folder_of(path)):
                    yield name
                break


def test_a_docstring_begins_with_what_it_describes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        for line, text in docstrings(path)
        if text.split()[0] in WITHOUT_A_NOUN
    ]
    assert found == []
