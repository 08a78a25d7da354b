"""`pcg compile`, `pcg opt` and `pcg plan`: what they print, write and refuse."""

import json
import re
import shlex

import pytest

from pcg import compiler
from pcg.explain import explain
from pcg.ir.parser import parse_graphs
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.registry import PASSES
from tests.support import tiny_llama
from tests.support.command_line import assert_one_error, output_of, run


def test_compile_shows_the_passes(model, tmp_path):
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


def test_compile_measures_auto_and_reports_what_it_chose(model, tmp_path):
    options = ["--dtype", "auto", "--quantization", "auto"]
    assert run("compile", model, *options, "-o", tmp_path / "out").exit_code == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text("utf-8"))
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert "auto" not in (plan.get("dtype"), plan.get("quantization"))
    assert report["dtype"] == plan["dtype"]
    assert report["quantization"] == plan.get("quantization")


def test_compile_prints_one_object(model, tmp_path):
    summary = json.loads(output_of("compile", model, "--json", "-o", tmp_path / "p"))
    assert [step["pass"] for step in summary["passes"]][:2] == ["trace", "fold"]
    assert "serving.py" in summary["files"]


def test_compile_prints_the_graphs_after_a_pass(model):
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


def test_compile_remembers_recipe_and_weights(program, model):
    manifest = json.loads((program / "manifest.json").read_text())
    assert manifest["weights"] == str(model)
    recipe = manifest["recipes"]["default"]
    assert (recipe["rank"], recipe["alpha"]) == (4, 8)
    assert recipe["target_modules"] == ["q_proj", "down_proj"]


def test_compile_takes_the_recipe_of_an_adapter(model, adapter, tmp_path):
    output_of("compile", model, "--peft", adapter, "-o", tmp_path / "p")
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text())
    assert manifest["recipes"]["loud"]["rank"] == 16


def test_compile_options_that_do_not_go_together(model, tmp_path):
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
        (("explain", "--html", "/proc/x.html"), "--html x.html cannot be saved in /proc"),
        (("explain", "--optimizer", "lion"), "--optimizer lion is not among those"),
        (("explain", "--optimizer-option", "rate=1"), "optimizer 'adamw' does not take 'rate'"),
    ],
)
def test_bad_places_and_names_are_refused_before_a_model_is_traced(
    model, words, message, monkeypatch
):
    def trace(*_):
        raise AssertionError("the model is traced")

    monkeypatch.setattr(explain, "compared", trace)
    monkeypatch.setattr(compiler, "compile_program", trace)
    command, *options = words
    assert_one_error(run(command, model, *options), message)


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "--output"),
        ("bench", "serve", "examples/checkpoint", "--plot"),
        ("plan", "llama-3.1-8b", "--workload", "train:1x8", "--html"),
        ("explain", "llama-3.1-8b", "--html"),
    ],
)
def test_a_file_is_refused_before_the_work(words, tmp_path, monkeypatch):
    def work(*_, **__):
        raise AssertionError("the work has begun")

    for name in ("profile._of_machine", "bench_serve.measure", "plan.busy", "explain.busy"):
        monkeypatch.setattr(f"cli.{name}", work)
    option = words[-1]
    assert_one_error(run(*words, tmp_path / "none/x"), f"{option} {tmp_path}/none/x: there is no")
    assert_one_error(run(*words, "/proc/x"), f"{option} x cannot be saved in /proc")
    assert_one_error(run(*words, tmp_path), f"{option} {tmp_path}: it is a directory")


def test_compile_leaves_other_files_alone_before_it_traces(model, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "compile_program", None)
    (tmp_path / "notes.txt").write_text("mine")
    assert_one_error(run("compile", model, "-o", tmp_path), "is not empty and not a compiled")


def test_compile_adds_the_report(program):
    report = json.loads((program / "report.json").read_text())
    assert report["memory_bytes"]["total"] > 0


def test_bad_recipes(model, program, data, tmp_path):
    assert_one_error(
        run("compile", model, "-o", tmp_path / "p", "--targets", "q_porj"), "did you mean q_proj"
    )
    assert_one_error(run("compile", model, "-o", tmp_path / "p", "--rank", "0"), "r=0; a rank")
    options = ("--data", data, "--adapter", "a", "-o", tmp_path / "a", "--rank", "0")
    assert_one_error(run("finetune", program, *options), "r=0; a rank")
    assert not list(tmp_path.iterdir())


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


