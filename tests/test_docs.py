"""Documents and docstrings name what exists; their commands, code and transcripts are true."""

import ast
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
import typer
from typer.testing import CliRunner

import pcg
from pcg.compiler import compile_program
from pcg.options import PlanOptions
from pcg.passes.pipeline import Settings, pipeline
from pcg_cli.application import DefaultGroup, app
from tests.support.gguf_models import random_gguf
from tests.support.started_ranks import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
DOCUMENTS = [*PAGES, ROOT / "examples" / "checkpoint" / "README.md"]
SOURCES = sorted(
    path
    for folder in ("pcg", "cli", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
PATH = re.compile(r"(?<![\w./<{])(?:pcg|cli|tests|docs|examples|benchmarks)/[\w./*-]*[\w*/]")
NAME = re.compile(r"(?<![\w./-])pcg(?:\.\w+)+(?![\w/])")
FILE = re.compile(r"(?<![\w./*-])\w+\.py\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EMITTED = {"serving.py", "training.py"}
LOGGERS = {"pcg.finetuning", "pcg.kernels"}


def _id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _missing_paths(text: str) -> set[str]:
    found = {match.rstrip("./") for match in PATH.findall(text)}
    return {path for path in found if not _is_there(path)}


@functools.cache
def _is_there(path: str) -> bool:
    return any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()


def _missing_names(text: str) -> set[str]:
    return {name for name in NAME.findall(text) if not _exists(name)} - LOGGERS


@functools.cache
def _exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute that is found from one."""
    if Path(name).suffix in (".json", ".toml", ".md", ".service", ".txt"):
        return True
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        if isinstance(value, ModuleType):
            try:
                value = importlib.import_module(".".join(parts[:end]))
                continue
            except ModuleNotFoundError:
                pass
        if not hasattr(value, part):
            classes = getattr(value, "__mro__", ())
            fields = {name for one in classes for name in getattr(one, "__annotations__", ())}
            return part in fields and end == len(parts)
        value = getattr(value, part)
    return True


def _docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def _blocks(path: Path, language: str) -> list[str]:
    return [
        code for kind, code in FENCE.findall(path.read_text(encoding="utf-8")) if kind == language
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_documents_name_paths_that_exist(document: Path) -> None:
    assert _missing_paths(document.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_documents_name_files_that_exist(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    assert set(FILE.findall(text)) <= {path.name for path in SOURCES} | EMITTED | {
        "setup.py",
        "utils.py",
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_documents_name_modules_that_exist(document: Path) -> None:
    assert _missing_names(document.read_text(encoding="utf-8")) == set()


def test_docstrings_name_paths_and_modules_that_exist() -> None:
    missing = {}
    for path in SOURCES:
        text = _docstrings(path)
        names = _missing_paths(text) | _missing_names(text)
        if names:
            missing[_id(path)] = names
    assert missing == {}


def _anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_links_lead_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


def test_the_index_of_the_docs_lists_every_document() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = set(LINK.findall(index))
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert there <= listed


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_python_in_documents_compiles(document: Path) -> None:
    for code in _blocks(document, "python"):
        if "…" not in code:
            if "yield" in code:  # a part of a function
                code = "def part():\n" + textwrap.indent(code, "    ")
            compile(code, _id(document), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _sentences(text: str) -> list[str]:
    """Return the sentences of the paragraphs and lists: no code, table, title or link's address."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text), flags=re.DOTALL)
    is_prose = re.compile(r"(?![|#]|---)(?!.* \| )").match
    prose = "\n".join(line if is_prose(line) else "" for line in text.splitlines())
    prose = LINK.sub("]", prose)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", prose)
    parts = (part for block in blocks for part in re.split(r"(?<=[.!?:])\s+(?=[^a-z\s])", block))
    return [part for part in parts if part.strip()]


def test_documents_are_short() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    assert len(list((ROOT / "docs").glob("*.md"))) <= 15
    assert sum(len(text.split()) for text in texts) <= 28_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("document", PAGES, ids=_id)
def test_sentences_are_short(document: Path) -> None:
    lengths = [len(part.split()) for part in _sentences(document.read_text(encoding="utf-8"))]
    assert statistics.mean(lengths) <= 18


def test_the_index_names_every_command() -> None:
    """The rows of the table of commands are the application's commands, with their summaries."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `pcg ([a-z-]+)", text, re.MULTILINE)
    assert set(rows) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_the_reference_names_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert sorted(name.rpartition(".")[2] for name in named) == sorted(
        set(pcg.__all__) - {"__version__"}
    )
    assert all(_exists(name) for name in named)


@pytest.mark.slow
def test_recipes_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in _blocks(ROOT / "README.md", "python"):
        exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "function readTable(path, limit = 20) {" in printed
    assert "def read_table(path, limit: int = 20):" in printed
    assert "def save_user(name):" in printed
    assert (tmp_path / "mine" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    "page",
    ["adapters.md", "architecture.md", "engine.md", "explain.md", "finetuning.md", "models.md"],
)
def test_python_of_pages_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page one after the other, as a reader does."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in _blocks(ROOT / "docs" / page, "python"):
        exec(compile(code, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("unzip")), reason="needs curl and unzip"
)
@pytest.mark.timeout(900)
def test_the_quickstart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the blocks of docs/README.md as printed, but for the port of the server."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    download, commands, printed, serve, ask = _blocks(ROOT / "docs" / "README.md", "")
    subprocess.run(["bash", "-ec", download + commands], check=True)
    assert printed in capfd.readouterr().out
    port = str(free_port())
    server = subprocess.Popen(["bash", "-c", f"exec {serve.strip()} --port {port}"])
    try:
        ask = ask.replace("8000", port).replace("curl", "curl --silent --fail", 1)
        until(
            lambda: subprocess.run(["bash", "-c", ask], check=False).returncode == 0, timeout_s=90
        )
    finally:
        server.terminate()
        server.wait(60)
    (choice,) = json.loads(capfd.readouterr().out.splitlines()[-1])["choices"]
    assert choice["message"]["content"].strip() == printed.strip()

    (code,) = _blocks(ROOT / "docs" / "README.md", "python")
    exec(compile(code, "docs/README.md", "exec"), {})
    assert capfd.readouterr().out.strip() == printed.strip()


def test_the_commands_of_the_quickstart_run_on_a_random_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    random_gguf(tmp_path / "smollm2.gguf")
    for words in _commands(f"```\n{_blocks(ROOT / 'docs' / 'README.md', '')[1]}```"):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert Path("run/report.html").is_file()
    assert transformers.AutoModelForCausalLM.from_pretrained("merged").dtype is torch.bfloat16


@pytest.mark.parametrize(("page", "count"), [("compiler.md", 1), ("finetuning.md", 1)])
def test_the_first_commands_of_a_page_run(
    page: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the first blocks of a page in one process."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    block = "".join(_blocks(ROOT / "docs" / page, "")[:count])
    other = [line for line in block.splitlines() if not line.startswith(("pcg ", " "))]
    subprocess.run(["bash", "-ec", "\n".join(other)], check=True)
    for words in _commands(f"```\n{block}```"):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_the_example_of_split_execution_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    port = str(free_port())
    command = _blocks(ROOT / "docs" / "split.md", "")[0].replace("8300", port)
    (code,) = _blocks(ROOT / "docs" / "split.md", "python")
    words = shlex.split(command)[1:]
    said = tmp_path / "said"
    with said.open("w", encoding="utf-8") as stderr:
        base = subprocess.Popen([sys.executable, "-m", "pcg_cli", *words], stderr=stderr)
    try:
        until(lambda: port in said.read_text(encoding="utf-8"), timeout_s=200)
        exec(compile(code.replace("8300", port), "docs/split.md", "exec"), {})
    finally:
        base.terminate()
        base.wait(60)
    assert "def" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
def test_the_job_of_ranks_runs(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (code,) = _blocks(ROOT / "docs" / "parallel.md", "python")
    (tmp_path / "job.py").write_text(code, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    command = [*launch, "--nproc-per-node", "2", "job.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stdout.strip()


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the command lines of pcg in a document's code blocks, as words."""
    for language, code in FENCE.findall(text):
        if language in ("", "console", "sh", "bash"):
            lines = code.replace("\\\n", " ").splitlines()
            for line in lines:
                for part in line.removeprefix("$ ").split(" | "):
                    if part.startswith("pcg ") and "…" not in part:
                        yield shlex.split(part, comments=True)[1:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_commands_in_documents_have_their_options(document: Path) -> None:
    for words in _commands(document.read_text(encoding="utf-8")):
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", ()):
            _, command, words = command.resolve_command(typer.Context(command), words)
            if isinstance(command, DefaultGroup) and words[0] not in command.commands:
                words = [next(iter(command.commands)), *words]
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert given <= known | {"--help"}, (command.name, given - known)
        assert given or not hasattr(command, "commands"), words


TRANSCRIPT = re.compile(
    r"^```\n\$ (pcg (?:explain|plan) [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LONG = ("--gpu A100-40", "Llama-3.1-70B", "--split")
"""Words of commands that take long."""
TRANSCRIPTS = [
    pytest.param(
        command,
        output,
        id=f"{_id(document)}: {command}",
        marks=pytest.mark.slow if any(word in command for word in LONG) else (),
    )
    for document in DOCUMENTS
    for command, output in TRANSCRIPT.findall(document.read_text(encoding="utf-8"))
]


@functools.cache
def _printed(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip("\n") + "\n"


@pytest.mark.parametrize(("command", "output"), TRANSCRIPTS)
def test_transcripts_show_what_is_printed(command: str, output: str) -> None:
    """A line of `…` in a transcript stands for any lines."""
    expected = re.escape(output).replace("…\\\n", r"(?:.*\n)*")
    assert re.fullmatch(expected, _printed(command)), _printed(command)


def test_docs_name_every_pass_of_the_pipeline() -> None:
    text = (ROOT / "docs" / "compiler.md").read_text(encoding="utf-8")
    for backend in ("torch", "triton"):
        settings = Settings(PlanOptions(tp=2), backend=backend, windows=True)
        names = {one.name for stage in pipeline(settings).stages for one, _ in stage.flat()}
        assert {name for name in names if f"`{name}`" not in text} == set()


def test_docs_show_the_beginning_of_the_layer_that_is_emitted() -> None:
    program = compile_program(ROOT / "examples" / "checkpoint", "lora", dtype="float32")
    (shown,) = _blocks(ROOT / "docs" / "compiler.md", "python")
    emitted = ast.parse(program.serving.source)
    layer = next(node for node in emitted.body if getattr(node, "name", "") == "block_0")
    assert ast.unparse(layer).startswith(ast.unparse(ast.parse(shown)))


def test_the_picture_of_the_house_has_the_layers_of_the_import_contract() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (picture,) = [block for _, block in FENCE.findall(text) if "cli/" in block]
    rows = [re.findall(r"([a-z_]+)(?:/|\.py)", line) for line in picture.splitlines()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["id"] == "layers"
    ]
    drawn = [set(row) for row in rows if row and row != ["cli"]]
    assert drawn == [{name.strip() for name in layer.split("|")} for layer in layers]
