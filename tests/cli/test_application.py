"""The command line as a whole: help, errors and exit statuses; models and doctor."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import pcg
from cli.doctor import REQUIREMENTS
from pcg.source import shipped
from tests.support import oracle
from tests.support.command_line import assert_one_error, output_of, python, run
from tests.support.families import BY_NAME

ROOT = Path(__file__).parents[2]


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


def test_doctor_counts_the_weights_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("cli.doctor._memory", lambda: {"total": room, "available": room})
    assert ("use --no-packed-weights" in output_of("doctor", model)) == (found["packed_bytes"] > 0)
    monkeypatch.setattr("cli.doctor._memory", lambda: {"total": room, "available": room - 1})
    assert "use --tp" in output_of("doctor", model)


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
    extras = project["optional-dependencies"]
    named = (*extras["peft"], *extras["bitsandbytes"], *extras["split"])
    assert wanted == {*listed, *named}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lora-modules", "a=x", "a=y"),
        ("--lora-modules=a=x", "a=y"),
        ("--lora-modules", "a=x", '{"name": "a", "path": "y"}', "--port", "0"),
        ("--lora-modules", "a=x", "--port", "0", "--lora-modules", "b=x", "a=y"),
    ],
)
def test_modules_are_listed_as_for_vllm(arguments: tuple[str, ...]) -> None:
    result = run("serve", "examples/checkpoint", *arguments)
    assert_one_error(result, "--lora-modules has 'a' twice")


def test_what_follows_modules_is_no_module() -> None:
    result = run("serve", "--lora-modules", "a=x", "examples/checkpoint")
    assert_one_error(result, "--lora-modules a=x: adapter_config.json is missing")
