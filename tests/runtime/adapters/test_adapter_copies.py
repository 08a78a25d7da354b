"""LoRA served from copies in bfloat16, against peft with weights that were rounded before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from pcg.errors import AdapterError, UnsupportedError
from pcg.files import SUMS
from pcg.kernels import sgmv
from pcg.kernels.torch.products import has_onednn
from pcg.options import CompileOptions
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.stacked_weights import _StackedLora
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import compiled
from tests.support.interpreter import bf16
from tests.support.lora_pair import lora_pair, small_llama

bf16.install()

pytestmark = pytest.mark.skipif(
    not sgmv.is_native(torch.device("cpu"), torch.float32), reason="there is no C++ compiler"
)

RECIPES: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "wide": {"r": 20, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]},
}


def model() -> LlamaForCausalLM:
    return small_llama(positions=256)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float()


@pytest.fixture(scope="module")
def pair() -> tuple[Executor, PeftModel]:
    # A scale of a power of two does not change what is rounded.
    return lora_pair(RECIPES, model(), rounded, adapter_copies="bfloat16", device="cpu")


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize(
    "lengths",
    [(1, 1, 1), (5, 80, 2), (70, 70, 70), (90, 3, 100), (40, 40, 40)],
    ids=["decode", "prefill", "equal", "ragged", "few"],
)
def test_logits_equal_peft_with_rounded_weights(
    pair: tuple[Executor, PeftModel],
    lengths: tuple[int, ...],
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments of more than `few` tokens are PyTorch's, and nothing else is rounded there."""
    executor, peft = pair
    monkeypatch.setattr(sgmv, "FEW_TOKENS", few)
    executor.serving.tables._bound.clear()
    torch.manual_seed(1)
    names = ["all", "wide", "all"]
    prompts = [torch.randint(1, 96, (length,)).tolist() for length in lengths]
    for prompt, name, ours in zip(prompts, names, executor.logits(prompts, names), strict=True):
        peft.set_adapter(name)
        with torch.inference_mode():
            expected = peft(input_ids=torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_a_step_trains_what_is_not_rounded() -> None:
    """The same losses as without copies, and the trained version is served from its own."""
    rows = [Example(tuple(range(3, 19)), tuple(range(3, 19)))] * 2
    losses = []
    for copies in (None, "bfloat16"):
        executor = compiled.executor(model(), None, adapter_copies=copies, device="cpu")
        recipe = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
        result = executor.finetune(
            rows, "mine", peft=recipe, epochs=3, learning_rate=0.05, batch_size=1
        )
        losses.append(list(result.losses))
        trained, base = (executor.logits([[3, 4, 5]], name)[0] for name in ("mine", None))
        assert not torch.allclose(trained, base)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("backend", "dtype", "copies"),
    [
        ("triton", torch.float16, "float32"),
        *(
            pytest.param(backend, dtype, copies, marks=pytest.mark.slow)
            for backend, dtype in (("torch", torch.bfloat16), ("triton", torch.bfloat16))
            for copies in (None, "float32")
        ),
        pytest.param("triton", torch.float16, None, marks=pytest.mark.slow),
    ],
)
def test_over_16_bits_adapters_are_served_as_well_as_pefts(
    backend: str, dtype: torch.dtype, copies: str | None
) -> None:
    """Against peft in fp64, ours are no further off than peft's own with fp32 adapters."""
    base = small_llama(dtype, positions=256)
    exact = small_llama(torch.float64, positions=256)
    exact.load_state_dict(base.state_dict())
    recipes = RECIPES | {"dora": {**RECIPES["all"], "use_dora": True}}
    options = {"backend": backend, "adapter_copies": copies, "device": "cpu"}
    executor, peft = lora_pair(recipes, base, **options)
    _, oracle = lora_pair(recipes, exact, device="cpu")
    oracle.load_state_dict(peft.state_dict())
    names = list(recipes)
    torch.manual_seed(1)
    prompts = [torch.randint(1, 96, (length,)).tolist() for length in (1, 40, 80)]
    ours = executor.logits(prompts, names)
    expected = torch.float32 if copies else expected_copies(backend, dtype)
    assert copied_dtypes(executor) == {expected}
    for prompt, name, found in zip(prompts, names, ours, strict=True):
        ids = torch.tensor([prompt])
        for one in (peft, oracle):
            one.set_adapter(name)
        with torch.inference_mode():
            theirs, right = peft(input_ids=ids).logits[0], oracle(input_ids=ids).logits[0]
        errors = [(one.double() - right).norm() / right.norm() for one in (found, theirs)]
        assert errors[0] < max(1.2 * errors[1], torch.finfo(dtype).eps)


