"""Kahneman-Tversky optimization (Ethayarajh et al., 2024), by a call or a file.

    result = kto(executor, KtoArguments("labelled.jsonl", adapter="polite", batch_size=8))

A row has a prompt, a completion, and a label: true for a desirable completion. With m = l - q of a
completion, the sums of its log-probabilities by the adapter and by the reference, the mean over the
completions of a step is taken of

    desirable      desirable_weight (1 - σ(β (m - kl)))
    undesirable    undesirable_weight (1 - σ(β (kl - m)))

kl is constant in the gradient: the mean of m over a batch, at least 0, where each prompt has the
completion of the example before it in the batch, and the first prompt that of the last example, as
in TRL's KTOTrainer. With loss_type apo_zero_unpaired, kl is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from pcg.options import CompileOptions
from pcg.runtime.data.dataset import RowKind
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.order import Batches
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import Numbers, StepRecord
from pcg.runtime.training.work_units import Work
from pcg.train.config_file import ConfigFile, ModelOptions, OutputOptions
from pcg.train.preference.dpo import FileOptions, train_file
from pcg.train.preference.options import KtoOptions, PreferenceArguments
from pcg.train.preference.run import (
    Pair,
    PreferenceResult,
    PreferenceRun,
    Preferences,
    data_of,
    target_sums,
)


@dataclass(frozen=True)
class KtoArguments(KtoOptions, PreferenceArguments):
    """Arguments of `kto`."""


@dataclass(frozen=True, kw_only=True)
class KtoFileOptions(KtoOptions, FileOptions):
    """Options of Kahneman-Tversky optimization by a file."""

    title: ClassVar[str] = "Data"


KTO_KEYS = (ModelOptions, OutputOptions, KtoFileOptions, CompileOptions)
"""The dataclasses with a configuration's keys as fields."""


def kto(executor: Executor, arguments: KtoArguments) -> PreferenceResult:
    """Train an adapter on labelled completions, and serve the adapter.

    Raises:
        DataError: unusable data; names file and line.
        FinetuneError: bad options, non-finite numbers, or a checkpoint that cannot be saved or
            belongs to another run.
        FinetuneInterrupted: Ctrl-C; the checkpoint has the state of the last complete step.
        UnsupportedError: the recipe has a feature that pcg does not train; or several ranks.
    """
    return PreferenceRun(executor, arguments, objective=LabelledOutputs).run()


def train_kto(config: ConfigFile) -> PreferenceResult:
    """Train an adapter on labelled completions by a configuration, and save it in the output.

    Raises:
        PcgError: the configuration, the model or the data is unusable; before the first step.
        FinetuneInterrupted: Ctrl-C; the same call continues from the checkpoint.
    """
    return train_file(
        config, KtoFileOptions, lambda executor, values: kto(executor, KtoArguments(**values))
    )


@dataclass(frozen=True, slots=True)
class Output(Example):
    """A labelled completion, with its prompt."""

    number: int

    @property
    def begin(self) -> int:
        """The index of the first target."""
        return next(i for i, label in enumerate(self.labels) if i and label != IGNORED)


