"""Random finetuning steps, and what eager PyTorch saves in them: measured with and without data."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import peft
import torch

from pcg.errors import PcgError
from pcg.explain.baselines.eager_memory import EagerMemory, EagerModel
from pcg.options import PlanOptions
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.bitfit import BitFitConfig
from pcg.peft.bottleneck import BottleneckConfig
from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_from
from tests.support.architectures import ARCHITECTURES, small_config
from tests.support.families import FAMILIES
from tests.support.saved_tensors import Adapter, finetuned_model, saved_bytes

CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}


@dataclass(frozen=True)
class Case:
    """A model, an adapter, and a step.

    Attributes:
        config: the contents of a config.json.
        dtype: of the base model.
        adapter: peft's configuration, None for BitFit, or the fields of bottleneck adapters.
        batch: sequences.
        seq: tokens of each, virtual ones included.
    """

    config: Mapping[str, Any]
    dtype: torch.dtype
    adapter: peft.PeftConfig | Mapping[str, Any] | None
    batch: int
    seq: int

    @property
    def recipe(self) -> Recipe:
        return BitFitConfig() if self.adapter is None else recipe_from(self.adapter)

    @property
    def model(self) -> EagerModel:
        """The model without data."""
        return EagerModel(self.config, self._dtype_name, self.recipe, self._sites())

    def predicted(self) -> EagerMemory:
        """What pcg measures without data."""
        return self.model.step(self.batch, self.seq - self.recipe.prompt_tokens)

    def expected(self) -> int:
        """What the oracle measures with data."""
        return saved_bytes(*self._of_oracle(), batch=self.batch, seq=self.seq)

    def expected_trainable(self) -> int:
        """The number of parameters that the oracle's model trains."""
        parameters = finetuned_model(*self._of_oracle()).parameters()
        return sum(one.numel() for one in parameters if one.requires_grad)

    def _of_oracle(self) -> tuple[Mapping[str, Any], torch.dtype, Adapter]:
        adapter: Adapter = self.adapter  # type: ignore[assignment]
        if isinstance(self.adapter, Mapping):
            adapter = ([*self._sites()], {**self.adapter})
        return self.config, self.dtype, adapter

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def _sites(self) -> Mapping[str, Any]:
        passes = pipeline(Settings(PlanOptions(dtype=self._dtype_name)))
        base = passes.fold.run(passes.trace.run(self.config)).model
        return self.recipe.bypasses_in(base, str(self.config["model_type"]))


# ------------------------------------------------------------------------------------ random ones


def drawn(seed: int) -> tuple[Case, EagerMemory, int]:
    """A random case, and both measurements of it.

    Drawn again is what pcg does not compile, and what transformers or peft does not run.
    """
    for attempt in range(100):
        case = _draw(random.Random(f"{seed} {attempt}"))
        try:
            expected = case.expected()
        except Exception:  # of transformers, peft and torch, whose limits are not ours
            continue
        try:
            case._sites()
        except PcgError:
            continue
        return case, case.predicted(), expected
    raise AssertionError(f"no case can be drawn with seed {seed}")


def _draw(draw: random.Random) -> Case:
    layers = draw.choice([2, 3, 4])
    named = [family.config(layers) for family in FAMILIES]
    kind = draw.choice([*ARCHITECTURES, None])
    config = draw.choice(named) if kind is None else small_config(kind, layers, draw)
    dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float32])
    adapter = draw.choice(METHODS)(draw, targets(config, draw), layers)
    return Case(config, dtype, adapter, draw.choice([1, 1, 2, 3]), draw.randint(9, 24))


def targets(config: Mapping[str, Any], draw: random.Random) -> list[str]:
    """Names of some linear modules of the layers."""
    passes = pipeline(Settings(PlanOptions(dtype="float32")))
    try:
        base = passes.fold.run(passes.trace.run(config)).model
    except PcgError:
        return ["o_proj"]
    paths = [path for path in base.linear_modules() if path != base.output_module]
    names = sorted({path.rpartition(".")[2] for path in paths})
    return draw.sample(names, draw.randint(1, len(names)))


