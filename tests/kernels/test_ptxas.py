"""The assembler that Triton takes, and the product that checks it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pcg.kernels.triton import ptxas
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

bf16.install()

CPU = torch.device("cpu")


def test_the_product_has_the_bits_that_it_has_to() -> None:
    with sanitized():
        found, exact = ptxas.products(CPU)
    assert torch.equal(found, exact)
    assert exact.unique().numel() > 1000


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ptxas, "prefer_newest", lambda: None)
    ptxas.failure.cache_clear()
    yield monkeypatch
    ptxas.failure.cache_clear()


def test_a_wrong_bit_is_a_failure_with_its_fix(hopper: pytest.MonkeyPatch) -> None:
    found, exact = ptxas.products(CPU)
    hopper.setattr(ptxas, "products", lambda device: (found, exact))
    assert ptxas.failure(CPU) is None
    ptxas.failure.cache_clear()
    wrong = found.clone()
    wrong[63, 127] += 1
    hopper.setattr(ptxas, "products", lambda device: (wrong, exact))
    said = ptxas.failure(CPU)
    assert said is not None
    assert said.startswith(str(ptxas.used_ptxas(90)))
    assert "ptxas 13.3 or later, or set TRITON_PTXAS_PATH" in said


def test_other_gpus_are_not_asked(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    hopper.setattr(ptxas, "products", None)
    assert ptxas.failure(CPU) is None


@pytest.mark.parametrize(
    ("plain", "newer", "chosen"),
    [("12.8", "12.9", "/newer"), ("12.8", "13.1", "/newer"), ("13.4", "12.9", None)],
)
def test_the_newest_one_is_preferred(
    monkeypatch: pytest.MonkeyPatch, plain: str, newer: str, chosen: str | None
) -> None:
    """As Triton 3.6 and 3.7 have it, which take `ptxas` for Hopper; not over the user's choice."""
    tools = [SimpleNamespace(path=f"/{name}", version=version) for name, version in
             (("plain", plain), ("newer", newer))]  # fmt: skip
    nvidia = SimpleNamespace(ptxas=tools[0], ptxas_blackwell=tools[1])
    monkeypatch.setattr(ptxas, "knobs", SimpleNamespace(nvidia=nvidia))
    monkeypatch.setattr(ptxas, "get_ptxas", lambda architecture: tools[0])
    environment: dict[str, str] = {}
    monkeypatch.setattr(ptxas.os, "environ", environment)
    ptxas.prefer_newest()
    assert environment.get("TRITON_PTXAS_PATH") == chosen
    environment["TRITON_PTXAS_PATH"] = "/own"
    ptxas.prefer_newest()
    assert environment["TRITON_PTXAS_PATH"] == "/own"


def test_versions() -> None:
    found = ptxas.used_ptxas(90)
    assert found.version >= (12, 8)
    assert dataclasses.replace(found, version=(13, 3)).is_fixed
    assert not dataclasses.replace(found, version=(13, 2)).is_fixed
    assert not dataclasses.replace(found, version=(12, 9)).is_fixed


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
