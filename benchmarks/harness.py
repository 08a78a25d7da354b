"""The harness of the benchmarks: cases, their options, processes, rounds, ratios and result files.

    python benchmarks/generation.py [CASE] [--OPTION VALUE …] [--quick]

A subject is a file, and a case is a function of it, whose parameters are the options. Without a
case, each case of the subject runs in a process of its own. A case returns a dict, which is written
to `results/CASE.json` with the commit, machine, versions and command, and with the case's targets.
`--quick` takes the smallest sizes, to see that a case works, and writes nothing.

The machine is shared and noisy, so no time stands alone: every contender runs once a round, in
turn, and a result is the median over the rounds of the ratios within a round.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHECKPOINT = ROOT / "examples" / "checkpoint"
CONTEXT = get_context("spawn")
KEY = "tml-key-of-the-benchmark"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Rates: TypeAlias = Mapping[str, Sequence[float]]

# ------------------------------------------------------------------------------------------ cases


BOUND = re.compile(r" \((at least|at most) ([\d.]+)( ?%)?\)$")


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        name: of the result file.
        shown: ends of the paths of numbers without a target that the table shows, too.
        quick: the options of `--quick`.
    """

    name: str
    run: Callable[..., dict[str, Any]]
    shown: tuple[str, ...]
    quick: Mapping[str, Any]


CASES: dict[str, Case] = {}


