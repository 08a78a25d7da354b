"""The base in memory after it is loaded: its bytes are those that `explain` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.kernels.torch import base_operators
from pcg.kernels.torch.products import has_onednn
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint
from pcg.source import resolve
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.live_memory import peak_of
from tests.support.live_tensors import REMEMBERED, live_bytes, memory_of, new_tensors, reached

TIED = {**BY_NAME["llama3"].config(2), "tie_word_embeddings": True}
IA3: dict[str, Any] = {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": TIED,
    **{name: BY_NAME[name].config(2) for name in ("gpt2", "qwen2", "falcon-mha", "mpt")},
}


class Loaded:
    """An executor of a model's files, and the tensors that are alive of it.

    Attributes:
        explained: the weights' bytes as `explain` says them.
    """

    def __init__(
        self, model: Any, live: Callable[[], list[Tensor]], config: Any = None, **options: Any
    ) -> None:
        self._live = live
        plan = {key: value for key, value in options.items() if key != "backend"}
        report = explaining.explain(config or model, None, device="cpu", **plan)
        self.explained = report.memory_bytes["weights"]
        self.packed = report.packed_bytes
        self.executor = compiler.compile(model, device=torch.device("cpu"), **options)

    def base_bytes(self) -> int:
        """The live bytes beside adapters, the tables that serve them, and what kernels remember."""
        state = self.executor.state
        stop = (state.weight_store, state.program, state.serving.runner)
        roots = [state.serving.tables, state.adapters, base_operators._last_signed, *REMEMBERED]
        theirs = {memory_of(tensor) for tensor in reached(roots, stop)}
        own = [tensor for tensor in self._live() if memory_of(tensor) not in theirs]
        # Traces that were made before keep their constants.
        return live_bytes([*own, *state.program.constants.values()])

    def serve(self, *adapters: str | None) -> None:
        prompts = [[3, 4, 5]] * len(adapters)
        self.executor.generate(prompts, list(adapters), max_new_tokens=2, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "dtype", "packs"),
    [
        ("mpt", "float32", False),
        *(
            pytest.param(name, dtype, packs, marks=pytest.mark.slow)
            for name in CONFIGS
            for dtype, packs in (("float64", True), ("float32", True), ("float32", False))
            if (name, dtype, packs) != ("mpt", "float32", False)
        ),
    ],
)
def test_live_bytes_after_load_are_those_explained(
    name: str, dtype: str, packs: bool, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    oracle.random_model(config, getattr(torch, dtype)).save_pretrained(tmp_path)
    with new_tensors() as live:  # tracing makes the constants
        loaded = Loaded(str(tmp_path), live, dtype=dtype, packed_weights=packs)
        assert loaded.base_bytes() == loaded.explained
        # Without packed copies, weights lie in memory as on a GPU.
        on_gpu = explaining.explain(str(tmp_path), None, dtype=dtype).memory_bytes["weights"]
        assert loaded.explained - loaded.packed == on_gpu
        assert bool(loaded.packed) == (packs and has_onednn(getattr(torch, dtype)))
    loaded.serve(None)


@pytest.mark.parametrize(
    ("backend", "dtype", "packs"),
    [
        pytest.param("torch", "float64", True, marks=pytest.mark.slow),
        ("torch", "float32", False),
        pytest.param("torch", "float32", True, marks=pytest.mark.slow),
        pytest.param("triton", "float32", True, marks=pytest.mark.slow),
        pytest.param("triton", "float32", False, marks=pytest.mark.slow),
    ],
)
def test_live_bytes_after_serving_and_training_are_those_explained(
    backend: str, dtype: str, packs: bool, tmp_path: Path
) -> None:
    oracle.random_model(BY_NAME["qwen2"].config(2), getattr(torch, dtype)).save_pretrained(tmp_path)
    options = {"dtype": dtype, "packed_weights": packs, "backend": backend}
    with new_tensors() as live:
        loaded = Loaded(str(tmp_path), live, **options)
        executor = loaded.executor
        assert loaded.base_bytes() == loaded.explained
        loaded.serve(None)
        assert loaded.base_bytes() == loaded.explained
        executor.add_adapter("lora", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        # Its input of k is another than that of q and v, which are so joined anew.
        executor.add_adapter("ia3", {**IA3, "feedforward_modules": ["k_proj", "down_proj"]})
        loaded.serve("lora", "ia3", None)
        assert loaded.base_bytes() == loaded.explained
        for name in ("lora", "ia3"):
            runner = executor.training_runner(name)
            runner.forward_backward([Example([3] * 8, [3] * 8)], 7)
            for tensor in runner.adapter.tensors:
                tensor.grad = None
            del runner
        assert loaded.base_bytes() == loaded.explained


def test_a_load_makes_no_copy_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.random_model(CONFIGS["qwen2"], torch.float32).save_pretrained(tmp_path)
    explained = explaining.explain(str(tmp_path), None, dtype="float64").memory_bytes["weights"]
    program = compiler.compile_program(str(tmp_path), None, dtype="float64", backend="torch")
    weights = Checkpoint.open(resolve(str(tmp_path), weights=True), program.base_prefix)
    load, in_place = weights.load, set()

    def watched(*arguments: Any, **options: Any) -> Tensor:
        loaded: list[Tensor] = []
        peak = peak_of(lambda: loaded.append(load(*arguments, **options)))
        out = arguments[6] if len(arguments) > 6 else options.get("out")
        mapped = loaded[0].numel() * torch.float32.itemsize
        if out is not None:
            in_place.add(arguments[0].split(".")[-2])
            assert loaded[0] is out
        assert peak <= mapped + (loaded[0].nbytes if out is None else 0)
        return loaded[0]

    monkeypatch.setattr(weights, "load", watched)
    executor = compiler.make_executor(program, weights, None, None, "cpu")
    assert executor.state.weight_store.size_bytes == explained
    assert in_place == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


@pytest.mark.parametrize(
    ("dtype", "packs"), [pytest.param("float64", True, marks=pytest.mark.slow), ("float32", False)]
)
def test_a_module_in_memory_and_its_executors_hold_one_copy(
    dtype: str, packs: bool, tmp_path: Path
) -> None:
    model = oracle.random_model(CONFIGS["qwen2"], getattr(torch, dtype))
    expected = model(torch.tensor([[3, 4, 5]])).logits
    parameters = dict(model.named_parameters())
    owned = [parameter.untyped_storage() for parameter in model.parameters()]
    assert sum(storage.nbytes() for storage in owned) == live_bytes(list(model.parameters()))
    del owned
    options: dict[str, Any] = {"dtype": dtype, "packed_weights": packs, "device": "cpu"}
    executors = [compiler.compile(model, **options) for _ in range(2)]
    constants = [c for one in executors for c in one.program.constants.values()]
    of_base = [tensor for one in executors for tensor in plain_weights(one)]
    held = live_bytes([*model.parameters(), *of_base, *constants])
    assert held == live_bytes([*model.parameters(), *constants])
    assert dict(model.named_parameters()) == parameters
    assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, expected)
    save_model(model, str(tmp_path / "model.safetensors"))  # refuses parts of larger storages


def test_a_module_can_be_trained_after_it_is_compiled_in_inference_mode() -> None:
    model = oracle.random_model(CONFIGS["qwen2"], torch.float64)
    with torch.inference_mode():
        compiler.compile(model, dtype="float64", device="cpu")
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def plain_weights(executor: Executor) -> list[Tensor]:
    """The weights that training reads."""
    weights = executor.state.weight_store.bind(executor.program.serving.model)
    holders = (weights.prologue, *weights.layers, weights.epilogue)
    return [one for holder in holders for one in vars(holder).values() if one is not None]


def test_memory_that_others_share_stays_theirs() -> None:
    """A module's parameters that other tensors or processes share are not made views."""
    model = oracle.random_model(CONFIGS["qwen2"], torch.float64)
    attention = model.model.layers[0].self_attn
    whole = torch.cat([attention.k_proj.weight, attention.v_proj.weight]).detach()
    attention.k_proj.weight.data, attention.v_proj.weight.data = whole.split(
        [len(attention.k_proj.weight), len(attention.v_proj.weight)]
    )
    attention.q_proj.weight.share_memory_()
    before = [parameter.data_ptr() for parameter in attention.parameters() if parameter.dim() == 2]
    compiler.compile(model, dtype="float64", device="cpu")
    after = [parameter.data_ptr() for parameter in attention.parameters() if parameter.dim() == 2]
    assert after == before