Draw = Callable[[random.Random, list[str], int], Any]


def _lora(draw: random.Random, targets: list[str], layers: int) -> peft.LoraConfig:
    fields: dict[str, Any] = {"target_modules": targets}
    if draw.random() < 0.3:
        fields["target_modules"] = "all-linear"
    elif draw.random() < 0.3:
        fields["layers_to_transform"] = draw.sample(range(layers), draw.randint(1, layers - 1))
    elif draw.random() < 0.3:
        fields["rank_pattern"] = {targets[0]: 7}
    return peft.LoraConfig(
        r=draw.choice([1, 4, 8]),
        lora_dropout=draw.choice([0.0, 0.1]),
        use_dora=draw.random() < 0.3,
        bias=draw.choice(["none", "none", "all", "lora_only"]),
        **fields,
        **CAUSAL,
    )


def _adalora(_: random.Random, targets: list[str], __: int) -> peft.AdaLoraConfig:
    ranks = {"init_r": 5, "target_r": 3, "total_step": 20}
    return peft.AdaLoraConfig(**ranks, target_modules=targets, **CAUSAL)


def _vera(draw: random.Random, targets: list[str], _: int) -> peft.VeraConfig:
    dropout = draw.choice([0.0, 0.1])
    return peft.VeraConfig(r=4, target_modules=targets, vera_dropout=dropout, **CAUSAL)


def _loha(_: random.Random, targets: list[str], __: int) -> peft.LoHaConfig:
    return peft.LoHaConfig(r=3, target_modules=targets, **CAUSAL)


def _ia3(draw: random.Random, targets: list[str], _: int) -> peft.IA3Config:
    inputs = draw.sample(targets, draw.randint(0, len(targets)))
    return peft.IA3Config(target_modules=targets, feedforward_modules=inputs, **CAUSAL)


def _prompt(draw: random.Random, _: list[str], __: int) -> peft.PromptTuningConfig:
    return peft.PromptTuningConfig(num_virtual_tokens=draw.randint(1, 6), **CAUSAL)


def _p_tuning(draw: random.Random, _: list[str], __: int) -> peft.PromptEncoderConfig:
    kind, dropout = draw.choice([("MLP", 0.0), ("LSTM", 0.0)])
    return peft.PromptEncoderConfig(
        num_virtual_tokens=draw.randint(1, 6),
        encoder_reparameterization_type=kind,
        encoder_hidden_size=20,
        encoder_dropout=dropout,
        **CAUSAL,
    )


def _prefix(draw: random.Random, _: list[str], __: int) -> peft.PrefixTuningConfig:
    projection = {"prefix_projection": True, "encoder_hidden_size": 24}
    fields = projection if draw.random() < 0.5 else {}
    return peft.PrefixTuningConfig(num_virtual_tokens=draw.randint(1, 6), **fields, **CAUSAL)


def _bottleneck(draw: random.Random, _: list[str], __: int) -> dict[str, Any]:
    recipe = BottleneckConfig(
        variant=draw.choice(["houlsby", "parallel", "pfeiffer"]),
        bottleneck_size=draw.choice([3, 8]),
        non_linearity=draw.choice(["gelu", "gelu_new", "relu", "silu", "tanh"]),
        scaling=draw.choice([1.0, 0.7]),
    )
    names = ("variant", "bottleneck_size", "non_linearity", "scaling")
    return {"peft_type": "BOTTLENECK", **{name: getattr(recipe, name) for name in names}}


def _bitfit(*_: Any) -> None:
    return None


METHODS: tuple[Draw, ...] = (
    _lora, _lora, _lora, _adalora, _vera, _loha, _ia3, _prompt, _p_tuning, _prefix, _bottleneck,
    _bottleneck, _bitfit,
)  # fmt: skip
