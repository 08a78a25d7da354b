"""Generation over quantized bases on one thread, against fp32, transformers and peft.

64 prompts of 16 to 64 tokens on 64 adapters: LoRA on q, k, v and o, of ranks 8, 16, 32 and 64 in
turn, over random Llamas. The unit is tokens a second of processor time, of whole generations:

    fp32, bf16      a float base of the dtype
    int8, nf4, …    the base quantized, fp32 otherwise
    transformers    model.generate of the fp32 base alone, left-padded
    peft            PeftModel.generate(adapter_names=…) over the fp32 base

`quantized-products` measures a product and a dequantization of a matrix by each format, by the
native kernel and by PyTorch's operators, microseconds. `format_quality` measures the perplexity of
the project's documents and licence, by the shipped model or `--model DIR`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness as bench
import torch
from generation import Calls, copy_of, left_padded, mixed_prompts, recipes_of, with_adapters
from generation import with_peft as wrapped

import pcg
from pcg.formats.format import Parts
from pcg.formats.registry import FORMATS
from pcg.kernels.torch.quantized import Block, QuantizedWeight

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


@bench.case("format_quality", "perplexity, relative", tokens=64, count=2)
def format_quality(model: str = str(bench.CHECKPOINT), tokens: int = 256, count: int = 40) -> Any:
    """Measure perplexity, relative to fp32, and the root mean square error of logits."""
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
