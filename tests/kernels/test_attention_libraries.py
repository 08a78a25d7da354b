"""Attention by libraries: which nodes they get, what they are given, and that the answer is right.

The libraries are stand-ins with the documented signatures, which compute by PyTorch in fp32.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import UnsupportedError
from pcg.ir.program.folder import load_program, save_program
from pcg.kernels import attention_libraries
from pcg.kernels.attention_libraries import LIBRARIES, choose_libraries
from pcg.kernels.torch import recurrent
from pcg.kernels.triton.attention import dispatch
from pcg.runtime.data.example import Example
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from tests.support import attention_libraries as stand_in
from tests.support import compiled as programs
from tests.support import oracle
from tests.support.families import BY_NAME, KIMI_DELTA, Family
from tests.support.interpreter import bf16

bf16.install()

BOTH = "flash_attn,flashinfer"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    dispatch._planners.cache_clear()
    recurrent._kernel.cache_clear()
    yield stand_in.install(monkeypatch)
    recurrent._kernel.cache_clear()
    dispatch._planners.cache_clear()


def config(**changed: Any) -> dict[str, Any]:
    return BY_NAME["llama3"].config(2, head_dim=64, **changed)


def executor_of(base: Any, attention: str) -> Any:
    return programs.executor(base, backend="triton", attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 7])
def test_prompts_are_the_library_s_and_decoding_our_own(calls: dict[str, int], window: int) -> None:
    """Prompts alone; then two around one of which only the last token is new; and decoding."""
    family, changed = ("mistral", {"sliding_window": window}) if window else ("llama3", {})
    base = oracle.random_model(BY_NAME[family].config(2, head_dim=64, **changed), torch.float16)
    known = list(range(3, 20))
    steps = [[known], [[9, 4, 9], known, list(range(40, 61))]]

    def tokens_of(executor: Any) -> list[list[int]]:
        page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
        engine = executor.engine(kv_cache_bytes=100 * page_bytes, prefix_caching=True)
        found: dict[str, list[int]] = {}
        for prompts in steps:
            for prompt in prompts:
                request = executor.request(prompt, max_new_tokens=3, ignore_eos=True)
                found[engine.submit(request)] = []
            while not engine.is_idle:
                for chunk in engine.step():
                    found[chunk.request_id].append(chunk.token_id)
        return list(found.values())

    executor = executor_of(base, BOTH)
    assert "flashinfer for prompts (1 nodes)" in executor.program.choices["attention"]
    found = tokens_of(executor)
    assert calls == {"plan": 2, "run": 4}  # once a step; once for each of two layers
    assert found == tokens_of(executor_of(base, "own"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("libraries", "called"),
    [(BOTH, "_flash_attn_varlen"), (f"flash_attn_3,{BOTH}", "_flash_attn")],
)
def test_whole_sequences_are_trained_by_the_library(
    calls: dict[str, int], libraries: str, called: str
) -> None:
    base = oracle.random_model(config(), torch.float16)
    sequences = [[5, 9, 2, 11, 4, 8], [7, 3, 3]]
    losses = []
    for attention in (libraries, "own"):
        executor = executor_of(base, attention)
        executor.add_adapter("a", LORA)
        result = executor.finetune(
            [Example(one, one) for one in sequences],
            adapter="a", max_steps=2, batch_size=2, learning_rate=0.1, seed=1,
        )  # fmt: skip
        losses.append(torch.tensor(result.losses))
    assert calls.keys() == {f"{called}_forward", f"{called}_backward"}
    torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "changed", "called"),
    [
        (
            BY_NAME["qwen3.5"],
            {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32},
            "chunk_gated_delta_rule",
        ),
        (KIMI_DELTA, {"linear_head_dim": 32}, "chunk_kda"),
        (BY_NAME["mamba2"], {"state_size": 32}, "chunk_simple_gla"),
        pytest.param(BY_NAME["lfm2"], {}, "causal_conv1d_fn", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_of_several_tokens(
    calls: dict[str, int], family: Family, changed: dict[str, Any], called: str
) -> None:
    """Logits of ragged prompts, decoded tokens, and gradients; single tokens are our own."""
    base = oracle.random_model(family.config(2, **changed), torch.bfloat16)
    sequences = [[5, 9, 2, 11, 4, 8], [7, 3, 3], [6]]
    logits, gradients = [], []
    for attention in ("fla,causal_conv1d", "own"):
        executor = executor_of(base, attention)
        executor.add_adapter("a", "lora")
        logits.append(torch.cat(executor.logits(sequences, "a")))
        runner = executor.training_runner("a")
        examples = [Example(one, one) for one in sequences[:2]]
        runner.forward_backward(examples, runner.count_targets(examples))
        gradients.append(torch.cat([p.grad.flatten() for p in runner.parameters.values()]))
        expected = set() if attention == "own" else {called, "causal_conv1d_fn"}
        assert calls.keys() == expected
        calls.clear()
        (completion,) = executor.generate(sequences[:1], max_new_tokens=3, ignore_eos=True)
        of_prompt = dict(calls)
        calls.clear()
        rows = executor.logits([[*sequences[0], *completion.token_ids]])[0][5:-1]
        chosen = rows.gather(1, torch.tensor(completion.token_ids)[:, None])
        assert (rows.max(1, keepdim=True).values - chosen).max() < 2e-2 * rows.abs().max()
        assert calls == of_prompt
        calls.clear()
    for ours, theirs in (logits, gradients):
        assert oracle.relative_error(ours, theirs) < 2e-2


@pytest.mark.parametrize(
    ("family", "changed", "dtype"),
    [
        ("gemma2", {"head_dim": 64}, "float16"),
        ("llama3", {"head_dim": 64}, "float32"),
        ("lfm2-biases", {}, "float32"),  # six taps
        ("mamba2", {"state_size": 13}, "float32"),  # 180 channels
    ],
)
def test_what_no_library_knows_is_our_own(
    calls: dict[str, int], family: str, changed: dict[str, Any], dtype: str
) -> None:
    names = f"{BOTH},causal_conv1d"
    program = compiler.compile_program(
        BY_NAME[family].config(2, **changed), "lora", backend="triton", attention=names, dtype=dtype
    )
    assert program.training is not None
    for source in (program.serving.source, program.training.source):
        assert "library=" not in source
    assert program.choices["attention"] == (
        f"own kernels: {names} know none of the heads, dtypes or scores"
    )


def test_a_folder_keeps_the_choice(calls: dict[str, int], tmp_path: Path) -> None:
    program = compiler.compile_program(
        config(), "lora", backend="triton", attention=BOTH, dtype="bfloat16"
    )
    assert program.training is not None
    assert "library='flashinfer'" in program.serving.source
    assert "library='flash_attn'" in program.training.source
    save_program(program, tmp_path / "program")
    loaded = load_program(tmp_path / "program")
    assert (loaded.options, loaded.choices) == (program.options, program.choices)
    assert loaded.options.attention == BOTH


def test_auto_takes_what_is_installed(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    rest = "flash_attn,fla,causal_conv1d"
    assert choose_libraries("auto", "triton", cuda) == f"flashinfer,flash_attn_3,{rest}"
    assert choose_libraries("auto", "torch", cuda) == "own"
    assert choose_libraries("auto", "triton", torch.device("cpu")) == "own"
    found = importlib.util.find_spec
    monkeypatch.setattr(
        attention_libraries.importlib.util,
        "find_spec",
        lambda name: None if name == "flashinfer_jit_cache" else found(name),
    )
    assert choose_libraries("auto", "triton", cuda) == f"flash_attn_3,{rest}"  # none compiles
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert choose_libraries("auto", "triton", cuda) == rest
    with pytest.raises(UnsupportedError, match=r"flash_attn_3 is for GPUs of capability 9\.0"):
        choose_libraries("flash_attn_3", "triton", cuda)


@pytest.mark.parametrize(
    ("attention", "backend", "message"),
    [
        ("xformers", "triton", "use auto, own, or some of flashinfer, flash_attn_3"),
        ("flash_attn", "triton", r"pip install 'pcg\[flash-attn\]'"),
        ("causal_conv1d", "triton", r"pip install 'pcg\[causal-conv1d\]'"),
        ("flash_attn_3", "triton", "needs the package flash_attn_interface.*folder hopper"),
    ],
)
def test_refusals(attention: str, backend: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        choose_libraries(attention, backend, torch.device("cpu"))


def test_pytorch_has_its_own(calls: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="is for backend='triton'"):
        choose_libraries("flash_attn", "torch", torch.device("cpu"))
    assert [library.use for library in LIBRARIES] == [
        *("prompts", "training", "training", "recurrences", "convolutions"),
    ]
