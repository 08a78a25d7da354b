"""The options of training on preferences, DPO and KTO, by TRL's names if TRL has the option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from pcg.errors import FinetuneError
from pcg.runtime.data.formats import FormattingFunc
from pcg.runtime.training.losses import SFT
from pcg.runtime.training.options import (
    Data,
    FinetuneOptions,
    StepRecord,
    check_number,
    check_one_evaluation,
)
from pcg.units import is_finite, shown

LossType = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft",
]  # fmt: skip
_SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")
"""The terms with label smoothing."""
LEARNING_RATE = 5e-5
"""The default learning rate: ten times that of TRL's DPO script for full finetuning."""
_WITHOUT = {
    "patience": None, "restore_best": None, "min_delta": 0.0, "data_format": "auto",
    "label_smoothing_factor": 0.0, "neftune_noise_alpha": None,
    "metric_for_best_model": None, "greater_is_better": None,
    "eval_samples": 0,
}  # fmt: skip
"""Unsupported options of finetuning, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(FinetuneOptions):
    """Options of training on preferences.

    Attributes:
        beta: strength of the regularization toward the reference; τ of ipo.
        reference: the reference model: base, the model without an adapter; start, the adapter
            before the first step; or the name of an adapter. By default start for an adapter that
            was trained before, else base.
        learning_rate: the learning rate at the schedule's peak.
    """

    title: ClassVar[str] = "Preferences"

    beta: float = 0.1
    reference: str | None = None
    learning_rate: float = LEARNING_RATE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in _WITHOUT.items():
            if getattr(self, name) != default:
                raise FinetuneError(
                    f"{name}={shown(getattr(self, name))}; training on preferences has no {name}, "
                    "leave it out"
                )
        check_one_evaluation(self.eval_data, "preferences are")
        if not is_finite(self.beta) or self.beta <= 0:
            raise FinetuneError(f"beta={shown(self.beta)}; use a number above 0, such as 0.1")
        if self.reference is not None and (
            not isinstance(self.reference, str) or not self.reference
        ):
            raise FinetuneError(
                f"reference={shown(self.reference)}; use 'base', 'start' or an adapter's name"
            )

    def trajectory(self, total_steps: int) -> dict[str, Any]:
        """Return the options that the resulting weights depend on, as JSON values."""
        values = {"beta": self.beta, "reference": self.reference}
        return {**super().trajectory(total_steps), **values}


@dataclass(frozen=True, kw_only=True)
class KtoOptions(PreferenceOptions):
    """Options of Kahneman-Tversky optimization; a batch has `batch_size` outputs.

    Attributes:
        loss_type: kto, or apo_zero_unpaired, which has no KL divergence.
        desirable_weight: the weight of desirable outputs' losses.
        undesirable_weight: the weight of undesirable outputs' losses.
    """

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("kto", "apo_zero_unpaired"):
            raise FinetuneError(
                f"loss_type={shown(self.loss_type)}; use 'kto' or 'apo_zero_unpaired'"
            )
        for name in ("desirable_weight", "undesirable_weight"):
            check_number(name, getattr(self, name), 0.0, False)
        if self.empty != "error":
            raise FinetuneError("empty='drop'; each row of KTO needs an output, leave it out")
        if self.loss_type == "kto" and self.batch_size == 1:
            raise FinetuneError(
                "batch_size=1; kto estimates a divergence by outputs of other prompts in a batch, "
                "so use at least 2"
            )

    def trajectory(self, total_steps: int) -> dict[str, Any]:
        """Return the options that the resulting weights depend on, as JSON values."""
        names = "loss_type", "desirable_weight", "undesirable_weight"
        return {
            **super().trajectory(total_steps),
            **{name: getattr(self, name) for name in names},
        }


@dataclass(frozen=True, kw_only=True)
class DpoOptions(PreferenceOptions):
    """Options of direct preference optimization; a batch has `batch_size` pairs.

    Attributes:
        loss_type: the terms of the loss, which are added: sigmoid, hinge, ipo, exo_pair, nca_pair,
            robust, bco_pair, sppo_hard, aot or aot_unpaired (which sort the pairs of a batch),
            apo_zero, apo_down, discopop, sigmoid_norm, and sft, the cross entropy of the preferred
            output.
        loss_weights: the weight of each term; 1 by default.
        label_smoothing: the probability of swapped preferences, for sigmoid, exo_pair (above 0),
            robust, aot and aot_unpaired.
        discopop_tau: the temperature of discopop's mixture.
    """

    loss_type: tuple[LossType, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            object.__setattr__(self, "loss_type", (self.loss_type,))
        super().__post_init__()
        self._check_terms()

    def _check_terms(self) -> None:
        terms, known = self.loss_type, get_args(LossType)
        if not isinstance(terms, tuple | list) or not terms:
            raise FinetuneError(f"loss_type={shown(terms)}; use some of {', '.join(known)}")
        for term in terms:
            if term not in known:
                raise FinetuneError(f"loss_type={shown(term)}; use some of {', '.join(known)}")
        if len(set(terms)) < len(terms):
            raise FinetuneError(f"loss_type={shown(terms)} names a term twice")
        weights = self.loss_weights
        if weights is not None and not (
            isinstance(weights, tuple | list)
            and len(weights) == len(terms)
            and all(is_finite(weight) and weight >= 0 for weight in weights)
            and any(weights)
        ):
            raise FinetuneError(
                f"loss_weights={shown(weights)}; use a number of at least 0 for each of the "
                f"{len(terms)} terms of loss_type"
            )
        smoothing = self.label_smoothing
        if not is_finite(smoothing) or not 0 <= smoothing < 0.5:
            raise FinetuneError(f"label_smoothing={shown(smoothing)}; use a number in [0, 0.5)")
        if "exo_pair" in terms and not smoothing:
            raise FinetuneError(
                "label_smoothing=0 makes the term exo_pair infinite; use a number above 0, such as "
                "0.001"
            )
        check_number("discopop_tau", self.discopop_tau, 0.0, True)
        if self.discopop_tau != DpoOptions.discopop_tau and "discopop" not in terms:
            raise FinetuneError(
                f"discopop_tau={self.discopop_tau:g} has no effect on {', '.join(terms)}; leave it "
                "out"
            )
        if smoothing and not set(_SMOOTHED).intersection(terms):
            raise FinetuneError(
                f"label_smoothing={smoothing:g} has no effect on {', '.join(terms)}; leave it out"
            )

    def loss_options(self, pairs: int, chosen_targets: int) -> dict[str, float]:
        """Return options of the loss `preference` for a mean over pairs instead of a sum.

        Args:
            chosen_targets: number of targets of the preferred outputs, for the mean of sft.
        """
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        counts = {SFT: chosen_targets}
        by_term = zip(self.loss_type, weights, strict=True)
        weights_by_term = {str(term): weight / counts.get(term, pairs) for term, weight in by_term}
        return {
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "discopop_tau": self.discopop_tau,
            "sigmoid": 0.0,
            **weights_by_term,
        }

    def trajectory(self, total_steps: int) -> dict[str, Any]:
        """Return the options that the resulting weights depend on, as JSON values."""
        values = {
            "loss_type": list(self.loss_type),
            "loss_weights": None if self.loss_weights is None else list(self.loss_weights),
            "label_smoothing": self.label_smoothing,
        }
        if "discopop" in self.loss_type:
            values["discopop_tau"] = self.discopop_tau
        return {**super().trajectory(total_steps), **values}


@dataclass(frozen=True)
class PreferenceArguments(PreferenceOptions):
    """Arguments of `dpo` and `kto`.

    Attributes:
        data: .jsonl files, rows, a dataset, a frame or a dict of columns; a row has two outputs
            for dpo, and a completion with a label for kto (docs/finetuning.md). In a DatasetDict,
            `train` is the training data, and `validation` is the default of `eval_data`. With
            `probabilities`, a list of as many of these.
        adapter: the adapter's name; a missing adapter is created.
        peft: the recipe of a new adapter, as for `add_adapter`; None for the recipe that the
            program was compiled for under the name, else "lora".
        on_step: function to call after each step, after evaluation and saving.
        formatting_func: function from a row to such a row; it runs in this process.
        callbacks: objects with methods of `pcg.TrainingCallback`, which may end the run.
    """

    data: Data = field(repr=False, compare=False)
    adapter: str = "default"
    peft: object = field(default=None, kw_only=True)
    on_step: Callable[[StepRecord], None] | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    formatting_func: FormattingFunc | None = field(
        default=None, kw_only=True, repr=False, compare=False
    )
    callbacks: Sequence[Any] = field(default=(), kw_only=True, repr=False, compare=False)


@dataclass(frozen=True)
class DpoArguments(DpoOptions, PreferenceArguments):
    """Arguments of `dpo`."""