def expected_copies(backend: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if backend == "triton" or has_onednn(dtype) else torch.float32


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    """In a file, with its scale; after training in place; and by a job that publishes."""
    recipe = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    base = small_llama(torch.float16)
    refused = r"lora_B of model\.layers\.1\.self_attn\.q_proj in adapter 'a' reaches 8e\+04"
    exact, halves = (
        compiled.executor(base, backend="triton", adapter_copies=copies, device="cpu")
        for copies in ("float32", None)
    )
    adapter = exact.add_adapter("a", recipe)
    b = adapter.weights["model.layers.1.self_attn.q_proj"].b
    b[3, 2] = 32_000.0  # and 64,000 with its scale
    exact.save_adapter("a", tmp_path / "fits")
    b[3, 2] = -40_000.0
    exact.save_adapter("a", tmp_path / "large")
    with pytest.raises(AdapterError, match=refused):
        halves.add_adapter("a", str(tmp_path / "large"))
    mine = halves.add_adapter("a", str(tmp_path / "fits"))
    before = halves.logits([[3, 4, 5]], ["a"])[0]
    assert before.isfinite().all()
    mine.weights["model.layers.1.self_attn.q_proj"].b[3, 2] = 40_000.0
    with pytest.raises(AdapterError, match=refused):
        halves.refresh_adapter("a")
    assert torch.equal(halves.logits([[3, 4, 5]], ["a"])[0], before)


def test_a_scale_that_makes_weights_infinite_is_refused(tmp_path: Path) -> None:
    """Where they are served in fp32, too; a rank above the engine's is refused as well."""
    recipe = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    executor = compiled.executor(small_llama(), device="cpu")
    adapter = executor.add_adapter("a", recipe)
    for tensor in adapter.tensors:
        tensor.add_(0.01)
    executor.save_adapter("a", tmp_path / "a")
    (tmp_path / "a" / SUMS).unlink()  # its files are edited
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for fields in ({"lora_alpha": 1e300}, {"lora_alpha": 1e300, "use_rslora": True}):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | fields))
        with pytest.raises(AdapterError, match=r"the scale of adapter_config\.json"):
            executor.add_adapter("b", str(tmp_path / "a"))
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    executor.engine(Limits(lora_rank=3), kv_cache_bytes=2**20)
    for wide in (str(tmp_path / "a"), recipe):
        with pytest.raises(AdapterError, match="has rank 4, and the engine serves up to 3; raise"):
            executor.add_adapter("b", wide)
    executor.engine(Limits(lora_rank=4), kv_cache_bytes=2**20)
    executor.add_adapter("b", str(tmp_path / "a"))


def copied_dtypes(executor: Executor) -> set[torch.dtype]:
    """The dtypes of the copies of LoRA that the last batch was served from."""
    tables = executor.serving.tables
    if isinstance(tables, RaggedTables):
        assert tables.lora is not None
        return {tables.lora._allocator.memory.dtype}
    stacks = [one for slots in tables._by_width.values() for one in slots._stacks]
    loras = [lora for one in stacks for lora in one.values() if isinstance(lora, _StackedLora)]
    found = {lora._a.dtype for lora in loras if lora._a is not None}
    assert found
    return found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adapter_copies": "float16"}, "use 'bfloat16'"),
        ({"adapter_copies": True}, "use 'bfloat16'"),
        ({"adapter_copies": "bfloat16", "backend": "torch", "tp": 2}, "tp=2"),
    ],
)
def test_what_has_no_such_copies_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        CompileOptions(**options)


def test_fp64_and_a_machine_without_a_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies in ("bfloat16", "float32"):
        with pytest.raises(UnsupportedError, match="float64"):
            compiled.executor(model().double(), adapter_copies=copies, device="cpu")
    with pytest.raises(UnsupportedError, match=r"activations in torch\.float32"):
        compiled.executor(model(), adapter_copies="bfloat16", backend="triton", device="cpu")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(sgmv, "_kernel", lambda: None)
    with pytest.raises(UnsupportedError, match=r"needs the native kernel: .*CXX is empty"):
        compiled.executor(model(), adapter_copies="bfloat16", device="cpu")
