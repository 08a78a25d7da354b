"""The assembler that Triton takes, and the product that checks it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcg.kernels.triton import TRITONS, choose_assembler, ptxas
from pcg.kernels.triton.ptxas import Ptxas, used_ptxas
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

bf16.install()

CPU = torch.device("cpu")
VARIABLE = TRITONS[0]


def test_the_product_has_the_bits_that_it_has_to() -> None:
    with sanitized():
        found, exact = ptxas.products(CPU)
    assert torch.equal(found, exact)
    assert exact.unique().numel() > 1000


# ------------------------------------------------------------------------------------ self-test


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A Hopper GPU whose products are right, and no choice of the user's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ptxas, "products", lambda device: (torch.ones(1), torch.ones(1)))
    monkeypatch.setattr(ptxas.os, "environ", {"PATH": "/usr/bin"})
    monkeypatch.setattr(ptxas, "assemblers", lambda architecture: [used_ptxas(architecture)])
    ptxas.failure.cache_clear()
    yield monkeypatch
    ptxas.failure.cache_clear()


def has_wrong_bit(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(ptxas, "products", lambda device: (torch.zeros(1), torch.ones(1)))


@pytest.mark.parametrize("version", [(12, 8), (13, 0), (13, 2), (13, 4)])
def test_the_self_test_alone_decides(hopper: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    """An old assembler whose products are right is taken, and a new one that is wrong refused."""
    one = Ptxas("/some/ptxas", version)
    hopper.setattr(ptxas, "used_ptxas", lambda architecture: one)
    assert ptxas.failure(CPU) is None
    ptxas.failure.cache_clear()
    has_wrong_bit(hopper)
    said = ptxas.failure(CPU)
    assert said is not None
    assert said.startswith(f"{one} gets products of Hopper's tensor cores wrong")
    assert "set PCG_PTXAS to another ptxas" in said


def test_other_gpus_are_not_asked(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    hopper.setattr(ptxas, "products", None)
    hopper.setattr(ptxas, "assemblers", None)
    assert ptxas.failure(CPU) is None


# ------------------------------------------------------------------------------------ the choice


def fake_ptxas(path: Path, release: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("right", "chosen"),
    [(["own", "newer"], "own"), (["newer"], "newer"), ([], None)],
)
def test_each_is_tried_in_a_process_of_its_own(
    hopper: pytest.MonkeyPatch, right: list[str], chosen: str | None, tmp_path: Path
) -> None:
    """Triton's own is tried first; the choice is made before a kernel is compiled here."""
    own, newer = (fake_ptxas(tmp_path / name, "12.8") for name in ("own", "newer"))
    there = [Ptxas(str(own), (12, 8)), Ptxas(str(newer), (13, 0))]
    hopper.setattr(ptxas, "assemblers", lambda architecture: there)
    hopper.setattr(ptxas, "is_right_apart", lambda one, device: Path(one.path).name in right)
    fresh = functools.lru_cache(lambda architecture=80: "")
    hopper.setattr(ptxas, "get_ptxas_version", fresh)
    if not right:
        has_wrong_bit(hopper)
    assert (ptxas.failure(CPU) is None) == bool(right)
    assert os.environ.get(VARIABLE) == (chosen and str(tmp_path / chosen))


def test_nothing_is_switched_once_a_kernel_is_compiled(hopper: pytest.MonkeyPatch) -> None:
    """The keys of Triton's cache name the version that was read first."""
    compiled_by = functools.lru_cache(lambda architecture=80: "12.8")
    compiled_by()
    hopper.setattr(ptxas, "get_ptxas_version", compiled_by)
    hopper.setattr(ptxas, "assemblers", lambda _: [Ptxas("/own", (12,)), Ptxas("/newer", (13,))])
    hopper.setattr(ptxas, "is_right_apart", None)
    before = dict(os.environ)
    assert ptxas.failure(CPU) is None
    assert os.environ == before


