"""`import pcg`: what it offers, and that it costs nothing until it is used."""

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import pcg
from pcg.errors import ConfigError, ProgramError, WeightsError
from pcg.ir.program.folder import save_program
from pcg.peft import METHODS
from tests.support import tiny_llama

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    from pcg.compiler import compile_program

    path = tmp_path_factory.mktemp("programs") / "program"
    save_program(compile_program(model), path, weights=model, tokenizer_directory=model)
    return path


def test_importing_pcg_imports_nothing_heavy():
    code = (
        "import sys, pcg; pcg.PcgError; heavy = ('torch', 'transformers', 'sympy', 'numpy'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there():
    for name in pcg.__all__:
        assert getattr(pcg, name) is not None
    assert set(METHODS) <= set(pcg.__all__) <= set(dir(pcg))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pcg.nonsense


def test_type_checkers_know_every_name():
    """Names that are found when they are first used are imported for type checkers."""
    (block,) = (
        node
        for node in ast.parse((ROOT / "pcg/__init__.py").read_text("utf-8")).body
        if isinstance(node, ast.If)
    )
    names = {a.name for line in block.body if isinstance(line, ast.ImportFrom) for a in line.names}
    assert names | {"PcgError", "__version__"} == set(pcg.__all__)


def test_public_errors_have_one_root_and_stand_in_the_tree():
    from pcg import errors

    types = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    there = {name for name, value in types.items() if value.__module__ == "pcg.errors"}
    assert all(issubclass(types[name], pcg.PcgError) for name in there)
    tree = errors.__doc__ or ""
    assert all(f" {name} " in tree or f"\n{name}\n" in tree for name in there)
    assert there & set(pcg.__all__) == {"PcgError"}


def test_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pcg.__version__ == project["version"]


def test_functions_stay_beside_packages_of_their_names(model):
    import pcg.explain.report.report
    import pcg.trace.export
    from pcg.explain.report.report import Report
    from pcg.trace import TracedModel

    assert isinstance(pcg.explain(model, seq=16), Report)

    by_path = pcg.trace(model)
    assert isinstance(by_path, TracedModel)
    by_config = pcg.trace(json.loads((model / "config.json").read_text()))
    by_module = pcg.trace(LlamaForCausalLM.from_pretrained(model))
    assert by_path.graph == by_config.graph == by_module.graph


def test_loaded_folder_computes_what_the_model_does(folder, model):
    executor = pcg.load(folder)
    ids = torch.randint(0, 512, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = LlamaForCausalLM.from_pretrained(model)(ids).logits
    torch.testing.assert_close(executor.logits(ids), expected, rtol=1e-4, atol=1e-5)
    by_model = pcg.compile(model).generate("def add(", max_new_tokens=8)
    assert executor.generate("def add(", max_new_tokens=8) == by_model


@pytest.mark.parametrize(
    ("fields", "message"), [({"rank": 0}, "r=0"), ({"rang": 1}, "'rang'"), ({"rank": "x"}, "r='x'")]
)
def test_a_recipe_that_is_damaged(folder, tmp_path, fields, message):
    shutil.copytree(folder, tmp_path / "program")
    path = tmp_path / "program" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["recipes"] = {"a": {"peft_type": "LORA", **fields}}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ProgramError, match=f"recipe 'a' is damaged: .*{message}"):
        pcg.load(tmp_path / "program")


def test_weights_elsewhere(folder, tmp_path):
    other = tiny_llama.save(tmp_path / "finetuned", seed=1)
    ids = [[1, 2, 3]]
    one, two = pcg.load(folder), pcg.load(folder, weights=other)
    assert not torch.equal(one.logits(ids)[0], two.logits(ids)[0])


def test_weights_of_another_model(folder, tmp_path):
    other = tiny_llama.save(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(ProgramError, match=r"rms_norm_eps=0.001, not 1e-06.*weights of this one"):
        pcg.load(folder, weights=other)


def test_weights_that_are_gone(folder, model, tmp_path):
    from pcg.ir.program.folder import load_program

    program = load_program(folder)
    save_program(program, tmp_path / "moved", weights=tmp_path / "gone")
    with pytest.raises(ProgramError, match=r"compiled from .*gone.*--weights PATH \(weights=PATH"):
        pcg.load(tmp_path / "moved")
    save_program(program, tmp_path / "bare")
    with pytest.raises(ProgramError, match=r"from a configuration alone; say where the weights"):
        pcg.load(tmp_path / "bare")
    executor = pcg.load(tmp_path / "bare", weights=model)
    assert executor.tokenizer is not None  # that of the weights
    with pytest.raises(ConfigError):
        pcg.load(tmp_path / "bare", weights=tmp_path)
    with pytest.raises(WeightsError):
        pcg.load(tmp_path / "bare", weights=tiny_llama_without_weights(tmp_path))


def tiny_llama_without_weights(tmp_path):
    directory = tmp_path / "no-weights"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_llama.config()))
    return directory
