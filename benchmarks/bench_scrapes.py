"""Measure what scrapes of /metrics every 50 ms cost: turns of a second with them and without.

    python benchmarks/bench_scrapes.py [--runs 3] [--streams 32] [--tokens 700] [--turn 1.0]

Differences of 1 % are below what rounds of `bench_http.py` tell on a machine that others use. Here
32 clients stream from `pcg serve` without a pause, and a scraper works every other second, so that
a turn has its neighbours without scrapes to be compared with, which saw the same machine:

    tokens/s            of a turn with scrapes / the mean of the turns before and behind it
    processor time      of the engine's process a token, likewise; and of each process a scrape

A step's tokens come to all clients together, so the events of the first one count them. Reported
are medians over all pairs of all runs, means, and the standard error of the mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from bisect import bisect
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_http import KEY, body, process_of, prompts_of, saved_model, server, started_by
from http_load import arrivals, scraper
from measure import write

_WARMING_S = 2.0
"""Time before the first turn, in which prompts are read."""
SERVER, ENGINE, SCRAPER = range(3)


@dataclass(frozen=True)
class Turn:
    """A turn of a run.

    Attributes:
        rate: tokens a second of all streams.
        cpu_s: processor time of the server's process, the engine's and the scraper's, seconds.
        scrapes: how often /metrics was asked for.
    """

    rate: float
    cpu_s: tuple[float, ...]
    scrapes: int


def cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def steps_at(found: list[tuple[float, int]], time_s: float) -> float:
    """Return the steps that had come at a time, between two of them a part of one."""
    place = bisect(found, (time_s, 0))
    (before_s, before), (behind_s, behind) = found[place - 1 : place + 1]
    return before + (behind - before) * (time_s - before_s) / (behind_s - before_s)


def turns_of(
    load: Connection,
    scraping: Connection,
    bodies: list[dict[str, Any]],
    pids: list[int],
    turn_s: float,
) -> list[Turn]:
    """Stream, and scrape every other turn; returns the turns, the first one without scrapes."""
    load.send(bodies)
    time.sleep(_WARMING_S)
    measured: list[tuple[float, float, tuple[float, ...], int]] = []
    while not load.poll():
        count, is_scraped = 0, len(measured) % 2 == 1
        if is_scraped:
            scraping.send("begin")
        began_s, before = time.perf_counter(), [cpu_s(pid) for pid in pids]
        time.sleep(turn_s)
        ended_s, behind = time.perf_counter(), [cpu_s(pid) for pid in pids]
        if is_scraped:
            scraping.send("end")
            count = scraping.recv()
        took = tuple(b - a for a, b in zip(before, behind, strict=True))
        measured.append((began_s, ended_s, took, count))
    found = load.recv()
    return [
        Turn(
            (steps_at(found, end_s) - steps_at(found, begin_s)) / (end_s - begin_s) * len(bodies),
            took,
            count,
        )
        for begin_s, end_s, took, count in measured
        if end_s < found[-1][0]
    ]


def main() -> None:
    """Run the turns and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--turn", type=float, default=1.0)
    given = parser.parse_args()
    pairs: list[tuple[Turn, ...]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        saved_model(Path(folder)),
        server(Path(folder)) as (port, server_pid),
        process_of(arrivals, port, KEY) as (load, _),
        process_of(scraper, port, KEY) as (scraping, scraper_pid),
    ):
        engine_pid = max(started_by(server_pid), key=cpu_s)
        pids = [server_pid, engine_pid, scraper_pid]
        for run in range(given.runs):
            bodies = [body(one, given.tokens) for one in prompts_of(run, given.streams)]
            turns = turns_of(load, scraping, bodies, pids, given.turn)
            pairs += [tuple(turns[i - 1 : i + 2]) for i in range(1, len(turns) - 1, 2)]
            print(f"  run {run}: {report(pairs)}", file=sys.stderr)
    write("scrapes", {"streams": given.streams, "turn_s": given.turn, **report(pairs)})


def report(pairs: list[tuple[Turn, ...]]) -> dict[str, Any]:
    """Return the result of turns with scrapes, each between its neighbours without."""
    rates, engine = [], []
    more: list[list[float]] = [[], [], []]
    for before, scraped, behind in pairs:
        rate = (before.rate + behind.rate) / 2
        cpu = [(a + b) / 2 for a, b in zip(before.cpu_s, behind.cpu_s, strict=True)]
        rates.append(scraped.rate / rate)
        engine.append(scraped.cpu_s[ENGINE] / scraped.rate / (cpu[ENGINE] / rate))
        for place, took in enumerate(scraped.cpu_s):
            more[place].append((took - cpu[place]) / max(1, scraped.scrapes) * 1e6)
    return {
        "pairs": len(pairs),
        "tokens_per_s": round(statistics.median(b.rate for b, _, _ in pairs), 1),
        "tokens/s, scraped / not (at least 0.99)": round(statistics.median(rates), 4),
        "tokens/s, scraped / not, mean": round(statistics.fmean(rates), 4),
        "its standard error": round(statistics.stdev(rates) / len(rates) ** 0.5, 4),
        "processor time of the engine's process a token, scraped / not": round(
            statistics.median(engine), 4
        ),
        "processor_us_a_scrape": {
            "server": round(statistics.median(more[SERVER])),
            "scraper": round(statistics.median(more[SCRAPER])),
        },
    }


if __name__ == "__main__":
    main()
