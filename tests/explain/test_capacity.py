"""Answers for choosing a GPU: totals, the steps that fit, and advice that holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import unescape
from typing import Any

import pytest

import pcg
from pcg.errors import AdapterError, UnsupportedError
from pcg.explain.report.report import Report
from pcg.parallel.costs.accelerators import ACCELERATORS, RESERVED_BYTES
from pcg.source import resolve

LLAMA = "meta-llama/Llama-3.1-8B"
GPT2 = "openai-community/gpt2-xl"
OPTIONS = {"--batch": int, "--seq": int, "--tp": int, "--memory-budget": float}


def short(model: str, layers: int = 2) -> Mapping[str, Any]:
    config = resolve(model).config
    return {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}


def options_of(advice: str) -> dict[str, Any]:
    """The keywords of options as they are written in advice."""
    words = advice.split()
    return {
        flag.strip("-").replace("-", "_"): OPTIONS[flag](value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }


def test_the_total_is_of_finetuning_alone_and_serving_adds_its_cache() -> None:
    alone = pcg.explain(short("facebook/opt-6.7b"), batch=8, seq=512)
    serving = pcg.explain(short("facebook/opt-6.7b"), batch=8, seq=512, serve_tokens=1000)
    assert alone.memory_bytes["kv_cache"] == 0
    assert alone.formulas["kv_cache"] == "0"
    cache = 1000 * 2 * 2 * 4096 * 2  # keys and values of two layers, in half precision
    assert serving.memory_bytes["kv_cache"] == cache
    copies = serving.memory_bytes["served_adapters"]
    assert copies > alone.memory_bytes["served_adapters"] == 0
    assert serving.memory_bytes["total"] == alone.memory_bytes["total"] + cache + copies
    assert alone.kept_bytes == 0
    assert "KV cache    = 32768000" in serving.to_text()
    assert "KV cache  " not in alone.to_text().partition("bytes, for B")[2]


def test_windows_that_a_job_leaves_are_told_where_they_are_recorded() -> None:
    """Beside requests on one GPU, but of a budget in bytes, whose steps may be planned anew."""
    config = short(LLAMA)
    report = pcg.explain(config, batch=2, seq=64, serve_tokens=100)
    windows = report.stage("token-level")
    assert windows is not None
    both = report.memory_bytes["adapters"] + report.memory_bytes["gradients"]
    layer = max(moment.workspace_bytes for moment in report.timeline if moment.label != "loss")
    assert report.kept_bytes == windows.bytes + layer + both
    assert "beside other jobs: 0.07 GiB that a job which has ended may keep" in report.to_text()
    found = pcg.explain(config, batch=2, seq=64, serve_tokens=100, memory_budget="1GiB")
    assert found.kept_bytes == 0
    assert "has ended" not in found.to_text()


def test_without_adapters_the_cache_is_that_of_the_batch() -> None:
    config = short(LLAMA)
    row = 2 * 2 * 8 * 128 * 2
    assert pcg.explain(config, None, batch=2, seq=64).memory_bytes["kv_cache"] == 128 * row
    assert pcg.explain(config, None, serve_tokens=7).memory_bytes["kv_cache"] == 7 * row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"serve_tokens": -1}, "serve_tokens=-1; use an int of at least 0"),
        ({"serve_tokens": 1.5}, "serve_tokens=1.5; use an int of at least 0"),
        ({"device": "tpu"}, "device='tpu'; use cuda or cpu"),
        ({"device": "cpu", "gpus": ["L4"]}, "leave one of them out"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        pcg.explain(short(LLAMA), **options)


def test_a_gpu_and_a_method_are_named_as_on_the_command_line() -> None:
    report = pcg.explain(short(LLAMA), "none", gpus="H100, L4")
    assert [fit.gpu for fit in report.fits] == ["H100", "L4"]
    assert report.parameters["trainable"] == 0
    with pytest.raises(UnsupportedError, match="'A100'; did you mean A100-40 or A100-40-PCIE"):
        pcg.explain(short(LLAMA), gpus="A100")
    with pytest.raises(AdapterError, match="'qlora' is neither one of lora, "):
        pcg.explain(short(LLAMA), "qlora")


def test_a_step_that_no_machine_could_hold_is_explained_without_eager() -> None:
    report = pcg.explain(short(LLAMA), batch=10**9)
    assert "eager" not in {row["stage"] for row in report.to_json()["activations"]}
    assert any("1,024,000,000,000 tokens are more than" in note for note in report.notes)


def test_longest_sequences_stop_at_the_positions_of_the_model() -> None:
    (fit,) = pcg.explain(short(GPT2), gpus=["H200"]).fits
    assert (fit.largest_seq, fit.least_largest_seq) == (1024, 1024)
    # Falcon's configuration leaves out the positions, which transformers has as a default.
    (fit,) = pcg.explain(short("tiiuae/falcon-7b"), gpus=["H200"]).fits
    assert fit.largest_seq == 2048


def test_sequences_beyond_the_positions_are_said() -> None:
    note = "seq: 4,096 tokens are beyond the 1,024 positions of this model"
    report = pcg.explain(short(GPT2), seq=4096)
    assert note in report.notes
    assert note in report.to_text()
    assert note in report.to_html()
    assert pcg.explain(short(GPT2), seq=1024).notes == ()


def test_gpus_that_hold_the_step_are_named() -> None:
    report = pcg.explain(short(LLAMA, 32), batch=4)
    total = report.memory_bytes["total"]
    holding = [n for n, gpu in ACCELERATORS.items() if gpu.memory_bytes - RESERVED_BYTES >= total]
    assert 0 < len(holding) < len(ACCELERATORS)
    assert report.gpus == tuple(holding)
    assert f"fits  {holding[0]}, {holding[1]}" in report.to_text()
    assert report.to_json()["gpus"] == holding
    assert f"A rank fits {', '.join(holding)}." in report.to_html()


@pytest.fixture(scope="module")
def crowded() -> Report:
    """A step that fits no L4, and less of it does."""
    return pcg.explain(short(LLAMA, 16), batch=32, seq=2048, gpus=["L4", "T4"])


def test_pages_and_json_have_the_fits_and_the_advice(crowded: Report) -> None:
    found = json.loads(json.dumps(crowded.to_json()))["fits"]
    assert [one["gpu"] for one in found] == ["L4", "T4"]
    page, text = unescape(crowded.to_html()), crowded.to_text()
    for fit, row in zip(crowded.fits, found, strict=True):
        assert row["largest_batch"] == fit.largest_batch
        assert row["advice"] == list(fit.advice)
        for advice in fit.advice:
            assert f"<code>{advice}</code>" in page
            assert f"to make it fit: {advice}" in text
        assert f"{fit.largest_batch:,}" in page


def test_advice_names_batch_budget_and_ranks_and_each_fits(crowded: Report) -> None:
    advice = crowded.fits[0].advice
    named = {word for option in advice for word in option.split() if word.startswith("--")}
    assert named == {"--batch", "--memory-budget", "--seq", "--tp"}
    assert any(option.startswith("--batch") and "--memory-budget" in option for option in advice)
    for option in advice:
        asked = {"batch": 32, "seq": 2048, **options_of(option)}
        total = pcg.explain(short(LLAMA, 16), **asked).memory_bytes["total"]
        assert total <= crowded.fits[0].usable_bytes, option


def test_weights_that_are_too_large_take_ranks() -> None:
    (fit,) = pcg.explain(short(LLAMA, 32), gpus=["T4"]).fits
    assert fit.advice == ("--tp 2",)
    asked = pcg.explain(short(LLAMA, 32), tp=2).memory_bytes["total"]
    assert asked <= fit.usable_bytes