class LabelledOutputs(Preferences):
    """Labelled completions, and the trainer's loss `kto`."""

    kind = "kto"
    rows: ClassVar[RowKind] = "labelled"

    def _item(self, number: int, examples: Sequence[Example]) -> Example:
        (output,) = examples
        return Output(output.ids, output.labels, number, is_desirable=output.is_desirable)

    def _pairs_of(self, batch: Sequence[Example]) -> list[Pair]:
        """Return each example, with its prompt and the completion of another as the second."""
        outputs = [item for item in batch if isinstance(item, Output)]
        most = self._arguments.max_length or self._executor.state.max_positions
        pairs = []
        for output, other in zip(outputs, [outputs[-1], *outputs[:-1]], strict=True):
            end, begin = output.begin, other.begin
            ids = [*output.ids[:end], *other.ids[begin:]][:most]
            labels = [*[IGNORED] * end, *other.labels[begin:]][:most]
            number = output.number * len(self._pairs) + other.number
            pairs.append(Pair([], [], number, output, Example(ids, labels)))
        return pairs

    def _reference_pairs(self, items: Sequence[Example]) -> Sequence[Pair]:
        """Return the pairs of all steps, or of an evaluation."""
        if not items:
            return []
        if items is not self._pairs:
            return [pair for lot in self._lots(items) for pair in self._pairs_of(lot)]
        steps, pairs, epoch = 0, dict[int, Pair](), 0
        while steps < self.total:
            plan = self._batches.plan(epoch)
            for indexes in plan:
                batch = [self._pairs[index] for index in indexes]
                pairs |= {pair.number: pair for pair in self._pairs_of(batch)}
            steps += math.ceil(len(plan) / self._arguments.gradient_accumulation_steps)
            epoch += 1
        return list(pairs.values())

    def _lots(self, items: Sequence[Example]) -> Iterator[list[Example]]:
        plan = Batches(items, **self._arguments.batch_bounds, shuffle=False).plan(0)
        return ([items[index] for index in indexes] for indexes in plan)

    # ------------------------------------------------------------------------------- a step

    def gradients(self, step: int, rate: float) -> Work[None]:
        yield from ()
        self._epoch = self._batches.epoch
        group = [*islice(self._batches, self._arguments.gradient_accumulation_steps)]
        self._numbers = self._computed(group, self._references[0], trains=True)

    def _step_numbers(self) -> dict[str, float]:
        return self._numbers

    def evaluate(self, step: int) -> Work[Numbers]:
        """Measure the loss and the metrics of the evaluation data, without dropout."""
        yield from ()
        numbers = self._computed([*self._lots(self._eval)], self._references[1], trains=False)
        self.evaluations.append((step, numbers))
        return numbers

    def _computed(
        self, batches: Sequence[Sequence[Example]], references: Any, *, trains: bool
    ) -> dict[str, float]:
        """Compute batches, with gradients if `trains`; return the loss and the metrics."""
        arguments, count = self._arguments, sum(map(len, batches))
        call = self.trainer.forward_backward if trains else self.trainer.forward
        loss, divergences = 0.0, list[float]()
        rewards: dict[str, list[float]] = {}
        for batch in batches:
            pairs = self._pairs_of(batch)
            by_reference = references.of(pairs)
            data, sums = data_of(pairs, by_reference), target_sums(pairs, by_reference)
            kl = 0.0
            if arguments.loss_type == "kto":
                others = self.trainer.forward(data_of(pairs, None)[1::2]).logprobs
                of_others = [float(values.sum()) for values in others]
                gaps = [new - old for new, old in zip(of_others, sums[1::2], strict=True)]
                kl = max(sum(gaps) / len(gaps), 0.0)
            outputs = [item for item in batch if isinstance(item, Output)]
            signs = [1.0 if output.is_desirable else -1.0 for output in outputs]
            signed = [
                replace(datum, advantages=[sign] * len(datum.tokens))
                for datum, sign in zip(data[::2], signs, strict=True)
            ]
            options = {
                "beta": arguments.beta,
                "kl": kl,
                "desirable_weight": arguments.desirable_weight / count,
                "undesirable_weight": arguments.undesirable_weight / count,
            }
            scored = call(signed, "kto", loss_options=options)
            loss += scored.loss
            divergences += [kl] * len(batch)
            for values, other, sign in zip(scored.logprobs, sums[::2], signs, strict=True):
                name, logp = "chosen" if sign > 0 else "rejected", float(values.sum())
                rewards.setdefault(f"rewards/{name}", []).append(arguments.beta * (logp - other))
                rewards.setdefault(f"logps/{name}", []).append(logp)
        numbers = {name: sum(values) / len(values) for name, values in sorted(rewards.items())}
        if {"rewards/chosen", "rewards/rejected"} <= numbers.keys():
            numbers["rewards/margins"] = numbers["rewards/chosen"] - numbers["rewards/rejected"]
        return {"loss": loss, "kl": sum(divergences) / count, **numbers}

    def shown(self, record: StepRecord) -> str:
        return f", kl {record.metrics['kl']:.4f}"
