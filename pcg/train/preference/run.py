"""A run on preferences: an objective of `pcg.runtime.training.run` over pairs of outputs.

A step runs forward and backward over its pairs with the trainer's loss `preference`, and updates
the adapter. If an engine runs on a thread, the trainer and the reference share the engine's steps
with requests. References are log-probabilities by a reference model, computed once per pair. The
base or a served adapter as the reference needs no second copy of the model: the engine that trains
computes their log-probabilities as requests.

Metrics have TRL's names. With the sums of a pair's log-probabilities by the adapter, l, and by the
reference, q, over the targets of each output:

    logps/chosen, logps/rejected        l
    rewards/chosen, rewards/rejected    β (l - q)
    rewards/margins                     the chosen reward minus the rejected reward
    rewards/accuracies                  1 for a margin above 0, else 0

and each is a mean over pairs.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from pcg.errors import (
    AdapterNotFoundError,
    FinetuneError,
    FinetuneInterrupted,
    GenerationError,
    QueueFullError,
)
from pcg.peft.registry import is_saved
from pcg.runtime.data.dataset import Dataset, RowKind
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.sources import UNLIMITED, DataLimits, choose_splits
from pcg.runtime.data.streaming import StreamedRows
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from pcg.runtime.training.callbacks import Listeners
from pcg.runtime.training.finetuning import data_trajectory
from pcg.runtime.training.options import Data, Numbers, StepRecord
from pcg.runtime.training.run import Find, Run, StepNumbers
from pcg.runtime.training.torch_optimizers import FIELDS, Optimizer
from pcg.runtime.training.trainer.datum import Datum
from pcg.runtime.training.trainer.trainer import Trainer, TrainerObjective
from pcg.runtime.training.training_data import (
    Load,
    batches_of,
    streamed_data,
    total_steps,
    training_data,
    with_own_template,
)
from pcg.runtime.training.work_units import Work, run_to_end
from pcg.train.preference.options import DpoArguments


@dataclass(frozen=True, slots=True)
class Pair(Example):
    """Two outputs for a prompt, as an example of their concatenated tokens and labels."""

    number: int
    chosen: Example
    rejected: Example

    @property
    def examples(self) -> tuple[Example, Example]:
        return self.chosen, self.rejected


def targets_of(example: Example) -> list[int]:
    """Return the target of each token but the last; -100 for no target."""
    return list(example.labels[1:])


def data_of(pairs: Sequence[Pair], references: Sequence[Sequence[float]] | None) -> list[Datum]:
    """Return the data of pairs, alternating chosen and rejected.

    Args:
        references: for each datum, the reference's log-probability of each target; None for a loss
            without a reference.
    """
    examples = [example for pair in pairs for example in pair.examples]
    columns = [None] * len(examples) if references is None else references
    return [
        Datum(list(example.ids[:-1]), targets_of(example), logprobs=logprobs)
        for example, logprobs in zip(examples, columns, strict=True)
    ]


def target_sums(pairs: Sequence[Pair], logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of the log-probabilities of each datum's targets."""
    examples = [example for pair in pairs for example in pair.examples]
    return [
        sum(x for x, target in zip(values, targets_of(item), strict=True) if target != IGNORED)
        for item, values in zip(examples, logprobs, strict=True)
    ]


@dataclass(frozen=True)
class PreferenceResult:
    """The result of a run, including the part before a resume.

    Attributes:
        adapter: the adapter's name.
        history: `loss` and the metrics of each step.
        evaluations: (step, `loss` and metrics) of each evaluation.
        steps: number of completed steps.
        total_steps: number of planned steps.
        tokens: number of tokens that went through the model in steps.
        seconds: time of the run.
        resumed_from: step of the checkpoint that the run resumed from, or None.
        checkpoint: the last checkpoint.
    """

    adapter: str
    history: tuple[Numbers, ...]
    evaluations: tuple[tuple[int, Numbers], ...]
    steps: int
    total_steps: int
    tokens: int
    seconds: float
    resumed_from: int | None
    checkpoint: Path | None


def metrics_of(
    policy: Sequence[float], reference: Sequence[float], beta: float
) -> dict[str, float]:
    """Return the metrics of pairs.

    Args:
        policy: the summed log-probability of each output, alternating chosen and rejected.
    """
    rewards = [beta * (l - q) for l, q in zip(policy, reference, strict=True)]  # noqa: E741
    margins = [chosen - other for chosen, other in zip(rewards[::2], rewards[1::2], strict=True)]
    columns = {
        "rewards/chosen": rewards[::2],
        "rewards/rejected": rewards[1::2],
        "rewards/margins": margins,
        "rewards/accuracies": [float(margin > 0) for margin in margins],
        "logps/chosen": policy[::2],
        "logps/rejected": policy[1::2],
    }
    return {name: sum(values) / len(values) for name, values in columns.items()}


