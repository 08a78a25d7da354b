"""Kill `pcg serve` at random instants under load of three APIs, and compare with what it promised.

    python benchmarks/soak_kills.py [--kills 50] [--by-command 4] [--seed 0]

Clients on threads of their own load a server with a folder for what it keeps: Tinker's protocol
(two that train and sample), OpenAI's files and uploads, fine-tuning jobs of the three methods, and
completions beside adapters that are loaded by name. SIGKILL ends the server, or its engine's
process alone, at an instant that is drawn: while it starts, right behind its first word, some
milliseconds behind an acknowledgement, or after a time. The next one begins in the same folder.

    sooner         the process is a copy of one that has imported everything (`kills_server.py`)
    by command     it is `pcg serve`, `--by-command` times of them

Clients keep all that they were told. Whenever one asks again for a result or for events, and in the
end for all, they must be those of before. A request whose answer did not come is asked for again
under its number, where the protocol has one. In the end a server that nobody kills is asked for the
same models and jobs: losses, log-probabilities, samples, adapters and optimizers' states are
compared. Then both folders are read: each file has a row, and each row its files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kills_jobs
import kills_tinker
from kills_files import FilesLoad
from kills_folder import (
    ADAPTER,
    OPTIMIZER,
    farthest,
    folders_of_checkpoints,
    folders_of_models,
    updates_of,
    wrong_in,
)
from kills_inference import InferenceLoad
from kills_jobs import JobsLoad
from kills_server import Life, Servers
from kills_tinker import TinkerLoad
from kills_world import KEY, MODEL, Load, World
from measure import write

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support import tiny_llama

GIVEN = "given"
LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
KINDS = ("start", "first", "answer", "answer", "trained", "trained", "trained", "time", "engine")
"""When servers are killed: while they start, up to 0.3 s behind their first word, up to 5 ms behind

an acknowledgement of any kind, or of a promise or a result of Tinker's protocol, after up to 6 s,
and by their engine's process after as long.
"""
LONGEST_S = 15.0
"""The longest wait for an acknowledgement, seconds."""
SETTLE_S = 1200.0
"""The longest time in which all that was promised comes, once nobody kills, seconds."""


def options_of(folder: Path, data: str) -> dict[str, Any]:
    """Return the options of a server that keeps things in a folder."""
    return {
        "data_dir": str(folder / data),
        "api_key": [KEY],
        "served_model_name": [MODEL],
        "kv_cache_gib": 0.05,
        "lora_roots": [str(folder / "adapters")],
        "access_log": "none",
    }


def make_model(folder: Path) -> Path:
    """Write the model and an adapter; returns the model's folder."""
    import pcg

    model = folder / "model"
    tiny_llama.save(model)
    executor = pcg.compile(model, dtype="float32")
    adapter = executor.add_adapter(GIVEN, LORA, seed=1)
    for weights in adapter.weights.values():
        weights.b.normal_(std=0.1)
    executor.save_adapter(GIVEN, folder / "adapters" / GIVEN)
    return model


