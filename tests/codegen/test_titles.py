"""Names of models and of their modules in the source that is emitted, which runs."""

from __future__ import annotations

import ast

import pytest

from pcg.codegen.emit import emit_module
from pcg.codegen.program_functions import Function
from pcg.ir.parser import parse_graph
from pcg.ir.printer import quote

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


@pytest.mark.parametrize(
    "scope", [f"x\n    {CODE}", f"x\r    {CODE}", f"\r\n    {CODE}", f"\f{CODE}"]
)
def test_a_path_of_a_module_stays_within_its_comment(scope: str) -> None:
    text = f"graph @f(%x: f32[T, 8]) {{ %y: f32[T, 8] = silu(%x) @{quote(scope)} return %y }}"
    source = emit_module("A model", "", [Function(parse_graph(text), "f", "A note.")], "torch")
    (function,) = (one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef))
    document, *statements = function.body
    assert isinstance(document, ast.Expr)
    assert [type(one) for one in statements] == [ast.Assign, ast.Return]
