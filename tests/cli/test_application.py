"""The command line as a whole: help, errors, exit statuses; models, doctor, runs and torchrun."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer

import pcg
import pcg.machine_memory as machine_memory
from cli.application import app
from cli.doctor import REQUIREMENTS
from cli.options.executors import PlaceOptions, check_alone, degree_of, shards_and_replicas
from pcg.machine_memory import Memory
from pcg.records.record import RunRecord
from pcg.source import shipped
from tests.support import oracle
from tests.support.command_line import assert_one_error, output_of, python, run
from tests.support.families import BY_NAME

ROOT = Path(__file__).parents[2]


def test_help_loads_nothing_heavy():
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


COMMANDS = [
    *(
        ("compile",),
        ("explain",),
        ("finetune",),
        ("plan",),
        ("profile",),
        ("quantize",),
        ("merge",),
        ("export",),
        ("run",),
    ),
    *(("serve",), ("serve-base",), ("bench", "serve"), ("train", "sft"), ("runs", "compare")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_two_screens_and_whole_names(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text, whole = output_of(*command, "--help"), output_of(*command, "--help-all")
    assert text.count("\n") <= 96
    for shown in (text, whole):
        lines = shown.partition("\nExample:")[0].splitlines()
        assert max(map(len, lines)) <= 80
    made = typer.main.get_command(app)
    for word in command:
        _, made, _ = made.resolve_command(typer.Context(made), [word])
    names = {each.opts[0] for each in made.params if each.param_type_name == "option"}
    for shown in (text, whole):
        assert names <= set(re.split(r"[\s,]+", shown))


def test_version():
    assert output_of("--version") == f"pcg {pcg.__version__}\n"


@pytest.mark.parametrize(
    "command", ["compile", "doctor", "explain", "finetune", "models", "profile", "run", "simulate"]
)
def test_every_help_has_an_example(command):
    help_text = output_of(command, "--help")
    assert f"pcg {command}" in help_text[help_text.index("Example:") :]


def test_usage_errors_exit_with_2():
    for args in ((), ("nonsense",), ("compile",), ("run", "x", "--tmperature", "1")):
        result = run(*args)
        assert result.exit_code == 2
        assert result.stdout == "" or args == ()


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("finetune", "--num-train-epochs", "the name here is --epochs"),
        ("serve", "--tensor-parallel-size", "the name here is --tp"),
        ("run", "--max-tokens", "the name here is --max-new-tokens"),
    ],
)
def test_options_of_other_programs_lead_to_ours(command, option, hint):
    result = run(command, "model", option, "2")
    assert result.exit_code == 2
    assert f"No such option: {option}; {hint}" in " ".join(result.stderr.replace("│", " ").split())


def test_options_of_a_file_are_those_of_the_command_line(tmp_path):
    given = ["llama-3.1-8b", "--batch", "1", "--seq", "64", "--r", "4", "--json"]
    given += ["--targets", "q_proj,v_proj", "--optimizer-option", "amsgrad=true"]
    file = tmp_path / "explain.yaml"
    file.write_text(
        "model: llama-3.1-8b\nbatch: 9\nseq: 64\nr: 4\njson: true\n"
        "target-modules: [q_proj, v_proj]\noptimizer_options: {amsgrad: true}\n"
    )
    expected = output_of("explain", *given)
    assert output_of("explain", "--config", file, "--batch", "1") == expected
    file.write_text("bacth: 1\n")
    refused = run("explain", "llama-3.1-8b", "--config", file)
    assert_one_error(refused, "unknown option 'bacth', did you mean 'batch'?")


def test_debug_shows_the_traceback(tmp_path):
    result = run("compile", tmp_path / "nothing", "-o", tmp_path / "x", "--debug")
    assert isinstance(result.exception, pcg.errors.ModelNotFoundError)
    result = run("compile", tmp_path / "nothing", "-o", tmp_path / "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no directory or file")
    assert "Traceback" not in result.output


def test_a_bug_is_called_one(monkeypatch):
    monkeypatch.setattr("pcg.source.shipped", lambda: 1 / 0)
    result = run("models")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ZeroDivisionError: division by zero\nThis is a bug")


def test_full_disk_is_one_line(monkeypatch):
    def full():
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("pcg.source.shipped", full)
    assert run("models").stderr == "error: No space left on device: /somewhere\n"


def test_memory_that_is_too_small(monkeypatch):
    def large():
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    monkeypatch.setattr("pcg.source.shipped", large)
    assert run("models").stderr.startswith("error: out of memory: Tried to allocate 20.00 GiB; use")


def test_interrupt_exits_with_130(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("pcg.source.shipped", interrupt)
    result = run("models")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_shells_complete_models():
    process = python(
        _PCG_COMPLETE="complete_bash", COMP_WORDS="pcg explain meta-llama/Llama-3", COMP_CWORD="2"
    )
    names = process.communicate(timeout=60)[0].split()
    assert names == [name for name in shipped() if name.startswith("meta-llama/Llama-3")]


def test_models():
    listed = json.loads(output_of("models", "--json"))["models"]
    assert [model["model"] for model in listed] == list(shipped())
    by_name = {model["model"]: model for model in listed}
    llama = by_name["meta-llama/Llama-3.1-70B"]
    assert (llama["layers"], llama["heads"], llama["kv_heads"]) == (80, 64, 8)
    assert by_name["tiiuae/falcon-7b"]["kv_heads"] == by_name["bigcode/starcoder"]["kv_heads"] == 1
    text = output_of("models")
    assert all(name in text for name in shipped())
    assert max(map(len, text.splitlines())) <= 80


def test_families():
    outcomes = json.loads(output_of("models", "--families", "--json"))["outcomes"]
    text = output_of("models", "--families")
    for row in outcomes:
        assert f"{row['outcome']} ({len(row['model_types'])})" in text
        assert set(row["model_types"]) <= set(text.replace(",", " ").split())


def throw(error):
    raise error


def test_doctor():
    report = json.loads(output_of("doctor", "--json"))
    assert report["product_ms"].keys() == {"float32", "bfloat16", "int8", "nf4"}
    assert all(ms > 0 for times in report["product_ms"].values() for ms in times.values())
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {package["name"] for package in report["packages"]} >= {"torch", "transformers"}
    assert report["cpu"]["cores"] >= 1
    assert report["disk_bytes"]["free"] > 0
    assert "torch" in output_of("doctor")


def test_doctor_counts_the_weights_of_a_model(tmp_path, monkeypatch):
    oracle.random_model(BY_NAME["llama3"].config(2), torch.float32).save_pretrained(tmp_path)
    model = str(tmp_path)
    arguments = ("--peft", "none", "--device", "cpu", "--dtype", "float32", "--json")
    both = json.loads(output_of("explain", model, *arguments))
    alone = json.loads(output_of("explain", model, *arguments, "--no-packed-weights"))
    found = json.loads(output_of("doctor", model, "--json"))["model"]
    assert found["weights_bytes"] == alone["memory_bytes"]["weights"]
    assert found["packed_bytes"] == both["packed_bytes"]
    assert both["memory_bytes"]["weights"] == found["weights_bytes"] + found["packed_bytes"]
    assert alone["packed_bytes"] == 0
    assert ("--no-packed-weights" in output_of("doctor", model)) == (found["packed_bytes"] > 0)
    room = found["weights_bytes"]
    monkeypatch.setattr("cli.doctor.memory", lambda: Memory(room, room))
    assert ("use --no-packed-weights" in output_of("doctor", model)) == (found["packed_bytes"] > 0)
    monkeypatch.setattr("cli.doctor.memory", lambda: Memory(room, room - 1))
    assert "use --tp" in output_of("doctor", model)


def test_doctor_says_how_to_get_what_is_missing(monkeypatch):
    def version(name):
        if name == "networkx":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.10.1+cpu"}.get(name, "99")

    monkeypatch.setattr("importlib.metadata.version", version)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install 'torch>=2.11,<2.16'" in result.stdout
    assert "networkx is missing" in result.stdout


def test_doctor_lists_every_extra(monkeypatch):
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    version = importlib.metadata.version
    lacking = importlib.metadata.PackageNotFoundError
    monkeypatch.setattr(
        "importlib.metadata.version",
        lambda name: throw(lacking(name)) if name == "uvicorn" else version(name),
    )
    extras = json.loads(output_of("doctor", "--json"))["extras"]
    assert extras.keys() == names.keys() - {"dev", "docs"}
    assert extras["serve"]["missing"] == ["uvicorn>=0.40"]
    assert "pip install 'pcg[serve]'" in output_of("doctor")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("uvicorn", "pip install 'pcg[serve]'"),
        ("google.protobuf", "pip install 'pcg[serve]'"),
        ("zmq", "pip install 'pcg[split]'"),
        ("nltk", "pip install 'pcg[graders]'"),
        ("sympy", "pip install sympy"),
    ],
)
def test_a_missing_module_is_no_bug(module, line, monkeypatch):
    monkeypatch.setattr("cli.run.degree_of", lambda *_: throw(ModuleNotFoundError(name=module)))
    assert_one_error(run("run", "examples/checkpoint", "--prompt", "x"), line)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_that_of_the_container(version, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_memory, "ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    meminfo = "MemTotal: 4096 kB\nMemFree: 1024 kB\nMemAvailable: 3072 kB\n"
    (tmp_path / "proc/meminfo").write_text(meminfo)
    assert machine_memory.memory() == (4096 * 1024, 3072 * 1024)
    limit, used = (tmp_path / name for name in machine_memory.CGROUP_FILES[2 - version])
    limit.parent.mkdir(parents=True)
    limit.write_text("2097152\n")
    used.write_text("1048576\n")
    assert machine_memory.memory() == (2097152, 1048576)
    limit.write_text("max\n")
    assert machine_memory.memory() == (4096 * 1024, 3072 * 1024)


def test_doctor_wants_what_the_distribution_wants():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {requirement.name + requirement.wanted for requirement in REQUIREMENTS}
    dependencies = (*project["dependencies"], *project["optional-dependencies"]["gpu"])
    listed = {dependency.partition(";")[0] for dependency in dependencies}
    assert wanted == listed


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lora-modules", "a=x", "a=y"),
        ("--lora-modules=a=x", "a=y"),
        ("--lora-modules", "a=x", '{"name": "a", "path": "y"}', "--port", "0"),
        ("--lora-modules", "a=x", "--port", "0", "--lora-modules", "b=x", "a=y"),
    ],
)
def test_modules_are_listed_as_for_vllm(arguments):
    result = run("serve", "examples/checkpoint", *arguments)
    assert_one_error(result, "--lora-modules has 'a' twice")


def test_what_follows_modules_is_no_module():
    result = run("serve", "--lora-modules", "a=x", "examples/checkpoint")
    assert_one_error(result, "--lora-modules a=x: adapter_config.json is missing")


@pytest.fixture
def folder(tmp_path):
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        with RunRecord(tmp_path / name / "record", {"learning_rate": rate}, kind="sft") as record:
            record.log(1, loss=2.0, eval_loss=1.5, tokens_per_second=100.0)
            record.log(2, loss=1.0, eval_loss=1.75, tokens_per_second=1250.0)
    RunRecord(tmp_path / "killed", name="\x1b[2J", kind="\x1b[31m")._metrics.close()
    return tmp_path


def test_runs_are_listed(folder):
    text = output_of("runs", folder)
    assert text == output_of("runs", "list", folder)
    first = text.splitlines()[1].split()
    assert first[:8] == ["a/record", "sft", "completed", "2", "1.0000", "1.7500", "1.5000", "1,250"]
    assert "\x1b" not in text
    assert "stopped" in text.splitlines()[3]
    found = json.loads(output_of("runs", folder, "--json"))["runs"]
    assert [one["status"] for one in found] == ["completed", "completed", "stopped"]
    assert found[0]["best_eval_loss"] == 1.5
    assert found[0]["best_step"] == 1
    (folder / "a/record/run.json").write_text("{")
    damaged = run("runs", folder)
    assert damaged.exit_code == 0
    assert "run.json is damaged" in damaged.stderr
    assert "b/record" in damaged.stdout


def test_runs_are_compared(folder):
    page = folder / "page.html"
    text = output_of("runs", "compare", folder / "a", folder / "b/record", "--html", page)
    cells = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines()[1:-1]}
    assert cells["learning_rate"] == ["0.001", "0.002"]
    assert cells["eval_loss, best"] == ["1.5", "1.5"]
    assert cells["tokens/s"] == ["1250", "1250"]
    assert "svg" in page.read_text("utf-8")
    found = json.loads(output_of("runs", "compare", folder / "a", folder / "b", "--json"))
    assert [one["run"] for one in found["runs"]] == ["a", "b"]
    assert [one["options"] for one in found["runs"]] == [
        {"learning_rate": 1e-3}, {"learning_rate": 2e-3},
    ]  # fmt: skip


def test_many_runs_keep_all_of_their_columns(folder):
    text = output_of("runs", "compare", *[folder / name for name in "abababababab"])
    assert "…" not in text
    assert text.splitlines()[0].count("(") == 12


def test_a_page_is_written_for_a_run_that_was_killed(folder):
    assert output_of("runs", "report", folder / "killed").strip() == str(
        folder / "killed/report.html"
    )
    assert "stopped" in (folder / "killed/report.html").read_text("utf-8")


def test_what_is_no_run_is_refused(folder):
    assert_one_error(run("runs", folder / "nothing"), "is no folder")
    assert_one_error(run("runs", "compare", folder), "has no record of a run")
    assert output_of("runs", folder / "a/record/") != ""


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def asked(**compiling):
    return degree_of("a/model", compiling, PlaceOptions())


@pytest.mark.usefixtures("torchrun")
def test_without_tp_there_are_as_many_ranks_as_processes():
    assert asked() == 4
    assert asked(tp=4) == 4


@pytest.mark.usefixtures("torchrun")
def test_copies_are_refused():
    with pytest.raises(typer.BadParameter, match=r"started 4 .* takes 1, each .* give --tp 4"):
        asked(tp=1)
    with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes 2$"):
        asked(tp=2)
    with pytest.raises(typer.BadParameter, match=r"started 4 .* takes 1, each"):
        degree_of("split://host:8300", {}, PlaceOptions())
    with pytest.raises(typer.BadParameter, match="which would each run all of pcg train sft"):
        check_alone("pcg train sft")


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("dp", "compiling", "expected"),
    [
        (None, {}, (4, 1)),
        (None, {"tp": 2}, (2, 2)),
        (None, {"tp": 1}, (1, 4)),
        (2, {}, (2, 2)),
        (4, {"tp": 1}, (1, 4)),
    ],
)
def test_replicas_are_the_processes_that_shards_leave(dp, compiling, expected):
    assert shards_and_replicas("a/model", compiling, PlaceOptions(), dp) == expected


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("dp", "cp", "compiling", "expected"),
    [(None, 2, {}, (2, 1)), (None, 2, {"tp": 1}, (1, 2)), (2, 2, {}, (1, 2)), (1, 4, {}, (1, 1))],
)
def test_parts_of_sequences_take_processes(dp, cp, compiling, expected):
    assert shards_and_replicas("a/model", compiling, PlaceOptions(cp=cp), dp) == expected
    with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes 3"):
        shards_and_replicas("a/model", {"tp": 1}, PlaceOptions(cp=3), 1)


@pytest.mark.usefixtures("torchrun")
def test_other_numbers_of_replicas_are_refused():
    for dp, tp in ((2, 4), (3, 1), (None, 3)):
        with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes"):
            shards_and_replicas("a/model", {"tp": tp}, PlaceOptions(), dp)


def test_without_torchrun_there_is_one_rank_unless_more_are_asked_for():
    assert (asked(), asked(tp=2)) == (1, 2)
    check_alone("pcg train sft")


@pytest.mark.usefixtures("torchrun")
def test_a_program_takes_the_ranks_that_it_was_compiled_for(tmp_path):
    from pcg.compiler import compile_program
    from pcg.ir.program.folder import save_program
    from tests.support.families import BY_NAME

    save_program(compile_program(BY_NAME["llama3"].config(1), tp=2), tmp_path / "program")
    with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes 2$"):
        degree_of(str(tmp_path / "program"), {}, PlaceOptions())


def test_more_stages_than_layers_start_no_ranks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    with pytest.raises(typer.BadParameter, match=r"4 stages need a layer each, and .* has 3"):
        degree_of(str(tmp_path), {}, PlaceOptions(pp=4))
    assert degree_of(str(tmp_path), {}, PlaceOptions(pp=3)) == 1
