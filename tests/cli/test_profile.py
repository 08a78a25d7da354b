"""`pcg profile`: what it measures, prints, keeps and refuses."""

import json

import pytest
from typer.testing import CliRunner

from cli.application import app
from pcg.ir.types import TOKENS, tensor
from pcg.parallel.costs import operator_profiler
from pcg.parallel.costs.catalog import find_cost_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pcg" / "profiles"


def run(*args):
    return CliRunner().invoke(app, ["profile", "--device", "cpu", *map(str, args)])


def test_a_profile_is_measured_once(tmp_path, cache, monkeypatch):
    path = tmp_path / "profile.json"
    result = run("--quick", "-o", path)
    assert result.exit_code == 0, result.output
    assert "attention_backward+softcap+window" in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-3])) <= 80
    x, w = tensor("f32", TOKENS, 96), tensor("f32", 32, 96)
    y = tensor("f32", TOKENS, 32)
    assert find_cost_model(path).operator_seconds("linear", (x, w), (y,), {}, 7, 7) > 0
    (kept,) = cache.iterdir()
    assert kept.read_text() == path.read_text()

    def refuse(*args, **options):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(operator_profiler, "measure_operators", refuse)
    again = json.loads(run("--quick", "--json").stdout)
    assert again["cached"]
    assert again["path"] == str(kept)
    assert again["links"] == {}
    assert {row["operator"] for row in again["operators"]} >= {"linear", "silu", "rope+half"}
    assert "measured before" in run("--quick").stdout
    for options in (("--fresh",), ("--dtype", "bfloat16")):
        assert "measured again" in run("--quick", *options).stderr
    kept.write_text("{}")
    assert "measured again" in run("--quick").stderr


@pytest.mark.dist
def test_links_are_measured_with_ranks(tmp_path):
    path = tmp_path / "profile.json"
    result = run("--quick", "--tp", 2, "-o", path)
    assert result.exit_code == 0, result.output
    assert "all_reduce" in result.stdout
    assert "gloo over 2 ranks" in result.stdout
    assert find_cost_model(path).collective_seconds("all_gather", 2**20, 2) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dtype", "int8"), "--dtype int8 is none of float64, float32, bfloat16, float16"),
        (("--device", "abacus"), "torch knows no device 'abacus'"),
        (("--device", "meta"), "not of 'meta'"),
    ],
)
def test_what_cannot_be_measured(options, message):
    result = run(*options)
    assert result.exit_code == 1
    assert message in result.stderr


def test_less_than_one_rank_is_wrong_usage():
    assert run("--tp", "0").exit_code == 2
