"""Measure adding an adapter of 32 layers, LoRA r16 on all linears, against reading its file.

    python benchmarks/bench_adapters.py [--rounds 5] [--most 512]

The model is a random Llama of 32 layers whose adapter has 448 tensors and 19 MiB. From each number
of adapters on, one is added a round, beside reads of the same file; ratios are medians over the
rounds:

    raw         `safetensors.torch.load_file`, which maps the file
    touched     the same with a copy of each tensor
    add         `Executor.add_adapter`
    use         copying it to a slot among those that run, as its first step does
    peft        `PeftModel.load_adapter`, for few, as it takes seconds

Then an engine's thread decodes one request all the time, and four adapters are added and used, the
first of them at sites for which the program is compiled again. Measured is the time from the end of
one step to the end of the next, with none added, with `AsyncEngine.add_adapter` (beside), and with
`add_adapter` on the engine's own thread (within).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import seconds, write
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import pcg
from pcg.peft.adapter import new_adapter
from pcg.peft.adapter_files import write_adapter
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import SHORTHANDS
from pcg.runtime.executor import Executor

HIDDEN, FFN, LAYERS, RANK = 512, 1376, 32, 16
COUNTS = (1, 9, 64, 512)
PEER_COUNTS = (1, 9)
WAYS = ("none", "beside", "within")


def model() -> LlamaForCausalLM:
    """Return the base, whose shapes give adapters of 19 MiB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=512, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def raw(folder: Path) -> float:
    """Return the seconds that safetensors takes to read the file, which it maps."""
    return seconds(lambda: load_file(folder / "adapter_model.safetensors"))


def touched(folder: Path) -> float:
    """Return the seconds of the same read with a copy of every byte."""

    def read() -> None:
        for tensor in load_file(folder / "adapter_model.safetensors").values():
            tensor.clone()

    return seconds(read)


def added(executor: Executor, folder: Path, rounds: int, most: int) -> list[dict[str, Any]]:
    """Measure adding and first using an adapter, with 0 to `most` others there before."""
    found = []
    tables = executor.serving.tables
    for count in (c for c in COUNTS if c <= most):
        while len(executor.adapters) < count - 1:
            executor.add_adapter(f"x{len(executor.adapters)}", folder)
        rows = []
        for _ in range(rounds):
            name = f"x{len(executor.adapters)}"
            times = [raw(folder), touched(folder)]
            times.append(seconds(partial(executor.add_adapter, name, folder)))
            times.append(seconds(partial(tables.order, [executor.adapters[name]])))
            rows.append(times)
        raw_s, touched_s, add_s, use_s = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        found.append({
            "adapter": count,
            "raw_ms": round(1e3 * raw_s, 2),
            "touched_ms": round(1e3 * touched_s, 2),
            "add_ms": round(1e3 * add_s, 2),
            "use_ms": round(1e3 * use_s, 2),
            "add_by_raw": round(statistics.median(add / read for read, _, add, _ in rows), 2),
            "add_and_use_by_touched": round(
                statistics.median((add + use) / copy for _, copy, add, use in rows), 2
            ),
        })  # fmt: skip
        print(found[-1], file=sys.stderr)
    return found


def peers(folder: Path) -> list[dict[str, Any]]:
    """Measure peft's `load_adapter` in the same way."""
    import peft

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.PeftModel.from_pretrained(model(), folder, adapter_name="x0")
        for count in range(2, max(PEER_COUNTS) + 2):
            file = raw(folder)
            load = seconds(lambda name=f"x{count}": wrapped.load_adapter(folder, adapter_name=name))
            if count - 1 in PEER_COUNTS:
                row = {"adapter": count, "load_ms": round(1e3 * load, 2)}
                found.append({**row, "load_by_raw": round(load / file, 1)})
                print(found[-1], file=sys.stderr)
    return found


def steps(folder: Path, way: str, count: int = 4) -> dict[str, float]:
    """Measure the times between ends of steps while adapters come and are used, one by one."""
    executor = pcg.compile(model(), None, device="cpu")
    engine = executor.engine(kv_cache_bytes=2**30)
    ends: list[float] = []
    step = engine.step

    def timed() -> Any:
        chunks = step()
        ends.append(time.perf_counter())
        return chunks

    engine.step = timed  # type: ignore[method-assign]

    def gaps_ms(first: int) -> list[float]:
        return sorted(1e3 * (b - a) for a, b in pairwise(ends[first:]))

    with engine.start() as async_engine:
        running = async_engine.submit([1, 2, 3], max_new_tokens=4000, ignore_eos=True)
        for _ in range(20):
            next(running)
        first = len(ends)
        for index in range(count):
            name = f"{way} {index}"
            if way == "beside":
                async_engine.add_adapter(name, folder).result()
            elif way == "within":
                async_engine.call(partial(executor.add_adapter, name, folder)).result()
            time.sleep(0.3)
        adding = gaps_ms(first)
        first = len(ends)
        for index in range(count):
            name = None if way == "none" else f"{way} {index}"
            async_engine.submit([1, 2], name, max_new_tokens=2, ignore_eos=True).wait()
        using = gaps_ms(first)
        running.cancel()
    return {
        "median_ms": round(statistics.median(adding), 2),
        "longest_ms": round(adding[-1], 2),
        "longest_of_first_uses_ms": round(using[-1], 2),
    }


def main() -> None:
    """Run all measurements and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    executor = pcg.compile(model(), {"first": SHORTHANDS["lora"]}, device="cpu")
    executor.remove_adapter("first")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "adapter"
        shapes = executor.program.base.module_shapes()
        recipe = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        write_adapter(new_adapter("x", recipe, shapes, output_layer="lm_head"), folder)
        size = (folder / "adapter_model.safetensors").stat().st_size
        result: dict[str, Any] = {
            "adapter": f"{LAYERS} layers, all linears, rank {RANK}, {size / 2**20:.1f} MiB",
            "pcg": added(executor, folder, options.rounds, options.most),
            "peft": peers(folder),
        }
        del executor
        result["steps"] = {way: steps(folder, way) for way in WAYS}
    write("adapters", result)


if __name__ == "__main__":
    main()
