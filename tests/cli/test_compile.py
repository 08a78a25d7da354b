"""`pcg compile`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from pcg import compiler
from pcg.explain import explain
from pcg.passes.pipeline import Settings, pipeline
from tests.support.command_line import assert_one_error, output_of, run


def test_compile_shows_the_passes(model: Path, tmp_path: Path) -> None:
    result = run("compile", model, "-o", tmp_path / "p", "--dump-dir", tmp_path / "dumps")
    assert result.exit_code == 0
    assert result.stdout == ""
    stages = pipeline(Settings()).stages
    passes = [one.name for stage in stages for one, _ in stage.flat()]
    lines = [line.split() for line in result.stderr.splitlines() if line.strip()]
    assert [line[0] for line in lines[1 : len(passes) + 1]] == passes
    assert all(int(line[1].replace(",", "")) > 0 for line in lines[1 : len(passes) + 1])
    dumps = {path.name for path in (tmp_path / "dumps").iterdir()}
    assert dumps == {f"{index:02}-{name}.pcg" for index, name in enumerate(passes)}


def test_compile_prints_one_object(model: Path, tmp_path: Path) -> None:
    summary = json.loads(output_of("compile", model, "--json", "-o", tmp_path / "p"))
    assert [step["pass"] for step in summary["passes"]][:2] == ["trace", "fold"]
    assert "serving.py" in summary["files"]


def test_compile_prints_the_graphs_after_a_pass(model: Path) -> None:
    from pcg.ir.parser import parse_graphs

    text = output_of("compile", model, "--print-after", "raise", "--print-after", "attach")
    names = [graph.name for graph in parse_graphs(text)]
    base = ["prologue", "block_0", "epilogue"]
    both = [f"{kind}.{name}" for kind in ("serving", "training") for name in base]
    assert names == [*base, *both]
    (text, again) = (output_of("compile", model, "--print-after", p) for p in ("fuse", "fuse_lora"))
    assert "serving.block_0" in text
    assert "training.block_0_backward" in text
    assert "= lora_linear(" in text
    # The pass fuses what serves; training's products are joined by a later one.
    assert text != again
    result = run("compile", model, "--print-after", "rise")
    assert result.exit_code == 2
    assert "no pass 'rise'" in result.stderr


def test_compile_remembers_recipe_and_weights(program: Path, model: Path) -> None:
    manifest = json.loads((program / "manifest.json").read_text())
    assert manifest["weights"] == str(model)
    recipe = manifest["recipes"]["default"]
    assert (recipe["rank"], recipe["alpha"]) == (4, 8)
    assert recipe["target_modules"] == ["q_proj", "down_proj"]


def test_compile_takes_the_recipe_of_an_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    output_of("compile", model, "--peft", adapter, "-o", tmp_path / "p")
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text())
    assert manifest["recipes"]["loud"]["rank"] == 16


def test_compile_options_that_do_not_go_together(model: Path, tmp_path: Path) -> None:
    for args, message in (
        (("--peft", "none", "--rank", "8"), "no effect with --peft none"),
        (("--peft", "lorra"), "neither none nor one of lora, dora"),
        (("--json", "--print-after", "raise"), "does not go with --json"),
    ):
        result = run("compile", model, "-o", tmp_path / "p", *args)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())
    assert run("compile", model).exit_code == 2
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compile", "-o", "/proc/x"), "the program cannot be saved in /proc/x"),
        (("compile", "--dump-dir", "/proc/x"), "the graphs cannot be saved in /proc/x"),
        (("explain", "--html", "/proc/x.html"), "the page x.html cannot be saved in /proc"),
        (("explain", "--optimizer", "lion"), "optimizer='lion' is not among those"),
        (("explain", "--optimizer-option", "rate=1"), "optimizer 'adamw' does not take 'rate'"),
    ],
)
def test_bad_places_and_names_are_refused_before_a_model_is_traced(
    model: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*_: object) -> None:
        raise AssertionError("the model is traced")

    monkeypatch.setattr(explain, "compared", trace)
    monkeypatch.setattr(compiler, "compile_program", trace)
    command, *options = words
    assert_one_error(run(command, model, *options), message)


def test_compile_leaves_other_files_alone_before_it_traces(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "compile_program", None)
    (tmp_path / "notes.txt").write_text("mine")
    assert_one_error(run("compile", model, "-o", tmp_path), "is not empty and not a compiled")


def test_compile_adds_the_report(program: Path) -> None:
    report = json.loads((program / "report.json").read_text())
    assert report["memory_bytes"]["total"] > 0


def test_bad_recipes(model: Path, program: Path, data: Path, tmp_path: Path) -> None:
    assert_one_error(
        run("compile", model, "-o", tmp_path / "p", "--targets", "q_porj"),
        "did you mean q_proj",
    )
    assert_one_error(run("compile", model, "-o", tmp_path / "p", "--rank", "0"), "r=0; a rank")
    options = ("--data", data, "--adapter", "a", "-o", tmp_path / "a", "--rank", "0")
    assert_one_error(run("finetune", program, *options), "r=0; a rank")
    assert not list(tmp_path.iterdir())
