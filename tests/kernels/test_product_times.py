"""A dtype and a format that are chosen by measured products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pcg
from pcg.errors import UnsupportedError
from pcg.kernels.torch import product_times
from pcg.kernels.torch.product_times import fastest_dtype, fastest_format
from tests.support import oracle
from tests.support.families import BY_NAME

CPU = torch.device("cpu")


def of(**ms: float) -> Any:
    """Times of all tokens, in milliseconds."""
    return {name: {str(tokens): one for tokens in (1, 16, 512)} for name, one in ms.items()}


@pytest.mark.parametrize(
    ("times", "dtype", "formats"),
    [
        (of(float32=4, bfloat16=2, int8=1, nf4=3), "bfloat16", ("int8", "int8")),
        (of(float32=4, bfloat16=9, int8=3.5, nf4=3), "float32", ("int8", "int8")),
        (of(float32=4, bfloat16=3.7, int8=3.7, nf4=1), "float32", (None, None)),
        (of(float32=4, bfloat16=2, int8=3, nf4=1), "bfloat16", ("int8", None)),
    ],
)
def test_the_fastest_is_chosen_if_it_gains_enough(
    times: Any, dtype: str, formats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_times, "product_times", lambda: times)
    assert fastest_dtype(CPU) == dtype
    assert tuple(fastest_format(CPU, name) for name in ("float32", "bfloat16")) == formats
    assert fastest_format(CPU, "float64") is None


def test_times_are_measured_once_for_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(product_times, "SIZE", 64)
    measured, times = [], product_times._measured()
    monkeypatch.setattr(product_times, "_measured", lambda: measured.append(1) or times)
    read = product_times.product_times.__wrapped__
    first = read()
    assert first == read()
    assert len(measured) == 1
    (path,) = tmp_path.glob("pcg/products/*.json")
    path.write_text('{"float32": 3}', encoding="utf-8")  # of another version
    assert read().keys() == first.keys()
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file: nothing can be kept there
    assert read().keys() == first.keys()
    assert len(measured) == 3


def test_a_program_is_compiled_in_the_measured_dtype_and_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = of(float32=4, bfloat16=2, int8=1, nf4=3)
    monkeypatch.setattr(product_times, "product_times", lambda: times)
    oracle.save_model(oracle.random_model(BY_NAME["llama3"].config(1)), tmp_path)
    options = pcg.compile(tmp_path, dtype="auto", quantization="auto").state.program.options
    assert (options.dtype, options.quantization) == ("bfloat16", "int8")
    stored = pcg.quantize(tmp_path, "int8_weight", tmp_path / "int8")
    kept = pcg.compile(stored, dtype="auto", quantization="auto").state.program.options
    assert (kept.dtype, kept.quantization) == ("bfloat16", None)
    with pytest.raises(UnsupportedError, match="dtype='auto' is measured on the machine"):
        pcg.explain(tmp_path, dtype="auto")
    with pytest.raises(UnsupportedError, match="quantization='auto' is measured"):
        pcg.explain(tmp_path, quantization="auto")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_model_with_experts_stays_in_floating_point(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = of(float32=4, bfloat16=2, int8=1, nf4=3)
    monkeypatch.setattr(product_times, "product_times", lambda: times)
    oracle.save_model(oracle.random_model(BY_NAME[family].config(1)), tmp_path)
    options = pcg.compile(tmp_path, dtype="auto", quantization="auto").state.program.options
    assert (options.dtype, options.quantization) == ("bfloat16", None)
