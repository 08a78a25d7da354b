"""Bytes that a training step saves and needs, measured while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import torch

from pcg.errors import PcgError
from pcg.explain import explain as explaining
from pcg.peft.bitfit import BitFitConfig
from pcg.peft.lora import LoraConfig
from pcg.peft.recipe import Recipe
from pcg.peft.registry import recipe_from
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.training.runner import TrainingPass, training_runner
from tests.support import compiled, oracle
from tests.support.families import FAMILIES, Family
from tests.support.live_memory import peak_of

BATCH, SEQ = 2, 16


def measured(executor: Executor, batch: int = BATCH, seq: int = SEQ) -> int:
    """Bytes of the storages that a forward leaves for backward and the loss, weights apart."""
    runner = training_runner(executor.state, executor.adapters["a"])
    examples = [Example([3] * seq, [3] * seq)] * batch
    whole = TrainingPass(runner, examples, normaliser=1.0)
    window = whole.begin(whole.tokens)
    with torch.no_grad():
        for layer in range(len(runner.training.layers)):
            run_single(whole.layer_requests(layer, window))
    tensors = [x for saved in window.saved.values() for x in saved if x is not None]
    weights = executor.state.weight_store.bind(runner.training.model)
    resident = {
        value.untyped_storage().data_ptr()
        for holder in (weights.prologue, *weights.layers, weights.epilogue)
        for value in vars(holder).values()
        if isinstance(value, torch.Tensor)
    }
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*tensors, *window.carried, window.targets]
    }
    return sum(size for pointer, size in storages.items() if pointer not in resident)


def peak_error(
    family: Family,
    dtype: str,
    budget: float,
    layers: int = 4,
    recipe: LoraConfig | None = None,
    **options: Any,
) -> float:
    """The error of a step of four sequences of 192 tokens; by default of LoRA on every layer.

    Args:
        options: of compiling, such as the ranks or a quantization.
    """
    excluded = tuple(family.excluded) or None
    recipe = recipe or LoraConfig(r=4, target_modules="all-linear")
    recipe = dataclasses.replace(recipe, exclude_modules=excluded)
    step = Step(_widened(family.config(layers)), recipe, dtype, budget, batch=4, seq=192)
    return step.peak_error(**options)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of a random model.

    Attributes:
        config: the contents of a config.json.
        dtype: of the base model.
        budget: the memory budget.
        batch: sequences.
        seq: tokens of each, virtual ones included.
    """

    config: Mapping[str, Any]
    recipe: Recipe
    dtype: str
    budget: float
    batch: int
    seq: int

    def peak_error(self, **others: Any) -> float:
        """Predicted peak by the measured one, less 1."""
        options = {"memory_budget": self.budget, "batch": self.batch, "seq": self.seq, **others}
        model = oracle.random_model(self.config, getattr(torch, self.dtype))
        executor = compiled.executor(model, {"a": self.recipe}, **options)
        runner = executor.training_runner("a")
        # The configuration that was compiled, whose trace is cached.
        memory = explaining.explain(
            model.config.to_dict(), self.recipe, dtype=self.dtype, **options
        ).memory_bytes
        tokens = self.seq - self.recipe.prompt_tokens
        examples = [Example([3] * tokens, [3] * tokens)] * self.batch

        def two_micro_batches() -> None:
            # The adapters' gradients are there through all of the second.
            for _ in range(2):
                normaliser = 2 * self.batch * (tokens - 1)
                runner.forward_backward(examples, normaliser, dropout_seed=3)

        # Imports peft: seconds, which processes of ranks save.
        from tests.support.saved_tensors import without_onednn

        # An LSTM without oneDNN, whose workspace is the CPU's own, as in
        # `pcg.explain.baselines.eager_memory`.
        has_encoder = self.recipe.encoder is not None
        with without_onednn() if has_encoder else contextlib.nullcontext():
            found = peak_of(two_micro_batches)
        predicted = sum(memory[kind] for kind in ("activations", "workspace", "gradients"))
        return predicted / found - 1

    def __str__(self) -> str:
        return (
            f"{self.config['model_type']} with {self.recipe}, {self.dtype}, budget {self.budget:g},"
            f" {self.batch} x {self.seq}"
        )


def _widened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A family's configuration with heads of 64, whose values outweigh what is small in a step."""
    width = 64 * next(
        config[key]
        for key in ("num_attention_heads", "n_head", "n_heads", "num_heads")
        if key in config
    )
    names = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
    wide = dict.fromkeys(names, width) | dict.fromkeys(("intermediate_size", "ffn_dim"), 2 * width)
    wide |= {"head_dim": 64}
    wide |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256)
    return {**config, **{key: size for key, size in wide.items() if key in config}}


def drawn_step(seed: int) -> tuple[Step, float]:
    """A random step of any family and method, and the error of its predicted peak.

    Drawn again is what pcg refuses.
    """
    from tests.support.eager_cases import METHODS, targets

    for attempt in range(100):
        draw = random.Random(f"{seed} {attempt}")
        layers = draw.choice([2, 3, 4])
        config = _widened(draw.choice(FAMILIES).config(layers))
        config["vocab_size"] = draw.choice([128, 2048])
        adapter = draw.choice(METHODS)(draw, targets(config, draw), layers)
        recipe = BitFitConfig() if adapter is None else recipe_from(adapter)
        if recipe.prompt_tokens and any("expert" in name for name in config):
            continue  # virtual tokens choose other experts than the rest, which are all alike
        budget = draw.choice([1.0, 0.5, 0.0, draw.random()])
        dtype = draw.choice(["bfloat16", "float32"])
        step = Step(
            config, recipe, dtype, budget, draw.choice([1, 1, 2, 3, 4]), draw.randint(33, 200)
        )
        try:
            return step, step.peak_error()
        except PcgError:
            continue
    raise AssertionError(f"no step can be drawn with seed {seed}")
