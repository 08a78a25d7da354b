"""Options of GRPO, by the names and with the defaults of TRL's GRPOConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from pcg.errors import FinetuneError
from pcg.runtime.training.options import ChatOptions, check_fields, check_one_evaluation
from pcg.units import is_finite, shown

LossType: TypeAlias = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo"]
Level: TypeAlias = Literal["token", "sequence"]
Scale: TypeAlias = Literal["group", "batch", "none"]
Aggregation: TypeAlias = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options of rollouts: how completions are sampled, and how many.

    Attributes:
        num_generations: completions per prompt: a group, within which rewards are compared.
        batch_size: completions per update; TRL's per_device_train_batch_size times its
            gradient_accumulation_steps.
        steps_per_generation: number of updates among which the completions of a generation are
            divided.
        num_iterations: number of passes over the completions of a generation.
        max_staleness: maximum number of updates between sampling and the first update by a
            generation. 0 is on-policy; from 1 on, completions are sampled during training on
            earlier completions.
        max_completion_length: maximum number of tokens of a completion.
        temperature: sampling temperature, at which updates compute log-probabilities, too; other
            than 1 only with max_staleness 0 and beta 0.
        top_p: keep the most likely tokens up to this probability, in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: keep tokens with at least this probability relative to the most likely token.
        repetition_penalty: values above 1 discourage repeated tokens.
        stop: texts that end a completion.
        router_replay: let the tokens of completions, in training, choose the experts that they
            chose in sampling.
    """

    title: ClassVar[str] = "Rollouts"

    num_generations: int = 8
    batch_size: int = 8
    steps_per_generation: int = 1
    num_iterations: int = 1
    max_staleness: int = 0
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    router_replay: bool = False

    @property
    def updates_per_generation(self) -> int:
        """The number of updates by the completions of a generation."""
        return self.steps_per_generation * self.num_iterations

    @property
    def prompts_per_generation(self) -> int:
        return self.batch_size * self.steps_per_generation // self.num_generations

    def sampling(self) -> dict[str, Any]:
        """Return the fields of a request for a group, without its seed."""
        return {
            "n": self.num_generations,
            "max_new_tokens": self.max_completion_length,
            "temperature": float(self.temperature),
            "top_p": None if self.top_p == 1 else float(self.top_p),
            "top_k": self.top_k or None,
            "min_p": self.min_p,
            "repetition_penalty": float(self.repetition_penalty),
            "stop": self.stop,
            "logprobs": 0,
            "routed_experts": self.router_replay,
        }


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Options of the objective: advantages of completions, and the loss of their tokens.

    Attributes:
        loss_type: weights of tokens' losses (docs/finetuning.md): dapo, grpo, dr_grpo or bnpo;
            cispo clips the ratio's weight instead.
        importance_sampling_level: token, for the ratio of each token, or sequence, for the ratio of
            the whole completion, as in GSPO.
        beta: weight of the KL divergence to the reference: the base without the adapter, or the
            initial version of an adapter that is trained further.
        epsilon: the lower bound of ratios is 1 - epsilon.
        epsilon_high: the upper bound of ratios is 1 + epsilon_high; epsilon by default. With cispo,
            the upper bound itself, without a default.
        delta: upper bound of ratios of completions with negative advantages; None for none.
        scale_rewards: divide rewards by the deviation in their group, by that in the batch, or by
            none.
        multi_objective_aggregation: sum the rewards of several functions and then normalize, or
            normalize and then sum, as in GDPO.
        mask_truncated_completions: exclude truncated completions from the loss.
        use_bias_correction_kl: multiply the KL divergence by the ratio.
    """

    title: ClassVar[str] = "Objective"

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    scale_rewards: Scale = "group"
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    mask_truncated_completions: bool = False
    use_bias_correction_kl: bool = True

    @property
    def low(self) -> float:
        """The lower bound of ratios."""
        return 0.0 if self.loss_type == "cispo" else 1.0 - self.epsilon

    @property
    def high(self) -> float:
        """The upper bound of ratios."""
        if self.loss_type == "cispo":
            assert self.epsilon_high is not None
            return self.epsilon_high
        return 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(ObjectiveOptions, RolloutOptions, ChatOptions):
    """Options of GRPO.

    Attributes:
        learning_rate: the learning rate of AdamW; 1e-5 to 1e-4 is usual for adapters.
        lr_scheduler_type: the learning-rate schedule, by transformers' name.
        warmup_steps: updates of linear warmup.
        weight_decay: decay of the weights.
        adam_beta1, adam_beta2: the betas of AdamW.
        adam_epsilon: the epsilon of AdamW.
        max_grad_norm: maximum norm, to which gradients are clipped; None for no clipping.
        num_train_epochs: passes over the prompts.
        max_steps: total number of updates, instead of epochs.
        shuffle: shuffle the prompts in each epoch.
        seed: the seed of the order, of sampling and of a new adapter.
        columns: the data's name of a column, by the name that is read, such as prompt=question.
        max_tokens_per_pass: tokens per forward and backward; None for a whole batch.
        eval_data: prompts for evaluations, in any form of the data, with its columns.
        eval_every: updates between evaluations by greedy completions of the evaluation prompts;
            the last update is always evaluated, and without a number no other is.
    """

    title: ClassVar[str] = "Optimizer and schedule"

    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    num_train_epochs: float = 3.0
    max_steps: int | None = None
    shuffle: bool = True
    seed: int = 42
    max_tokens_per_pass: int | None = None
    columns: Mapping[str, str] | None = None
    eval_data: Any = field(default=None, repr=False, compare=False)
    eval_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, _COUNTS, _FLAGS)
        self.template()
        self.variables()
        self._check_numbers()
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise FinetuneError(f"{name}={shown(getattr(self, name))}; use one of {choices}")
        columns = self.columns
        if columns is not None and not (
            isinstance(columns, Mapping)
            and all(isinstance(name, str) for pair in columns.items() for name in pair)
        ):
            raise FinetuneError(
                f"columns={shown(columns)}; give the data's name of a column by the name that is "
                "read, such as {'prompt': 'question'}"
            )
        check_one_evaluation(self.eval_data, "GRPO is")
        if self.eval_every is not None and self.eval_data is None:
            raise FinetuneError(f"eval_every={self.eval_every} has no effect without eval_data")
        if self.batch_size * self.steps_per_generation % self.num_generations:
            raise FinetuneError(
                f"batch_size={self.batch_size} times steps_per_generation="
                f"{self.steps_per_generation} completions are not a multiple of num_generations="
                f"{self.num_generations}; use a multiple of it"
            )
        if self.temperature != 1 and (self.max_staleness or self.beta):
            name = "max_staleness" if self.max_staleness else "beta"
            raise FinetuneError(
                f"temperature={self.temperature:g} and {name}={getattr(self, name):g}; requests "
                "have log-probabilities at temperature 1, so leave one of them out"
            )
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise FinetuneError(
                "loss_type='cispo' bounds ratios by epsilon_high, which was not given; "
                "epsilon_high=5.0 is the paper's"
            )
        if self.loss_type == "cispo" and self.delta is not None:
            raise FinetuneError("loss_type='cispo' has no delta; leave it out")

    def _check_numbers(self) -> None:
        for name, (low, high, is_optional) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and is_optional:
                continue
            if not is_finite(value) or not low <= value <= high:
                upper = f" to {high:g}" if high < _ANY else " on"
                raise FinetuneError(f"{name}={shown(value)}; use a number from {low:g}{upper}")


_ANY = 1e300
_LEAST = 1e-12
_CHOICES: dict[str, Any] = {
    "loss_type": LossType,
    "importance_sampling_level": Level,
    "scale_rewards": Scale,
    "multi_objective_aggregation": Aggregation,
}
_COUNTS = {
    **dict.fromkeys(("batch_size", "steps_per_generation", "num_iterations", "max_steps"), 1),
    **dict.fromkeys(("eval_every", "max_completion_length", "max_tokens_per_pass"), 1),
    "num_generations": 2,
    "max_staleness": 0,
    "top_k": 0,
    "warmup_steps": 0,
}
_FLAGS = ("mask_truncated_completions", "router_replay", "shuffle", "use_bias_correction_kl")
_NUMBERS: dict[str, tuple[float, float, bool]] = {
    "temperature": (_LEAST, _ANY, False),
    "top_p": (_LEAST, 1, False),
    "min_p": (0, 1, True),
    "repetition_penalty": (0.01, 100, False),
    "beta": (0, _ANY, False),
    "epsilon": (0, 1, False),
    "epsilon_high": (0, _ANY, True),
    "delta": (1, _ANY, True),
    "learning_rate": (0, _ANY, False),
    "weight_decay": (0, _ANY, False),
    "adam_beta1": (0, 1 - _LEAST, False),
    "adam_beta2": (0, 1 - _LEAST, False),
    "adam_epsilon": (_LEAST, _ANY, False),
    "max_grad_norm": (_LEAST, _ANY, True),
    "num_train_epochs": (_LEAST, _ANY, False),
}
"""The range of each number, and True if None is allowed."""
