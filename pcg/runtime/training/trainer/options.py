"""The options of a trainer, checked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pcg.errors import FinetuneError
from pcg.options import OptimizerChoice
from pcg.runtime.training.options import DEFAULT_BATCH_SIZE
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.units import shown


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(OptimizerChoice):
    """Options of a trainer.

    Attributes:
        seed: the seed of a fresh adapter's weights, and of dropout.
        batch_size: sequences that go through the model together; gradients do not depend on it.
        max_tokens: tokens that go through the model together; both bounds may be given.
        total_steps: the updates that there will be, which AdaLoRA's schedule needs.
        dropout: drop what the recipe says in forward_backward. Without, its log-probabilities are
            those that the adapter samples by.
    """

    seed: int = 0
    batch_size: int = DEFAULT_BATCH_SIZE
    max_tokens: int | None = None
    total_steps: int | None = None
    dropout: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise FinetuneError(f"seed={shown(self.seed)}; use an int")
        for name in ("batch_size", "max_tokens", "total_steps"):
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FinetuneError(f"{name}={shown(value)}; use an int of at least 1")
        if type(self.dropout) is not bool:
            raise FinetuneError(f"dropout={shown(self.dropout)}; use True or False")
        if self.optimizer_options is not None and not isinstance(self.optimizer_options, Mapping):
            raise FinetuneError(
                f"optimizer_options={shown(self.optimizer_options)}; use a dict, such as "
                "{'momentum': 0.9}"
            )
        self.make_optimizer()

    def make_optimizer(self) -> Optimizer:
        """Return the optimizer with its options; without weight decay unless that is one."""
        kind = Optimizer.of(self.optimizer)
        given = {"weight_decay": 0.0} if "weight_decay" in kind.fields else {}
        return Optimizer.of(
            self.optimizer, {**given, **(self.optimizer_options or {})}, self.offload_optimizer
        )


@dataclass(frozen=True)
class TrainerArguments(TrainerOptions):
    """Arguments of `Executor.trainer`.

    Attributes:
        name: the adapter's name. An adapter of that name is trained further; else one is made.
        peft: the recipe of a new adapter, as `add_adapter` takes it; None for the one that the
            program was compiled for under that name, else "lora".
        tenant: of an engine's trainer, as of `JobArguments`.
    """

    name: str
    peft: object = field(default=None, kw_only=True)
    tenant: str = field(default="", kw_only=True)