_LOT = 8
"""Number of pairs per computation of references."""
_AGAIN_S = 0.2
"""Time between retries for an engine with a full queue, seconds."""


class References(ABC):
    """Log-probabilities of pairs by a reference.

    Args:
        keeps: keep them for the next epochs.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._kept: dict[int, tuple[array[float], array[float]]] = {}

    def of(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Return the log-probability of each target, alternating chosen and rejected outputs."""
        if not self._keeps:
            self._kept.clear()
        missing = [pair for pair in pairs if pair.number not in self._kept]
        for begin in range(0, len(missing), _LOT):
            lot = missing[begin : begin + _LOT]
            logprobs = self._compute(lot)
            for index, pair in enumerate(lot):
                two = logprobs[2 * index : 2 * index + 2]
                self._kept[pair.number] = array("d", two[0]), array("d", two[1])
        return [values.tolist() for pair in pairs for values in self._kept[pair.number]]

    @abstractmethod
    def _compute(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Compute the log-probabilities of new pairs."""


class ServedReferences(References):
    """Log-probabilities by the base, or by an adapter that the executor serves.

    Args:
        adapter: the adapter's name; None for the base.
    Raises:
        AdapterNotFoundError: no adapter has the name.
    """

    def __init__(
        self,
        executor: Executor,
        adapter: str | None,
        check: Callable[[], None],
        *,
        keeps: bool = True,
    ) -> None:
        super().__init__(keeps=keeps)
        self._executor = executor
        self._check = check
        if adapter is not None and adapter not in executor.adapters:
            known = ", ".join(("base", "start", *executor.adapters))
            raise AdapterNotFoundError(
                f"reference={adapter!r}, and there is no adapter of that name; use one of {known}"
            )
        self._adapter = adapter

    def _compute(self, pairs: Sequence[Pair]) -> list[list[float]]:
        examples = [example for pair in pairs for example in pair.examples]
        prompts = [list(example.ids) for example in examples]
        completions = self._done(prompts)
        logprobs = []
        for example, completion in zip(examples, completions, strict=True):
            if completion.prompt_logprobs is None:
                raise GenerationError("the engine returned no log-probabilities of a prompt")
            values = [each.logprob for each in completion.prompt_logprobs[1:] if each is not None]
            targets = targets_of(example)
            logprobs.append([x if t >= 0 else 0.0 for x, t in zip(values, targets, strict=True)])
        return logprobs

    def _done(self, prompts: list[list[int]]) -> list[Completion]:
        """Return the prompts' empty completions with logprobs; retry while the queue is full."""
        while True:
            self._check()
            try:
                return self._executor.generate(
                    prompts, self._adapter, max_new_tokens=0, prompt_logprobs=0
                )
            except QueueFullError:
                time.sleep(_AGAIN_S)


class StartReferences(References):
    """Log-probabilities by the adapter before its first update.

    All pairs are computed in advance, before the trainer changes the adapter.
    """

    def __init__(self, trainer: Trainer, pairs: Sequence[Pair]) -> None:
        super().__init__()
        self._trainer = trainer
        self.of(pairs)

    def _compute(self, pairs: Sequence[Pair]) -> list[list[float]]:
        scored = self._trainer.forward(data_of(pairs, None))
        return [values.tolist() for values in scored.logprobs]


_LOG = logging.getLogger("pcg.finetuning")
_EVALUATED = 64
"""Number of pairs per evaluation call."""


class Preferences(TrainerObjective[PreferenceResult]):
    """Preference optimization: pairs, their reference, and the trainer's loss `preference`.

    Attributes:
        stops: event to set to end the run after the current step.
    """

    kind = "dpo"
    rows: ClassVar[RowKind] = "pairs"

    def __init__(
        self, executor: Executor, arguments: DpoArguments, load: Load | None, limits: DataLimits
    ) -> None:
        """Read the data; see `PreferenceRun`."""
        super().__init__(arguments.adapter)
        start = arguments.adapter, arguments.peft
        arguments = with_own_template(arguments, executor.state, *start)
        self.device = executor.device
        self._executor = executor
        self._arguments: Any = arguments  # a subclass has its own
        self.doing = f"training {self.name!r} on preferences"
        self.stops, self.cancels = Event(), Event()
        splits = choose_splits(
            arguments.data, arguments.eval_data, arguments.most_rows, arguments.sources
        )
        if splits.chosen:
            _LOG.warning("%s: %s", self.name, splits.chosen)

        if arguments.streaming:
            model, formatting = executor.state, arguments.formatting_func
            data = streamed_data(splits.train, arguments, model, formatting, self.rows)
            assert isinstance(data.examples, StreamedRows)
            data.examples.item = self._item
        else:
            sources = [self._read(source, load, limits) for source in splits.train]
            data = self._items(Dataset.joined(sources))
        self._pairs, self._eval = data.examples, list[Example]()
        if splits.evaluation is not None:
            self._eval = [*self._items(self._read(splits.evaluation, load, limits)).examples]
        self.evaluates = bool(self._eval)
        self._batches = batches_of(data, arguments)
        self.total = total_steps(self._batches, arguments)
        self._reference = arguments.reference
        if self._reference is None:
            peft = arguments.peft
            is_trained = is_saved(peft) or self.name in executor.adapters
            self._reference = "start" if is_trained else "base"
        if self._reference == "start" and arguments.streaming:
            raise FinetuneError(
                "the reference 'start' needs all rows before the first step, and the rows stream; "
                "give 'base' as the reference, or the name of another adapter"
            )
        trajectory = data_trajectory(arguments, self.total, self._batches, executor.state)
        self.trajectory = {**trajectory, "reference": self._reference}
        self._group: list[Pair] = []
        self._by_reference: list[list[float]] = []

    def _read(self, source: Data, load: Load | None, limits: DataLimits) -> Dataset:
        """Read a source of rows."""
        arguments, model = self._arguments, self._executor.state
        formatting = arguments.formatting_func
        return training_data(
            source, arguments, model, load, limits, rows=self.rows, formatting_func=formatting
        )

    def _items(self, data: Dataset) -> Dataset:
        """Return data with the items of batches as its examples."""
        each = 2 if self.rows == "pairs" else 1
        lots = (data.examples[at : at + each] for at in range(0, len(data), each))
        items = tuple(self._item(number, lot) for number, lot in enumerate(lots))
        return replace(data, examples=items, parts=tuple(part // each for part in data.parts))

    def _item(self, number: int, examples: Sequence[Example]) -> Example:
        """Return the item of a batch of a row's examples."""
        chosen, rejected = examples
        ids = array("q", [*chosen.ids, *rejected.ids])
        labels = array("q", [*chosen.labels, *rejected.labels])
        return Pair(ids, labels, number, chosen, rejected)

    def _reference_pairs(self, items: Sequence[Example]) -> Sequence[Pair]:
        """Return all pairs that need log-probabilities by the reference."""
        return [item for item in items if isinstance(item, Pair)]

    def start(self, find: Find) -> None:
        arguments, checkpoint = self._arguments, find()
        bounds = arguments.batch_bounds
        size = bounds["batch_size"]
        self.trainer = self._executor.trainer(
            self.name,
            peft=arguments.peft,
            seed=arguments.seed,
            batch_size=2 * (size if size is not None else max(1, len(self._batches))),
            max_tokens=bounds["max_tokens"],
            total_steps=self.total,
            optimizer=arguments.optimizer,
            optimizer_options=arguments.optimizer_options,
            offload_optimizer=arguments.offload_optimizer,
            loraplus_lr_ratio=arguments.loraplus_lr_ratio,
            chat_template=arguments.template(),
        )
        try:
            # The reference "start" must be computed before a checkpoint is loaded.
            self._references = self._references_of(self._pairs), self._references_of(self._eval)
            self.load(checkpoint)
            if checkpoint is not None:
                self._batches.load_state_dict(checkpoint[1].state.position)
        except BaseException:
            self.undo()
            raise

    def _references_of(self, items: Sequence[Example]) -> References:
        name = self._reference
        if name == "start":
            return StartReferences(self.trainer, self._reference_pairs(items))
        adapter, keeps = None if name == "base" else name, not self._arguments.streaming
        return ServedReferences(self._executor, adapter, self._check, keeps=keeps)

    def _check(self) -> None:
        """Raise a FinetuneError if the run was cancelled."""
        if self.cancels.is_set():
            raise FinetuneError(f"job {self.name!r} was cancelled")

    def position(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def gradients(self, step: int, rate: float) -> Work[None]:
        yield from ()
        self._epoch = self._batches.epoch
        group = [*islice(self._batches, self._arguments.gradient_accumulation_steps)]
        pairs = [pair for batch in group for pair in batch if isinstance(pair, Pair)]
        self._group, self._by_reference = pairs, self._references[0].of(pairs)
        self._scored = self.trainer.forward_backward(
            data_of(pairs, self._by_reference), "preference", loss_options=self._loss_options(pairs)
        )

    def update(self, step: int, rate: float) -> StepNumbers:
        arguments = self._arguments
        takes = Optimizer.of(arguments.optimizer).fields
        fields = {name: getattr(arguments, name) for name in FIELDS if name in takes}
        stepped = self.trainer.optim_step(
            learning_rate=rate,
            grad_clip_norm=arguments.max_grad_norm,
            **{name: value for name, value in fields.items() if value},
        )
        numbers = self._step_numbers()
        self.history.append(numbers)
        norm, tokens = stepped.gradient_norm, stepped.tokens
        metrics = {name: value for name, value in numbers.items() if name != "loss"}
        return StepNumbers(self._epoch, numbers["loss"], norm, tokens, metrics=metrics)

    def _step_numbers(self) -> dict[str, float]:
        """Return the loss and the metrics of the last gradients."""
        policy = target_sums(self._group, [values.tolist() for values in self._scored.logprobs])
        by_reference = target_sums(self._group, self._by_reference)
        metrics = metrics_of(policy, by_reference, self._arguments.beta)
        return {"loss": self._scored.loss, **metrics}

    def _loss_options(self, pairs: Sequence[Pair]) -> dict[str, float]:
        targets = sum(pair.chosen.targets for pair in pairs)
        options: dict[str, float] = self._arguments.loss_options(len(pairs), targets)
        return options

    def evaluate(self, step: int) -> Work[Numbers]:
        """Measure the loss and the metrics of the evaluation data, without dropout."""
        yield from ()
        pairs = self._reference_pairs(self._eval)
        options = self._loss_options(pairs)
        loss, policy, by_reference = 0.0, list[float](), list[float]()
        for begin in range(0, len(pairs), _EVALUATED):
            lot = pairs[begin : begin + _EVALUATED]
            references = self._references[1].of(lot)
            data = data_of(lot, references)
            scored = self.trainer.forward(data, "preference", loss_options=options)
            loss += scored.loss
            policy += target_sums(lot, [values.tolist() for values in scored.logprobs])
            by_reference += target_sums(lot, references)
        metrics = metrics_of(policy, by_reference, self._arguments.beta)
        numbers = {"loss": loss, **metrics}
        self.evaluations.append((step, numbers))
        return numbers

    def is_interrupted(self, is_done: bool) -> bool:
        return self.stops.is_set() and not is_done

    def end(self) -> None:
        self._batches.close()
        super().end()

    def finish(self, run: Run[PreferenceResult]) -> Work[PreferenceResult]:
        yield from ()
        if isinstance(self._pairs, StreamedRows):
            _LOG.info("%s: %s", self.name, self._pairs.counts())
        self.trainer.snapshot()
        return PreferenceResult(
            adapter=self.name,
            history=tuple(self.history),
            evaluations=tuple(self.evaluations),
            steps=run.state.step,
            total_steps=self.total,
            tokens=run.state.tokens,
            seconds=run.seconds,
            resumed_from=run.resumed_from,
            checkpoint=run.checkpoint,
        )

    def shown(self, record: StepRecord) -> str:
        margin, accuracy = (record.metrics[f"rewards/{name}"] for name in ("margins", "accuracies"))
        return f", margin {margin:.4f}, accuracy {accuracy:.2f}"

    def config(self) -> Mapping[str, Any]:
        """Return the configuration for the record."""
        executor, peft = self._executor, self._arguments.peft
        names = {"adapter": self.name, "model": executor.program.name}
        return {**names, "device": str(executor.device), "peft": peft, **self.trajectory}


class PreferenceRun:
    """A run on preferences; call `run` once. `stop` and `cancel` are for other threads."""

    def __init__(
        self,
        executor: Executor,
        arguments: Any,
        load: Load | None = None,
        limits: DataLimits = UNLIMITED,
        objective: type[Preferences] | None = None,
    ) -> None:
        """Read the data, create the trainer, and load a checkpoint, if any.

        Args:
            arguments: the arguments of the objective.
            load: creates examples from files and rows; by default in this process.
            objective: the kind of the run; `Preferences` by default.
        Raises:
            PcgError: see `dpo`.
        """
        self._objective = (objective or Preferences)(executor, arguments, load, limits)
        total = self._objective.total
        schedule = arguments.make_schedule(total)
        self._run = Run(
            self._objective,
            arguments,
            total=total,
            rate=lambda step: arguments.learning_rate * schedule(step),
            trajectory=self._objective.trajectory,
            config=self._objective.config,
            listeners=Listeners(arguments.on_step, arguments.callbacks),
        )

    def run(self) -> PreferenceResult:
        """Run all steps, and serve the adapter.

        Raises:
            FinetuneInterrupted: Ctrl-C, or `stop`.
            FinetuneError: the run was cancelled, or a number is not finite.
            RecordError: the record cannot be written.
        """
        try:
            return run_to_end(self._run.work())
        except Exception as error:
            if self._objective.cancels.is_set() and not isinstance(error, FinetuneInterrupted):
                raise FinetuneError(f"job {self._objective.name!r} was cancelled") from error
            raise

    def stop(self) -> None:
        """End after the current step, with a checkpoint if the run has a `checkpoint_dir`."""
        self._objective.stops.set()

    def cancel(self) -> None:
        """End now, without serving the adapter."""
        self._objective.cancels.set()
        self._objective.trainer.close()
