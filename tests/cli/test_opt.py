"""`pcg opt`: passes over graphs in text, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pcg.ir.parser import parse_graphs
from pcg.passes.registry import PASSES
from tests.support import tiny_llama
from tests.support.command_line import output_of, run

TWO = """\
graph @one(%x: f32[T, 8]) {
  frozen %a: f32[4, 8] = "a"
  frozen %b: f32[4, 8] = "b"
  %y: f32[T, 4] = linear(%x, %a)
  %z: f32[T, 4] = linear(%x, %b)
  return %y, %z
}

graph @two(%x: f32[T, 8]) {
  %y: f32[T, 8] = relu(%x)
  return %y
}
"""
JOINED = "%y: f32[T, 4], %z: f32[T, 4] = linear_group(%x, %a, %b) {bias=False, count=2}"


def test_a_pass_runs_over_every_graph_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.pcg"
    path.write_text(TWO)
    text = output_of("opt", path, "--passes", "fuse_linears")
    assert JOINED in text
    assert [graph.name for graph in parse_graphs(text)] == ["one", "two"]


def test_standard_input_is_read_and_without_passes_printed() -> None:
    result = run("opt", "-", input=TWO)
    assert (result.exit_code, result.stdout) == (0, TWO)


def test_a_traced_model_is_folded_and_raised_as_compile_does(tmp_path: Path) -> None:
    model = tiny_llama.save(tmp_path / "model")
    output_of("compile", model, "-o", tmp_path / "p", "--dump-dir", tmp_path / "dumps")
    text = output_of("opt", tmp_path / "dumps" / "00-trace.pcg", "--passes", "fold,raise")
    assert text == (tmp_path / "dumps" / "03-raise.pcg").read_text()


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("fuse_linear", "no pass 'fuse_linear' .did you mean fuse_linears"),
        ("attach", "needs recipes of adapters; use pcg compile MODEL --print-after attach"),
        ("prune", "needs graphs with their backward; put 'differentiate' before it"),
        ("defer_residual_add", "needs the graphs of a model, .* the file has @one, @two"),
        ("side_by_side", "runs behind 'group_kernels'"),
        ("fold", "needs the one graph of a model; the file has 2"),
        ("localize", "needs degree; write localize{degree=…}"),
        ("localize{degree=many}", "'many' is no int"),
        ("overlap{size=2}", "has no option 'size'; it has counted"),
        ("overlap{2}", "expected an option at '2'"),
        ("overlap}", "expected a pass at 'overlap}'"),
    ],
)
def test_refusals(passes: str, message: str) -> None:
    result = run("opt", "-", "--passes", passes, input=TWO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(message, result.stderr), result.stderr


def test_a_file_that_is_no_graph_is_shown_where() -> None:
    result = run("opt", "-", input="graph @g(%x: f32[T, 8) {\n}")
    assert result.exit_code == 1
    assert "error: -: line 1, column 22: expected" in result.stderr
    assert run("opt", "nowhere.pcg").exit_code == 1
    assert run("opt").exit_code == 2


def test_every_pass_is_listed_with_its_options() -> None:
    lines = output_of("opt", "--list").splitlines()
    assert [line.partition("{")[0].split()[0] for line in lines] == [one.name for one in PASSES]
    assert any(line.startswith("localize{degree=…} ") for line in lines)
