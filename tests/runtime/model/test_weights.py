"""Weights against transformers' own: what it saves is found under the names of its modules."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor

import pcg.compiler as compiler
from pcg.errors import UnsupportedError, WeightsError
from pcg.explain import explain as explaining
from pcg.kernels.torch import base_operators
from pcg.kernels.torch.products import has_onednn
from pcg.options import CompileOptions
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.model.weights import Checkpoint, StateDictCheckpoint, Weights
from pcg.source import ModelSource, resolve
from pcg.trace.model_config import renamings_of
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.live_memory import peak_of
from tests.support.live_tensors import REMEMBERED, live_bytes, memory_of, new_tensors, reached
from tests.support.small_job import make_model

SMALL = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_attention_heads": 2,
         "num_key_value_heads": 1, "num_hidden_layers": 2}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=3),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=8, head_dim=8
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    ),
    "opt": transformers.OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        word_embed_proj_dim=16,
    ),
    "falcon": transformers.FalconConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    ),
}  # fmt: skip


def build(model_type: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type])


def tied(model: Any) -> set[str]:
    return set(model.all_tied_weights_keys)


def assert_same_weights(weights: Weights, model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name not in tied(model):
            loaded = weights.load(name, tuple(parameter.shape), torch.float32)
            assert torch.equal(loaded, parameter), name


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    source = resolve(tmp_path)
    assert len(source.weight_files) > 1
    weights = Checkpoint.open(source, model.base_model_prefix, renamings_of(model))
    assert len(weights.unused()) == len(weights.index)
    assert_same_weights(weights, model)
    assert weights.unused() == ()


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "falcon", "llama"])
@pytest.mark.parametrize("headless", [True, False])
def test_checkpoints_without_their_head(model_type: str, headless: bool, tmp_path: Path) -> None:
    """`h.0.…` for `transformer.h.0.…`, and the other way round."""
    model = build(model_type)
    (model.base_model if headless else model).save_pretrained(tmp_path)
    other = model if headless else model.base_model
    weights = Checkpoint.open(resolve(tmp_path), model.base_model_prefix)
    for name, parameter in other.named_parameters():
        if name == "lm_head.weight":
            continue
        assert torch.equal(weights.load(name, tuple(parameter.shape), torch.float32), parameter)


def test_dtypes_layout_and_sharing(tmp_path: Path) -> None:
    matrix = torch.randn(3, 5)
    save_file({"w": matrix, "b": torch.ones(5).bfloat16()}, tmp_path / "model.safetensors")
    source = ModelSource("m", {}, tmp_path, (tmp_path / "model.safetensors",))
    for weights in (Checkpoint.open(source), StateDictCheckpoint({"w": matrix})):
        transposed = weights.load("w", (5, 3), torch.float32, transposed=True)
        assert transposed.is_contiguous()
        assert torch.equal(transposed, matrix.t())
        assert torch.equal(weights.load("w", (3, 5), torch.bfloat16), matrix.bfloat16())
        assert not weights.load("w", (3, 5), torch.float32).requires_grad
    assert Checkpoint.open(source).load("b", (5,), torch.float32).dtype == torch.float32


def test_a_module_shares_its_weights() -> None:
    model = build("mixtral")
    weights = StateDictCheckpoint(model.state_dict(), model.base_model_prefix)
    assert_same_weights(weights, model)
    name = "model.layers.0.self_attn.q_proj.weight"
    loaded = weights.load(name, (16, 16), torch.float32)
    assert loaded.data_ptr() == model.get_parameter(name).data_ptr()
    assert weights.load(name, (16, 16), torch.float16).dtype == torch.float16
    assert name not in weights.unused()
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(WeightsError, match="on the meta device; load its weights"):
        StateDictCheckpoint(empty.state_dict())


# ------------------------------------------------------------------------------------------ refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 3000, -1])
def test_truncated_files(saved: Path, keep: int) -> None:
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(WeightsError, match=r"truncated|damaged") as error:
        Checkpoint.open(resolve(saved))
    assert str(file) in str(error.value)
    if keep == -1:
        assert f"describes {len(content)} bytes, the file has {len(content) - 1}" in str(
            error.value
        )


@pytest.mark.parametrize(
    "header", [b"[]", b'{"w": 1}', b'{"w": {"dtype": "F32"}}', b'{"w"', b"\xff\xfe"]
)
def test_damaged_headers(saved: Path, header: bytes) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightsError, match=r"model.safetensors.* is damaged"):
        Checkpoint.open(resolve(saved))


def test_a_header_that_lies(saved: Path) -> None:
    """Offsets that add up but do not fit the shapes: safetensors finds out, we tell."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    file = saved / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WeightsError, match=r"model.safetensors cannot be read at w"):
        Checkpoint.open(resolve(saved)).load("w", (3,), torch.float32)


