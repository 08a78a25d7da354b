"""Measure split execution: a base and its clients as processes, on one machine.

    python benchmarks/bench_split.py [finetuning] [policies] [memory] [loading] [--rounds 2]

The model is a random Llama of hidden size 1,024 and 16 layers, 222 M parameters, that runs in fp32:
weights are most of the memory. Its checkpoint is in bf16, as most are, so that each peer has a copy
of its own in fp32; with --stored float32 transformers maps the file, and its processes share the
pages. Adapters are LoRA of rank 8 on q, k, v and o (the paper's LoRA 3), with AdamW. Every process
has one thread for tensors but the base, which has --threads.

finetuning: four clients, and an undivided engine with four jobs, against four processes of
transformers + peft, on the same tokens, for each of some sizes of a step. The rate is all tokens by
the time until the last has ended; beside it stand tokens by a second of processor time of all
processes together, which other programs of the machine do not change as much. Memory is the largest
sum of proportional set sizes (Pss): what several processes map counts once in all.

policies: eight clients of mixed sizes, of which six generate and two finetune, until a time is
over. Latency is the time of one token of each of a client's prompts, in the mean over clients. The
base is killed and started again with the next policy; clients find it again.

memory: the base's own memory with 1 to 8 clients that finetune, and with sequences that grow.

loading: processor time of a base, all of the model or half of its layers: loading the weights, and
hashing them, those of the other layers, too. What is only mapped when it is loaded is read when it
is hashed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import write
from split_processes import Memory, Process, Work, serving_base, started

from pcg.compiler import compile_program
from pcg.runtime.model.weights import Checkpoint
from pcg.source import resolve
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.serve_base import executor_of

MIB = 2**20
SIZES = ((1, 16), (1, 32))
"""Sequences of a step and their tokens, for finetuning."""
MIXED = (
    Work("serve", 1, 16, rank=8, seed=1),
    Work("serve", 2, 16, rank=64, seed=2),
    Work("serve", 2, 48, rank=8, seed=3),
    Work("serve", 4, 16, rank=64, seed=4),
    Work("serve", 8, 16, rank=8, seed=5),
    Work("serve", 16, 16, rank=64, seed=6),
    Work("train", 1, 32, rank=8, seed=7),
    Work("train", 2, 32, rank=64, seed=8),
)
PORT = 8377


@dataclass(frozen=True)
class Setting:
    """What all parts have in common.

    Attributes:
        directory: the model's.
        transport: of the clients.
        threads: of the base.
    """

    directory: Path
    transport: str
    threads: int

    @property
    def base_program(self) -> Path:
        """The folder of the program that bases load."""
        return self.directory / "base-program"

    @property
    def client_program(self) -> Path:
        """The folder of the program that clients which finetune load."""
        return self.directory / "client-program"

    def save_programs(self) -> None:
        """Compile a base's program and a client's, as `pcg compile` does."""
        options = ("--backend", "torch", "--no-packed-weights", "--dtype", "float32")
        command = [sys.executable, "-m", "pcg_cli", "compile", str(self.directory), *options]
        quiet = subprocess.DEVNULL
        subprocess.run([*command, "-o", str(self.base_program)], check=True, stderr=quiet)
        with ExitStack() as stack:
            _, where = self.base(stack, "--port", "0")
            one = self.client(stack, where, Work("train", 1, 16), saves=str(self.client_program))
            if one.popen.wait(300):
                raise SystemExit("error: no program of a client was saved")

    def client(
        self,
        stack: ExitStack,
        where: str,
        work: Work,
        saves: str | None = None,
        connecting: Mapping[str, Any] | None = None,
    ) -> Process:
        """Start a client, which loads its program unless it saves one or connects otherwise."""
        given: dict[str, Any] = {"where": where, "transport": self.transport, "work": asdict(work)}
        if connecting:
            given["connecting"] = connecting
        elif saves is not None:
            given["saves"] = saves
        elif work.kind == "train" and work.rank == 8:
            given["program"] = str(self.client_program)
        arguments = str(self.directory), json.dumps(given)
        return stack.enter_context(started("client", f"client {work.seed}", *arguments))

    def peer(self, stack: ExitStack, work: Work) -> Process:
        """Start a process of transformers + peft."""
        arguments = str(self.directory), json.dumps({"work": asdict(work)})
        return stack.enter_context(started("peer", f"peer {work.seed}", *arguments))

    def engine(self, stack: ExitStack, work: Work, count: int) -> Process:
        """Start an undivided engine, which trains that many adapters at once."""
        given = json.dumps({"work": asdict(work), "count": count})
        return stack.enter_context(started("whole", "engine", str(self.directory), given))

    def base(self, stack: ExitStack, *options: str) -> tuple[Process, str]:
        """Start a base."""
        given = ("--drain-s", "0", *options)
        return stack.enter_context(serving_base(self.base_program, self.threads, *given))


def save_model(directory: Path, stored: str) -> None:
    """Write the random model."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, stored)).save_pretrained(directory)


