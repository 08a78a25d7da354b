"""The cost of weights that are read twice: a recorded step, and a window's own graphs behind it.

    python benchmarks/roofline_shared.py

A step that decodes is one graph, and a window that goes forward with it is a graph for each layer,
so the base's weights are read once for each. Merged, as an eager step has it, one product serves
both, and the host launches all. Of Llama-3.1-8B on an H200 that is not there, with the decode step
of results/roofline.json, n tokens of a window, weights W of the layers, and F FLOPs a token:

    window        L · launches · (launch + fill) + max(W / bandwidth, n F / rate)
    apart         decode + window
    beside        at least max(decode, window, (bytes of decode + W) / bandwidth): two streams
    merged        max(decode + L · launches · (launch + fill) + max(0, (n + batch) F / rate -
                  W / bandwidth), L · (launches of both) · host)

Results: results/roofline_shared.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpu_model import config
from gpu_work import LlamaShape
from measure import RESULTS, write
from rich.console import Console
from rich.table import Table
from roofline_device import H200
from roofline_steps import Sizes

WINDOW_LAUNCHES = 21
"""Launches of a layer of a window forward beside the base's products: shrink and expand at seven
linears, three of attention, four of groups."""
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Decode:
    """The decode step with adapters, as it was counted."""

    expected_us: float
    bytes: float
    layer_launches: float

    @classmethod
    def counted(cls) -> Decode:
        """The step of the roofline's result file."""
        steps = json.loads((RESULTS / "roofline.json").read_text())["steps"]
        step = steps["decode, adapters"]
        names = ("expected_us", "bytes", "launches_a_layer")
        return cls(*(float(step[name]["value"]) for name in names))


def times_us(shape: LlamaShape, decode: Decode, tokens: int) -> dict[str, float]:
    """The times of a step with a window of so many tokens, by how their products run."""
    gpu, batch = H200, Sizes().batch
    weights = shape.layers * sum(in_ * out for in_, out in shape.linears)
    read_us = 1e6 * 2 * weights / gpu.bytes_per_s
    token_us = 1e6 * 2 * weights / gpu.flops_per_s
    own_us = shape.layers * WINDOW_LAUNCHES * (gpu.launch_us + gpu.fill_us)
    window_us = own_us + max(read_us, tokens * token_us)
    both_us = 1e6 * (decode.bytes + 2 * weights) / gpu.bytes_per_s
    merged_us = decode.expected_us + own_us + max(0.0, (tokens + batch) * token_us - read_us)
    host_us = shape.layers * (decode.layer_launches + WINDOW_LAUNCHES) * gpu.host_us
    return {
        "apart": decode.expected_us + window_us,
        "beside, at least": max(decode.expected_us, window_us, both_us),
        "merged, device": merged_us,
        "merged, host": host_us,
        "merged": max(merged_us, host_us),
    }


def main() -> None:
    """Print and write the times, and the bytes that are read twice."""
    shape, decode = LlamaShape.of(config()), Decode.counted()
    found: dict[str, Any] = {
        str(tokens): {
            name: round(us / 1e3, 2) for name, us in times_us(shape, decode, tokens).items()
        }
        for tokens in TOKENS
    }
    table = Table(title="ms of a decode step with a window, by count")
    for name in ("tokens", *found[str(TOKENS[0])]):
        table.add_column(name, justify="right")
    for tokens, times in found.items():
        table.add_row(tokens, *(f"{ms:.2f}" for ms in times.values()))
    Console(width=100).print(table)
    twice = 2 * shape.layers * sum(in_ * out for in_, out in shape.linears)
    write("roofline_shared", {"bytes_read_twice": twice, "ms": found})


if __name__ == "__main__":
    main()
