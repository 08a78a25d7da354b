"""The options and results of finetuning jobs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from pcg.errors import FinetuneError
from pcg.options import UpdateOptions
from pcg.pages import fact_table
from pcg.records.sinks import check_sinks
from pcg.runtime.data.example import Example
from pcg.runtime.data.formats import FormattingFunc, check_mapping
from pcg.runtime.data.order import StoppingStrategy, check_probabilities
from pcg.runtime.data.sources import NamedSources, Source, choose_splits, has_validation
from pcg.runtime.text.chat import ChatTemplate, check_variables
from pcg.runtime.training.schedules import Schedule, make_schedule
from pcg.runtime.training.torch_optimizers import FIELDS, Optimizer
from pcg.units import is_finite, shown

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a step; the argument of `on_step`.

    Attributes:
        step: number of the step, from 1.
        total_steps: number of steps of the job.
        epoch: epoch of the data, from 0.
        loss: mean over the step's target tokens, before the update.
        eval_loss: evaluation loss after the update; None without an evaluation.
        learning_rate: the learning rate of the step.
        gradient_norm: norm of the gradients before clipping.
        tokens: number of tokens that went through the model.
        tokens_per_second: mean since the job started or was resumed.
        checkpoint: the last checkpoint, or None.
        metrics: other numbers of the step, before the update.
        evaluation: `loss` and other numbers of the evaluation data; None without an evaluation.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    eval_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    checkpoint: Path | None = None
    metrics: Numbers = field(default_factory=dict)
    evaluation: Numbers | None = None


OnStep = Callable[[StepRecord], None]

_COLLAPSE = math.log(2)


@dataclass(frozen=True)
class LossChange:
    """The loss at the beginning of a job and at its end, over several batches.

    Attributes:
        first: mean of the first tenth of the steps, at least of five steps.
        last: mean of the same number of steps at the end.
        steps: the number of steps in each mean; the two ranges do not overlap.
    """

    first: float
    last: float
    steps: int

    @classmethod
    def of(cls, losses: Sequence[float]) -> LossChange:
        """Return the change of the losses."""
        steps = max(1, math.ceil(len(losses) / 10), min(5, len(losses) // 2))
        return cls(sum(losses[:steps]) / steps, sum(losses[-steps:]) / steps, steps)


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a job, including the part before a resume.

    Attributes:
        adapter: the adapter's name.
        losses: mean loss of the target tokens in each step.
        eval_losses: (step, mean loss) of each evaluation.
        steps: number of completed steps.
        total_steps: number of planned steps.
        tokens: number of tokens that went through the model in steps.
        targets: number of target tokens among `tokens`.
        seconds: time of the job.
        stopped: "completed", or "early" without improvement.
        best_step: step of the best evaluation; None without evaluations.
        best_loss: loss, or value of `metric_for_best_model`, of the best evaluation.
        restored: True if the adapter is restored to `best_step`.
        resumed_from: step of the checkpoint that the job resumed from, or None.
        checkpoint: the last checkpoint.
        first_data: losses of the first step's data, before the job and with the final adapter.
            Measured only if the steps' loss rose, as different data may also raise the loss.
    """

    adapter: str
    losses: tuple[float, ...]
    eval_losses: tuple[tuple[int, float], ...]
    steps: int
    total_steps: int
    tokens: int
    targets: int
    seconds: float
    stopped: str
    best_step: int | None
    best_loss: float | None
    restored: bool
    resumed_from: int | None
    checkpoint: Path | None
    first_data: tuple[float, float] | None = None

    def _repr_html_(self) -> str:
        """Return the result as a table, which notebooks show."""
        facts: dict[str, object] = {
            "steps": f"{self.steps:,} of {self.total_steps:,} ({self.stopped})",
            "tokens": f"{self.tokens:,}",
            "time": f"{self.seconds:,.1f} s",
        }
        if self.losses:
            facts["loss"] = f"{self.losses[0]:.4f} → {self.losses[-1]:.4f}"
        if self.best_loss is not None:
            facts["best evaluation"] = f"{self.best_loss:.4f} at step {self.best_step}"
        if self.checkpoint is not None:
            facts["checkpoint"] = self.checkpoint
        return fact_table(f"Adapter {self.adapter}", facts)

    @property
    def is_collapsed(self) -> bool:
        """True if the job more than doubled the perplexity of its first data."""
        return self.first_data is not None and self.first_data[1] - self.first_data[0] > _COLLAPSE