class Killer:
    """Begins servers and kills them."""

    def __init__(self, world: World, servers: Servers, drawn: random.Random) -> None:
        self.kinds: Counter[str] = Counter()
        self.start_s: list[float] = []
        self._world = world
        self._servers = servers
        self._drawn = drawn

    def kill_one(self, *, by_command: bool) -> None:
        """Have a server live for as long as is drawn."""
        drawn = self._drawn
        kind = drawn.choice(KINDS)
        began = time.monotonic()
        life = self._servers.begin(by_command=by_command)
        if kind == "start":
            usual = sorted(self.start_s)[len(self.start_s) // 2] if self.start_s else 5.0
            time.sleep(drawn.random() * usual)
            life.kill()
        else:
            self._live(life, kind, began)
        self.kinds[f"{kind}, by command" if by_command else kind] += 1

    def _live(self, life: Life, kind: str, began: float) -> None:
        drawn, world = self._drawn, self._world
        world.is_at(life.wait())
        self.start_s.append(time.monotonic() - began)
        if kind == "first":
            time.sleep(drawn.random() * 0.3)
        elif kind in ("answer", "trained"):
            of = ("promises", "results") if kind == "trained" else None
            world.wait_for_more(drawn.randrange(1, 60), LONGEST_S, of)
            time.sleep(drawn.random() * 0.005)
        else:
            time.sleep(drawn.random() * 6.0)
        life.kill(engine=kind == "engine")
        world.is_at(None)


def compare(world: World, folder: Path, loads: Sequence[Load], servers: Servers) -> dict[str, Any]:
    """Ask a server that nobody kills for the same, and return the largest differences."""
    life = servers.begin()
    world.is_at(life.wait())
    worst: dict[str, float] = {}
    paths: dict[str, str] = {}
    jobs: dict[str, tuple[str, list[float]]] = {}
    ours: dict[str, list[float]] = {}
    for load in loads:
        if isinstance(load, TinkerLoad):
            found, more = kills_tinker.replay(world, load)
            paths |= more
            for name, far in found.items():
                together = worst.get(name, 0.0) + far if name == "other_tokens" else 0.0
                worst[name] = together or max(worst.get(name, 0.0), far)
        if isinstance(load, JobsLoad):
            jobs |= kills_jobs.replay(world, load)
            for one in load.jobs:
                metrics = [each for each in one.events if each.type == "metrics"]
                ours[one.id] = [each.data["train_loss"] for each in metrics]
    life.end()
    kept, again = folder / "kept", folder / "again"
    mine, others = folders_of_checkpoints(kept), folders_of_checkpoints(again)
    pairs = [(mine[path], others[other]) for path, other in paths.items()]
    far = [farthest(*pair, ADAPTER) for pair in pairs]
    states = [farthest(*pair, OPTIMIZER) for pair in pairs]
    updates = [tuple(map(updates_of, pair)) for pair in pairs]
    for (one, _), (count, expected) in zip(pairs, updates, strict=True):
        if count != expected:
            world.wrong.append(f"{one} had {count} updates, not {expected}")
    made, remade = folders_of_models(kept), folders_of_models(again)
    by_job = {id: farthest(made[id], remade[other], ADAPTER) for id, (other, _) in jobs.items()}
    losses = [
        abs(a - b) for id, (_, other) in jobs.items() for a, b in zip(ours[id], other, strict=True)
    ]
    return {
        "tinker": {
            **worst,
            "checkpoints_compared": len(far),
            "checkpoints_of_equal_bits": sum(one == 0 for one in far),
            "weights": max(far, default=0.0),
            "optimizers_relative": max(states, default=0.0),
            "most_updates": max((one or 0 for one, _ in updates), default=0),
        },
        "jobs": {
            "compared": len(by_job),
            "of_equal_bits": sum(one == 0 for one in by_job.values()),
            "losses": max(losses, default=0.0),
            "weights": max(by_job.values(), default=0.0),
        },
    }


def soak(folder: Path, kills: int, by_command: int, seed: int) -> dict[str, Any]:
    """Kill so many servers; returns what was promised, and what became of it."""
    drawn, world = random.Random(seed), World()
    model = make_model(folder)
    servers = Servers(model, folder, options_of(folder, "kept"))
    loads: list[Load] = [
        TinkerLoad(world, 1, updates=0), TinkerLoad(world, 2, updates=30), FilesLoad(world, 3),
        JobsLoad(world, 4, most=3), InferenceLoad(world, 5, GIVEN),
    ]  # fmt: skip
    began, killer = time.monotonic(), Killer(world, servers, drawn)
    for load in loads:
        load.thread.start()
    commanded = set(drawn.sample(range(kills), min(by_command, kills)))
    for turn in range(kills):
        killer.kill_one(by_command=turn in commanded)
        print(f"{turn + 1} of {kills} killed, {dict(world.counts)}", file=sys.stderr)
        for one in world.wrong:
            print(f"  {one}", file=sys.stderr)
    world.is_over = True
    life = servers.begin()
    world.is_at(life.wait())
    for load in loads:
        load.thread.join(120)
        load.finish(SETTLE_S)
    life.end()
    life = servers.begin()  # what the last kill left is removed by a start
    life.wait()
    time.sleep(2)
    life.end()
    seconds = time.monotonic() - began
    wrong = wrong_in(folder / "kept")
    servers.close()
    servers = Servers(model, folder, options_of(folder, "again"))
    found = compare(world, folder, loads, servers)
    servers.close()
    starts = sorted(killer.start_s)
    return {
        "kills": kills,
        "kills_by_kind": dict(killer.kinds),
        "seconds": round(seconds),
        "start_s_median": round(starts[len(starts) // 2], 1) if starts else None,
        "counts": dict(sorted(world.counts.items())),
        "largest_differences": found,
        "promises_broken": world.wrong,
        "wrong_in_the_folder": wrong,
    }


def main() -> None:
    """Kill, compare, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--by-command", type=int, default=4, help="of them kill `pcg serve`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for all files; a temporary one by default")
    parser.add_argument("--dry", action="store_true", help="print the result alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if given.folder is None else given.folder
        folder.mkdir(parents=True, exist_ok=True)
        result = soak(folder, given.kills, given.by_command, given.seed)
    if given.dry:
        print(json.dumps(result, indent=2))
    else:
        write("kills", result)
    if result["promises_broken"] or result["wrong_in_the_folder"]:
        raise SystemExit("error: promises were broken")


if __name__ == "__main__":
    main()
