"""Split execution: a base and its clients as processes, on one machine.

The model of the first four is a random Llama of hidden size 1,024 and 16 layers, 222 M parameters,
that runs in fp32: weights are most of the memory. Its checkpoint is in bf16, as most are, so that
each peer has a copy of its own. Adapters are LoRA of rank 8 on q, k, v and o, with AdamW. Every
process has one thread for tensors.

split-finetuning    four clients, and an undivided engine with four jobs, against four processes of
                    transformers + peft, on the same tokens. The rate is all tokens by the time
                    until the last has ended; memory is the largest sum of proportional set sizes:
                    what several processes map counts once in all.
split-int8          the same four clients over a base in int8
split-policies      eight clients of mixed sizes, of which six generate and two finetune. Latency is
                    the time of one token of each of a client's prompts, in the mean over clients.
                    The base is killed and started again with the next policy; clients reconnect.
split-slo           `pcg serve --split-port` streams two completions at a time while a split client
                    finetunes by the same weights: gaps between tokens beside those of the server
                    alone, without an SLO, and with one of three times the median gap alone
split-noise         one client's finetuning steps without noise, by both cuts, and with noise whose
                    effects the base computes, in both precisions
split-cut           cuts over TCP whose messages come 1 ms late each: each product of a layer a call
                    as Symbiosis has it (fixed), q, k and v in one and gate and up (linear), and
                    the cut that `pcg.connect` searches for its measured link (searched); a step of
                    one sequence of 32 tokens, and 8 new tokens for a prompt
privacy             tokens that a base finds, which knows the weights and records all it is sent, by
                    the nearest of the exact rows in the input of the first layer's attention, in
                    one epoch and in the mean of 16; beside the bounds of docs/split.md
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import harness as bench
import torch
from torch import Tensor

import pcg
from pcg.runtime.data.example import Example
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.client.base_weights import CalledWeight
from pcg.split.messages import LINEAR, Message
from pcg.split.zeromq import ZeroMqEndpoint, ZeroMqTransport

sys.path.insert(0, str(bench.ROOT))
from tests.support.split_attacks import guess_bound, nearest, sizes_of

MIB = 2**20
RECIPE: dict[str, Any] = {
    "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip
"""The paper's LoRA 3."""
SIZES = ((1, 16), (1, 32))
"""Sequences of a step and their tokens, for finetuning."""
PORT = 8377


@dataclass(frozen=True)
class Work:
    """The work of a client or peer.

    Attributes:
        kind: `train`, or `serve`.
        batch: sequences of a step, or prompts that are continued together.
        sequence: tokens of a sequence, or of a prompt.
    """

    kind: str
    batch: int
    sequence: int
    rank: int = 8
    seed: int = 1

    def rows(self) -> list[list[int]]:
        random = Random(self.seed)
        return [random.choices(range(5, 5000), k=self.sequence) for _ in range(self.batch)]


MIXED = (
    Work("serve", 1, 16, rank=8, seed=1), Work("serve", 2, 16, rank=64, seed=2),
    Work("serve", 2, 48, rank=8, seed=3), Work("serve", 4, 16, rank=64, seed=4),
    Work("serve", 8, 16, rank=8, seed=5), Work("serve", 16, 16, rank=64, seed=6),
    Work("train", 1, 32, rank=8, seed=7), Work("train", 2, 32, rank=64, seed=8),
)  # fmt: skip

# -------------------------------------------------------------------------------------- processes


def connected(where: str, work: Work, **given: Any) -> Any:
    recipe = pcg.LoraConfig(**{**RECIPE, "r": work.rank})
    options: Any = {"api_key": bench.KEY, "connect_s": 120, "lost_s": 120, **given}
    return pcg.connect(where, peft={"mine": recipe}, **options)


def save_client(where: str, folder: str) -> None:
    """Compile the program of a client that finetunes, and save it."""
    with connected(where, Work("train", 1, 16)) as executor:
        executor.save_program(folder)


def client(pipe: Any, where: str, work: Work, given: Mapping[str, Any]) -> None:
    """Be a client of a base; its model is the base's."""
    bench.prepare()
    with connected(where, work, **given) as executor:
        act = generating(executor, work) if work.kind == "serve" else training(executor, work)
        tokens = work.batch * (1 if work.kind == "serve" else work.sequence)
        obey(pipe, act, tokens, lambda: executor.caller.call("stats").fields)


