"""A model's name in the source that is emitted for it, which runs."""

from __future__ import annotations

import ast

import pytest

from pcg.codegen.emit import emit_module

CODE = "import os; os.abort()"


@pytest.mark.parametrize(
    "name", [f'x"""\n{CODE}\n"""', f'x"""; {CODE}; """', "x\\", '"', "half \ud800", f"\r\f{CODE}"]
)
def test_a_name_stays_within_the_docstring(name: str) -> None:
    source = emit_module(name, "A note.", [], "torch")
    source.encode()
    document, *imports = ast.parse(source).body
    assert isinstance(document, ast.Expr)
    assert all(isinstance(one, ast.Import | ast.ImportFrom) for one in imports)
    assert ast.unparse(imports[0]) == "import torch"


def test_a_plain_name_is_as_it_is() -> None:
    assert emit_module("meta-llama/Llä-3.1 (8B)", "", [], "torch").startswith(
        '"""meta-llama/Llä-3.1 (8B)\n'
    )
