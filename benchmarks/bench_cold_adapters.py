"""Measure the host's work to bring an adapter of an 8B model to a GPU that is not there.

    python benchmarks/bench_cold_adapters.py [--model meta-llama/Llama-3.1-8B] [--rank 16]

An adapter in float32, at all linears, is packed as it is when it is added to a running engine, and
then brought to pages of a KV cache on the meta device, where copies cost nothing: what is left is
all that the host does beside the copy. Each is processor time, in medians over the rounds:

    pack        once, when the adapter is added
    count       once, the pages that it takes, on the engine's thread
    load        whenever it comes: reserving memory on the engine's thread, then the copy of its
                rows and of the tables that say where they lie, on the thread of copies
    engine      the part of `load` on the engine's thread

The adapters that come in a second are the fewer of those whose loads one core makes and those whose
bytes PCIe 5 carries by its sheet, 64 GB/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from measure import write

from pcg.compiler import compile_program
from pcg.parallel.costs.accelerators import SHEETS
from pcg.peft.adapter import Adapter, new_adapter
from pcg.peft.lora import LoraConfig
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.memory.pool import PageTable

META = torch.device("meta")


class Clock:
    """Processor milliseconds since it began: of the process, and of this thread alone."""

    def __init__(self) -> None:
        self._began = time.process_time(), time.thread_time()

    def read(self) -> tuple[float, float]:
        now = time.process_time(), time.thread_time()
        return 1e3 * (now[0] - self._began[0]), 1e3 * (now[1] - self._began[1])


class Case:
    """Tables of a model in pages of a meta device, and adapters for it."""

    def __init__(self, model: str, rank: int) -> None:
        program = compile_program(model, "lora", backend="triton", dtype="bfloat16")
        serving, self._shapes = program.serving.model, program.base.module_shapes()
        weights = ServedWeights({}, self._shapes)
        self._own = RaggedTables(serving, weights, META, lora_dtype=torch.bfloat16)
        self._recipe = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        self.page_bytes = bytes_of_page(kv_types(serving))
        self._tables: dict[int, PageTable] = {}
        pages = torch.empty((4096, self.page_bytes), dtype=torch.uint8, device=META)
        self._paged = self._own.in_pages(pages, lambda one: self._tables[one.version])

    def adapter(self, seed: int) -> Adapter:
        name, head = f"a{seed}", "lm_head"
        return new_adapter(name, self._recipe, self._shapes, seed=seed, output_layer=head)

    def measured(self, adapter: Adapter) -> dict[str, float]:
        clock = Clock()
        self._own.pack(adapter)
        pack, _ = clock.read()
        clock = Clock()
        count = self._own.pages_of(adapter, self.page_bytes)
        counted, _ = clock.read()
        self._paged.reserve(1, [adapter])
        self._tables[adapter.version] = PageTable("a", pages=[*range(count)])
        clock = Clock()
        self._paged.prefetch([adapter])
        _, begun = clock.read()
        while self._paged.is_copying(adapter):
            time.sleep(0.001)
        after = Clock()
        self._paged.prefetch([])
        load, _ = clock.read()
        _, taken = after.read()
        self._paged.order([adapter])  # an error, had it not come
        self._paged.forget(adapter)
        engine = begun + taken
        return {"pack": pack, "count": counted, "load": load, "engine": engine, "pages": count}


def main() -> None:
    """Run all rounds and write `results/cold_adapters.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = Case(options.model, options.rank)
    adapter = case.adapter(0)
    rows = [case.measured(adapter) for _ in range(options.rounds + 1)][1:]
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    size_bytes = found.pop("pages") * case.page_bytes
    result: dict[str, Any] = {
        "adapter": f"rank {options.rank} at all linears of {options.model}",
        "mib": round(size_bytes / 2**20, 1),
        "ms": {name: round(value, 3) for name, value in found.items()},
        "copy_ms": round(1e3 * size_bytes / SHEETS["H100"].links["PCIe 5"].bytes_per_s, 3),
    }
    slowest = max(found["load"], result["copy_ms"])
    result["adapters_a_second"] = round(1e3 / slowest)
    write("cold_adapters", result)


if __name__ == "__main__":
    main()
