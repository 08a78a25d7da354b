"""The data of a plan: machines that do the workload, the best of them, and its command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.parallel.costs.step_costs import host_seconds
from pcg.plan.candidate import Candidate
from pcg.plan.workload import MachineWorkload


@dataclass(frozen=True)
class PlanData:
    """Machines for a workload.

    Attributes:
        model: the model's name.
        method: the PEFT method in words; None for the base alone.
        method_options: the options of the command line that name the method; None where it was
            given as an object, which has no word there.
        optimizer_options: those that name the optimizer.
        costs: the source of each GPU's times, by its name.
        planned_for: the device by whose costs adapters lie on ranks; None where there is one rank
            or the base alone.
        own_costs: the profile by which a GPU is costed; None for data sheets.
        candidates: the number of machines that were tried.
        kept: the number of those that keep all promises.
        front: the Pareto front, in order of cost.
        chosen: the cheapest that keeps all promises, of these the best; None if none does.
        closest: the one that breaks its promises least, if none keeps them.
        refused: reasons why degrees cannot be, by degree.
        tpot_slo_s: the promise of the time per output token; None for none.
    """

    model: str
    method: str | None
    method_options: tuple[str, ...] | None
    optimizer_options: tuple[str, ...]
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
        """Return the command that starts one replica of a candidate.

        It finetunes where nothing is served; else it compiles the program to serve with, whose
        plan is for the finetuning beside.
        """
        machine, choice, training = candidate.machine, candidate.choice, self.workload.training
        trains_alone = self.workload.serving is None
        words = ["pcg", "finetune" if trains_alone else "compile", self.model]
        words += ("--peft", "ADAPTER") if self.method_options is None else self.method_options
        words += ["--dtype", machine.dtype]
        if machine.tp > 1:
            words += ["--tp", str(machine.tp)]
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

    @property
    def notes(self) -> tuple[str, ...]:
        """The source of the times, and what else is to be known, in sentences."""
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
        if any(one.machine.tp > 1 for one in self.front):
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
        found: dict[str, Any] = {
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
            "front": [self._row(one) for one in self.front],
            "chosen": None if self.chosen is None else self.front.index(self.chosen),
            "closest": None if self.closest is None else self.closest.to_json(),
            "refused": {str(degree): why for degree, why in self.refused.items()},
            "notes": list(self.notes),
        }
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {**candidate.to_json(), "command": self.command(candidate)}
