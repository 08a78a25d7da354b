"""The backend that `auto` stands for, by device, by packages and by model; and where it is said."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pcg
from pcg.compiler import compile_program
from pcg.errors import UnsupportedError
from pcg.ir.program.folder import load_program, save_program
from pcg.ir.program.manifest import read_manifest
from pcg.kernels.triton.backend import check_device, choose_backend, machine_device
from pcg.kernels.triton.ptxas import used_ptxas
from tests.support.families import BY_NAME

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have an H100, as far as a compiler asks."""
    importlib.import_module("pcg.kernels.triton.ops")  # while the interpreter is asked for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("pcg.kernels.triton.ptxas.failure", lambda device: None)
    return monkeypatch


def program(family: str = "llama3", **changed: Any) -> Any:
    options = {name: changed.pop(name) for name in ("dtype", "backend") if name in changed}
    return compile_program(BY_NAME[family].config(2, **changed), "lora", **options)


def test_a_cpu_gets_pytorch() -> None:
    assert str(choose_backend("auto", torch.device("cpu"))) == (
        "torch: the device is cpu, not an NVIDIA GPU"
    )
    assert choose_backend("triton", torch.device("cpu")).name == "triton"


@pytest.mark.parametrize("name", ["nosuch", "cuda:99", "mps:0"])
def test_a_device_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the device {name} cannot be used .*; use cpu"):
        machine_device(name)


@pytest.mark.parametrize(
    ("capability", "name"), [((7, 5), "torch"), ((8, 0), "triton"), ((8, 9), "triton")]
)
def test_by_capability(gpu: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = choose_backend("auto", machine_device())
    assert found.name == name
    assert f"H100 of capability {capability[0]}.{capability[1]}" in found.reason
    assert choose_backend("torch", CUDA).name == "torch"


def test_amd_gets_pytorch(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "7.0")
    assert "AMD" in choose_backend("auto", CUDA).reason


def test_the_interpreter_is_no_choice(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set" in choose_backend("auto", CUDA).reason


def test_products_that_are_wrong(gpu: pytest.MonkeyPatch) -> None:
    """The self-test's failure is the reason for PyTorch, and refuses a program for Triton."""
    gpu.setattr("pcg.kernels.triton.ptxas.failure", lambda device: "ptxas 12.8 is wrong")
    assert str(choose_backend("auto", CUDA)) == "torch: ptxas 12.8 is wrong"
    with pytest.raises(
        UnsupportedError, match=r"ptxas 12\.8 is wrong; or compile the program for PyTorch"
    ):
        check_device("triton", CUDA)
    check_device("torch", CUDA)


def test_kernels_that_cannot_be_imported(gpu: pytest.MonkeyPatch) -> None:
    gpu.setitem(sys.modules, "pcg.kernels.triton.ops", None)
    found = choose_backend("auto", CUDA)
    assert found.name == "torch"
    assert "pcg.kernels.triton.ops cannot be imported" in found.reason


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="backend='triton' needs the package triton"):
        choose_backend("triton", CUDA)


def test_a_large_vocabulary_is_no_obstacle(gpu: pytest.MonkeyPatch) -> None:
    """An adapter of the head, which peft's all-linear leaves out, is refused when it is loaded."""
    assert program(vocab_size=50_000).options.backend == "triton"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 12}, "attention kernels know no heads of 12; their sizes are 16, 32"),
        ({"dtype": "float64"}, "attention kernels do not compute in float64"),
        ({"intermediate_size": 4096}, "row of 4096 elements is longer than a page"),
    ],
)
def test_a_model_that_kernels_do_not_know_falls_back_by_name(
    gpu: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING, "pcg.compiler"):
        compiled = program(**changed)
    assert compiled.options.backend == "torch"
    assert reason in compiled.choices["backend"]
    assert reason in caplog.text
    assert "pcg.kernels.torch" in compiled.serving.source


def test_the_choice_is_in_the_manifest(gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = program()
    assert compiled.options.backend == "triton"
    assert "pcg.kernels.triton" in compiled.serving.source
    save_program(compiled, tmp_path / "program")
    chosen = {
        "backend": f"triton: the device is H100 of capability 9.0, by {used_ptxas(90).name}",
        "attention": "own kernels",
    }
    assert read_manifest(tmp_path / "program").choices == chosen
    assert load_program(tmp_path / "program").choices == chosen
    assert program(backend="torch").choices["backend"] == "torch: it was asked for"


def test_explain_says_it() -> None:
    config = BY_NAME["llama3"].config(2)
    said = "backend      triton: on NVIDIA GPUs of capability 8.0 or later"
    assert said in pcg.explain(config).to_text()
    assert pcg.explain(config, device="cpu").backend.startswith("torch: the device is cpu")
    other = pcg.explain(BY_NAME["llama3"].config(2, head_dim=12)).to_json()
    assert other["backend"].startswith("torch: attention kernels know no heads of 12")
