"""Data of a plan: machines for the workload, the cheapest, and the table of the front."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pcg.parallel.costs.step_costs import host_seconds
from pcg.plan.candidate import Candidate
from pcg.plan.workload import MachineWorkload
from pcg.units import gib

MUCH_LESS = 0.75
"""The price of a token, relative to another, from which a plan names the machine."""


@dataclass(frozen=True)
class PlanData:
    """Machines for a workload.

    Attributes:
        model: the model's name.
        method: the PEFT method in words; None for the base alone.
        method_options: the command-line options of the method; None for a method given as an
            object.
        optimizer_options: the command-line options of the optimizer.
        quantization: the format that float weights are quantized to; None for none.
        ep: the given number of parts of the experts; None for what costs least.
        costs: the source of each GPU's times, by its name.
        planned_for: the device whose costs place adapters on ranks; None with one rank or no
            adapters.
        own_costs: the profile with a GPU's costs; None for data sheets.
        candidates: the number of tried machines.
        kept: the number of machines that keep all promises.
        front: the Pareto front, in order of cost.
        chosen: the cheapest machine that keeps all promises, and the best of equal cost; or None.
        closest: if no machine keeps all promises, the machine with the least shortfall.
        refused: reasons why degrees are impossible, by degree.
        tpot_slo_s: the promised time per output token, or None.
    """

    model: str
    method: str | None
    method_options: tuple[str, ...] | None
    optimizer_options: tuple[str, ...]
    quantization: str | None
    ep: int | None
    workload: MachineWorkload
    costs: Mapping[str, str]
    planned_for: str | None
    own_costs: str | None
    candidates: int
    kept: int
    front: tuple[Candidate, ...]
    chosen: Candidate | None
    closest: Candidate | None
    refused: Mapping[int, str]
    tpot_slo_s: float | None

    def command(self, candidate: Candidate) -> str:
        """Return the command that starts a replica of a candidate.

        Without requests the command finetunes; otherwise it compiles the program that serves and
        finetunes.
        """
        machine, choice, training = candidate.machine, candidate.choice, self.workload.training
        trains_alone = self.workload.serving is None
        words = ["pcg", "finetune" if trains_alone else "compile", self.model]
        words += ("--peft", "ADAPTER") if self.method_options is None else self.method_options
        words += ["--dtype", machine.dtype]
        words += ["--quantization", self.quantization] if self.quantization else []
        if machine.tp > 1:
            words += ["--tp", str(machine.tp)]
            words += ["--ep", str(self.ep)] if self.ep is not None else []
            if self.planned_for is not None:
                words += ["--costs", self.own_costs or machine.gpu]
        if choice is not None and training is not None:
            words += ["--batch", str(choice.batch), "--seq", str(training.seq)]
            if choice.budget < 1:
                words += ["--memory-budget", f"{choice.budget:g}"]
        if trains_alone and machine.replicas > 1:
            words += ["--dp", str(machine.replicas), *["--shard-base"] * machine.shard_base]
        if not trains_alone:
            return shlex.join([*words, "-o", "program"])
        assert choice is not None
        words += [*self.optimizer_options, "--batch-size", str(choice.batch * machine.replicas)]
        if choice.accumulation > 1:
            words += ["--gradient-accumulation-steps", str(choice.accumulation)]
        return shlex.join([*words, "--data", "train.jsonl", "--adapter", "mine", "-o", "mine"])

    def serve_command(self, candidate: Candidate) -> str:
        """Return the command that serves the compiled program with the planned memory."""
        sizes = candidate.memory_bytes
        pool = sizes.get("kv_cache", 0) + sizes.get("served_adapters", 0)
        words = ["pcg", "serve", "program", "--kv-cache-gib", f"{math.ceil(pool / 2**20) / 1024:g}"]
        if self.tpot_slo_s is not None:
            words += ["--tpot-slo-ms", f"{1e3 * self.tpot_slo_s:g}"]
        return shlex.join(words)

    @property
    def cheaper_tokens(self) -> Candidate | None:
        """The cheapest machine whose tokens cost at most `MUCH_LESS` of the chosen machine's."""
        if self.chosen is None or (price := _token_price(self.chosen)) is None:
            return None
        cheaper = (
            each for each in self.front if (_token_price(each) or price) <= MUCH_LESS * price
        )
        return min(cheaper, key=lambda each: each.dollars_per_hour or 0.0, default=None)

    def tokens_ratio(self, candidate: Candidate) -> float:
        """Return a candidate's tokens per second, relative to those of the chosen machine."""
        assert self.chosen is not None
        return (_made(candidate) or 0.0) / max(_made(self.chosen) or 0.0, 1e-9)

    @property
    def notes(self) -> tuple[str, ...]:
        """The sources of the times and other remarks, in sentences."""
        by_words: dict[str, list[str]] = {}
        for gpu, words in self.costs.items():
            by_words.setdefault(words, []).append(gpu)
        notes = [f"times of {', '.join(gpus)}: {words}" for words, gpus in by_words.items()]
        both = self.workload.serving is not None and self.workload.training is not None
        if self.workload.serving is not None:
            notes.append("latencies are means of a steady state; bursts are not in them")
        if both:
            if self.tpot_slo_s is None:
                notes.append(
                    "finetuning takes all time until --max-num-seqs requests run at once: without "
                    "--tpot-slo-ms nothing bounds TPOT but that"
                )
            notes.append("each replica trains an adapter of its own; tokens are those of all")
        if self.method_options is None:
            notes.append(
                "ADAPTER stands for the directory of an adapter with the configuration that was "
                "given, as save_adapter or peft writes it"
            )
        if any(candidate.machine.tp > 1 for candidate in self.front):
            notes.append(
                "over ranks the host launches steps, which are not recorded there: none that "
                f"serves takes less than {1e3 * host_seconds(1):.2f} ms a layer"
            )
            if self.planned_for is not None:
                notes.append(f"over ranks, adapters are parallelized for {self.planned_for}")
        notes += [f"tp={degree} cannot be: {why}" for degree, why in self.refused.items()]
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON; times in seconds, sizes in bytes."""
        serving, training = self.workload.serving, self.workload.training
        fields: dict[str, Any] = {
            "model": self.model,
            "method": self.method,
            "workload": {
                "training": None if training is None else vars(training),
                "serving": None if serving is None else vars(serving),
            },
            "costs": dict(self.costs),
            "planned_for": self.planned_for,
            "candidates": self.candidates,
            "kept": self.kept,
            "front": [self._row(candidate) for candidate in self.front],
            "chosen": None if self.chosen is None else self.front.index(self.chosen),
            "closest": None if self.closest is None else self.closest.to_json(),
            "refused": {str(degree): why for degree, why in self.refused.items()},
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = json.loads(json.dumps(fields))
        return plain

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {**candidate.to_json(), "command": self.command(candidate)}


# -------------------------------------------------------------------------------------- front table


Cell = Callable[[Candidate], str]
MACHINE = "machine"
"""The column of machine names; all other columns hold numbers."""


def front_columns(plan: PlanData) -> Mapping[str, Cell]:
    """Return the columns with content for the plan, by their heads."""
    front, workload = plan.front, plan.workload
    columns: dict[str, Cell] = {
        MACHINE: lambda candidate: f"{candidate.machine.gpus}×{candidate.machine.gpu}",
        "tp": lambda candidate: str(candidate.machine.tp),
    }
    if len({candidate.machine.dtype for candidate in front}) > 1:
        columns["dtype"] = lambda candidate: candidate.machine.dtype
    if any(candidate.machine.shard_base for candidate in front):
        columns["base"] = lambda candidate: (
            f"{candidate.machine.replicas} parts" if candidate.machine.shard_base else "whole"
        )
    columns["GiB/rank"] = lambda candidate: gib(candidate.memory_bytes["total"])
    if workload.training is not None:
        columns["batch"] = _batch
        if any(candidate.choice is not None and candidate.choice.budget < 1 for candidate in front):
            columns["budget"] = lambda candidate: (
                f"{candidate.choice.budget:g}" if candidate.choice else "–"
            )
        columns["step s"] = lambda candidate: _number(candidate.step_s)
        columns["tuned tok/s"] = lambda candidate: _number(candidate.finetuning_tokens_per_s)
    if workload.serving is not None:
        columns["TPOT ms"] = lambda candidate: _number(
            1e3 * candidate.load.tpot_s if candidate.load else None
        )
        columns["TTFT ms"] = lambda candidate: _number(
            1e3 * candidate.load.ttft_s if candidate.load else None
        )
        columns["max req/s"] = lambda candidate: _number(candidate.sustained_per_s)
    if any(candidate.dollars_per_hour is not None for candidate in front):
        columns["$/h"] = lambda candidate: _dollars(candidate.dollars_per_hour)
        columns["$/M tokens"] = lambda candidate: _dollars(_token_price(candidate))
    return columns


def price_words(plan: PlanData) -> str:
    """Explain the price of a million tokens; empty without prices."""
    if all(candidate.dollars_per_hour is None for candidate in plan.front):
        return ""
    tokens = "finetuned" if plan.workload.training is not None else "generated"
    return f"$/M tokens: the whole machine's price for a million {tokens} tokens"


def _made(candidate: Candidate) -> float | None:
    """Return the tokens per second that the price of a million tokens refers to."""
    return (
        candidate.output_tokens_per_s
        if candidate.choice is None
        else candidate.finetuning_tokens_per_s
    )


def _token_price(candidate: Candidate) -> float | None:
    return candidate.dollars_per_million(_made(candidate))


def _batch(candidate: Candidate) -> str:
    choice = candidate.choice
    if choice is None:
        return "–"
    return f"{choice.accumulation}×{choice.batch}" if choice.accumulation > 1 else f"{choice.batch}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _dollars(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
