"""The command line: what it prints, where, and with which exit status.

Long because every command and every bad input of it is a test of its own.
"""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

import pcg
from cli.doctor import REQUIREMENTS
from cli.options.fields import flags_of
from cli.options.method import ALIASES, Method
from cli.options.types import kind_of
from pcg.explain import explain as explaining
from pcg.ir.program.folder import load_program
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import SHORTHANDS
from pcg.source import shipped
from tests.support import tiny_llama
from tests.support.command_line import output_of, run

ROOT = Path(__file__).parents[2]
PROMPT = "def add(a, b):"


def python(*args: str | Path, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def program(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "program"
    output_of("compile", model, "--rank", "4", "--targets", "q_proj,down_proj", "-o", folder)
    return folder


@pytest.fixture(scope="module")
def adapter(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that says something else than the base."""
    path = tmp_path_factory.mktemp("adapters") / "loud"
    executor = pcg.load(program)
    made = executor.add_adapter("loud", "lora")
    for weights in made.weights.values():
        weights.b.normal_()
    executor.save_adapter("loud", path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"add {i} and {i}: ", "completion": f"{2 * i}"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


# ---------------------------------------------------------------------------------------- the whole


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from cli import main\n"
        "heavy = 'torch', 'transformers', 'peft', 'triton', 'sympy', 'networkx', 'numpy'\n"
        "try: main()\n"
        "finally: print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Compile, serve and finetune" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_version() -> None:
    assert output_of("--version") == f"pcg {pcg.__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["compile", "doctor", "explain", "finetune", "models", "profile", "run", "simulate"],
)
def test_every_help_has_an_example(command: str) -> None:
    help_text = output_of(command, "--help")
    assert f"pcg {command}" in help_text[help_text.index("Example:") :]


def test_usage_errors_exit_with_2() -> None:
    for args in ((), ("nonsense",), ("compile",), ("run", "x", "--tmperature", "1")):
        result = run(*args)
        assert result.exit_code == 2
        assert result.stdout == "" or args == ()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("compile", tmp_path / "nothing", "-o", tmp_path / "x", "--debug")
    assert isinstance(result.exception, pcg.errors.ModelNotFoundError)
    result = run("compile", tmp_path / "nothing", "-o", tmp_path / "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no directory or file")
    assert "Traceback" not in result.output


def test_a_bug_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pcg.source.shipped", lambda: 1 / 0)
    result = run("models")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ZeroDivisionError: division by zero\nThis is a bug")


def test_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("pcg.source.shipped", full)
    assert run("models").stderr == "error: No space left on device: /somewhere\n"


def test_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.setattr("pcg.source.shipped", large)
    assert run("models").stderr.startswith("error: out of memory: Tried to allocate 20.00 GiB; use")


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pcg.source.shipped", interrupt)
    result = run("models")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_shells_complete_models() -> None:
    process = python(
        _PCG_COMPLETE="complete_bash", COMP_WORDS="pcg explain meta-llama/Llama-3", COMP_CWORD="2"
    )
    names = process.communicate(timeout=60)[0].split()
    assert names == [name for name in shipped() if name.startswith("meta-llama/Llama-3")]


# ------------------------------------------------------------------------------ models and doctor


def test_models() -> None:
    listed = json.loads(output_of("models", "--json"))["models"]
    assert [model["model"] for model in listed] == list(shipped())
    by_name = {model["model"]: model for model in listed}
    llama = by_name["meta-llama/Llama-3.1-70B"]
    assert (llama["layers"], llama["heads"], llama["kv_heads"]) == (80, 64, 8)
    assert by_name["tiiuae/falcon-7b"]["kv_heads"] == by_name["bigcode/starcoder"]["kv_heads"] == 1
    text = output_of("models")
    assert all(name in text for name in shipped())
    assert max(map(len, text.splitlines())) <= 80


def test_doctor() -> None:
    report = json.loads(output_of("doctor", "--json"))
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {package["name"] for package in report["packages"]} >= {"torch", "transformers"}
    assert report["cpu"]["cores"] >= 1
    assert report["disk_bytes"]["free"] > 0
    assert "torch" in output_of("doctor")


def test_doctor_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        if name == "networkx":
            raise metadata.PackageNotFoundError(name)
        return {"torch": "2.10.1+cpu"}.get(name, "99")

    monkeypatch.setattr("importlib.metadata.version", version)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install 'torch>=2.11,<2.14'" in result.stdout
    assert "networkx is missing" in result.stdout


def test_doctor_wants_what_the_distribution_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {requirement.name + requirement.wanted for requirement in REQUIREMENTS}
    listed = {dependency.partition(";")[0] for dependency in project["dependencies"]}
    assert wanted - {"peft"} == listed


# ------------------------------------------------------------------------------------------ compile


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


# ------------------------------------------------------------------------------------------ explain


class FakeReport:
    def to_text(self, tensors: bool = False, formulas: bool = False) -> str:
        return f"the text, {tensors=}"

    def to_json(self) -> dict[str, Any]:
        return {"model": "tiny"}


def test_explain_passes_its_options_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def explain(*args: Any, **options: Any) -> FakeReport:
        calls.append((args, options))
        return FakeReport()

    monkeypatch.setattr(explaining, "explain", explain)
    assert output_of("explain", model) == "the text, tensors=False\n"
    assert calls.pop()[0] == (str(model), "lora")
    options = ["--rank", "4", "--targets", "q_proj", "--tp", "2", "--batch", "3", "--seq", "64"]
    options += ["--memory-budget", "8GiB", "--dtype", "float16", "--gpu", "L4"]
    options += ["--optimizer", "rprop", "--optimizer-option", "etas=[0.5, 1.1]"]
    text = output_of("explain", model, *options, "--json")
    assert json.loads(text) == {"model": "tiny"}
    ((_, recipe), sizes) = calls.pop()
    assert recipe == LoraConfig(r=4, lora_alpha=8, target_modules=("q_proj",))
    assert sizes == {
        "tp": 2, "batch": 3, "seq": 64, "dtype": "float16", "memory_budget": "8GiB",
        "gpus": ("L4",), "optimizer": "rprop", "optimizer_options": {"etas": [0.5, 1.1]},
    }  # fmt: skip
    output_of("explain", model, "--peers")
    assert calls.pop()[1]["peers"] is True
    assert output_of("explain", model, "--peft", "none", "--tensors") == "the text, tensors=True\n"
    assert calls.pop()[0][1] is None


def test_sequence_parallelism_takes_ranks(model: Path, program: Path, tmp_path: Path) -> None:
    refused = run("explain", model, "--sequence-parallel")
    assert_one_error(refused, "tp=1 is one rank; use tp=2 or more")
    report = json.loads(output_of("explain", model, "--tp", "2", "--sequence-parallel", "--json"))
    assert report["parallel"]["sequence_parallel"] is True
    folder = tmp_path / "program"
    run("compile", model, "--tp", "2", "--sequence-parallel", "-o", folder)
    assert load_program(folder).options.sequence_parallel
    other = run("run", program, "--sequence-parallel", "--prompt", "hello")
    assert other.exit_code == 2
    assert "--sequence-parallel" in other.stderr


def test_explain_a_model_that_ships() -> None:
    report = json.loads(output_of("explain", "llama-3.2-1b", "--seq", "64", "--json"))
    assert report["model"] == "meta-llama/Llama-3.2-1B"
    assert report["parameters"]["base"] == 1_235_814_400
    assert_one_error(run("explain", "llama-3.2-1b", "--targets", "q_porj"), "did you mean q_proj")


def test_compile_adds_the_report(program: Path) -> None:
    report = json.loads((program / "report.json").read_text())
    assert report["memory_bytes"]["total"] > 0


# ---------------------------------------------------------------------------------------------- run


def test_run_a_program_and_a_model(program: Path, model: Path) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", "8")
    text = output_of("run", program, *options)
    assert text.startswith(PROMPT)
    assert text == output_of("run", model, *options)
    assert text == output_of("run", program, *options, "--stream")


def test_run_prints_one_object(program: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("line one\nline two\n")
    text = output_of(
        *("run", program, "-p", PROMPT, "--prompt-file", tmp_path / "prompt.txt"),
        *("--prompt-file", "-", "--adapter", f"loud={adapter}"),
        *("--use", "loud", "--use", "base", "--use", "loud"),
        *("--max-new-tokens", "6", "--ignore-eos", "--json"),
        input=PROMPT,
    )
    result = json.loads(text)
    one, two, three = result["completions"]
    assert [c["adapter"] for c in (one, two, three)] == ["loud", None, "loud"]
    assert two["prompt"] == "line one\nline two\n"
    assert one["token_ids"] == three["token_ids"]
    assert {c["finish_reason"] for c in result["completions"]} == {"length"}
    assert result["tokens"] == 18
    base = json.loads(output_of("run", program, "-p", PROMPT, "-n", "6", "--ignore-eos", "--json"))
    assert base["completions"][0]["token_ids"] != one["token_ids"]


def test_run_uses_its_only_adapter(program: Path, adapter: Path) -> None:
    options = ("-p", PROMPT, "-n", "4", "--json")
    result = json.loads(output_of("run", program, "--adapter", f"loud={adapter}", *options))
    assert result["completions"][0]["adapter"] == "loud"


def test_run_streams_several_prompts_in_order(program: Path) -> None:
    options = ("-p", PROMPT, "-p", "The quick", "-n", "6", "--seed", "3", "--temperature", "1")
    assert output_of("run", program, *options, "--stream") == output_of("run", program, *options)
    lines = output_of("run", program, *options).splitlines()
    assert [line for line in lines if line.startswith("── ")] == [
        "── 1 · base ──",
        "── 2 · base ──",
    ]


def test_run_applies_the_chat_template(program: Path) -> None:
    options = ("-p", "what is it?", "-n", "2", "--json")
    plain, chat = (
        json.loads(output_of("run", program, *options, *more))["completions"][0]["prompt_tokens"]
        for more in ((), ("--chat",))
    )
    assert chat > plain


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give a prompt"),
        (("-p", "x", "--stream", "--json"), "does not go with --json"),
        (("-p", "x", "--adapter", "loud"), "use NAME=PATH"),
        (("-p", "x", "--adapter", "a=x", "--adapter", "a=y"), "a is given twice"),
        (("-p", "x", "--adapter", "a=x", "--adapter", "b=y"), "say which of a, b to use"),
        (("-p", "x", "--use", "mine"), "no adapter is called 'mine'; there are: base"),
        (("-p", "x", "--use", "base", "--use", "base"), "given 2 times for 1 prompt"),
        (("--prompt-file", "nothing.txt"), "No such file"),
        (("-p", "x", "--dtype", "float32"), "chosen by pcg compile"),
        (("-p", "x", "--backend", "torch"), "backend is chosen by pcg compile"),
    ],
)
def test_run_usage(program: Path, args: tuple[str, ...], message: str) -> None:
    result = run("run", program, *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_run_takes_options_of_programs_for_programs_alone(model: Path) -> None:
    for option in (("--weights", "x"), ("--trust-edits",)):
        result = run("run", model, "-p", "x", *option)
        assert result.exit_code == 2
        assert "is not a compiled program" in " ".join(result.stderr.replace("│", " ").split())


# ----------------------------------------------------------------------------------------- finetune


def test_finetune_takes_every_field_of_every_method() -> None:
    """Each field's option is there, and a method refuses those that it does not have."""
    options = {option.name for option in Method.options()}
    for word, recipe in SHORTHANDS.items():
        names = {field.name for field in dataclasses.fields(recipe)}
        assert names <= options
        other = next(name for name in sorted(options - names) if name not in ("peft", *ALIASES))
        refused = run("explain", "llama-3.2-1b", "--peft", word, *as_given(other))
        assert refused.exit_code == 2
        message = " ".join(refused.stderr.replace("│", " ").split())
        assert f"--peft {word} does not have it; it has" in message
        assert flags_of(other)[0] in message


def as_given(name: str) -> tuple[str, ...]:
    """An option with a value, if it takes one."""
    (option,) = (option for option in Method.options() if option.name == name)
    kind = kind_of(option.hint)
    value = "a=1" if "=" in (kind.metavar or "") else "1"
    return flags_of(name)[:1] if kind.is_flag else (flags_of(name)[0], value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--peft dora --r 8", {"r": 8, "lora_alpha": 16, "use_dora": True}),
        ("--peft dora --dropout 0.1", {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1}),
        ("--rank 8 --alpha 8", {"r": 8, "lora_alpha": 8, "use_dora": False}),
        (
            "--rank-pattern q_proj=4 --use-rslora",
            {"rank_pattern": {"q_proj": 4}, "use_rslora": True},
        ),
        ("--init-lora-weights false", {"init_lora_weights": False}),
        ("--init-lora-weights gaussian", {"init_lora_weights": "gaussian"}),
        ("--targets q_proj,v_proj", {"target_modules": ("q_proj", "v_proj")}),
        ("--targets .*_proj", {"target_modules": ".*_proj"}),
        ("--targets q_proj --layers-to-transform 0,1", {"layers_to_transform": (0, 1)}),
        ("--peft vera --no-save-projection", {"save_projection": False}),
        ("--peft prefix --num-virtual-tokens 3", {"num_virtual_tokens": 3}),
        ("--peft pfeiffer --bottleneck-size 8", {"variant": "pfeiffer", "bottleneck_size": 8}),
    ],
)
def test_fields_of_methods(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: str, expected: dict[str, Any]
) -> None:
    recipes: list[Any] = []

    def explain(model: str, peft: Any) -> FakeReport:
        recipes.append(peft)
        return FakeReport()

    monkeypatch.setattr(explaining, "explain", explain)
    output_of("explain", model, *options.split())
    found = dataclasses.asdict(recipes[0])
    assert {name: found[name] for name in expected} == expected


def test_finetune_and_run(program: Path, data: Path, tmp_path: Path) -> None:
    from peft import PeftConfig

    result = run(
        *("finetune", program, "--data", data, "--adapter", "sums", "-o", tmp_path / "sums"),
        *("--epochs", "2", "--lr", "5e-3", "--eval-data", data),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "sums: 4 steps" in result.stderr
    assert "evaluation loss" in result.stderr
    files = {path.name for path in (tmp_path / "sums").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    assert PeftConfig.from_pretrained(tmp_path / "sums").r == 4  # the program's recipe
    place = f"sums={tmp_path / 'sums'}"
    assert output_of("run", program, "--adapter", place, "-p", "add 1", "-n", "3")


def test_finetune_prints_one_object(model: Path, data: Path, tmp_path: Path) -> None:
    options = ("--data", data, "--adapter", "sums", "--max-steps", "2", "--rank", "2", "--json")
    summary = json.loads(output_of("finetune", model, *options, "-o", tmp_path / "sums"))
    assert summary["steps"] == len(summary["losses"]) == 2
    assert summary["output"] == str(tmp_path / "sums")
    more = ("--data", data, "--adapter", "sums", "--max-steps", "1", "--json")
    go_on = (*more, "--start-from", tmp_path / "sums", "-o", tmp_path / "more")
    json.loads(output_of("finetune", model, *go_on))
    before, after = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sums", "more")
    )
    assert {k: t.shape for k, t in before.items()} == {k: t.shape for k, t in after.items()}


def test_finetune_that_is_interrupted_goes_on_exactly(
    program: Path, data: Path, tmp_path: Path
) -> None:
    def command(name: str) -> tuple[str | Path, ...]:
        start = ("finetune", program, "--data", data, "--adapter", "sums", "-o", tmp_path / name)
        return (*start, "--epochs", "20", "--batch-size", "2", "--log-every", "1")

    process = python(*command("one"))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("sums step 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130, rest
    last = rest.splitlines()[-1]
    assert "interrupted after step" in last
    assert "Traceback" not in rest
    assert not (tmp_path / "one" / "adapter_model.safetensors").exists()
    assert "resumed from step" in run(*command("one")).stderr
    assert run(*command("two")).exit_code == 0
    one, two = (tmp_path / name / "adapter_model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


# ---------------------------------------------------------------------------------------- bad input


def changed_config(**fields: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def cut_short(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def without_a_shard(directory: Path) -> None:
    weights = directory / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(weights), "model-00001-of-00002.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    weights.unlink()


def with_pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def damaged_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama",')


def write_nothing(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write_nothing, "has no config.json; give a Hugging Face model directory"),
        (damaged_config, "config.json is damaged at line 1, column 24"),
        (cut_short, "is truncated: its header describes"),
        (without_a_shard, "model-00001-of-00002.safetensors is missing"),
        (with_pickles, "loading a pickle can run any code"),
        (changed_config(hidden_size=64, head_dim=8), "hidden_size=64"),
        (changed_config(model_type="nonesuch"), "'nonesuch'"),
    ],
)
def test_bad_models(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    bad = shutil.copytree(model, tmp_path / "bad")
    damage(bad)
    result = run("run", bad, "-p", "x")
    assert_one_error(result, message)


def for_another_base(adapter: Path, directory: Path) -> Path:
    other = shutil.copytree(adapter, directory / "other")
    weights = other / "adapter_model.safetensors"
    tensors = load_file(weights)
    wide = {name: t.repeat(1, 2) if "lora_A" in name else t for name, t in tensors.items()}
    save_file(wide, weights)
    return other


def test_bad_adapters(program: Path, adapter: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nothing", "is not there; give the directory of a saved adapter"),
        (for_another_base(adapter, tmp_path), "model.layers.0.mlp.down_proj"),
    ):
        assert_one_error(run("run", program, "-p", "x", "--adapter", f"a={path}"), message)


def test_bad_recipes(model: Path, program: Path, data: Path, tmp_path: Path) -> None:
    assert_one_error(
        run("compile", model, "-o", tmp_path / "p", "--targets", "q_porj"),
        "did you mean q_proj",
    )
    assert_one_error(run("compile", model, "-o", tmp_path / "p", "--rank", "0"), "r=0; a rank")
    options = ("--data", data, "--adapter", "a", "-o", tmp_path / "a", "--rank", "0")
    assert_one_error(run("finetune", program, *options), "r=0; a rank")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "prompt 0 is empty"), ("fox " * 400, "the model has 256 positions")],
)
def test_bad_prompts(program: Path, prompt: str, message: str) -> None:
    assert_one_error(run("run", program, "-p", prompt), message)
    assert_one_error(run("run", program, "-p", prompt, "--stream"), message)


def test_bad_sampling(program: Path) -> None:
    assert_one_error(run("run", program, "-p", "x", "--top-p", "1.5"), "top_p=1.5")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "completion": "b"', "train.jsonl line 2"),
        ('{"prompt": "a"}', "train.jsonl line 2"),
    ],
)
def test_bad_data(program: Path, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    options = ("--data", path, "--adapter", "a", "-o", tmp_path / "a")
    assert_one_error(run("finetune", program, *options), message)
    assert not (tmp_path / "a").exists()


def test_loss_that_is_no_number(program: Path, data: Path, tmp_path: Path) -> None:
    options = ("--data", data, "--adapter", "a", "-o", tmp_path / "a", "--max-steps", "4")
    result = run("finetune", program, *options, "--lr", "1e30", "--schedule", "constant")
    assert_one_error(result, "lower learning_rate=1e+30")
    assert not (tmp_path / "a" / "adapter_model.safetensors").exists()


def test_bad_finetuning_options(tmp_path: Path) -> None:
    """Said before a model is looked for."""
    options = ("--data", "x.jsonl", "--adapter", "a", "-o", tmp_path / "a")
    result = run("finetune", "nothing", *options, "--lr", "-1")
    assert_one_error(result, "learning_rate=-1.0")
    sgd = (*options, "--optimizer", "SGD", "--optimizer-option")
    assert_one_error(run("finetune", "nothing", *sgd, "nesterov=true"), "'sgd': Nesterov momentum")
    assert_one_error(run("finetune", "nothing", *sgd, "momentun=0.9"), "did you mean 'momentum'?")
    for value, message in (("momentum", "use NAME=VALUE"), ("momentum=", "use NAME=VALUE")):
        result = run("finetune", "nothing", *sgd, value)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())


def test_bad_programs(program: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(program, tmp_path / "bad")
    (bad / "serving.py").write_text((bad / "serving.py").read_text() + "# mine\n")
    assert_one_error(run("run", bad, "-p", "x"), "accept it: --trust-edits")
    assert output_of("run", bad, "-p", "x", "-n", "1", "--trust-edits")
    (bad / "plan.json").unlink()
    assert_one_error(run("run", bad, "-p", "x", "--trust-edits"), "plan.json is missing")


def assert_one_error(result: Result, message: str) -> None:
    """One line on standard error, nothing on standard output."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