def training(executor: Any, work: Work) -> Callable[[], float]:
    runner = executor.training_runner("mine")
    examples = [Example(row, row) for row in work.rows()]
    optimizer = torch.optim.AdamW(list(runner.parameters.values()), lr=1e-4)
    count = sum(one.targets for one in examples)

    def step() -> float:
        loss = float(runner.forward_backward(examples, count)) / count
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def generating(executor: Any, work: Work) -> Callable[[], float]:
    """Return a call that continues each prompt by a token."""

    def chunks() -> Iterator[Any]:
        options: Any = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
        while True:
            yield from executor.generate(work.rows(), "mine", stream=True, **options)

    every = chunks()

    def step() -> float:
        for _ in range(work.batch):
            next(every)
        return 0.0

    return step


def peer(pipe: Any, directory: Path, work: Work) -> None:
    """Be transformers + peft with a model of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    bench.prepare()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(**{**RECIPE, "r": work.rank})).train()
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.tensor(work.rows())

    def step() -> float:
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    obey(pipe, step, work.batch * work.sequence, dict)


def obey(pipe: Any, step: Callable[[], float], tokens: int, stats: Callable[[], object]) -> None:
    """Do steps as the pipe says, by number or until a time of the monotonic clock."""
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        if order == "stats":
            pipe.send(stats())
            continue
        times: list[float] = []
        losses = []
        while len(times) < order.get("steps", 1e9) and time.monotonic() < order.get("until", 1e18):
            begun = time.monotonic()
            losses.append(step())
            times.append(time.monotonic() - begun)
        pipe.send({"seconds": times, "tokens": tokens * len(times), "first_losses": losses[:1]})


def engine(pipe: Any, directory: Path, work: Work, count: int) -> None:
    """Be an undivided engine, whose jobs train as many adapters in the same steps."""
    bench.prepare()
    executor = pcg.compile(str(directory), dtype="float32")
    works = [replace(work, seed=seed) for seed in range(count)]
    examples = [[Example(row, row) for row in one.rows()] for one in works]
    options: Any = {"batch_size": work.batch, "learning_rate": 1e-4, "weight_decay": 0.01}
    with executor.engine(kv_cache_bytes=2**28).start() as running:
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            given = {**options, "peft": pcg.LoraConfig(**RECIPE), "max_steps": order["steps"]}
            begun = time.monotonic()
            jobs = [
                running.finetune(rows, f"mine-{begun}-{at}", **given)
                for at, rows in enumerate(examples)
            ]
            losses = [job.wait().losses[0] for job in jobs]
            tokens = count * work.batch * work.sequence * order["steps"]
            seconds = [time.monotonic() - begun]
            pipe.send({"seconds": seconds, "tokens": tokens, "first_losses": losses})


def save_model(directory: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
    sizes |= {"num_attention_heads": 16, "max_position_embeddings": 8192}
    model = bench.random_llama(**sizes, tie_word_embeddings=True)
    model.to(torch.bfloat16).save_pretrained(directory)


@dataclass(frozen=True)
class Setting:
    """The folders of the model, and of the programs of bases and of clients that finetune."""

    directory: Path
    base_program: Path
    client_program: Path

    def base(self, stack: ExitStack, *options: object) -> tuple[str, int]:
        """Start a base; return its address and process id."""
        given = ("serve-base", self.base_program, "--api-key", bench.KEY, "--drain-s", 0, *options)
        pattern = r"listening at (\S+)"
        found, pid = stack.enter_context(bench.command(*given, pattern=pattern))
        return found[1], pid

    def client(self, stack: ExitStack, where: str, work: Work, **given: Any) -> bench.Process:
        """Start a client, which loads its program if it is saved."""
        if not given and work.kind == "train" and work.rank == 8:
            given = {"program": str(self.client_program)}
        return stack.enter_context(bench.started(client, where, work, given))


@contextmanager
def prepared(quantization: str | None = None) -> Iterator[Setting]:
    """Write the model, and compile a base's program and a client's, as `pcg compile` does."""
    with bench.saved(save_model) as directory:
        setting = Setting(directory, directory / "base-program", directory / "client-program")
        options = ("--backend", "torch", "--no-packed-weights", "--dtype", "float32")
        if quantization is not None:
            options += ("--quantization", quantization)
        command = [sys.executable, "-m", "pcg_cli", "compile", str(directory), *options]
        quiet = subprocess.DEVNULL
        output = ["-o", str(setting.base_program)]
        subprocess.run([*command, *output], check=True, stderr=quiet, stdout=quiet)
        with ExitStack() as stack:
            where, _ = setting.base(stack, "--port", 0)
            bench.fresh(save_client, where, str(setting.client_program))
        yield setting


# ------------------------------------------------------------------------------------- finetuning


def pss_bytes(pid: int) -> int:
    """Return the proportional set size: a page that n processes map counts one nth in each."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024  # type: ignore[index]