Data = Source | Iterable[Example]

DEFAULT_BATCH_SIZE = 8


class BatchBounds(TypedDict):
    """The bounds of a batch of `Batches`."""

    batch_size: int | None
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options of a job's length and its batches.

    A step is an update of the adapter. Its gradients come from `gradient_accumulation_steps`
    batches, or the remaining batches of an epoch, normalised by the number of their target tokens.

    Attributes:
        epochs: passes over the data; 1 by default, without `max_steps`.
        max_steps: number of steps, instead of `epochs`.
        batch_size: examples per batch. Default without `max_tokens`: the batch size that the
            program was compiled for, if it has a step size (a memory budget in bytes, `batch` or
            `seq`), else 8.
        max_tokens: tokens per batch; may be combined with `batch_size`.
        gradient_accumulation_steps: batches per step.
    """

    title: ClassVar[str] = "Length and batches"

    epochs: int | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None
    gradient_accumulation_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(UpdateOptions):
    """Options of the optimizer and the schedule of its learning rate.

    Attributes:
        learning_rate: the learning rate at the schedule's peak. 2e-4 is usual for LoRA with AdamW
            (QLoRA, table 9); other optimizers have other rates.
        weight_decay: decay of the bypass weights; trained biases and norms do not decay.
        betas: the two betas of optimizers of the Adam family; the library's default by default.
        eps: the optimizer's epsilon; the library's default by default.
        max_grad_norm: maximum norm, to which gradients are clipped; None for no clipping.
        schedule: linear, cosine, cosine_with_restarts, polynomial, constant or
            constant_with_warmup.
        warmup_steps: steps of linear warmup.
        warmup_ratio: warmup as a share of all steps, instead of `warmup_steps`.
        min_lr_ratio: the final learning rate, relative to `learning_rate`.
        cycles: the number of cycles of cosine_with_restarts.
        power: the exponent of polynomial.
    """

    title: ClassVar[str] = "Optimizer and schedule"

    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    max_grad_norm: float | None = 1.0
    schedule: str = "linear"
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    min_lr_ratio: float = 0.0
    cycles: int = 1
    power: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of rendering chats.

    Attributes:
        chat_template: the chat template, instead of the model's: a file, or the template's text.
        chat_template_kwargs: variables of the chat template, such as enable_thinking; those of a
            row take precedence.
    """

    title: ClassVar[str] = "Data"

    chat_template: str | os.PathLike[str] | None = field(default=None, repr=False)
    chat_template_kwargs: Mapping[str, Any] | None = None

    def template(self) -> ChatTemplate | None:
        """Return the chat template; None for the model's. ConfigError: it cannot be used."""
        return None if self.chat_template is None else ChatTemplate.read(self.chat_template)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template. DataError: they are no object."""
        return check_variables(self.chat_template_kwargs or {}, "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True)
class DataOptions(ChatOptions):
    """Options for reading and ordering data.

    Attributes:
        max_length: maximum number of tokens per example; longer examples are truncated at the end,
            and plain text files are cut into examples of this length. Default for text files: the
            sequence length that the program was compiled for. Default otherwise: examples longer
            than the model's positions are an error.
        data_format: the rows' format: chat, sharegpt, prompt-completion, alpaca or text; auto
            detects the format from the first row. With chat, prompts and completions that are
            texts are messages.
        columns: the data's name of a column, by the name that the format reads, such as
            prompt=question,completion=answer.
        append_eos: append the end-of-sequence token as a target to text other than chats.
        empty: policy for rows without target tokens: error or drop.
        seed: the seed of the data's order, of dropout, and of a new adapter's weights.
        shuffle: shuffle the data in each epoch.
        streaming: read rows from .jsonl or .ndjson files when a batch needs them, for data that
            does not fit into memory; needs `max_length`.
        probabilities: how often each of several data sources is drawn from, such as 0.7,0.3; by
            default the sources are concatenated.
        stopping_strategy: an epoch with `probabilities` ends when the first source is exhausted,
            or when all are, with repeated examples of shorter sources.
    """

    title: ClassVar[str] = "Data"

    max_length: int | None = None
    data_format: str = "auto"
    columns: Mapping[str, str] | None = None
    append_eos: bool = True
    empty: Literal["error", "drop"] = "error"
    seed: int = 0
    shuffle: bool = True
    streaming: bool = False
    probabilities: tuple[float, ...] | None = None
    stopping_strategy: StoppingStrategy = "first_exhausted"

    @property
    def sources(self) -> int | None:
        """The number of data sources that are mixed; None without `probabilities`."""
        return None if self.probabilities is None else len(self.probabilities)


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of evaluation.

    Attributes:
        eval_data: evaluation data, in any form of the training data; or several sources by name,
            NAME=FILE,… or a dict, each with a metric eval_NAME_loss.
        eval_every: steps between evaluations; each epoch by default. The last step is always
            evaluated.
        eval_at_start: evaluate before the first step, too.
        patience: number of consecutive evaluations without improvement after which to stop.
        min_delta: minimum change from the best value that counts as an improvement.
        restore_best: end with the adapter of the best evaluation; by default True with `patience`.
        metric_for_best_model: the metric of the best evaluation: eval_loss (the default, a mean
            over the targets of all evaluation data), or eval_NAME_loss.
        eval_samples: number of prompts of the evaluation data, the tokens before the first target,
            to continue greedily at each evaluation, for the log and the record.
        eval_sample_tokens: maximum number of tokens of these continuations.
        greater_is_better: True if greater values of the metric are better; by default False for a
            metric that ends with loss, as in transformers.
    """

    title: ClassVar[str] = "Evaluation"

    eval_data: Data | None = field(default=None, repr=False, compare=False)
    eval_every: int | None = None
    eval_at_start: bool = False
    patience: int | None = None
    min_delta: float = 0.0
    restore_best: bool | None = None
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    eval_samples: int = 0
    eval_sample_tokens: int = 64

    @property
    def best_metric(self) -> str:
        """The name of `metric_for_best_model` in an evaluation."""
        return (self.metric_for_best_model or "loss").removeprefix("eval_")

    @property
    def metric_sign(self) -> float:
        """The factor of the metric that is to be minimized."""
        is_greater = self.greater_is_better
        if is_greater is None:
            is_greater = not self.best_metric.endswith("loss")
        return -1.0 if is_greater else 1.0


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of checkpoints, logs and records.

    Attributes:
        checkpoint_dir: the directory of the checkpoints.
        save_every: steps between checkpoints; each epoch by default. The last step is always
            saved.
        keep_last: number of checkpoints to keep.
        resume: resume from the latest checkpoint and fail without it (True), start from step 0
            (False), or resume if a checkpoint exists (auto, the default).
        log_every: steps between lines in the log `pcg.finetuning`; no step lines by default.
        record: the folder of the job's record: its configuration, the numbers of each step, and a
            page with curves.
        report_to: further destinations of the record's numbers: mlflow, tensorboard, wandb.
        progress: show a progress bar if standard error is a terminal.
    """

    title: ClassVar[str] = "Checkpoints and progress"

    checkpoint_dir: str | Path | None = None
    save_every: int | None = None
    keep_last: int = 2
    resume: Literal["auto"] | bool = "auto"
    log_every: int | None = None
    record: str | Path | None = None
    report_to: tuple[Literal["mlflow", "tensorboard", "wandb"], ...] = ()
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class RunOptions(CheckpointOptions, EvaluationOptions):
    """Options of every run: its evaluations, checkpoints and reports."""

    @property
    def restores_best(self) -> bool:
        return self.patience is not None if self.restore_best is None else self.restore_best


@dataclass(frozen=True, kw_only=True)
class RegularizationOptions:
    """Options that regularize supervised finetuning, by transformers' names.

    Attributes:
        label_smoothing_factor: the share of a target that is divided equally among all tokens of
            the vocabulary, also in evaluations, as in transformers.
        neftune_noise_alpha: α of NEFTune: in training, add uniform noise of at most α / √(L d) to
            the embeddings of a sequence of L tokens; None for no noise.
    """

    title: ClassVar[str] = OptimizerOptions.title

    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(
    RunOptions, RegularizationOptions, DataOptions, OptimizerOptions, LengthOptions
):
    """Options of a finetuning job, which are checked before data is read.

    Raises:
        FinetuneError: a value is out of range, or two values exclude each other.
    """

    def __post_init__(self) -> None:
        check_fields(self, {**dict.fromkeys(_COUNTS, 1), "eval_samples": 0}, _FLAGS)
        for name, (low, is_open) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                check_number(name, value, low, is_open)
        check_betas(self.betas)
        smoothing = self.label_smoothing_factor
        if not is_finite(smoothing) or not 0 <= smoothing < 1:
            raise FinetuneError(
                f"label_smoothing_factor={shown(smoothing)}; use a number in [0, 1), such as 0.1"
            )
        self._check_pairs()
        check_sinks(self.report_to)
        self.template()
        self.variables()
        check_mapping(self.columns or {}, self.data_format)
        check_probabilities(self.probabilities, self.stopping_strategy)
        self._check_optimizer()
        self.make_schedule(self.max_steps or 2**62)

    def make_schedule(self, total_steps: int) -> Schedule:
        """Return the learning-rate schedule of the job."""
        return make_schedule(
            self.schedule,
            total_steps=total_steps,
            warmup_steps=self.warmup_steps,
            warmup_ratio=self.warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
            cycles=self.cycles,
            power=self.power,
        )

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer with all of its options."""
        optimizer, values = Optimizer.of(self.optimizer), dict(self.optimizer_options or {})
        for name in FIELDS:
            value = getattr(self, name)
            takes = name in optimizer.fields
            if takes and name in values:
                raise FinetuneError(f"optimizer_options has {name!r}; give it as {name}= instead")
            if value and not takes:
                raise FinetuneError(
                    f"{name}={value!r}, which optimizer {optimizer.name!r} does not take; leave it "
                    f"out. Its optimizer_options are {', '.join(optimizer.options)}"
                )
            if takes and value is not None:
                values[name] = value
        result = Optimizer.of(self.optimizer, values, self.offload_optimizer)
        return result.with_ratio(self.loraplus_lr_ratio)

    @property
    def batch_bounds(self) -> BatchBounds:
        """The bounds of a batch, with the default."""
        default = DEFAULT_BATCH_SIZE if self.max_tokens is None else None
        return {"batch_size": self.batch_size or default, "max_tokens": self.max_tokens}

    @property
    def most_rows(self) -> int | None:
        """The maximum number of rows for `max_steps`; None without `max_steps`."""
        if self.max_steps is None:
            return None
        bounds = self.batch_bounds
        size = bounds["batch_size"] or max(1, (bounds["max_tokens"] or 2) // 2)
        return self.max_steps * self.gradient_accumulation_steps * size

    @property
    def evaluates(self) -> bool:
        """True if the job has evaluation data."""
        return self.eval_data is not None

    def trajectory(self, total_steps: int) -> dict[str, Any]:
        """Return the options that the resulting weights depend on, as JSON values.

        `total_steps` is None if the schedule does not depend on it, so that the job can be resumed
        with more steps.
        """
        names = [*_TRAJECTORY, *(_EVALUATION if self.restores_best or self.patience else ())]
        values = {name: getattr(self, name) for name in names}
        values["label_smoothing_factor"] = self.label_smoothing_factor or None  # as older runs
        optimizer = self.make_optimizer()
        values["optimizer"] = optimizer.name
        for name, value in optimizer.options.items():
            values[name] = list(value) if isinstance(value, tuple) else value
        counts = not self.schedule.startswith("constant") or self.warmup_ratio is not None
        if self.probabilities is not None:
            values |= {
                "probabilities": list(self.probabilities),
                "stopping_strategy": self.stopping_strategy,
            }
        return {**values, "total_steps": total_steps if counts else None}

    def _check_pairs(self) -> None:
        """Refuse options that exclude each other or would have no effect."""
        if self.epochs is not None and self.max_steps is not None:
            raise FinetuneError(
                f"epochs={self.epochs} and max_steps={self.max_steps} both say when to end; "
                "give one of them"
            )
        if self.max_length is not None and self.max_length < 2:
            raise FinetuneError(f"max_length={self.max_length}; an example needs at least 2 tokens")
        if self.streaming and (self.max_length is None or self.max_tokens is not None):
            raise FinetuneError(
                "streaming bounds a step by batch_size and max_length, as lengths are unknown "
                "before rows are read; give max_length, and leave max_tokens out"
            )
        if self.resume not in ("auto", True, False) or type(self.resume) is int:
            raise FinetuneError(f"resume={self.resume!r}; use 'auto', True or False")
        if self.restore_best not in (None, True, False):
            raise FinetuneError(f"restore_best={self.restore_best!r}; use True, False or None")
        without = [
            ("eval_data", self.evaluates, (*_EVALUATION, "eval_samples")),
            ("checkpoint_dir", self.checkpoint_dir is not None, ("save_every",)),
            ("record", self.record is not None, ("report_to",)),
        ]
        for missing, is_given, names in without:
            for name in () if is_given else names:
                if getattr(self, name):
                    raise FinetuneError(
                        f"{name}={getattr(self, name)!r} has no effect without {missing}; give it, "
                        "too"
                    )
        if self.checkpoint_dir is None and self.resume is True:
            raise FinetuneError("resume=True needs checkpoint_dir, where the checkpoints are")
        for name in ("min_delta", "metric_for_best_model", "greater_is_better"):
            if getattr(self, name) and not (self.patience or self.restores_best):
                raise FinetuneError(
                    f"{name}={getattr(self, name)!r} has no effect without patience or restore_best"
                )

    def _check_optimizer(self) -> None:
        options = self.optimizer_options
        if options is not None and not isinstance(options, Mapping):
            raise FinetuneError(
                f"optimizer_options={options!r}; use a dict, such as {{'momentum': 0.9}}"
            )
        optimizer = self.make_optimizer()
        if not optimizer.follows_schedule and self.schedule != "constant":
            raise FinetuneError(
                f"schedule={self.schedule!r} has no effect on {optimizer.name!r}, which takes the "
                "learning rate for its first step alone; use schedule='constant'"
            )
        from pcg.runtime.training.optimizer import check_optimizer  # imports torch

        check_optimizer(optimizer, self.learning_rate)


@dataclass(frozen=True)
class FinetuneArguments(FinetuneOptions):
    """Arguments of `Executor.finetune`.

    Attributes:
        data: .jsonl or .txt files, rows, a dataset, a frame, a dict of columns, or tokenized
            `Example`s. In a DatasetDict, `train` is the training data, and `validation` is the
            default of `eval_data`. With `probabilities`, a list of as many of these.
        adapter: the adapter's name; a missing adapter is created.
        peft: the recipe of a new adapter, as for `add_adapter`; None for the recipe that the
            program was compiled for under the name, else "lora".
        on_step: function to call after each step, after evaluation and saving.
        formatting_func: function from a row to its text, or to a row of a known format; it runs in
            this process.
        callbacks: objects with methods of `pcg.TrainingCallback`, which may end the job.
    """

    data: Data = field(repr=False, compare=False)
    adapter: str = "default"
    peft: object = field(default=None, kw_only=True)
    on_step: OnStep | None = field(default=None, kw_only=True, repr=False, compare=False)
    formatting_func: FormattingFunc | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    callbacks: Sequence[Any] = field(default=(), kw_only=True, repr=False, compare=False)

    @property
    def evaluates(self) -> bool:
        return self.eval_data is not None or has_validation(self.data)


@dataclass(frozen=True)
class JobArguments(FinetuneArguments):
    """Arguments of `Engine.finetune`.

    Attributes:
        publish_every: steps between published versions; 0 publishes only the result.
        on_step: function that the engine's thread calls after each step, after evaluation and
            saving.
        progress: show a progress bar if standard error is a terminal.
        tenant: the tenant to charge for the job's work in serving steps; empty for none.
    """

    tenant: str = field(default="", kw_only=True)
    publish_every: int = field(default=0, kw_only=True)
    progress: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming:
            raise FinetuneError(
                "streaming=True; the examples of an engine's job are tokenized before it begins. "
                "Leave it out, or use executor.finetune"
            )


_COUNTS = (
    "epochs", "max_steps", "batch_size", "max_tokens", "gradient_accumulation_steps", "max_length",
    "eval_every", "eval_sample_tokens", "patience", "save_every", "keep_last", "log_every",
)  # fmt: skip
_FLAGS = ("append_eos", "shuffle", "streaming", "eval_at_start", "progress")

# name -> lower bound, and True if the bound is excluded.
_NUMBERS: Mapping[str, tuple[float, bool]] = {
    "learning_rate": (0.0, True),
    "weight_decay": (0.0, False),
    "eps": (0.0, True),
    "loraplus_lr_ratio": (0.0, True),
    "neftune_noise_alpha": (0.0, True),
    "max_grad_norm": (0.0, True),
    "min_delta": (0.0, False),
}
_OPTIONAL = ("eps", "loraplus_lr_ratio", "max_grad_norm", "neftune_noise_alpha")
_TRAJECTORY = (
    "gradient_accumulation_steps", "learning_rate", "loraplus_lr_ratio", "max_grad_norm",
    "neftune_noise_alpha", "schedule", "warmup_steps", "warmup_ratio", "min_lr_ratio", "cycles",
    "power",
)  # fmt: skip
_EVALUATION = (
    "eval_every", "eval_at_start", "patience", "min_delta", "restore_best", "metric_for_best_model",
    "greater_is_better",
)  # fmt: skip


def check_one_evaluation(eval_data: Any, subject: str) -> None:
    """Refuse named sources of evaluation data; `subject` has its verb, for the message."""
    evaluation = choose_splits((), eval_data).evaluation
    if isinstance(evaluation, NamedSources):
        raise FinetuneError(
            f"eval_data names {', '.join(evaluation)}; {subject} evaluated on one source, so give "
            "its files alone"
        )


def check_fields(options: Any, counts: Mapping[str, int], flags: Sequence[str] = ()) -> None:
    """Refuse a non-int seed, counts below their minimum, and flags that are not bools.

    A count may be None if its type allows None.
    """
    types = {field.name: str(field.type) for field in fields(options)}
    for name, least in counts.items():
        value = getattr(options, name)
        if value is None and "None" in types[name]:
            continue
        if type(value) is not int or value < least:
            raise FinetuneError(f"{name}={shown(value)}; use an int of at least {least}")
    if "seed" in types and type(options.seed) is not int:
        raise FinetuneError(f"seed={shown(options.seed)}; use an int")
    for name in flags:
        if type(getattr(options, name)) is not bool:
            raise FinetuneError(f"{name}={shown(getattr(options, name))}; use True or False")


def check_number(name: str, value: Any, least: float, is_open: bool) -> None:
    """Refuse a number below its minimum, or equal to the minimum if the range is open."""
    if not is_finite(value) or value < least or (is_open and value == least):
        hints = {
            "max_grad_norm": "; None turns clipping off",
            "grad_clip_norm": "; None turns it off",
        }
        bound = f"above {least:g}" if is_open else f"of at least {least:g}"
        raise FinetuneError(f"{name}={shown(value)}; use a number {bound}{hints.get(name, '')}")


def check_betas(betas: object) -> None:
    """Refuse betas out of [0, 1); None is the optimizer's default."""
    if betas is not None and not (
        isinstance(betas, tuple | list)
        and len(betas) == 2
        and all(is_finite(beta) and 0 <= beta < 1 for beta in betas)
    ):
        raise FinetuneError(f"betas={shown(betas)}; use two numbers in [0, 1), as (0.9, 0.999)")
