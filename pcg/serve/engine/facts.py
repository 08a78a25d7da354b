"""Facts of a model that is served: all that a server needs to know of it beside its tokenizer.

The memory of a server, by explain's numbers.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import torch

from pcg.errors import UnsupportedError
from pcg.explain.base_memory import base_bytes, packed_bytes
from pcg.ir.program.program import Program
from pcg.ir.types import TORCH_NAMES
from pcg.runtime.engine.device.device_memory import step_bytes
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import base_digest
from pcg.runtime.model.step_graphs import WarmUp
from pcg.serve.engine.options import ServeOptions

# ------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class ServingMemory:
    """Bytes that a server takes beside Python and its libraries.

    Attributes:
        weights: the base on its device, with packed copies where a CPU's library makes some.
        adapters: the adapters in host memory.
        kv_cache: the pool of the KV cache and of adapters' pages, if all of it is used.
        workspace: the fullest moment of a step of as many tokens as a step may have.
        recorded: steps and windows that a GPU has recorded before the first request.
    """

    weights: int
    adapters: int
    kv_cache: int
    workspace: int
    recorded: int = 0

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes by what has them."""
        return asdict(self)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def serving_memory(executor: Executor, engine: Engine) -> ServingMemory:
    """Return the memory that a server takes at most, without adapters."""
    model, limits, warmed = executor.program.base, engine.scheduler.limits, engine.device.warmed
    is_packed = executor.program.options.packed_weights
    packed = packed_bytes(model, executor.device) if is_packed else 0
    return ServingMemory(
        weights=base_bytes(model) + packed,
        adapters=0,
        kv_cache=engine.device.cache.size_bytes,
        workspace=step_bytes(model, limits, executor.max_positions),
        recorded=0 if warmed is None else warmed.size_bytes,
    )


# -------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model and of the engine that serves it, which do not change.

    Attributes:
        name: the program's.
        device: the device of the weights, as torch names it.
        dtype: the dtype of the base, as torch names it.
        vocabulary: the number of tokens that the model has logits of.
        width: the number of dimensions of its hidden states.
        is_matryoshka: True if the first dimensions of an embedding are one, too;
            `matryoshka_dimensions` are how many may be taken, and any if there are none.
        max_positions: the number of positions; None if its configuration names no bound.
        ttft_slo_s, tpot_slo_s: the engine's SLOs, seconds; None for none.
        memory: the memory that it takes at most, without adapters.
        warmed: the steps that were recorded before the first request; None if there are none.
        pid: the process in which it runs.
        base_digest: a digest of the base's weights; empty without `--data-dir`.
        no_jobs: why the engine runs no finetuning jobs; None where it does.
        split_address: where it is a base executor for split clients; None if it is none.
    """

    name: str
    device: str
    dtype: str
    vocabulary: int
    width: int
    is_matryoshka: bool
    matryoshka_dimensions: tuple[int, ...]
    max_positions: int | None
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    memory: ServingMemory
    warmed: WarmUp | None
    pid: int
    base_digest: str
    no_jobs: str | None = None
    split_address: str | None = None


def facts_of(executor: Executor, engine: Engine, options: ServeOptions) -> ModelFacts:
    """Return the facts of an executor's model, which an engine serves."""
    limits = engine.scheduler.limits
    program = executor.program
    dimensions = program.config.get("matryoshka_dimensions") or ()
    return ModelFacts(
        name=program.name,
        device=str(executor.device),
        dtype=f"torch.{TORCH_NAMES[program.dtype]}",
        vocabulary=program.base.vocabulary,
        width=width_of(program),
        is_matryoshka=bool(program.config.get("is_matryoshka")),
        matryoshka_dimensions=tuple(map(int, dimensions)),
        max_positions=executor.max_positions,
        ttft_slo_s=limits.ttft_slo_s,
        tpot_slo_s=limits.tpot_slo_s,
        memory=serving_memory(executor, engine),
        warmed=engine.device.warmed,
        pid=os.getpid(),
        base_digest="" if options.data_dir is None else _digest(executor),
        no_jobs=_why_no_jobs(executor),
    )


def _digest(executor: Executor) -> str:
    """Return a digest of the base, the same whichever floating type it is served in."""
    model_type = executor.program.config.get("model_type")
    return f"{base_digest(executor.state.weight_store, torch.bfloat16)} {model_type}"


def _why_no_jobs(executor: Executor) -> str | None:
    try:
        executor.state.mesh.check_no_parts("a job of an engine")
    except UnsupportedError as error:
        return str(error)
    return None


def width_of(program: Program) -> int:
    """Return the number of dimensions of a model's hidden states."""
    return int(program.base.epilogue.inputs[0].type.shape[-1])
