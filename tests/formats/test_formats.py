"""Weight formats: dequantization by the formats' own libraries, models by transformers and peft."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pcg
from pcg.compiler import compile_program, make_executor
from pcg.errors import UnsupportedError
from pcg.formats import fp8
from pcg.formats.format import Parts, StoredMatrix
from pcg.formats.int8 import padded_for_cuda
from pcg.formats.registry import FORMATS
from pcg.ir.parser import parse_type
from pcg.ir.printer import print_graphs
from pcg.ir.types import tensor
from pcg.peft.lora import LoraConfig
from pcg.runtime.data.example import Example
from pcg.runtime.model.weights import StateDictCheckpoint
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.peft_cases import CONFIGS, check_batch, give_encoder, wrap
from tests.support.prompts import TOLERANCE, prompts

bf16.install()
ROUNDS_INPUTS = ("int8",)
"""Formats that round a product's inputs, so that no float matrix gives their numbers."""
READ_ONLY = ("q4_k", "q6_k")
QUANTIZES = [name for name in FORMATS if name not in READ_ONLY]
EXACT = [name for name in QUANTIZES if name not in ROUNDS_INPUTS]
IN_SHORT = ("nf4", "fp8_block", "q4_1")
"""Formats of each file, whose others run in the slow run alone."""
METHODS = ("lora", "dora", "adalora", "vera", "loha", "ia3-all", "prompt", "prefix")


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return 0.05 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def bitsandbytes_matrix(name: str, weight: Tensor, dtype: torch.dtype) -> tuple[Parts, Tensor]:
    """A matrix as bitsandbytes stores it, and as it dequantizes it."""
    import bitsandbytes.functional as bnb

    code, _, single = name.partition("_")
    codes, state = bnb.quantize_4bit(
        weight, quant_type=code, compress_statistics=not single, blocksize=64
    )
    state.dtype = dtype
    rows, columns = weight.shape
    tensors = {"codes": codes.view(rows, -1), "scales": state.absmax.view(rows, -1)}
    if single:
        return Parts(tensors, rows, columns), bnb.dequantize_4bit(codes, state)
    tensors["nested_scales"] = state.state2.absmax
    places = {"first_row": 0, "first_block": 0, "row_blocks": columns // 64}
    parts = Parts(tensors, rows, columns, {**places, "offset": state.offset.item()})
    return parts, bnb.dequantize_4bit(codes, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["nf4", "nf4_single", "fp4", "fp4_single"])
def test_4_bit_blocks_are_those_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    weight = matrix(333, 576)
    parts, expected = bitsandbytes_matrix(name, weight, dtype)
    assert torch.equal(FORMATS[name].whole(parts, dtype), expected)
    ours = FORMATS[name].quantize(weight)
    assert torch.equal(ours["codes"], parts["codes"])
    # bitsandbytes rounds a few scales to the second nearest of their 8-bit values.
    away = (ours["scales"].float() - parts["scales"].float()).abs()
    assert away.max() <= 1
    assert away.count_nonzero() <= 0.01 * away.numel()


GGUF = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q4_k": "Q4_K", "q6_k": "Q6_K"}
PLACES_OF_HALVES = {"q4_k": (1, 3), "q6_k": (209,)}
"""High bytes of fp16 numbers in a block, which are cleared so that no number is infinite."""


@pytest.mark.parametrize("name", GGUF)
def test_blocks_are_those_of_gguf(name: str) -> None:
    format_, kind = FORMATS[name], gguf.GGMLQuantizationType[GGUF[name]]
    weight = matrix(64, 512)
    if name in READ_ONLY:  # the package quantizes to none of them
        size = format_.tensors(64, 512)["blocks"][0]
        blocks = torch.randint(0, 256, size, dtype=torch.uint8).view(-1, format_.block_bytes)
        blocks[:, PLACES_OF_HALVES[name]] &= 0x3B
        blocks = blocks.view(size)
    else:
        blocks = torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind))
        assert torch.equal(format_.quantize(weight)["blocks"], blocks)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind))
    assert torch.equal(format_.whole(Parts({"blocks": blocks}, 64, 512), torch.float32), expected)


