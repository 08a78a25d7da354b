"""Data of a report: the memory of a model under a recipe, in bytes, with reasons."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pcg.units import gib, rounded

KINDS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "served_adapters",
    "kv_cache",
    "activations",
    "workspace",
)
"""The kinds of memory, in the order of a report."""
STAGES = {
    "eager": "transformers + peft",
    "pruned": "all that gradients read",
    "rematerialized": "the rest recomputed",
    "compressed": "and bits for signs: pcg",
    "fp8": "and lossy 8 bits: pcg",
    "even-routing": "if experts are chosen equally",
    "token-level": "in windows, K/V cached",
    "checkpointing": "transformers' own",
    "torch-partitioner": "torch.compile's default",
}
"""The stages, with a short description of the saved values."""
LAYOUTS = {
    "|-2": "column-parallel",
    "|-1": "row-parallel",
    "~-3": "expert-parallel",
    "~-3|-2": "experts' columns",
    "~-3|-1": "experts' rows",
    "+": "on one rank",
    "~-3+": "experts, once",
    "-": "whole",
}
"""The layouts of matrices over ranks, in words; a summand is a bias of a sum over ranks."""
IN_PARTS = "in parts"
"""The word for other weights of which ranks hold parts: vectors of columns, heads or channels."""


@dataclass(frozen=True)
class Stage:
    """The bytes that a way to train saves for backward.

    Attributes:
        bytes_per_block: the bytes of a layer, on average over all but the first.
        recompute_flops_ratio: recomputed floating-point operations, as a share of the forward's.
    """

    stage: str
    bytes: int
    bytes_per_block: int
    recompute_flops_ratio: float = 0.0


@dataclass(frozen=True)
class ParetoPoint:
    """A plan of the front: fewer bytes take more recomputed operations.

    Attributes:
        bytes: the bytes that the whole model saves for backward.
        recompute_flops_ratio: as in `Stage`.
        restored: the number of layers that recompute their input from an earlier layer's saved
            input; only a budget in bytes permits that.
    """

    bytes: int
    recompute_flops_ratio: float
    restored: int = 0


@dataclass(frozen=True)
class PeerPoint:
    """The bytes that torch's min-cut partitioner saves under an activation memory budget.

    Attributes:
        budget: the budget, from 1, torch's default, to 0.
        outside_bytes: the part of shared tensors, logits and loss.
        bytes_per_block: as in `Stage`.
        recompute_flops_ratio: as in `Stage`.
    """

    budget: float
    bytes: int
    outside_bytes: int
    bytes_per_block: int
    recompute_flops_ratio: float


@dataclass(frozen=True)
class GpuCapacity:
    """The steps that fit a GPU.

    Attributes:
        usable_bytes: the GPU's memory without the reserve.
        largest_batch: the largest batch at the report's sequence length and budget; 0 for none.
        largest_seq: the largest sequence length at the report's batch and budget; 0 for none.
        least_largest_batch: the largest batch with a memory budget of 0.
        least_largest_seq: the largest sequence length with a memory budget of 0.
        advice: options, each of which makes the step fit.
    """

    gpu: str
    memory_bytes: int
    usable_bytes: int
    fits: bool
    largest_batch: int
    largest_seq: int
    least_largest_batch: int
    least_largest_seq: int
    advice: tuple[str, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the training program, and the decision on it.

    Attributes:
        tensor: the names of its graph and value.
        shape: its shape in this batch.
        bytes: its bytes if saved, in a layer.
        formula: `bytes` as a formula in B and S.
        needed_by: backward operators that read it.
        decision: "save", "compress", "recompute" or "drop".
        layers: the number of layers with this tensor.
    """

    tensor: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    formula: str
    needed_by: tuple[str, ...]
    decision: str
    reason: str
    layers: int