class Memory:
    """Samples the memory of processes while a context lasts; `most` is the largest sum, bytes."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._is_over, self.most = pids, threading.Event(), 0

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._is_over.wait(0.1):
            self.most = max(self.most, sum(map(pss_bytes, self._pids)))

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@bench.case("split-int8", rounds=1, steps=1)
def int8_base(rounds: int = 2, steps: int = 0) -> dict[str, Any]:
    return finetuning(rounds, steps, "int8", 2.0)


@bench.case("split-finetuning", rounds=1, steps=1)
def finetuning(
    rounds: int = 2, steps: int = 0, quantization: str | None = None, bound: float = 2.5
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with prepared(quantization) as setting:
        for batch, sequence in SIZES:
            count = steps or max(3, 256 // (batch * sequence))
            work = Work("train", batch, sequence)
            sides = ("peers", "clients") if quantization else ("peers", "clients", "engine")
            series: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for _ in range(rounds):
                for side in series:
                    with ExitStack() as stack:
                        series[side].append(one_side(setting, stack, side, work, count))
            numbers: dict[str, Any] = {side: middle(many) for side, many in series.items()}
            bounds = {"tokens_per_s": f" (at least {bound})", "memory_mib": " (at most 0.4)"}
            for name in ("tokens_per_s", "tokens_per_cpu_s", "memory_mib"):
                for side in sides[1:]:
                    pairs = zip(series[side], series["peers"], strict=True)
                    ratio = statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
                    limit = bounds.get(name, "") if side == "clients" else ""
                    numbers[f"{name}, {side} / peers{limit}"] = round(ratio, 3)
            found[f"{batch} x {sequence}, {count} steps"] = numbers
    return {"rounds": rounds, "sizes": found}


def one_side(
    setting: Setting, stack: ExitStack, side: str, work: Work, steps: int
) -> dict[str, Any]:
    """Return the numbers of four clients and their base, of four peers, or of one engine."""
    works = [replace(work, seed=seed) for seed in range(4)]
    pids = []
    if side == "engine":
        given = (setting.directory, work, len(works))
        four = [stack.enter_context(bench.started(engine, *given))]
    elif side == "peers":
        given = [bench.started(peer, setting.directory, one) for one in works]
        four = [stack.enter_context(one) for one in given]
    else:
        where, pid = setting.base(stack, "--port", 0)
        four = [setting.client(stack, where, one) for one in works]
        pids = [pid]
    pids = [*(one.pid for one in four), *pids]
    for one in four:
        one.answer()
    losses = [loss for one in together(four, steps=2) for loss in one["first_losses"]]
    before, begun = [bench.cpu_s(pid) for pid in pids], time.monotonic()
    with Memory(pids) as memory:
        tokens = sum(one["tokens"] for one in together(four, steps=steps))
    seconds = time.monotonic() - begun
    spent = [bench.cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    found: dict[str, Any] = {
        "tokens_per_s": round(tokens / seconds, 2),
        "tokens_per_cpu_s": round(tokens / sum(spent), 2),
        "memory_mib": memory.most // MIB,
        "first_losses": [round(loss, 4) for loss in losses],
    }
    if side == "clients":
        found["tokens_a_batch"], found["requests_a_batch"] = merged(four[0].ask("stats"))
    bench.note({side: found})
    return found


def together(processes: Sequence[bench.Process], **order: Any) -> list[dict[str, Any]]:
    for one in processes:
        one.pipe.send(order)
    return [one.answer() for one in processes]


def merged(stats: Mapping[str, Any]) -> tuple[float, float]:
    """Return tokens and requests of a batch of a base."""
    batches = max(1, stats["batches"])
    return round(stats["tokens"] / batches, 1), round(stats["requests"] / batches, 2)


def middle(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the round of the median rate."""
    return dict(sorted(rounds, key=lambda one: one["tokens_per_s"])[(len(rounds) - 1) // 2])


# --------------------------------------------------------------------------------------- policies


@bench.case("split-policies", "tokens_per_s", rounds=1, window_s=1.0)
def policies(rounds: int = 2, window_s: float = 12.0) -> dict[str, Any]:
    series: dict[str, list[dict[str, Any]]] = {}
    with prepared() as setting, ExitStack() as stack:
        clients: list[bench.Process] = []
        for _ in range(rounds):
            for policy in ("none", "lockstep", "opportunistic"):
                with ExitStack() as inner:
                    where, pid = setting.base(inner, "--port", PORT, "--policy", policy)
                    if not clients:
                        clients = [setting.client(stack, where, work) for work in MIXED]
                        for one in clients:
                            one.answer()
                    numbers = window(pid, clients, window_s)
                series.setdefault(policy, []).append(numbers)
                bench.note({policy: numbers})
    found = {policy: middle(many) for policy, many in series.items()}
    return {"rounds": rounds, "window_s": window_s, "policies": found}


def window(base: int, clients: Sequence[bench.Process], window_s: float) -> dict[str, Any]:
    """Let all clients work for a time; return their rates in it."""
    together(clients, steps=1)  # they find the base, and begin a generation
    before, earlier = bench.cpu_s(base), clients[0].ask("stats")
    begun = time.monotonic()
    done = together(clients, until=begun + window_s)
    lasted, spent = time.monotonic() - begun, bench.cpu_s(base) - before
    stats = {name: count - earlier[name] for name, count in clients[0].ask("stats").items()}
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
        "rows_per_base_cpu_s": round(stats["tokens"] / spent, 1),
        "base_cpu_share": round(spent / lasted, 3),
    }


# -------------------------------------------------------------------------------------- SLO, noise

STREAMS = 2


@bench.case("split-slo", window_s=2.0)
def slo(window_s: float = 15.0, promised: float = 3.0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    slo_ms = None
    with prepared() as setting:
        for name in ("", ", SLO"):
            options = [] if slo_ms is None else ["--tpot-slo-ms", slo_ms]
            given = ["--port", 0, "--split-port", 0, "--api-key", bench.KEY, "--dtype", "float32"]
            given += ["--served-model-name", "model", *options]
            # In either order, the addresses of split clients and of the server.
            pattern = r'(?=.*pcg\.connect\("([^"]+)")(?=.*https?://[^ :/]+:(\d+))'
            command = bench.command("serve", setting.directory, *given, pattern=pattern)
            with command as (match, _), ExitStack() as stack:
                where, port = match[1], int(match[2])
                found[f"alone{name}"] = shown(gaps_of(port, window_s), slo_ms)
                one = setting.client(stack, where, Work("train", 1, 32))
                one.answer()
                together([one], steps=2)
                one.pipe.send({"until": time.monotonic() + window_s})
                gaps, trained = gaps_of(port, window_s), one.answer()
                rate = trained["tokens"] / sum(trained["seconds"])
                row = {**shown(gaps, slo_ms), "trained_tokens_per_s": round(rate, 1)}
                found[f"split client{name or ', no SLO'}"] = row
            slo_ms = slo_ms or round(promised * found["alone"]["median_ms"], 1)
    return {"tpot_slo_ms": slo_ms, "streams": STREAMS, "window_s": window_s, "cases": found}


def shown(gaps: list[float], slo_ms: float | None) -> dict[str, float]:
    """Return statistics of gaps, s, and the share of them within an SLO."""
    p99 = sorted(gaps)[int(0.99 * len(gaps))]
    found = {"median_ms": round(1e3 * statistics.median(gaps), 2), "p99_ms": round(1e3 * p99, 2)}
    if slo_ms is not None:
        within = statistics.fmean(gap <= slo_ms / 1e3 for gap in gaps)
        found["within_slo (at least 0.99)"] = round(within, 4)
    return found | {"gaps": len(gaps)}


def gaps_of(port: int, window_s: float) -> list[float]:
    """Stream completions for a window; return all gaps between tokens, s."""
    gaps: list[float] = []
    end_s = time.monotonic() + window_s
    # The random model has no tokenizer, and its tokens no text.
    body = {"model": "model", "prompt": list(range(5, 37)), "max_tokens": 64, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {bench.KEY}", "Content-Type": "application/json"}

    def stream() -> None:
        while time.monotonic() < end_s:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            times = [time.monotonic() for line in reply if line.startswith(b"data: {")]
            connection.close()
            if reply.status != 200 or len(times) < 2:
                raise SystemExit(f"error: {reply.status}: the server streams no tokens")
            gaps.extend(after - before for before, after in pairwise(times))

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gaps


@bench.case("split-noise", "step_s", rounds=1)
def noise(rounds: int = 3) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "none, searched cut": {"cut": "searched"},
        "none, linear cut": {"cut": "linear"},
        "scale 16, float32": {
            "privacy": pcg.Privacy("base", scale=16, precision="float32"),
        },
        "scale 1024, float64": {"privacy": pcg.Privacy("base")},
    }
    with prepared() as setting, ExitStack() as stack:
        where, base = setting.base(stack, "--port", 0, "--wait-ms", 0)
        clients = {
            name: setting.client(stack, where, Work("train", 1, 32), **given)
            for name, given in kinds.items()
        }
        for one in clients.values():
            one.answer()
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
        for _ in range(rounds + 1):
            for name, one in clients.items():
                before = bench.cpu_s(base), bench.cpu_s(one.pid)
                (done,) = together([one], steps=3)
                row = {"step_s": statistics.mean(done["seconds"])}
                row["base_cpu_s"] = (bench.cpu_s(base) - before[0]) / 3
                row["client_cpu_s"] = (bench.cpu_s(one.pid) - before[1]) / 3
                rows[name].append(row)
    cases = {name: bench.medians_of_rows(many[1:], 3) for name, many in rows.items()}
    return {"rounds": rounds, "cases": cases}


# -------------------------------------------------------------------------------------------- cut

CUTS = ("searched", "linear", "fixed")
TARGETS: Mapping[str, Any] = {"q and v": ["q_proj", "v_proj"], "all linear": "all-linear"}
TOKENS, LAYERS, CUT_VOCABULARY = 32, 8, 4096
FIXED: list[Any] = []
"""The connections of clients of the fixed cut."""


class DelayedTransport(ZeroMqTransport):
    """TCP whose messages come later, each by a delay, s."""

    delay_s = 0.0

    def exchange(self, message: Message, timeout_s: float) -> Message:
        time.sleep(self.delay_s)
        reply = super().exchange(message, timeout_s)
        time.sleep(self.delay_s)
        return reply


def ask_one_by_one() -> None:
    """Let clients of the fixed cut ask for each weight of a product by itself."""
    joined = CalledWeight.linear

    def linear(self: CalledWeight, x: Tensor, others: Sequence[CalledWeight]) -> Tensor:
        names = self.joined(others).names
        if self.caller not in FIXED or len(names) == 1:
            return joined(self, x, others)
        return torch.cat([joined(replace(self, names=(name,)), x, ()) for name in names], -1)

    CalledWeight.linear = linear  # type: ignore[method-assign]


def save_cut_model(directory: Path, hidden: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4}
    sizes |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    model = bench.random_llama(**sizes, vocab_size=CUT_VOCABULARY, tie_word_embeddings=True)
    model.save_pretrained(directory)


def steps_of(executor: Any) -> Mapping[str, Callable[[], object]]:
    """Return a step of each kind."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randint(5, CUT_VOCABULARY, (TOKENS,), generator=generator).tolist()
    runner = executor.training_runner("mine")
    optimizer = torch.optim.AdamW(list(runner.parameters.values()), lr=1e-4)

    def train() -> None:
        runner.forward_backward([Example(row, row)], TOKENS - 1)
        optimizer.step()
        optimizer.zero_grad()

    options: Any = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {"finetuning": train, "serving": lambda: executor.generate([row[:4]], "mine", **options)}


def compared(where: str, targets: Any, delay_s: float, rounds: int, count: int) -> dict[str, Any]:
    """Return seconds of a step and round trips of all cuts, and their ratios."""
    executors, found = {}, {}
    for cut in CUTS:
        transport = DelayedTransport(where)
        transport.delay_s = delay_s
        recipe = {"mine": pcg.LoraConfig(r=8, target_modules=targets)}
        kind: Any = "searched" if cut == "searched" else "linear"
        executors[cut] = pcg.connect(transport, peft=recipe, cut=kind, api_key=bench.KEY)
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
                if turn:  # the first one compiles shapes, and sends the base its graphs
                    seconds[cut].append((time.monotonic() - began_s) / count)
                    trips[cut] = (moved.calls - before) / count
        ms = {cut: 1e3 * value for cut, value in bench.medians(seconds, 5).items()}
        found[kind] = {"step_ms": ms, "round_trips": trips}
        for other in ("fixed", "linear"):
            ratio = bench.ratio(seconds, other, "searched")
            found[kind][f"throughput, searched / {other}"] = {"median": ratio}
    found["cut"] = str(executors["searched"].cut).splitlines()
    for executor in executors.values():
        executor.close()
    return found


@bench.case("split-cut", "searched / fixed: median", hidden=(128,), rounds=1, steps=1)
def cut(
    hidden: tuple[int, ...] = (512, 1024), delay_ms: float = 1.0, rounds: int = 3, steps: int = 3
) -> dict[str, Any]:
    ask_one_by_one()
    parameters = {"hidden": hidden, "delay_ms": delay_ms, "rounds": rounds, "steps": steps}
    results: dict[str, Any] = {}
    for size in hidden:
        with bench.saved(save_cut_model, size) as folder:
            given = ("serve-base", folder, "--api-key", bench.KEY, "--dtype", "float32")
            given = (*given, "--port", 0, "--drain-s", 0)
            with bench.command(*given, pattern=r"listening at (\S+)") as (found, _):
                for name, targets in TARGETS.items():
                    numbers = compared(found[1], targets, delay_ms / 1e3, rounds, steps)
                    results[f"hidden {size}, LoRA on {name}"] = numbers
    return {"parameters": parameters, "results": results}


# ---------------------------------------------------------------------------------------- privacy

HIDDEN, VOCABULARY, EPOCHS = 128, 1024, 16
PRECISIONS = (("float32", 16.0), ("float64", 2.0**10), ("float64", 2.0**20))


@contextmanager
def watched_base(executor: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Run a base on a thread; give its address, and the inputs of the first layer's queries."""
    endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**28)
    base, sent = BaseExecutor(executor), list[Tensor]()
    run = base.run

    def watching(piece: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if piece.kind == LINEAR and "model.layers.0." in str(piece) and "q_proj" in str(piece):
            sent.append(inputs[0].clone())
        return run(piece, inputs)

    base.run = watching  # type: ignore[method-assign]
    loop = BaseLoop(base, endpoint, BaseOptions(api_key=(bench.KEY,), downloads=True))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield endpoint.where, sent
    finally:
        loop.stop()
        thread.join(60)
        endpoint.close()


@bench.case("privacy", "tokens_nearest", sequences=2, length=16, dtypes=("float32",))
def privacy(
    sequences: int = 40, length: int = 64, dtypes: tuple[str, ...] = ("float32", "float64")
) -> dict[str, Any]:
    sizes: Any = {"hidden_size": HIDDEN, "intermediate_size": 192, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    model = bench.random_llama(**sizes, initializer_range=0.08)
    ids = torch.randint(0, VOCABULARY, (sequences, length))
    every = torch.arange(VOCABULARY).view(-1, length).tolist()
    cases: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        whole = pcg.compile(model, dtype=dtype, verify=False)
        with watched_base(whole) as (where, sent), watched_base(whole) as (second, _):

            def rows(options: Any, prompts: list[list[int]], where: str = where) -> Tensor:
                """Return the rows that the base is sent for some prompts."""
                sent.clear()
                connect: Any = {"transport": "tcp", "cut": "linear", "privacy": options}
                with pcg.connect(where, api_key=bench.KEY, **connect) as own:
                    for prompt in prompts:
                        own.logits(prompt)
                return torch.cat(sent)

            known = rows(None, every)

            def right(found: Tensor, known: Tensor = known) -> float:
                share = (nearest(found, known) == ids.reshape(-1)).double().mean()
                return round(float(share), 4)

            prompts = ids.tolist()
            cases[f"{dtype}, no noise"] = {"tokens_nearest": right(rows(None, prompts))}
            norm = float(known.double().norm(dim=1).max())
            for precision, scale in PRECISIONS:
                case: dict[str, float] = {}
                cases[f"{dtype}, {precision}, scale {scale:g}"] = case
                options = pcg.Privacy(second, scale, precision=precision)
                for epochs, suffix in ((1, ""), (EPOCHS, f"_{EPOCHS}")):
                    found = rows(options, prompts * epochs).double()
                    mu = norm / float(sizes_of(found, length).min()) * epochs**0.5
                    mean = found.unflatten(0, (epochs, -1)).mean(0)
                    case[f"tokens_nearest{suffix}"] = right(mean)
                    case[f"tokens_bound{suffix}"] = round(guess_bound(1 / VOCABULARY, mu), 4)
    sizes = {"hidden": HIDDEN, "vocabulary": VOCABULARY, "rows": sequences * length}
    return {"sizes": sizes, "cases": cases}


if __name__ == "__main__":
    bench.main()