def stored_matrix(
    tensors: Mapping[str, Tensor], rows: int, columns: int, **settings: object
) -> StoredMatrix:
    return StoredMatrix("m", rows, columns, tensors.__contains__, tensors.__getitem__, settings)


COMPRESSED: Mapping[str, tuple[str, dict[str, Any], bool]] = {
    "group": ("int4_g32", {"num_bits": 4, "strategy": "group", "group_size": 32}, True),
    "zeros": ("int4_g32", {"num_bits": 4, "strategy": "group", "group_size": 32}, False),
    "channel": ("int4_row", {"num_bits": 4, "strategy": "channel"}, True),
    "fp8": ("fp8", {"num_bits": 8, "type": "float", "strategy": "channel"}, True),
    "tensor": ("fp8", {"num_bits": 8, "type": "float", "strategy": "tensor"}, True),
    "mxfp4": (
        "mxfp4",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        True,
    ),
    "nvfp4": (
        "nvfp4",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        True,
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_read_as_their_library_does(case: str, dtype: torch.dtype) -> None:
    from compressed_tensors.compressors import (
        MXFP4PackedCompressor,
        NaiveQuantizationCompressor,
        NVFP4PackedCompressor,
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    name, fields, symmetric = COMPRESSED[case]
    args = QuantizationArgs(symmetric=symmetric, **fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = {
        "int4": PackedQuantizationCompressor,
        "fp8": NaiveQuantizationCompressor,
        "mxfp4": MXFP4PackedCompressor,
        "nvfp4": NVFP4PackedCompressor,
    }[name.partition("_")[0]]
    weight = matrix(96, 128).to(dtype)
    group = fields.get("group_size") or (weight.numel() if case == "tensor" else 128)
    blocks = weight.view(-1, group) if case == "tensor" else weight.view(96, -1, group)
    least, most = blocks.amin(-1), blocks.amax(-1)
    state = {"weight": weight}
    if name == "nvfp4":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).float().reshape(1)
    scales, zeros = calculate_qparams(
        least, most, args, global_scale=state.get("weight_global_scale")
    )
    state |= {"weight_scale": scales, "weight_zero_point": zeros}
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    parts = FORMATS[name].read(stored_matrix(packed, 96, 128))
    assert parts is not None
    assert torch.equal(FORMATS[name].whole(parts, expected.dtype), expected)


def packed_int32(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Codes [.., 8 n] as int32 [.., n], the code of column `order[i]` in the i-th four bits."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= codes[..., column::8].long() << 4 * place
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "gptq-act", "awq"])
def test_gptq_and_awq_matrices_are_read(layout: str) -> None:
    rows, columns, group = 64, 256, 32
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    zeros = torch.randint(1, 16, (rows, columns // group), generator=generator)
    scales = matrix(rows, columns // group).abs().half() + 0.01
    order = torch.arange(columns) // group
    if layout == "gptq-act":
        order = order[torch.randperm(columns, generator=generator)]
    expected = (codes - zeros[:, order]).half() * scales[:, order]
    settings = {"quant_method": "awq" if layout == "awq" else "gptq", "checkpoint_format": layout}
    if layout == "awq":
        awq = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": packed_int32(codes.t(), awq), "qzeros": packed_int32(zeros.t(), awq)}
    else:
        less = zeros if layout == "gptq_v2" else zeros - 1
        tensors = {"qweight": packed_int32(codes).t(), "qzeros": packed_int32(less.t())}
        tensors["g_idx"] = order.int()
    tensors["scales"] = scales.t()
    format_ = FORMATS["int4_g32_act" if layout == "gptq-act" else "int4_g32"]
    parts = format_.read(stored_matrix(tensors, rows, columns, **settings))
    assert parts is not None
    assert torch.equal(format_.whole(parts, torch.float16), expected)


def test_fine_grained_fp8_is_read() -> None:
    rows, columns = 300, 200
    codes = (matrix(rows, columns) * 1000).to(torch.float8_e4m3fn)
    scales = matrix(3, 2).abs()
    tensors = {"weight": codes, "weight_scale_inv": scales}
    parts = FORMATS["fp8_block"].read(stored_matrix(tensors, rows, columns))
    assert parts is not None
    expected = codes.float()
    for row, column in itertools.product(range(rows), range(columns)):
        expected[row, column] *= scales[row // 128, column // 128]
    assert torch.equal(FORMATS["fp8_block"].whole(parts, torch.float32), expected)


def rounded(x: Tensor) -> Tensor:
    """Each row in 127 steps up to its largest magnitude."""
    steps = x.abs().amax(1, keepdim=True) / 127
    return (x / steps).round() * steps


@pytest.mark.parametrize("name", QUANTIZES)
@given(rows=st.integers(1, 300), blocks=st.integers(1, 6), data=st.data())
def test_products_and_parts_are_those_of_the_whole(
    name: str, rows: int, blocks: int, data: st.DataObject
) -> None:
    format_, columns = FORMATS[name], 128 * blocks
    parts = format_.quantize(matrix(rows, columns))
    whole = format_.whole(parts, torch.float32)
    assert parts.size_bytes == format_.size_bytes(rows, columns)
    assert parts.size_bytes == tensor(name, rows, columns).size_bytes
    start = data.draw(st.integers(0, (rows - 1) // format_.row_block)) * format_.row_block
    stop = data.draw(st.integers(start + 1, rows))
    first = 128 * data.draw(st.integers(0, blocks - 1))
    cut = format_.cut(parts, (start, stop), (first, columns))
    assert torch.equal(format_.whole(cut, torch.float32), whole[start:stop, first:])
    x, dy = matrix(5, columns, seed=1), matrix(5, stop - start, seed=2)
    x[1::2, 3] = 10  # makes the other entries' steps coarse
    y, dx = torch.empty(5, stop - start), torch.zeros(5, columns)
    packed = format_.packed(parts)
    format_.linear(packed, x, y, start, stop)
    format_.input_gradient(packed, dy, dx, start, stop)
    torch.testing.assert_close(dx, dy @ whole[start:stop])
    if name in ROUNDS_INPUTS:
        once = rounded(x)
        twice = once + rounded(x - once)
        x = torch.where(torch.arange(5).unsqueeze(1) % 2 == 1, twice, once)
    torch.testing.assert_close(y, x @ whole[start:stop].t())


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 7, 9), (16, 8, 8), (17, 50, 40)])
def test_int8_is_padded_for_cuda_by_zeros(tokens: int, rows: int, columns: int) -> None:
    x, codes = (torch.randint(-127, 128, (n, columns), dtype=torch.int8) for n in (tokens, rows))
    wide_x, wide_codes = padded_for_cuda(x, codes)
    assert len(wide_x) > 16
    assert wide_x.shape[1] % 8 == len(wide_codes) % 8 == 0
    product = torch._int_mm(wide_x, wide_codes.t())[:tokens, :rows]
    assert torch.equal(product.double(), x.double() @ codes.double().t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_fp8_inputs_in_two_terms_are_those_of_16_bits(
    is_coarse: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPUs multiply, by the same function of PyTorch."""
    format_, generator = FORMATS["fp8"], torch.Generator().manual_seed(1)
    parts, x = format_.quantize(matrix(96, 256)), torch.randn(21, 256, generator=generator)
    if is_coarse:
        x[:, 7] *= 2000
    x[3], x = 0, x.to(dtype)
    exact = x.double() @ format_.whole(parts, torch.float32)[16:64].double().t()
    errors = []
    for has_fp8 in (False, True):
        monkeypatch.setattr(fp8, "multiplies", lambda device, has_fp8=has_fp8: has_fp8)
        y = torch.full((21, 48), torch.nan, dtype=dtype)
        format_.linear(parts, x, y, 16, 64)
        errors.append(float((y - exact).norm() / exact.norm()))
    assert errors[1] < (2e-3 if dtype is torch.bfloat16 else 1e-3)
    assert dtype is torch.float16 or errors[1] < errors[0]


def test_int8_tokens_have_the_same_bits_in_any_batch() -> None:
    format_ = FORMATS["int8"]
    parts = format_.packed(format_.quantize(matrix(700, 512)))
    x = matrix(600, 512, seed=1)
    x[::3, 5] *= 300
    whole = torch.empty(600, 700)
    format_.linear(parts, x, whole, 0, 700)
    for start, stop in ((0, 1), (17, 19), (100, 164), (300, 599)):
        some = torch.empty(stop - start, 700)
        format_.linear(parts, x[start:stop], some, 0, 700)
        assert torch.equal(some, whole[start:stop])
    rows = torch.empty(600, 300)
    format_.linear(parts, x, rows, 100, 400)
    assert torch.equal(rows, whole[:, 100:400])


def dequantized(model: Any, name: str) -> Any:
    """A copy of a model with its matrices as they are in a format."""
    copied = copy.deepcopy(model)
    heads = [copied.lm_head] if FORMATS[name].has_heads else []
    with torch.no_grad():
        for module in [*copied.model.layers.modules(), *heads]:
            if isinstance(module, torch.nn.Linear):
                parts = FORMATS[name].quantize(module.weight)
                module.weight.copy_(FORMATS[name].whole(parts, torch.float32))
    return copied


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    config = {**BY_NAME["llama-biases"].config(2), "hidden_size": 128, "intermediate_size": 384}
    model = oracle.random_model(config)
    directory = tmp_path_factory.mktemp("float")
    oracle.save_model(model, directory)
    return model, directory


def wrapped_models(model: Any, directory: Path) -> Iterator[tuple[str, Any]]:
    for name in METHODS:
        wrapped = wrap(model, CONFIGS["llama-biases"][name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped.save_pretrained(directory / name, save_embedding_layers=False)
        yield name, wrapped


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_SHORT else pytest.mark.slow) for n in EXACT]
)
def test_every_method_serves_and_trains_over_a_format(
    base: tuple[Any, Path], name: str, tmp_path: Path
) -> None:
    model, directory = base
    expected = dequantized(model, name)
    models: Mapping[str | None, Any] = {
        None: expected, **dict(wrapped_models(expected, tmp_path)),
    }  # fmt: skip
    adapters = {method: str(tmp_path / method) for method in METHODS}
    executor = pcg.compile(directory, adapters, quantization=name)
    for method in METHODS:
        give_encoder(executor, method, models[method])
        other = METHODS[METHODS.index(method) - 1]
        check_batch(executor, {name: models[name] for name in (None, other, method)}, method)


CHECKPOINTS = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "nf4_single": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4_single": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8_weight": {"load_in_8bit": True},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bitsandbytes_checkpoints_run_as_in_transformers(
    base: tuple[Any, Path], name: str, tmp_path: Path
) -> None:
    import transformers

    _, directory = base
    config = transformers.BitsAndBytesConfig(
        bnb_4bit_compute_dtype=torch.float32, **CHECKPOINTS[name]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = transformers.AutoModelForCausalLM.from_pretrained(
            directory, quantization_config=config, dtype=torch.float32
        )
    oracle.save_model(stored, tmp_path)
    executor = pcg.compile(tmp_path)
    assert f"{name}[" in print_graphs(executor.state.program.base.blocks)
    # In evaluation, bitsandbytes multiplies in 8 bits by the columns that outliers leave.
    stored.train()
    sequence = list(range(3, 60))
    error = oracle.relative_error(executor.logits([sequence])[0], oracle.logits(stored, sequence))
    assert error < 1e-5


def test_a_model_in_memory_is_verified_before_it_is_quantized(base: tuple[Any, Path]) -> None:
    model, directory = base
    executor, of_files = (pcg.compile(m, quantization="nf4") for m in (model, directory))
    (sequence,) = prompts((9,))
    assert executor.logits([sequence])[0].equal(of_files.logits([sequence])[0])


def test_formats_are_types() -> None:
    for name in FORMATS:
        type_ = tensor(name, 256, 512)
        assert parse_type(str(type_)) == type_


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, "use one of none, nf4"),
        ({"quantization": "nf4", "model": {"hidden_size": 96}}, "blocks of 64 columns"),
        ({"quantization": "nf4", "model": BY_NAME["mixtral"].config(2)}, "blocks of 64 columns"),
    ],
)
def test_refusals_name_the_fix(options: dict[str, Any], message: str) -> None:
    config = {**BY_NAME["llama-biases"].config(2), **options.get("model", {})}
    with pytest.raises(UnsupportedError, match=message):
        compile_program(config, quantization=options["quantization"])


def with_stored_weights(model: Any, executor: Any) -> Any:
    """A copy of a model with the dequantized matrices of an executor, by their names."""
    copied = copy.deepcopy(model)
    state = copied.state_dict()
    store = executor.state.weight_store
    for name, parameter in store.frozen():
        if parameter.type.dtype in FORMATS:
            weight = store.whole(name, parameter)
            state[name].copy_(weight.mT if parameter.transposed else weight)
    copied.load_state_dict(state)
    return copied


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("gpt2", "gemma2", "opt") else pytest.mark.slow)
        for name, one in BY_NAME.items()
        if not one.extra and name != "mixtral"
    ],
)
def test_every_family_runs_over_a_quantized_base(family: str) -> None:
    model = oracle.random_model(BY_NAME[family].config(2))
    program = compile_program(model.config.to_dict(), quantization="q8_0", dtype="float32")
    weights = StateDictCheckpoint(model.state_dict(), program.base_prefix)
    executor = make_executor(program, weights, None, None, "cpu")
    expected = with_stored_weights(model, executor)
    sequences = prompts((9, 4, 17))
    for sequence, logits in zip(sequences, executor.logits(sequences), strict=True):
        assert oracle.relative_error(logits, oracle.logits(expected, sequence)) < TOLERANCE
        changed = oracle.relative_error(logits, oracle.logits(model, sequence))
        assert changed > 10 * TOLERANCE  # the matrices are quantized


@pytest.mark.parametrize("name", ["q8_0", "int8", "nf4"])
def test_triton_programs_generate_and_train_as_pytorch_s(name: str, tmp_path: Path) -> None:
    """With heads and tied embeddings in the format where it has them; by Triton's interpreter."""
    config = {**BY_NAME["llama3"].config(1), "hidden_size": 128, "intermediate_size": 128}
    oracle.save_model(oracle.random_model({**config, "tie_word_embeddings": True}), tmp_path)
    recipe = LoraConfig(r=4, target_modules="all-linear")
    (sequence,), found = prompts((23,)), []
    for backend in ("torch", "triton"):
        executor = pcg.compile(tmp_path, {"a": recipe}, quantization=name, backend=backend)
        (done,) = executor.generate([sequence], "a", max_new_tokens=5, ignore_eos=True)
        runner = executor.training_runner("a")
        loss = runner.forward_backward([Example(sequence, sequence)], len(sequence) - 1)
        gradients = torch.cat([p.grad.flatten() for p in runner.parameters.values()])
        found.append((done.token_ids, loss, gradients))
    (tokens, loss, gradients), (other_tokens, other_loss, other_gradients) = found
    assert other_tokens == tokens
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert oracle.relative_error(other_gradients, gradients) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZES)
def test_random_mixed_batches_give_each_adapter_its_own_tokens(
    base: tuple[Any, Path], name: str
) -> None:
    """10,000 tokens of eight adapters of five methods, against requests that run one by one."""
    _, directory = base
    recipes = {
        "lora": LoraConfig(r=4, target_modules="all-linear"),
        "lora-1": LoraConfig(r=1, target_modules=["q_proj"]),
        "lora-16": LoraConfig(r=16, target_modules=["v_proj", "down_proj"]),
        "dora": LoraConfig(r=3, use_dora=True, target_modules="all-linear"),
        **{method: method for method in ("vera", "loha", "ia3", "prefix")},
    }
    executor = pcg.compile(directory, recipes, quantization=name)
    for number, adapter in enumerate(executor.adapters.values()):
        generator = torch.Generator().manual_seed(number)
        for weight in adapter.tensors:
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        executor.refresh_adapter(adapter.name)
    draw, total = random.Random(0), 0
    while total < 10_000:
        count = draw.randint(2, 24)
        sequences = prompts([draw.randint(1, 40) for _ in range(count)])
        names = [draw.choice([None, *recipes]) for _ in range(count)]
        options = {"max_new_tokens": draw.randint(1, 20), "ignore_eos": True}
        mixed = executor.generate(sequences, names, **options)
        for completion, sequence, adapter in zip(mixed, sequences, names, strict=True):
            (alone,) = executor.generate([sequence], [adapter], **options)
            assert completion.token_ids == alone.token_ids, adapter
            total += len(alone.token_ids)