@dataclass(frozen=True)
class LayerGroup:
    """Layers of the training program that save the same tensors.

    Attributes:
        name: the name of their forward, and the prefix of `SavedTensor.tensor`.
        layers: their indices.
        trained: the number of parameters that each layer trains.
        bytes: the bytes that each layer saves for backward.
        has_backward: False below the lowest layer with trained parameters.
    """

    name: str
    layers: tuple[int, ...]
    trained: int
    bytes: int
    has_backward: bool


@dataclass(frozen=True)
class Moment:
    """A moment of a finetuning step.

    Attributes:
        label: "forward 0" for a layer, "loss", "backward 0".
        kept_bytes: the bytes saved for backward.
        workspace_bytes: the most bytes of other values that are alive at the same time.
    """

    label: str
    kept_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of saved bytes and workspace."""
        return self.kept_bytes + self.workspace_bytes


@dataclass(frozen=True)
class GraphNode:
    """A node or an input of a layer's forward graph; weights and views are left out.

    Attributes:
        name: the name of its value.
        op: its operator; "input" for an input of the layer.
        scope: the path of its module, within the layer.
        decision: as in `SavedTensor`, of its first output.
    """

    name: str
    op: str
    scope: str
    inputs: tuple[str, ...]
    decision: str


@dataclass(frozen=True)
class ReportData:
    """The fields of a report; memory is in bytes of a rank.

    `memory_bytes` counts, for a finetuning step of `batch` sequences of `seq` tokens:

    - weights: the base model's loaded parameters and constants; on a CPU with packed copies;
    - adapters: the trainable parameters; fp32 over a half-precision base, as in peft;
    - gradients: a gradient for each trainable parameter, in its dtype;
    - optimizer: the states of `optimizer`, for AdamW two moments and the step count; with
      offloading, only the states on the device;
    - served_adapters: the copies of all adapters that concurrent requests read; on a CPU also the
      tensors of the versions that are served during training; 0 without serving;
    - kv_cache: keys and values of concurrent requests; without adapters, of batch · seq tokens;
    - activations: the bytes that pcg's training program saves for backward (stage `compressed`, or
      `fp8` with lossy activations; `eager` if pcg cannot train the model). Of ranks with whole
      experts they are the most that routing can make them; `even-routing` has the usual bytes;
    - workspace: the other bytes of the step's peak, at the loss over a chunk of tokens or at a
      layer's forward or backward, less the saved bytes that are freed before it.

    `host_bytes` counts offloaded kinds in the host memory of a GPU, and the served versions of the
    adapters, of which the GPU has copies. `packed_bytes` counts oneDNN's packed copies, which are
    part of the weights in `memory_bytes`. `allocator_bytes` is the memory that the allocator of a
    CPU's process may hold in addition to the total.

    `kept_bytes` is the memory that an ended job of this kind may hold in addition to the
    `memory_bytes` of running jobs: the saved values of its recorded windows (stage `token-level`),
    the workspace of a layer of them, its adapter and gradients. 0 without recorded windows.

    `backend` is the choice of `auto` on such a device, with the reason, for GPUs of capability 8.0
    or later.

    With `cp` ranks that share the tokens of sequences, memory is that of a rank; `context` has the
    rank's tokens, and its traffic for a step.

    `shard_base` is the number of replicas that shard the layers' weights: a rank's weights are its
    part, two gathered layers, and the weights outside the layers. `gathered` has the number of
    layers that a rank gathers in a step of one batch, and the bytes that it sends for them.

    With `pp` pipeline stages, memory is that of the largest stage's rank. `stages` has each stage's
    layers, micro-batches in flight, memory, and traffic for a step: activations to the next stage,
    and gradients back.

    `quantization` names the formats of the layers' weights; None for weights in `dtype`.

    `gpus` names all known GPUs that hold a rank; `fits` has details of the requested GPUs.
    """

    model: str
    architecture: str
    peft: str | None
    tp: int
    batch: int
    seq: int
    dtype: str
    layers: int
    parameters: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    activations: tuple[Stage, ...]
    formulas: Mapping[str, str]
    saved: tuple[SavedTensor, ...] = ()
    pareto: tuple[ParetoPoint, ...] = ()
    parallel: Mapping[str, Any] = field(default_factory=lambda: {"base": [], "bypass": []})
    notes: tuple[str, ...] = ()
    region: tuple[int, int] | None = None
    rank_region: tuple[int, int] | None = None
    formula_degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fits: tuple[GpuCapacity, ...] = ()
    gpus: tuple[str, ...] = ()
    memory_budget: str = "1"
    optimizer: str = "adamw"
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    packed_bytes: int = 0
    allocator_bytes: int = 0
    shard_base: int = 1
    gathered: Mapping[str, int] = field(default_factory=dict)
    kept_bytes: int = 0
    backend: str = ""
    quantization: str | None = None
    cp: int = 1
    context: Mapping[str, Any] = field(default_factory=dict)
    pp: int = 1
    stages: tuple[Mapping[str, Any], ...] = ()
    timeline: tuple[Moment, ...] = ()
    graph: tuple[GraphNode, ...] = ()
    layer_groups: tuple[LayerGroup, ...] = ()
    peers: tuple[PeerPoint, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of a step."""
        return self.tp * self.cp * self.pp

    @property
    def chosen_stage(self) -> Stage | None:
        """The stage that the report's activations belong to; None without training."""
        return self.trained_stage or self.stage("eager")

    @property
    def trained_stage(self) -> Stage | None:
        """The stage of pcg's training program; None if pcg cannot train the model."""
        return self.stage("fp8") or self.stage("compressed")

    def stage(self, name: str) -> Stage | None:
        """Return the stage of a name, or None."""
        return next((stage for stage in self.activations if stage.stage == name), None)

    @property
    def precision(self) -> str:
        """The dtype, with the formats of quantized weights."""
        return f"{self.dtype}, weights {self.quantization}" if self.quantization else self.dtype

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, which `pcg explain --json` prints."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of `to_json`."""
        return msgspec.json.schema(ReportData)

    def saved_bytes_at(self, recompute_flops_ratio: float) -> int | None:
        """Return the front's bytes at a share of recomputed operations; None below the front.

        Above the front's largest share, the result is the front's fewest bytes.
        """
        front = [(p.recompute_flops_ratio, p.bytes) for p in self.pareto if not p.restored]
        below = [point for point in front if point[0] <= recompute_flops_ratio]
        if not below:
            return None
        if len(below) == len(front):
            return below[-1][1]
        (left, most), (right, least) = below[-1], front[len(below)]
        return round(most - (most - least) * (recompute_flops_ratio - left) / (right - left))


HEADS = ("trainable", "states", "saved", "recomputed", "workspace", "total")
"""The columns of a comparison; bytes are in GiB."""


def compared_cells(report: ReportData) -> tuple[str, ...]:
    """Return a report's line of a comparison, in the order of `HEADS`."""
    memory, ours = report.memory_bytes, report.trained_stage
    states = sum(memory[kind] for kind in ("adapters", "gradients", "optimizer"))
    return (
        rounded(report.parameters["trainable"]),
        gib(states),
        gib(memory["activations"]),
        f"{ours.recompute_flops_ratio:.0%}" if ours else "-",
        gib(memory["workspace"]),
        gib(memory["total"]),
    )


def fitting(reports: Mapping[str, ReportData]) -> Mapping[str, str]:
    """Return the reports whose step fits, with the largest batch, by GPU."""
    names: dict[str, list[str]] = {}
    for name, report in reports.items():
        for fit in report.fits:
            of_gpu = names.setdefault(fit.gpu, [])
            if fit.fits:
                of_gpu.append(f"{name} (batch {fit.largest_batch:,})")
    return {gpu: ", ".join(fits) or "none of them" for gpu, fits in names.items()}