def test_missing_tensors(saved: Path, tmp_path: Path) -> None:
    weights = Checkpoint.open(resolve(saved), "model")
    with pytest.raises(WeightsError, match="is not among the 21 tensors") as error:
        weights.load("model.layers.0.self_attn.g_proj.weight", (16, 16), torch.float32)
    assert "nor layers.0.self_attn.g_proj.weight" in str(error.value)
    assert "the closest are model.layers.0.self_attn." in str(error.value)
    with pytest.raises(WeightsError, match=r"experts.gate_up_proj is not among"):
        weights.load("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4), torch.float32)
    with pytest.raises(WeightsError, match="has no weights"):
        Checkpoint.open(ModelSource("none", {}))
    with pytest.raises(WeightsError, match="cannot be read"):
        Checkpoint.open(ModelSource("gone", {}, tmp_path, (tmp_path / "gone.safetensors",)))


def test_a_tensor_in_two_files(saved: Path) -> None:
    file = saved / "model.safetensors"
    content = load_file(file)
    save_file({"lm_head.weight": content["lm_head.weight"]}, saved / "b.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head.weight is both in"):
        Checkpoint.open(ModelSource("m", {}, saved, (file, saved / "b.safetensors")))


def test_shapes_that_do_not_fit(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    weights = Checkpoint.open(resolve(saved), "model")
    with pytest.raises(WeightsError) as error:
        weights.load("model.layers.1.mlp.up_proj.weight", (48, 16), torch.float32)
    for part in ("is [32, 16] in ", "model.safetensors", "wants [48, 16]", "intermediate_size=48"):
        assert part in str(error.value)
    with pytest.raises(WeightsError, match=r"is \[32, 16\]"):
        weights.load("model.layers.1.mlp.up_proj.weight", (32, 16), torch.float32, transposed=True)


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    weights = Checkpoint.open(resolve(tmp_path), "model", renamings_of(model))
    with pytest.raises(
        WeightsError, match=r"experts.0.w1.weight is \[32, 16\] .* wants \[40, 16\]"
    ):
        weights.load("model.layers.0.mlp.experts.gate_up_proj", (3, 80, 16), torch.float32)


def test_quantized_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4, 4, dtype=torch.int8)}, file)
    with pytest.raises(WeightsError, match=r"w is I8 in .*quantized"):
        Checkpoint.open(ModelSource("m", {}, tmp_path, (file,))).load("w", (4, 4), torch.float32)
    module = StateDictCheckpoint({"w": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(WeightsError, match=r"w is torch.int32 in the given module"):
        module.load("w", (4,), torch.float32)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(saved: Path) -> None:
    source = resolve(saved)
    (saved / "model.safetensors").chmod(0)
    with pytest.raises(WeightsError, match="cannot be read: Permission denied"):
        Checkpoint.open(source)


# ------------------------------------------------------------------------------------------ digests


def test_each_entry_changes_it_and_the_type_of_loading_does_not() -> None:
    model = make_model().to(torch.bfloat16)
    stores = [
        compiled.executor(model, dtype=dtype).state.weight_store
        for dtype in ("bfloat16", "float32")
    ]
    exact = {base_digest(store) for store in stores}
    (rounded,) = {base_digest(store, torch.bfloat16) for store in stores}
    assert len(exact) == 2
    for name, parameter in model.named_parameters():
        entry = parameter.data.view(-1)[torch.randint(parameter.numel(), ())]
        before = entry.clone()
        entry += 0.125
        store = compiled.executor(model, dtype="float32").state.weight_store
        assert base_digest(store, torch.bfloat16) != rounded, name
        entry.copy_(before)


# ----------------------------------------------------------- the base in memory after it is loaded

TIED = {**BY_NAME["llama3"].config(2), "tie_word_embeddings": True}
IA3: dict[str, Any] = {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"]}
EXPLAINED: dict[str, dict[str, Any]] = {
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
            for name in EXPLAINED
            for dtype, packs in (("float64", True), ("float32", True), ("float32", False))
            if (name, dtype, packs) != ("mpt", "float32", False)
        ),
    ],
)
def test_live_bytes_after_load_are_those_explained(
    name: str, dtype: str, packs: bool, tmp_path: Path
) -> None:
    config = EXPLAINED[name]
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
    oracle.random_model(EXPLAINED["qwen2"], torch.float32).save_pretrained(tmp_path)
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
    model = oracle.random_model(EXPLAINED["qwen2"], getattr(torch, dtype))
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


def test_an_option_that_is_none() -> None:
    with pytest.raises(UnsupportedError, match="use True or False"):
        CompileOptions(packed_weights="no")  # type: ignore[arg-type]


def test_a_module_can_be_trained_after_it_is_compiled_in_inference_mode() -> None:
    model = oracle.random_model(EXPLAINED["qwen2"], torch.float64)
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
    model = oracle.random_model(EXPLAINED["qwen2"], torch.float64)
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