def test_a_pass_runs_over_every_graph_of_a_file(tmp_path):
    path = tmp_path / "two.pcg"
    path.write_text(TWO)
    text = output_of("opt", path, "--passes", "fuse_linears")
    assert JOINED in text
    assert [graph.name for graph in parse_graphs(text)] == ["one", "two"]


def test_standard_input_is_read_and_without_passes_printed():
    result = run("opt", "-", input=TWO)
    assert (result.exit_code, result.stdout) == (0, TWO)


def test_a_traced_model_is_folded_and_raised_as_compile_does(tmp_path):
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
def test_refusals(passes, message):
    result = run("opt", "-", "--passes", passes, input=TWO)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(message, result.stderr), result.stderr


def test_a_file_that_is_no_graph_is_shown_where():
    result = run("opt", "-", input="graph @g(%x: f32[T, 8) {\n}")
    assert result.exit_code == 1
    assert "error: -: line 1, column 22: expected" in result.stderr
    assert run("opt", "nowhere.pcg").exit_code == 1
    assert run("opt").exit_code == 2


def test_every_pass_is_listed_with_its_options():
    lines = output_of("opt", "--list").splitlines()
    assert [line.partition("{")[0].split()[0] for line in lines] == [one.name for one in PASSES]
    assert any(line.startswith("localize{degree=…} ") for line in lines)


def test_plan_prints_machines_and_what_starts_them(model, tmp_path):
    page = tmp_path / "plan.html"
    options = ["--workload", "train:4x64,serve:2req/s:32x32", "--gpus", "H100,L40S"]
    options += ["--price", "h100=2.5,L40S=1", "--max-gpus", "2"]
    text = output_of("plan", model, *options, "--html", page)
    assert max(map(len, text.partition("start it")[0].splitlines())) <= 100
    assert "→ 1×L40S" in text
    assert "data sheets, not measured" in text
    html = page.read_text()
    assert '<h2 id="front-title">' in html
    assert "dollars an hour" in html
    found = json.loads(output_of("plan", model, *options, "--json"))
    chosen = found["front"][found["chosen"]]
    assert (chosen["gpu"], chosen["dollars_per_hour"]) == ("L40S", 1.0)
    assert f"  {chosen['command']}\n" in text
    assert found["costs"].keys() == {"H100", "L40S"}


@pytest.mark.parametrize("workload", ["train:4x64", "serve:2req/s:32x32"])
def test_the_command_runs(model, data, tmp_path, workload):
    options = ["--workload", workload, "--rank", "4", "--targets", "q_proj,v_proj", "--gpu", "A10G"]
    options += ["--optimizer", "sgd", "--optimizer-option", "momentum=0.9"]
    found = json.loads(output_of("plan", model, *options, "--max-gpus", "1", "--json"))
    program, name, *words = shlex.split(found["front"][found["chosen"]]["command"])
    assert program == "pcg"
    words = [str(data) if word == "train.jsonl" else word for word in words]
    words = [str(tmp_path / word) if word in ("mine", "program") else word for word in words]
    words = [str(model) if word == found["model"] else word for word in words]
    if name == "finetune":
        assert words[words.index("--r" if "--r" in words else "--rank") + 1] == "4"
        assert "--optimizer sgd --optimizer-option momentum=0.9" in " ".join(words)
        words += ["--max-steps", "1", "--max-length", "64"]
        words[words.index("--adapter") + 1] = "mine"
    output_of(name, *words)
    assert (tmp_path / ("mine" if name == "finetune" else "program")).is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "train:4"], "workload 'train:4'; use train:BATCHxTOKENS"),
        (["--workload", "train:1x64", "--html", "nowhere/plan.html"], "no directory nowhere"),
    ],
)
def test_mistakes_are_one_line(model, options, message):
    assert_one_error(run("plan", model, *options), message)


def test_a_price_without_a_number(model):
    refused = run("plan", model, "--workload", "train:1x64", "--price", "H100")
    assert refused.exit_code == 2
    assert "use NAME=X" in refused.stderr
