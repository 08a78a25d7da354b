"""Facts about a served model that the server needs, and the memory that serving it takes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import torch

from pcg.errors import UnsupportedError
from pcg.explain.base_memory import base_bytes, packed_bytes
from pcg.ir.program.program import Program, labels_of
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
    """Memory of a server, without Python and its libraries, bytes.

    Attributes:
        weights: the base on its device, with the copies that a CPU library packs.
        adapters: the adapters in host memory.
        kv_cache: the pool of KV cache blocks and adapter pages, fully used.
        workspace: peak memory of a step with the maximum number of tokens.
        recorded: CUDA graphs of steps and windows recorded before the first request.
    """

    weights: int
    adapters: int
    kv_cache: int
    workspace: int
    recorded: int = 0

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of each part, by name."""
        return asdict(self)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def serving_memory(executor: Executor, engine: Engine) -> ServingMemory:
    """Return the maximum memory of a server, without adapters."""
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
    """Constant facts about a model and the engine that serves it.

    Attributes:
        name: name of the program.
        device: device of the weights, as torch names it.
        dtype: dtype of the base, as torch names it.
        vocabulary: number of tokens in the model's logits.
        width: dimension of the hidden states.
        is_matryoshka: True if a prefix of an embedding is a valid embedding;
            `matryoshka_dimensions` lists the allowed lengths, and is empty if any length is
            allowed.
        labels: the labels of a sequence classifier; none of a causal LM.
        max_positions: number of positions; None if the configuration sets no bound.
        ttft_slo_s, tpot_slo_s: the engine's SLOs, seconds; None without an SLO.
        memory: maximum memory, without adapters.
        warmed: steps recorded before the first request; None without recording.
        pid: process id of the engine.
        base_digest: digest of the base's weights; empty without `--data-dir`.
        no_jobs: reason why the engine cannot run finetuning jobs; None if it can.
        split_address: address of the base executor for split clients, or None.
    """

    name: str
    device: str
    dtype: str
    vocabulary: int
    width: int
    is_matryoshka: bool
    matryoshka_dimensions: tuple[int, ...]
    labels: tuple[str, ...]
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
    """Return the facts of an executor's model and of its engine."""
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
        labels=labels_of(program.config),
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
    """Return a digest of the base that does not depend on the serving dtype."""
    model_type = executor.program.config.get("model_type")
    return f"{base_digest(executor.state.weight_store, torch.bfloat16)} {model_type}"


def _why_no_jobs(executor: Executor) -> str | None:
    try:
        executor.state.mesh.check_no_parts("a job of an engine")
    except UnsupportedError as error:
        return str(error)
    return None


def width_of(program: Program) -> int:
    """Return the dimension of a model's hidden states."""
    return int(program.base.epilogue.inputs[0].type.shape[-1])
