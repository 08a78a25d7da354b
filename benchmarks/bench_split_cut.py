"""Measure the searched cut beside Symbiosis' fixed one and the linear one, over a slow link.

    python benchmarks/bench_split_cut.py [--hidden 512 1024] [--delay-ms 1] [--rounds 3]

The base is a process of `pcg serve-base`, the client this one, over TCP on one machine. The delay
is injected in the client's transport: it sleeps before a message goes out, and before a reply is
handed on, as long each, so that a round trip takes twice the delay more. The client measures its
link through that, and so searches its cut for it.

The model is a random Llama in fp32, LoRA of rank 8 is on q and v, or on all linear modules. A step
that trains has one sequence of 32 tokens, with AdamW; one that serves continues a prompt by 8.

fixed      each product of a layer is a call, as Symbiosis has it: 7 round trips forward, 7 back
linear     q, k and v in one, and gate and up: 4 forward, 7 back
sheets     searched for the same link, but for devices as fast as their data sheets
searched   what `pcg.connect` does by default

Cuts take turns, and the ratio of each turn is of the times of its steps; the median of the turns
counts. Base and client run on one thread each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import write
from split_processes import KEY, serving_base
from torch import Tensor

import pcg
from pcg.runtime.data.example import Example
from pcg.split.client.base_weights import CalledWeight
from pcg.split.client.caller import Caller
from pcg.split.messages import Message
from pcg.split.zeromq import ZeroMqTransport

CUTS = ("searched", "sheets", "linear", "fixed")
RECIPES: Mapping[str, Any] = {"q and v": ["q_proj", "v_proj"], "all linear": "all-linear"}
TOKENS = 32
LAYERS = 8
FIXED: list[Caller] = []
"""The connections of clients of the fixed cut."""


class DelayedTransport(ZeroMqTransport):
    """TCP whose messages come later, each by a delay.

    Attributes:
        delay_s: of a message in either direction, s.
    """

    delay_s = 0.0

    def exchange(self, message: Message, timeout_s: float) -> Message:
        time.sleep(self.delay_s)
        reply = super().exchange(message, timeout_s)
        time.sleep(self.delay_s)
        return reply


def ask_one_by_one() -> None:
    """Have clients that are marked ask for each weight of a product by itself."""
    joined = CalledWeight.linear

    def linear(self: CalledWeight, x: Tensor, others: Sequence[CalledWeight]) -> Tensor:
        names = self.joined(others).names
        if self.caller not in FIXED or len(names) == 1:
            return joined(self, x, others)
        return torch.cat([joined(replace(self, names=(name,)), x, ()) for name in names], -1)

    CalledWeight.linear = linear  # type: ignore[method-assign]


def save_model(directory: Path, hidden: int) -> None:
    """Write the random model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        vocab_size=4096,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def steps_of(executor: Any) -> Mapping[str, Callable[[], None]]:
    """Return a step of each kind."""
    row = torch.randint(5, 4096, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = executor.training_runner("mine")
    optimizer = torch.optim.AdamW(list(runner.parameters.values()), lr=1e-4)

    def train() -> None:
        runner.forward_backward([Example(row, row)], TOKENS - 1)
        optimizer.step()
        optimizer.zero_grad()

    def decode() -> None:
        options: Any = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        executor.generate([row[:4]], "mine", **options)

    return {"finetuning": train, "serving": decode}


def kind_of(cut: str) -> str:
    """Return the cut that a client is to take."""
    return "searched" if cut in ("searched", "sheets") else "linear"


def link_of(executor: Any) -> str:
    """Return the link that a client has measured, as another may be given it."""
    link = executor.cut.link
    return f"{1e3 * link.latency_s:.6g},{8e-9 * link.bytes_per_s:.6g}"


def compared(where: str, targets: Any, delay_s: float, rounds: int, count: int) -> dict[str, Any]:
    """Return seconds of a step and round trips of all cuts, and their ratios."""
    executors, found = {}, {}
    for cut in CUTS:
        transport = DelayedTransport(where)
        transport.delay_s = delay_s
        lora = pcg.LoraConfig(r=8, target_modules=targets)
        given: dict[str, Any] = {"peft": {"mine": lora}, "cut": kind_of(cut), "api_key": KEY}
        if cut == "sheets":
            given["link"] = link_of(executors["searched"])
        executors[cut] = pcg.connect(transport, **given)
        if cut == "fixed":
            FIXED.append(executors[cut].caller)
    steps = {cut: steps_of(executor) for cut, executor in executors.items()}
    for kind in steps["linear"]:
        seconds: dict[str, list[float]] = {cut: [] for cut in CUTS}
        trips = {}
        for turn in range(rounds + 1):
            for cut in CUTS:
                moved = executors[cut].caller.moved
                before, began_s = moved.calls, time.monotonic()
                for _ in range(count):
                    steps[cut][kind]()
                if turn:  # the first one compiles shapes, and tells the base its graphs
                    seconds[cut].append((time.monotonic() - began_s) / count)
                    trips[cut] = (moved.calls - before) / count
        found[kind] = {
            "step_ms": {c: round(1e3 * statistics.median(seconds[c]), 2) for c in CUTS},
            "round_trips": trips,
        }
        for other in ("fixed", "linear", "sheets"):
            ratios = [b / a for a, b in zip(seconds["searched"], seconds[other], strict=True)]
            found[kind][f"throughput, searched / {other}"] = {
                "median": round(statistics.median(ratios), 3),
                "turns": [round(one, 3) for one in ratios],
            }
    found["cut"] = str(executors["searched"].cut).splitlines()
    for executor in executors.values():
        executor.close()
    return found


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of a message, injected")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ask_one_by_one()
    results: dict[str, Any] = {}
    for hidden in given.hidden:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), hidden)
            with serving_base(
                Path(folder), 1, "--dtype", "float32", "--port", "0", "--drain-s", "0"
            ) as (_, where):
                for name, targets in RECIPES.items():
                    key = f"hidden {hidden}, LoRA on {name}"
                    results[key] = compared(
                        where, targets, given.delay_ms / 1e3, given.rounds, given.steps
                    )
    parameters = {**vars(given), "layers": LAYERS, "tokens": TOKENS}
    write("split-cut", {"parameters": parameters, "results": results})


if __name__ == "__main__":
    main()