# ------------------------------------------------------------------------------------- finetuning


def finetuning(setting: Setting, rounds: int) -> dict[str, Any]:
    """Four clients against four peers, at each size."""
    found: dict[str, Any] = {}
    for batch, sequence in SIZES:
        steps = max(3, 256 // (batch * sequence))
        series: dict[str, list[dict[str, Any]]] = {"peers": [], "clients": [], "engine": []}
        for _ in range(rounds):
            for side in series:
                with ExitStack() as stack:
                    series[side].append(one_side(setting, stack, side, batch, sequence, steps))
        numbers: dict[str, Any] = {side: middle(many) for side, many in series.items()}
        for name in ("tokens_per_s", "tokens_per_cpu_s", "memory_mib"):
            for side in ("clients", "engine"):
                pairs = zip(series[side], series["peers"], strict=True)
                ratio = statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
                numbers[f"{name}, {side} / peers"] = round(ratio, 3)
        found[f"{batch} x {sequence}, {steps} steps"] = numbers
    return found


def one_side(
    setting: Setting, stack: ExitStack, side: str, batch: int, sequence: int, steps: int
) -> dict[str, Any]:
    """Return the numbers of four clients and their base, of four peers, or of one engine."""
    works = [Work("train", batch, sequence, seed=seed) for seed in range(4)]
    base = None
    if side == "peers":
        four = [setting.peer(stack, work) for work in works]
    elif side == "engine":
        four = [setting.engine(stack, works[0], len(works))]
    else:
        base, where = setting.base(stack, "--port", "0")
        four = [setting.client(stack, where, work) for work in works]
    every = [*four, base] if base else four
    for one in four:
        one.answer()
    for one in four:
        one.order({"steps": 2})
    answers = [one.answer() for one in four]
    losses = [loss for one in answers for loss in one.get("first_losses", [one.get("first_loss")])]
    before = [one.cpu_s() for one in every]
    begun = time.monotonic()
    with Memory(every) as memory:
        for one in four:
            one.order({"steps": steps})
        tokens = sum(one.answer()["tokens"] for one in four)
    seconds = time.monotonic() - begun
    spent = [one.cpu_s() - earlier for one, earlier in zip(every, before, strict=True)]
    found: dict[str, Any] = {
        "tokens_per_s": round(tokens / seconds, 2),
        "tokens_per_cpu_s": round(tokens / sum(spent), 2),
        "memory_mib": memory.most // MIB,
        "memory_mib_each": {name: size // MIB for name, size in memory.most_of.items()},
        "cpu_s_each": {one.name: round(s, 2) for one, s in zip(every, spent, strict=True)},
        "first_losses": [round(loss, 4) for loss in losses],
    }
    if base:
        four[0].order({"stats": True})
        found["tokens_a_batch"], found["requests_a_batch"] = merged(four[0].answer())
    print(json.dumps({side: found}), flush=True)
    return found


def merged(stats: Mapping[str, Any]) -> tuple[float, float]:
    """Return tokens and requests of a batch of a base."""
    batches = max(1, stats["batches"])
    return round(stats["tokens"] / batches, 1), round(stats["requests"] / batches, 2)


def middle(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the round of the median rate."""
    return dict(sorted(rounds, key=lambda one: one["tokens_per_s"])[(len(rounds) - 1) // 2])


# --------------------------------------------------------------------------------------- policies


def policies(setting: Setting, rounds: int, window_s: float) -> dict[str, Any]:
    """Eight clients of mixed sizes under each policy."""
    series: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        where = f"127.0.0.1:{PORT}"
        clients: list[Process] = []
        for _ in range(rounds):
            for policy in ("none", "lockstep", "opportunistic"):
                with ExitStack() as inner:
                    base, _ = setting.base(inner, "--port", str(PORT), "--policy", policy)
                    if not clients:
                        clients = [setting.client(stack, where, work) for work in MIXED]
                        for one in clients:
                            one.answer()
                    numbers = window(base, clients, window_s)
                series.setdefault(policy, []).append(numbers)
                print(json.dumps({policy: numbers}), flush=True)
    return {policy: middle(many) for policy, many in series.items()}


def window(base: Process, clients: Sequence[Process], window_s: float) -> dict[str, Any]:
    """Let all clients work for a time; returns what they did in it."""
    for one in clients:  # they find the base, and begin a generation
        one.order({"steps": 1})
    for one in clients:
        one.answer()
    before = base.cpu_s()
    clients[0].order({"stats": True})
    earlier = clients[0].answer()
    begun = time.monotonic()
    for one in clients:
        one.order({"until": begun + window_s})
    done = [one.answer() for one in clients]
    lasted = time.monotonic() - begun
    clients[0].order({"stats": True})
    stats = {name: count - earlier[name] for name, count in clients[0].answer().items()}
    tokens, requests = merged(stats)
    rates = [one["tokens"] / sum(one["seconds"]) for one in done]
    served = [one for one, work in zip(done, MIXED, strict=True) if work.kind == "serve"]
    return {
        "tokens_per_s": round(sum(rates), 2),
        "generated_per_s": round(sum(rates[: len(served)]), 2),
        "trained_per_s": round(sum(rates[len(served) :]), 2),
        "latency_s": round(statistics.mean(statistics.mean(one["seconds"]) for one in served), 4),
        "requests_a_batch": requests,
        "tokens_a_batch": tokens,
        "rows_per_base_cpu_s": round(stats["tokens"] / (base.cpu_s() - before), 1),
        "base_cpu_share": round((base.cpu_s() - before) / lasted, 3),
    }


# ----------------------------------------------------------------------------------------- memory


def memory(setting: Setting) -> dict[str, Any]:
    """The base's memory by the number of clients, and by the length of one client's sequences."""
    found: dict[str, Any] = {"clients, 1 x 64 tokens each": {}, "tokens of a sequence": {}}
    with ExitStack() as stack:
        base, where = setting.base(stack, "--port", "0")
        found["idle_mib"] = own_mib(base)
        clients: list[Process] = []
        for count in (1, 2, 4, 8):
            while len(clients) < count:
                work = Work("train", 1, 64, seed=len(clients))
                clients.append(setting.client(stack, where, work))
                clients[-1].answer()
            found["clients, 1 x 64 tokens each"][count] = peak_mib(base, clients)
    for length in (64, 256, 1024, 2048):
        with ExitStack() as stack:
            base, where = setting.base(stack, "--port", "0")
            one = setting.client(stack, where, Work("train", 1, length))
            one.answer()
            found["tokens of a sequence"][length] = peak_mib(base, [one])
    return found


def loading(setting: Setting) -> dict[str, Any]:
    """Return the processor seconds of loading and of hashing, by a base's dtype and layers."""
    found: dict[str, Any] = {}
    source = resolve(str(setting.directory), weights=True)
    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16"):
        for layers in ("0-15", "0-7"):
            program = compile_program(source.config, None, dtype=dtype, packed_weights=False)
            times = [time.process_time()]
            weights = Checkpoint.open(source, program.base_prefix)
            base = BaseExecutor(executor_of(program, weights, layers, "cpu"))
            times.append(time.process_time())
            hashed = len(base.digests)
            times.append(time.process_time())
            load_s, hash_s = (round(end - begin, 3) for begin, end in pairwise(times))
            sizes = {"held_mib": base.size_bytes // MIB, "hashed_tensors": hashed}
            found[f"{dtype}, layers {layers}"] = {**sizes, "load_s": load_s, "hash_s": hash_s}
    return found


def own_mib(base: Process) -> dict[str, int]:
    """Return a base's memory beside the files that it maps: its own, and shared with clients."""
    sizes = base.memory()
    return {"own": sizes["Anonymous"] // MIB, "shared": sizes.get("Rss_Shmem", 0) // MIB}


def peak_mib(base: Process, clients: Sequence[Process]) -> dict[str, int]:
    """Return the most that a base has while its clients take two steps each."""
    for one in clients:
        one.order({"steps": 2})
    most = {"own": 0, "shared": 0}
    left = list(clients)
    while left:
        for name, size in own_mib(base).items():
            most[name] = max(most[name], size)
        if left[0].has_answered(0.05):
            left.pop(0).answer()
    return most


def main() -> None:
    """Run the parts that were asked for, all by default, and write a result file of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window", type=float, default=12.0, help="s, of policies")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stored", default="bfloat16", help="the dtype of the checkpoint")
    given = parser.parse_args()
    parts = given.parts or ["finetuning", "policies", "memory", "loading"]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), given.transport, given.threads)
        save_model(setting.directory, given.stored)
        setting.save_programs()
        common = {"stored": given.stored, "base_threads": given.threads, "rounds": given.rounds}
        if "finetuning" in parts:
            write("split-finetuning", {**common, "sizes": finetuning(setting, given.rounds)})
        if "policies" in parts:
            found = policies(setting, given.rounds, given.window)
            write("split-policies", {**common, "window_s": given.window, "policies": found})
        if "memory" in parts:
            write("split-memory", {**common, **memory(setting)})
        if "loading" in parts:
            write("split-loading", {**common, **loading(setting)})


if __name__ == "__main__":
    main()
