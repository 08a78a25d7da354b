"""Workloads as they are written, and what is refused, in a line that names the fix."""

from __future__ import annotations

import pytest

import pcg
from pcg.errors import CostModelError, PcgError
from pcg.plan.workload import MachineWorkload, Serving, Training, parse_workload
from tests.support import tiny_llama


def test_a_workload_is_read() -> None:
    assert parse_workload("train:4x2048") == MachineWorkload(Training(4, 2048))
    assert parse_workload("serve:2.5req/s") == MachineWorkload(None, Serving(2.5, 161, 338))
    both = parse_workload(" serve:20req/s:512x128 , train:1x8192")
    assert both == MachineWorkload(Training(1, 8192), Serving(20.0, 512, 128))
    words = (
        "finetuning steps of 1 × 8,192 tokens, beside 20 requests/s of 512 tokens, 128 generated"
    )
    assert str(both) == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:4", "workload 'train:4'; use train:BATCHxTOKENS, as train:4x2048"),
        ("serve:20", "workload 'serve:20'; use serve:RATEreq/s or serve:RATEreq/s:PROMPTxOUTPUT"),
        ("serve:20req/s:512", "use serve:RATEreq/s or"),
        ("", "workload ''; use train:BATCHxTOKENS"),
        ("tran:4x2048", "workload 'tran:4x2048'; use train:BATCHxTOKENS"),
        ("train:4x20,train:1x20", "has train twice; give it once"),
        ("train:0x20", "sequences a step: 0; use at least 1"),
        ("train:2x1", "tokens of a sequence: 1; use at least 2"),
        ("serve:0req/s", "0 requests a second; use a rate above 0"),
        ("serve:1req/s:8x1", "generated tokens: 1; use at least 2"),
    ],
)
def test_what_is_no_workload(text: str, message: str) -> None:
    with pytest.raises(PcgError) as found:
        parse_workload(text)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": ["H1000"]}, "no GPU is known as 'H1000'; did you mean H100"),
        ({"price": {"H100": -1.0}}, "price H100=-1.0; use dollars an hour above 0"),
        ({"gpus": ["h100"], "price": {"L40S": 1}}, "of no GPU to choose from; these are H100"),
        ({"max_gpus": 0}, "max_gpus=0; use an int from 1 to 4096"),
        ({"tp": [16]}, "tp=16; use degrees from 1 to max_gpus=8"),
        ({"dtypes": ["nf4"]}, "dtype='nf4'; use one of float32"),
        ({"tpot_slo_ms": 0}, "tpot_slo_ms=0; use a number above 0"),
        ({"costs": "H100"}, "of one device, and 6 GPUs are to choose from"),
        ({"adapters": 2}, "used by requests, and workload 'train:1x64' has none"),
        ({"peft": None}, "needs a method, and there is none; name one"),
        ({"workload": "serve:1req/s", "finetuning_tokens_per_s": 9}, "trains nothing; add train:"),
        ({"workload": "train:1x512"}, "sequences of 512 tokens are beyond the 256 positions"),
        ({"tp": [3]}, "tp=3 does not divide num_attention_heads=4"),
        ({"optimiser": "sgd"}, "unknown option 'optimiser', did you mean 'optimizer'"),
    ],
)
def test_what_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PcgError) as found:
        pcg.plan(tiny_llama.config(), **{"workload": "train:1x64", **options})  # type: ignore[arg-type]
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_a_file_that_is_no_profile() -> None:
    with pytest.raises(CostModelError, match="there is no profile nowhere"):
        pcg.plan(
            tiny_llama.config(), workload="train:1x64", gpus=["H100"], costs="nowhere/profile.json"
        )
