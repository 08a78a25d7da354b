"""Recorded decode steps on a CPU: the log-probabilities of eager steps, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pcg.formats import native
from pcg.kernels.torch import host_kernels
from pcg.kernels.torch.host_recorder import HostRecording
from pcg.native_library import NotRecordedError, check_unrecorded
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.model import host_steps
from pcg.runtime.model.host_steps import HostSteps
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts

pytestmark = pytest.mark.skipif(
    host_kernels._library() is None or not native.is_native(torch.device("cpu")),
    reason="there is no C++ compiler, or no AVX2",
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HostSteps]:
    """The recorded steps that engines make."""
    every: list[HostSteps] = []
    start = HostSteps.__init__

    def begin(self: HostSteps, *arguments: Any) -> None:
        start(self, *arguments)
        every.append(self)

    monkeypatch.setattr(HostSteps, "__init__", begin)
    return every


def completions(executor: Executor, adapters: list[str | None], new: int) -> list[Any]:
    """Return tokens and log-probabilities; sequences end one after another, and lie apart."""
    lengths = (19, 5, 33, 8)[: len(adapters)]
    asked = [{"max_new_tokens": new + 6 * place} for place in range(len(adapters))]
    fields: Any = {name: [one[name] for one in asked] for name in asked[0]}
    found = executor.generate(prompts(lengths), adapters, logprobs=2, ignore_eos=True, **fields)
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("llama3.2", torch.float32, {}),
        ("llama3", torch.bfloat16, {}),
        ("llama3", torch.float32, {"quantization": "int8"}),
        ("qwen2", torch.float32, {"quantization": "q8_0"}),
        ("gemma2", torch.float32, {}),
        ("mistral-window", torch.bfloat16, {"quantization": "q4_0"}),
        ("opt", torch.float32, {}),
        ("mixtral", torch.float32, {}),
        ("gpt_oss", torch.float32, {"quantization": "int8"}),
    ],
)
def test_steps_are_those_of_eager_batches(
    family: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    made: list[HostSteps],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = BY_NAME[family].config(2, max_position_embeddings=128)
    executor = compiled.executor(oracle.random_model(config, dtype), **options)
    targets = ["q_proj", "v_proj"] if family in ("mixtral", "gpt_oss") else "all-linear"
    for name, rank in {"narrow": 4, "wide": 24}.items():
        executor.add_adapter(
            name,
            {"peft_type": "LORA", "r": rank, "init_lora_weights": False, "target_modules": targets},
        )
    for adapters in ([None], ["narrow"], ["wide", None, "narrow", "narrow"]):
        made.clear()
        recorded = completions(executor, adapters, 12)
        assert made[0].replayed > made[0].recorded > 0
        with monkeypatch.context() as patch:
            patch.setattr(host_steps, "_FEW_TOKENS", 0)
            assert completions(executor, adapters, 12) == recorded
            assert not made[1].recorded


def test_little_memory_and_changed_adapters(
    made: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step too large runs eagerly; a replaced adapter is not read where it was, nor kept."""
    config = BY_NAME["llama3"].config(2, max_position_embeddings=128)
    executor = compiled.executor(oracle.random_model(config))
    lora = {"peft_type": "LORA", "r": 4, "init_lora_weights": False}
    executor.add_adapter("a", lora)
    engine = executor.engine()
    before = after = None
    for _ in range(2):
        before, after = after, completions(executor, ["a"], 9)
    assert before == after
    assert made[-1]._steps
    for tensor in executor.adapters["a"].tensors:
        tensor.mul_(-2)
    executor.refresh_adapter("a")
    changed = completions(executor, ["a"], 9)
    assert not made[-2]._steps
    monkeypatch.setattr(host_steps, "_MOST_BYTES", 1000)
    del engine
    made.clear()
    assert completions(executor, ["a"], 9) == changed != after
    assert (made[0].recorded, made[0].replayed) == (0, 0)


def test_sequences_share_scattered_pages(
    made: list[HostSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of eight sequences list more pages than the cache has."""
    config = BY_NAME["llama3"].config(1, max_position_embeddings=512)
    executor = compiled.executor(oracle.random_model(config))
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    (common,) = prompts([288])
    asked = [[*common, *own] for own in prompts([9] * 8)]

    def served() -> list[Any]:
        with executor.engine(kv_cache_bytes=64 * page_bytes).start() as engine:
            engine.submit(common, max_new_tokens=1).wait()
            runs = [engine.submit(ids, max_new_tokens=16, ignore_eos=True) for ids in asked]
            return [run.wait().token_ids for run in runs]

    recorded = served()
    assert made[0].replayed > made[0].recorded > 0
    monkeypatch.setattr(host_steps, "_FEW_TOKENS", 0)
    assert served() == recorded


def test_operators_of_numbers_in_tensors_follow_them() -> None:
    """An operator that takes a tensor instead of a number has another kind of output."""
    low, x = torch.zeros(2), torch.tensor([-1.0, 2.0])
    with torch.inference_mode():
        recording = HostRecording(lambda: x.clamp(low), 2**30)
        low.copy_(torch.tensor([3.0, 1.0]))
        recording.replay()
    assert recording.result.tolist() == [3.0, 2.0]


def test_a_recording_follows_its_inputs() -> None:
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    kept = torch.zeros(3, 8)

    def run() -> torch.Tensor:
        y = F.silu(F.linear(x * x, weight)).reshape(24)
        most, places = (y.view(3, 8) + kept).topk(2)
        kept.index_add_(0, torch.tensor([1]), most.sum(-1)[:1, None].expand(1, 8))
        return torch.cat([most, places.to(torch.float32), kept], 1)

    with torch.inference_mode():
        recording = HostRecording(run, 2**30)
        for _ in range(3):
            x.normal_(), kept.normal_()
            before = kept.clone()
            wanted = run().clone()
            kept.copy_(before)
            recording.replay()
            assert torch.equal(recording.result, wanted)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        torch.nonzero,
        lambda x: check_unrecorded("numbers"),
    ],
)
@torch.inference_mode()
def test_numbers_that_the_host_reads_are_not_recorded(read: Any) -> None:
    def run() -> torch.Tensor:
        read(torch.ones(3))
        return torch.ones(1)

    with pytest.raises(NotRecordedError):
        HostRecording(run, 2**30)
    run()
