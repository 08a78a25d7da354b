"""Sixty actions of a first day, typed as four newcomers type them, and what became of each.

Each action of first_day.yaml is a command of a shell, in one folder and in this order: who rents a
GPU, who finetunes, who operates a server, who extends pcg. An action works if it ends with status 0
and its output has what the user wants to see, such as the tokens that peft finds with the saved
adapter. An action that pcg should refuse has to fail in one line that names the fix; without such a
line it is unclear, and a command that should fail and succeeds, or shows something else, is wrong.

`peers` is the answer of TRL, peft and vLLM to the same wish, by their documentation (TRL 1.16, peft
0.21, vLLM 0.33): + has it, o has a part or leaves it to scripts, - has it not.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness as bench
import yaml

ACTIONS = Path(__file__).with_suffix(".yaml")
MOST_S = 300


@dataclass(frozen=True)
class Action:
    """An action: a command, and the pattern of its output or of its refusal.

    Attributes:
        shows: a pattern of the output if the action works.
        refused: a pattern of the error if pcg should refuse the action.
        peers: the answers of TRL, peft and vLLM.
    """

    title: str
    command: str
    shows: str = ""
    refused: str = ""
    peers: str = "---"


def users() -> dict[str, list[Action]]:
    """Read the actions of each user."""
    read = yaml.safe_load(ACTIONS.read_text(encoding="utf-8"))
    return {user: [Action(**action) for action in actions] for user, actions in read.items()}


def outcome(action: Action, folder: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Run an action; return what became of it, and the end of its output."""
    done = subprocess.run(
        ["bash", "-c", action.command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    text = done.stdout + done.stderr
    end = text.strip()[-300:]
    if action.refused:
        if done.returncode == 0:
            return "wrong", end
        is_clear = "Traceback" not in done.stderr or action.command.startswith("python")
        return ("refused" if is_clear and re.search(action.refused, text) else "unclear"), end
    if done.returncode:
        return "unclear", end
    return ("works" if re.search(action.shows, text) else "wrong"), end


def prepare(folder: Path) -> dict[str, str]:
    """Write the user's files and the commands `pcg` and `python`; return the environment."""
    (folder / "examples").symlink_to(bench.ROOT / "examples")
    tools = folder / "bin"
    tools.mkdir()
    for name, words in {"python": "", "pcg": "-m pcg_cli", "mypy": "-m mypy"}.items():
        path = tools / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        path.chmod(0o755)
    rows = [
        {"prompt": f"def load_{name}(path):", "completion": f'\n    """Load the {name}."""'}
        for name in ("file", "user", "key", "table", "image", "row")
    ]
    code = (
        "import csv, gzip, json, sys\n"
        f"rows = {rows!r}\n"
        "for name, columns in (('rows.csv', ('prompt', 'completion')),"
        " ('asked.csv', ('question', 'answer'))):\n"
        "    writer = csv.writer(open(name, 'w', newline=''))\n"
        "    writer.writerows([columns, *(list(row.values()) for row in rows)])\n"
        "lines = [json.dumps(row) for row in rows * 2]\n"
        "open('rows.jsonl', 'w').write('\\n'.join(lines))\n"
        "open('bad.jsonl', 'w').write(lines[0] + '\\n{\"prompt\": 3}\\n')\n"
        "gzip.open('rows.json.gz', 'wt').write(json.dumps(rows))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PORT": str(port),
        "COLUMNS": "100",
    }


@contextmanager
def serving(folder: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start the server that the operator asks; yield the environment with its process id."""
    command = (
        "pcg serve examples/checkpoint --served-model-name base "
        "--lora-modules typed=examples/adapters/typed "
        "--lora-roots examples/adapters --data-dir kept --api-key secret-key --port $PORT & "
        "echo $! > server.id; wait $!; echo $? > server.status"
    )
    with (folder / "server.log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=log, stderr=log
        )
    ask = ["curl", "-sf", f"localhost:{environment['PORT']}/health"]
    try:
        while subprocess.run(ask, check=False, capture_output=True).returncode:
            if shell.poll() is not None:
                raise SystemExit((folder / "server.log").read_text())
            time.sleep(0.5)
        yield {**environment, "SERVER": (folder / "server.id").read_text().strip()}
    finally:
        if shell.poll() is None:
            os.kill(int((folder / "server.id").read_text()), signal.SIGTERM)
            shell.wait(120)


@bench.case("first_day", "works", "refused", most=3)
def first_day(most: int = 1000) -> dict[str, Any]:
    """Run the actions; the first `most` of each user."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = prepare(folder)
        for user, actions in users().items():
            is_operator = user == "operates"
            with (
                serving(folder, environment) if is_operator else nullcontext(environment) as served
            ):
                for action in actions[:most]:
                    became, end = outcome(action, folder, served)
                    row = {"user": user, "action": action.title, "outcome": became}
                    row["trl, peft, vllm"] = action.peers
                    if became in ("wrong", "unclear"):
                        row["end"] = end
                        print(f"{became}: {action.title}: {end}", file=sys.stderr)
                    rows.append(row)
    counts = Counter(row["outcome"] for row in rows)
    return {
        "actions": len(rows),
        "works, or refused as it should be (at least 56)": counts["works"] + counts["refused"],
        "wrong (at most 0)": counts["wrong"],
        "unclear (at most 0)": counts["unclear"],
        "outcomes": dict(counts),
        "rows": rows,
    }


if __name__ == "__main__":
    bench.main()
