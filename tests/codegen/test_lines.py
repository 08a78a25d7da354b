"""Statements broken over lines: they mean the same, and fit."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.codegen.lines import WIDTH, statement
from pcg.compiler import compile_program
from tests.support.families import BY_NAME
from tests.support.parameters import mostly_slow

NAMES = st.sampled_from(["x", "gate_proj_z", "post_attention_layernorm_weight", "w.q_proj_weight"])


def _of(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = st.sampled_from(["+", "-", "*", "/", "&"])
    lists = st.lists(inner, min_size=1, max_size=4)
    return st.one_of(
        st.builds(lambda left, op, right: f"({left} {op} {right})", inner, operators, inner),
        st.builds(lambda values: f"K.call({', '.join(values)}, eps=1e-06)", lists),
        st.builds(lambda values: f"({', '.join(values)},)", lists),
        st.builds(lambda value, op, other: f"{value}[0] {op} {other}", NAMES, operators, inner),
    )


@given(text=st.recursive(NAMES, _of, max_leaves=30), indent=st.sampled_from((4, 8, 12)))
def test_a_broken_statement_is_the_same(text: str, indent: int) -> None:
    whole = f"d_gate_proj_z, (up,) = {text}"
    lines = statement(whole, indent).splitlines()
    parsed = ast.parse("def f():\n" + "\n".join(lines)).body[0]
    assert ast.dump(parsed) == ast.dump(ast.parse(f"def f():\n    {whole}").body[0])
    assert all(line.startswith(" " * indent) and line == line.rstrip() for line in lines)


def test_operands_begin_lines_with_their_operator() -> None:
    long = "d_post_attention_layernorm * post_attention_layernorm_weight - x * (rstd * rstd * p)"
    assert statement(f"d = rstd * ({long} + residual)") == (
        f"    d = rstd * (\n        {long}\n        + residual\n    )"
    )


def test_targets_that_are_longer_than_a_line_are_broken() -> None:
    names = ", ".join(f"d_self_attn_{name}_proj_lora_A" for name in "qkv")
    found = statement(f"{names} = yield from K.asked_outer_group(context, x)")
    assert found.splitlines() == [
        "    (",
        f"        {names}",
        "    ) = yield from K.asked_outer_group(",
        "        context, x",
        "    )",
    ]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", mostly_slow(["llama3", "gemma2", "gptj"], "llama3"))
def test_no_emitted_line_is_long(name: str, backend: str) -> None:
    program = compile_program(BY_NAME[name].config(2), "lora", backend=backend)
    assert program.training is not None
    for source in (program.serving.source, program.training.source):
        ast.parse(source)
        assert max(map(len, source.splitlines())) <= WIDTH
