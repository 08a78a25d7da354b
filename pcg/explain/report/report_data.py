"""The data of a report: the bytes a model needs under a recipe, with reasons."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    "token-level": "in windows, K/V cached",
    "checkpointing": "transformers' own",
    "torch-partitioner": "torch.compile's default",
}
"""The stages, and in words what each of them saves."""
LAYOUTS = {"|-2": "column-parallel", "|-1": "row-parallel"}
"""The layouts of weights over ranks, in words."""


@dataclass(frozen=True)
class Stage:
    """The bytes that one way to train saves for backward.

    Attributes:
        bytes_per_block: the bytes of one layer, on average over all but the first.
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
        restored: the number of layers that save no input, as they share that of a layer before;
            only a budget in bytes goes there.
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
        usable_bytes: its memory without a reserve.
        largest_batch: the largest batch at the report's sequence length and budget; 0 for none.
        largest_seq: the largest sequence length at its batch and budget; 0 for none.
        least_largest_batch: the largest batch with a memory budget of 0.
        least_largest_seq: the largest sequence length with a memory budget of 0.
        advice: options, each of which lets the step fit.
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
        tensor: its graph and value.
        shape: its shape in this batch.
        bytes: its bytes if saved, in one layer.
        formula: the same in B and S.
        needed_by: operators of backward that read it.
        decision: "save", "compress", "recompute" or "drop".
        layers: the number of layers that have it.
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
    """Layers of the training program that save the same.

    Attributes:
        name: the name of their forward, with which `SavedTensor.tensor` begins.
        layers: their indices.
        trained: the number of parameters that each of them trains.
        bytes: the bytes that each of them saves for backward.
        has_backward: False below the lowest layer that trains anything: no backward runs there.
    """

    name: str
    layers: tuple[int, ...]
    trained: int
    bytes: int
    has_backward: bool


@dataclass(frozen=True)
class Moment:
    """One moment of a finetuning step.

    Attributes:
        label: "forward 0" for a layer, "loss", "backward 0".
        kept_bytes: the bytes saved for backward.
        workspace_bytes: the most bytes of other values that are alive at once.
    """

    label: str
    kept_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of both."""
        return self.kept_bytes + self.workspace_bytes


@dataclass(frozen=True)
class GraphNode:
    """A node of a layer's forward graph, or an input of it; weights and views are left out.

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
    """The fields of a report; memory is in bytes of one rank.

    `memory_bytes` has, for one finetuning step of `batch` sequences of `seq` tokens:

    - weights: the base model's parameters and constants, as they lie in memory after loading: on a
      CPU with oneDNN's packed copies of them;
    - adapters: the trainable parameters, in fp32 over half precision as peft has them;
    - gradients: one for each trainable parameter, in its dtype;
    - optimizer: the states of `optimizer`, for AdamW two moments and the count of steps; where they
      are offloaded, what stays of them on the device;
    - served_adapters: where requests are served beside it, the copies that they read of all the
      adapters; on a CPU also the tensors of the versions that are served while others are trained;
    - kv_cache: keys and values of requests that are served beside it; without adapters, those of
      batch · seq tokens;
    - activations: the bytes that pcg's training program saves for backward (stage `compressed`, or
      `fp8` where lossy activations are asked for; `eager` where pcg cannot train the model);
    - workspace: the other bytes of the step's peak, which is the loss over one chunk of tokens or
      one layer's forward or backward; less the saved bytes that were freed by then.

    `host_bytes` has the bytes of offloaded kinds in host memory, beside a GPU's, and those of the
    served versions of the adapters, of which a GPU has copies. `packed_bytes` are
    those of oneDNN's packed copies, which `memory_bytes` counts among the weights.
    `allocator_bytes` are those that the allocator of a CPU's process may hold beside the total.

    `kept_bytes` are those that a job like this one, when it has ended, may hold beside the
    `memory_bytes` of others that run: what its recorded windows save for backward (stage
    `token-level`), the workspace of a layer of them, its adapter and gradients. 0 where no windows
    are recorded.

    `backend` is what `auto` stands for on such a device, and why; GPUs are of capability 8.0 or
    later here.

    Of `cp` ranks that share the tokens of sequences, memory is that of one; `context` says how many
    it has, and what it sends for one step.

    `shard_base` are the replicas that have parts of the layers' weights: a rank's weights are its
    part, two gathered layers, and what is outside the layers. `gathered` has, of a step of one
    batch, the layers that a rank gathers, and the bytes that it sends for them.

    Of `pp` pipeline stages, memory is that of the largest one's rank. `stages` says of each its
    layers, the micro-batches that it has under way, its memory, and what it sends for one step:
    activations on, and gradients back.

    `gpus` are all known GPUs that a rank fits, `fits` says more of those that were asked for.
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
        """The number of ranks that a step is over."""
        return self.tp * self.cp * self.pp

    @property
    def chosen_stage(self) -> Stage | None:
        """The stage that the report's activations are of; None where nothing is trained."""
        return self.trained_stage or self.stage("eager")

    @property
    def trained_stage(self) -> Stage | None:
        """The stage of the program that trains; None where pcg cannot train the model."""
        return self.stage("fp8") or self.stage("compressed")

    def stage(self, name: str) -> Stage | None:
        """Return the stage of a name, if there is one."""
        return next((stage for stage in self.activations if stage.stage == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, which `pcg explain --json` prints."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def saved_bytes_at(self, recompute_flops_ratio: float) -> int | None:
        """Return the bytes of pcg's front at a share of recomputed operations; None for none.

        Above the share that the fewest bytes need, these are the fewest bytes.
        """
        front = [(p.recompute_flops_ratio, p.bytes) for p in self.pareto if not p.restored]
        below = [point for point in front if point[0] <= recompute_flops_ratio]
        if not below:
            return None
        if len(below) == len(front):
            return below[-1][1]
        (left, most), (right, least) = below[-1], front[len(below)]
        return round(most - (most - least) * (recompute_flops_ratio - left) / (right - left))
