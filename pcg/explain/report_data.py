"""The data of a report: what a model needs under a recipe, in bytes, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "kv_cache",
    "activations",
    "workspace",
)
"""The kinds of memory, in the order of a report."""


@dataclass(frozen=True)
class Stage:
    """What one way to train keeps for backward.

    Attributes:
        stage: its name.
        bytes: of the whole model.
        bytes_per_block: of one layer, on average over all but the first.
        recompute_flops_ratio: floating-point operations done again, as a share of the forward's.
    """

    stage: str
    bytes: int
    bytes_per_block: int
    recompute_flops_ratio: float = 0.0


@dataclass(frozen=True)
class ParetoPoint:
    """A memory budget that pays: fewer bytes take more operations made again.

    Attributes:
        bytes: kept for backward, of the whole model.
        recompute_flops_ratio: as in `Stage`.
        restored: layers that save no input, as they share that of a layer before; only a budget in
            bytes goes there.
    """

    bytes: int
    recompute_flops_ratio: float
    restored: int = 0


@dataclass(frozen=True)
class PeerPoint:
    """What torch's min-cut partitioner keeps under an activation memory budget.

    Attributes:
        budget: from 1, torch's default, to 0.
        bytes: of the whole model.
        outside_bytes: of them, of what layers share, and of logits and loss.
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
    """What fits a GPU.

    Attributes:
        gpu: its name.
        memory_bytes: of it.
        usable_bytes: of those, without what is left free.
        fits: whether the step of the report does.
        largest_batch: that fits with the report's sequence length and budget; 0 for none.
        largest_seq: that fits with its batch and budget; 0 for none.
        least_largest_batch: the same with a memory budget of 0.
        least_largest_seq: likewise.
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
    """A tensor of the training program, and what is done with it.

    Attributes:
        tensor: its graph and value.
        op: the operator that made it.
        shape: sizes in this batch.
        dtype: torch's name.
        bytes: of one of it, where it is kept.
        formula: the same in B and S.
        needed_by: operators of backward that read it.
        decision: "save", "compress", "recompute" or "drop".
        reason: why.
        layers: how many of it there are.
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
class Moment:
    """One moment of a finetuning step.

    Attributes:
        label: "forward 0" for a layer, "loss", "backward 0".
        kept_bytes: kept for backward.
        workspace_bytes: the most of its other values that are alive at once.
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
        name: of the value that it makes.
        op: its operator; "input" for what the layer is given.
        scope: path of its module, within the layer.
        inputs: names of the nodes that it reads.
        decision: as in `SavedTensor`, of its first output.
    """

    name: str
    op: str
    scope: str
    inputs: tuple[str, ...]
    decision: str


@dataclass(frozen=True)
class ReportData:
    """What `pcg.explain` found; memory is in bytes of one rank.

    `memory_bytes` has, for one finetuning step of `batch` sequences of `seq` tokens:

    - weights: the base model's parameters;
    - adapters: the trainable parameters, in fp32 over half precision as peft has them;
    - gradients: one for each trainable parameter, in its dtype;
    - optimizer: what `optimizer` keeps of them, as AdamW two moments and the count of steps;
    - kv_cache: keys and values of batch · seq tokens, for the requests served beside it;
    - activations: what pcg's training program keeps for backward (stage `compressed`; `eager`
      where pcg cannot train the model);
    - workspace: what the fullest moment of the step needs beside all of these, the loss over one
      chunk of tokens or one layer's forward or backward; less what it need not keep any more.
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
    memory_budget: str = "1"
    optimizer: str = "adamw"
    timeline: tuple[Moment, ...] = ()
    graph: tuple[GraphNode, ...] = ()
    peers: tuple[PeerPoint, ...] = ()

    @property
    def chosen_stage(self) -> Stage | None:
        """The stage that the report's activations are of; None where nothing is trained."""
        return self.stage("compressed") or self.stage("eager")

    def stage(self, name: str) -> Stage | None:
        """Return the stage of a name, if there is one."""
        return next((stage for stage in self.activations if stage.stage == name), None)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, which `pcg explain --json` prints."""
        fields = dataclasses.asdict(self)
        fields["parameters"] = dict(self.parameters)
        fields["memory_bytes"] = dict(self.memory_bytes)
        fields["formulas"] = dict(self.formulas)
        fields["activations"] = [dataclasses.asdict(stage) for stage in self.activations]
        fields["saved"] = [
            dataclasses.asdict(row) | {"shape": list(row.shape), "needed_by": list(row.needed_by)}
            for row in self.saved
        ]
        fields["parallel"] = dict(self.parallel)
        fields["formula_degrees"] = {n: list(d) for n, d in self.formula_degrees.items()}
        fields["notes"] = list(self.notes)
        return fields

    def saved_bytes_at(self, recompute_flops_ratio: float) -> int | None:
        """Bytes of pcg's front where this share is made again; None where it has no such point.

        Where more is made again than the least needs, that is the least.
        """
        front = [(p.recompute_flops_ratio, p.bytes) for p in self.pareto if not p.restored]
        below = [point for point in front if point[0] <= recompute_flops_ratio]
        if not below:
            return None
        if len(below) == len(front):
            return below[-1][1]
        (left, most), (right, least) = below[-1], front[len(below)]
        return round(most - (most - least) * (recompute_flops_ratio - left) / (right - left))
