"""Measure what split clients take of a server's requests, and noise of a client's time.

    python benchmarks/bench_split_slo.py [slo] [noise]

The model is that of `bench_split.py`, a Llama of 222 M parameters in fp32; every process has one
thread for tensors. Times are of the real clock.

slo: `pcg serve --split-port` streams two completions at a time while a split client finetunes by
the same weights. Gaps between tokens stand beside those of the server alone, without an SLO, and
with one of PROMISED times the median gap alone: the share of gaps within it, and the tokens that
the client trains a second.

noise: one client's finetuning steps without noise, by the searched cut and by the linear one, and
with noise whose effects the base computes, in both precisions.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_split import Setting, save_model
from measure import write
from split_processes import KEY, Work

PROMISED = 3.0
WINDOW_S = 15.0
STREAMS = 2
NOISES: dict[str, dict[str, Any]] = {
    "none, searched cut": {},
    "none, linear cut": {"cut": "linear"},
    "scale 16, float32": {"privacy": {"effects": "base", "scale": 16, "precision": "float32"}},
    "scale 1024, float64": {"privacy": {"effects": "base"}},
}


def slo(setting: Setting) -> dict[str, Any]:
    """Gaps of the server alone, and beside a split client, without an SLO and with one."""
    found: dict[str, Any] = {}
    with served(setting.directory) as (port, where):
        found["alone"] = shown(gaps_of(port), None)
        found["split client, no SLO"] = beside(setting, port, where, None)
    slo_ms = round(PROMISED * found["alone"]["median_ms"], 1)
    with served(setting.directory, "--tpot-slo-ms", str(slo_ms)) as (port, where):
        found["alone, SLO"] = shown(gaps_of(port), slo_ms)
        found["split client, SLO"] = beside(setting, port, where, slo_ms)
    return {"tpot_slo_ms": slo_ms, "streams": STREAMS, "window_s": WINDOW_S, "cases": found}


def beside(setting: Setting, port: int, where: str, slo_ms: float | None) -> dict[str, Any]:
    """Return the gaps while a split client finetunes, and its rate."""
    with ExitStack() as stack:
        client = setting.client(stack, where, Work("train", 1, 32))
        client.answer()
        client.order({"steps": 2})
        client.answer()
        client.order({"until": time.monotonic() + WINDOW_S})
        gaps = gaps_of(port)
        trained = client.answer()
    rate = trained["tokens"] / sum(trained["seconds"])
    return {**shown(gaps, slo_ms), "trained_tokens_per_s": round(rate, 1)}


def shown(gaps: list[float], slo_ms: float | None) -> dict[str, float]:
    """Return statistics of gaps, s, and the share of them within an SLO."""
    gaps = sorted(gaps)
    found = {
        "median_ms": round(1e3 * statistics.median(gaps), 2),
        "p99_ms": round(1e3 * gaps[int(0.99 * len(gaps))], 2),
        "gaps": len(gaps),
    }
    if slo_ms is not None:
        within = sum(gap <= slo_ms / 1e3 for gap in gaps)
        found["within_slo"] = round(within / len(gaps), 4)
    return found


def gaps_of(port: int) -> list[float]:
    """Stream completions for a window; returns all gaps between tokens, s."""
    gaps: list[float] = []
    end_s = time.monotonic() + WINDOW_S

    def stream() -> None:
        while time.monotonic() < end_s:
            gaps.extend(one_stream(port))

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return gaps


def one_stream(port: int) -> list[float]:
    """Stream one completion; returns the gaps between its tokens, s."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {
        "model": "model",
        "prompt": list(range(5, 37)),
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,  # the random model has no tokenizer, and its tokens no text
    }
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(f"error: {reply.status}: {reply.read()[:300]!r}")
    times = [time.monotonic() for line in reply if line.startswith(b"data: {")]
    connection.close()
    if len(times) < 2:
        raise SystemExit("error: the server streams no tokens")
    return [after - before for before, after in pairwise(times)]


@contextmanager
def served(directory: Path, *options: str) -> Iterator[tuple[int, str]]:
    """Start `pcg serve --split-port`; yields its port, and where split clients connect."""
    command = [sys.executable, "-m", "pcg_cli", "serve", str(directory), "--dtype", "float32"]
    given = ["--port", "0", "--split-port", "0", "--api-key", KEY, "--served-model-name", "model"]
    pipe = subprocess.PIPE
    popen = subprocess.Popen([*command, *given, *options], stderr=pipe, text=True)
    assert popen.stderr is not None
    port, where = None, None
    try:
        said = []
        for line in popen.stderr:
            said.append(line)
            where = where or _first(r'pcg\.connect\("([^"]+)"', line)
            port = port or _first(r"https?://[^ :/]+:(\d+)", line)
            if port and where:
                break
        if port is None or where is None:
            raise SystemExit("error: the server ended:\n" + "".join(said))
        reader = threading.Thread(target=lambda: list(popen.stderr or ()), daemon=True)
        reader.start()
        yield int(port), where
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(30)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait(30)


def _first(pattern: str, line: str) -> str | None:
    found = re.search(pattern, line)
    return None if found is None else found[1]


def noise(setting: Setting, rounds: int) -> dict[str, Any]:
    """Seconds of a finetuning step of 32 tokens, and processor seconds of client and base."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        base, where = setting.base(stack, "--port", "0", "--wait-ms", "0")
        clients = {
            name: setting.client(stack, where, Work("train", 1, 32), connecting=connecting)
            for name, connecting in NOISES.items()
        }
        for one in clients.values():
            one.answer()
        series: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
        for _ in range(rounds + 1):
            for name, one in clients.items():
                before = base.cpu_s(), one.cpu_s()
                one.order({"steps": 3})
                step_s = statistics.mean(one.answer()["seconds"])
                cpu_s = (base.cpu_s() - before[0]) / 3, (one.cpu_s() - before[1]) / 3
                series[name].append((step_s, *cpu_s))
    for name, many in series.items():
        step_s, base_s, own_s = map(statistics.median, zip(*many[1:], strict=True))
        found[name] = {
            "step_s": round(step_s, 3),
            "base_cpu_s": round(base_s, 3),
            "client_cpu_s": round(own_s, 3),
        }
    return found


def main() -> None:
    """Run the parts that were asked for, both by default, and write a result file of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--rounds", type=int, default=3, help="of noise")
    given = parser.parse_args()
    parts = given.parts or ["slo", "noise"]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), "auto", 1)
        save_model(setting.directory, "bfloat16")
        setting.save_programs()
        if "slo" in parts:
            write("split-slo", slo(setting))
        if "noise" in parts:
            write("split-noise", {"rounds": given.rounds, "cases": noise(setting, given.rounds)})


if __name__ == "__main__":
    main()