def case(name: str, *shown: str, **quick: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as a case; see `Case`."""

    def register(run: Callable[..., Any]) -> Any:
        CASES[name] = Case(name, run, shown, quick)
        return run

    return register


def targets(result: Any, shown: tuple[str, ...] = (), path: str = "") -> Iterator[dict[str, Any]]:
    """Yield the numbers whose keys end in a bound, as `speed (at least 2)`, and those shown."""
    if isinstance(result, list):  # an entry is named by its first words and whole numbers
        result = {_label(one) or str(place): one for place, one in enumerate(result)}
    if not isinstance(result, dict):
        return
    for key, value in result.items():
        found, name = BOUND.search(key), f"{path}{BOUND.sub('', key)}"
        if found and isinstance(value, dict):
            value = {f"{one}{found[0]}": number for one, number in value.items()}
        if isinstance(value, int | float) and (found or name.endswith(shown)):
            row = {"name": name, "value": value}
            if found:
                row[found[1].replace(" ", "_")] = float(found[2]) / (100 if found[3] else 1)
            yield row
        yield from targets(value, shown, f"{name}: ")


def _label(entry: Any) -> str:
    first = list(entry.values())[:4] if isinstance(entry, dict) else []
    return ", ".join(str(value) for value in first if isinstance(value, str | int))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the case that the command names, or all cases of the file."""
    subject = Path(sys.argv[0])
    module = sys.modules["__main__"]
    parser = argparse.ArgumentParser(
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quick = argparse.ArgumentParser(add_help=False)
    quick.add_argument("--quick", action="store_true", help="the smallest sizes; writes nothing")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes; writes nothing")
    parsers = parser.add_subparsers(dest="case", metavar="CASE", help=", ".join(CASES))
    for one in CASES.values():
        options = parsers.add_parser(one.name, parents=[quick])
        for parameter in inspect.signature(one.run).parameters.values():
            _add_option(options, parameter.name, parameter.default)
    given = vars(parser.parse_args(arguments))
    name, is_quick = given.pop("case"), given.pop("quick")
    if name is None:
        status = 0
        for one in CASES:
            command = [sys.executable, str(subject), one, *["--quick"] * is_quick]
            status |= subprocess.run(command, check=False).returncode
        raise SystemExit(status)
    if is_quick:
        given |= CASES[name].quick
    prepare()
    result = CASES[name].run(**given)
    write(CASES[name], result, subject.stem, is_kept=not is_quick)


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
    elif isinstance(default, tuple):
        parser.add_argument(flag, nargs="*", type=type(default[0]), default=default)
    else:
        parser.add_argument(flag, type=str if default is None else type(default), default=default)


def prepare() -> None:
    """Use one thread and a fixed seed."""
    import torch

    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)


def write(one: Case, result: Mapping[str, Any], subject: str, *, is_kept: bool = True) -> None:
    """Print a result, and write its file."""
    known = {"targets": [*targets(result, one.shown)], "subject": subject}
    whole = {**result, **known, "environment": environment()}
    text = json.dumps(whole, indent=2, ensure_ascii=False)
    print(text)
    if is_kept:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{one.name}.json").write_text(text + "\n", "utf-8")


def environment() -> dict[str, Any]:
    """Return the commit, machine, versions and command."""
    packages = ("torch", "transformers", "peft", "safetensors")
    return {
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "command": " ".join(["python", *sys.argv]),
    }


def _commit() -> str:
    """Return the commit, with "+" if files of pcg or benchmarks differ from it."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    changed = git(["git", "status", "--porcelain", "pcg", "cli", "benchmarks/*.py"]).stdout
    return f"{commit}+" if changed.strip() else commit or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


# ----------------------------------------------------------------------------------------- rounds


def interleave(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run each contender once a round; return their values by name.

    Args:
        contenders: calls by name that run the workload and return its time in seconds or its rate.
        rounds: the number of rounds; one more comes first and is thrown away.
    Raises:
        SystemExit: fewer than one round.
    """
    if rounds < 1:
        raise SystemExit(f"error: {rounds} rounds; use at least 1")
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, run in contenders.items():
            value = run()
            if round_:
                values[name].append(value)
                note(f"round {round_} {name:<28} {value:10.3f}")
    return values


def note(text: object) -> None:
    """Print progress."""
    print(f"  {text}", file=sys.stderr, flush=True)


def seconds(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes by a clock."""
    started = clock()
    act()
    return clock() - started


def ratio(values: Rates, name: str, to: str) -> float:
    """Return the median over the rounds of one contender's value divided by another's."""
    pairs = zip(values[name], values[to], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def medians(values: Rates, digits: int = 4) -> dict[str, float]:
    """Return each contender's median over the rounds."""
    return {name: round(statistics.median(series), digits) for name, series in values.items()}


def medians_of_rows(rows: Sequence[Mapping[str, float]], digits: int = 4) -> dict[str, float]:
    """Return the median of each number over rows of the same keys."""
    return medians({key: [row[key] for row in rows] for key in rows[0]}, digits)


# ---------------------------------------------------------------------------------------- models

LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "target_modules": "all-linear",
}
RECIPE = {name: value for name, value in LORA.items() if name != "peft_type"}
"""The same as arguments of peft's `LoraConfig`."""
VOCABULARY = 32_000


def random_llama(**sizes: Any) -> Any:
    """Return a Llama of 8 layers and hidden size 512 with random weights, or of other sizes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    usual = {
        "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(LlamaConfig(**usual | sizes)).eval()


def save_random_llama(directory: Path) -> None:
    """Write the random model with a tokenizer that has a word for each token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    random_llama().save_pretrained(directory)
    words = {f"Ġword{index}" if index else "<unk>": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@contextmanager
def saved(save: Callable[..., None] = save_random_llama, *arguments: Any) -> Iterator[Path]:
    """Write a model to a temporary folder, by a process that ends, so that its memory is free."""
    with tempfile.TemporaryDirectory() as folder:
        process = CONTEXT.Process(target=save, args=(Path(folder), *arguments))
        process.start()
        process.join()
        yield Path(folder)


# -------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Process:
    """A process that was started here, which answers over a pipe."""

    pipe: Any
    pid: int

    def ask(self, *asked: Any) -> Any:
        self.pipe.send(asked[0] if len(asked) == 1 else asked)
        return self.answer()

    def answer(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit("error: a process of the benchmark ended; see above") from None


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Process]:
    """Run `target(pipe, *arguments)` in a process, which is ended by None over its pipe."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Process(ours, process.pid or 0)
        with suppress(OSError):  # the process has ended
            ours.send(None)
        process.join(30)
    finally:
        process.kill()
        process.join(30)


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a process of its own."""
    with started(_answer, function, *arguments) as process:
        return process.answer()


def _answer(pipe: Any, function: Callable[..., Any], *arguments: Any) -> None:
    prepare()
    pipe.send(function(*arguments))


@contextmanager
def command(*arguments: object, pattern: str, **variables: str) -> Iterator[tuple[Any, int]]:
    """Run a `pcg` command until the context ends.

    Args:
        pattern: of the text that it prints once it is ready.
        variables: environment variables; tensors have one thread by default.
    Returns:
        The match of the pattern, and the process id.
    Raises:
        SystemExit: the command ended before, or before the context did.
    """
    line = [sys.executable, "-m", "pcg_cli", *map(str, arguments)]
    with tempfile.NamedTemporaryFile("w+") as said:
        process = subprocess.Popen(
            line, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}
        )
        try:
            while (found := re.search(pattern, Path(said.name).read_text(), re.DOTALL)) is None:
                if process.poll() is not None:
                    raise SystemExit(f"error: {line} ended\n{Path(said.name).read_text()}")
                time.sleep(0.05)
            yield found, process.pid
            if process.poll() is not None:
                raise SystemExit(f"error: {line} ended\n{Path(said.name).read_text()[-2000:]}")
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


@contextmanager
def server(model: Path, *options: object) -> Iterator[tuple[int, int]]:
    """Run `pcg serve` with a key; gives its port and its process id."""
    given = ["--port", 0, "--dtype", "float32", "--served-model-name", "model", *options]
    if "--api-keys" not in options:
        given += ["--api-key", KEY]
    with command("serve", model, *given, pattern=r"at http://\S*:(\d+)") as (found, pid):
        yield int(found[1]), pid


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def threads_s(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS for now, VmHWM for the peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024