@pytest.mark.parametrize("contents", [None, "no program", "#!/bin/sh\necho 1.0\n"])
def test_a_choice_that_does_not_run_is_named(
    hopper: pytest.MonkeyPatch, contents: str | None, tmp_path: Path
) -> None:
    """Triton would take its own instead, and say nothing."""
    path = tmp_path / "ptxas"
    if contents is not None:
        path.write_text(contents)
        path.chmod(0o755)
    choose_assembler(str(path))
    said = ptxas.failure(CPU)
    assert said is not None
    assert said.startswith(f"{path} is no ptxas that runs here; set PCG_PTXAS to another")


SAID = """
import os
from pcg.kernels.triton.ptxas import used_ptxas
print(*(used_ptxas(architecture).path for architecture in (80, 90, 100)))
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PCG_PTXAS": "a", "TRITON_PTXAS_PATH": "b"}, "a a a"),
        ({"TRITON_PTXAS_PATH": "b", "TRITON_PTXAS_BLACKWELL_PATH": "a"}, None),
        pytest.param({"PCG_PTXAS": "a"}, "a a a", marks=pytest.mark.slow),
        pytest.param({"TRITON_PTXAS_PATH": "b"}, "b b b", marks=pytest.mark.slow),
    ],
)
def test_a_choice_of_the_user_counts_on_every_gpu(
    variables: dict[str, str], expected: str | None, tmp_path: Path
) -> None:
    """Triton has two variables, and which counts on Hopper differs by its version."""
    paths = {name: str(fake_ptxas(tmp_path / name, "12.8")) for name in ("a", "b")}
    environment = {**os.environ, **{name: paths[one] for name, one in variables.items()}}
    done = subprocess.run(
        [sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, check=True
    )
    used = [Path(path).name for path in done.stdout.split()]
    if expected is None:  # both of Triton's are the user's, and stay
        assert set(used) == {"a", "b"}
    else:
        assert used == expected.split()


def test_assemblers_are_tritons_and_newer_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = fake_ptxas(tmp_path / "own/ptxas", "12.8")
    newest = fake_ptxas(tmp_path / "home/bin/ptxas", "99.1")
    fake_ptxas(tmp_path / "path/ptxas", "12.7")
    for name in TRITONS:
        monkeypatch.setenv(name, str(own))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    first, second, *others = ptxas.assemblers(90)
    assert (first.path, first.name) == (str(own), "ptxas 12.8")
    assert (second.path, second.name) == (str(newest), "ptxas 99.1")
    assert all((12, 8) < one.version < (99, 1) for one in others)


def test_a_trial_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the assembler as the user's choice, and finds pcg where this process does."""
    asked: list[Any] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        asked.append((command, env))
        return SimpleNamespace(returncode=len(asked) - 1)

    monkeypatch.setattr(ptxas.subprocess, "run", run)
    one = Ptxas("/newer", (13, 0))
    assert ptxas.is_right_apart(one, torch.device("cuda:1"))
    assert not ptxas.is_right_apart(one, torch.device("cuda:1"))
    command, environment = asked[0]
    assert command == [sys.executable, "-m", "pcg.kernels.triton.ptxas", "cuda:1"]
    assert environment["PCG_PTXAS"] == "/newer"
    assert str(Path(ptxas.__file__).parents[3]) in environment["PYTHONPATH"].split(os.pathsep)


def test_machine_code() -> None:
    """Hopper's own products, under way while weights are computed and loads beside them."""
    names = ("queries", "keys", "values")
    signature = dict.fromkeys(names, "*bf16") | {"out": "*fp32", "steps": "i32"}
    constants = {"ROWS": 64, "KEYS": 64, "SIZE": 128}
    (code,) = compiled([Kernel(ptxas.__name__, "weighted_values", signature, constants)], [90])
    code.check_in_registers()
    assert code.count("LDGSTS", "128")
    (loop,) = code.product_loops
    loop.check_ahead(exponentials=32)
