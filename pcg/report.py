"""The report of `pcg.explain`: what a model needs under a recipe, in bytes, and why.

The file is long because all that a report holds stands in it beside the text that shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

from pcg.parallel.report_lines import parallel_lines, region_lines

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

_STAGES = {
    "eager": "transformers + peft",
    "pruned": "all that gradients read",
    "rematerialized": "the rest made again",
    "compressed": "and bits for signs: pcg",
    "checkpointing": "transformers' own",
    "torch-partitioner": "torch.compile's default",
}
_BAR_CELLS = 28
_BLOCKS = " ▏▎▍▌▋▊▉█"


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
class Fit:
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
class Report:
    """What `pcg.explain` found; memory is in bytes of one rank.

    `memory_bytes` has, for one finetuning step of `batch` sequences of `seq` tokens:

    - weights: the base model's parameters;
    - adapters: the trainable parameters, in fp32 over half precision as peft has them;
    - gradients: one for each trainable parameter, in its dtype;
    - optimizer: AdamW's two moments in fp32;
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
    fits: tuple[Fit, ...] = ()
    memory_budget: str = "1"
    timeline: tuple[Moment, ...] = ()
    graph: tuple[GraphNode, ...] = ()
    peers: tuple[PeerPoint, ...] = ()

    def to_html(self) -> str:
        """The report as one HTML page that needs no other file, `pcg explain --html`."""
        from pcg.html.page import page

        return page(self)

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

    def to_text(self, tensors: bool = False, formulas: bool = False) -> str:
        """The report as monospaced text of at most 100 columns, formulas apart.

        Args:
            tensors: list every tensor of a layer, and what becomes of it.
            formulas: of every kind of memory, instead of the numbers.
        """
        if formulas:
            lines = [*self._heading(), "", *self._formulas(self.formulas), *self._region()]
            lines += region_lines(self.parallel)
            return "\n".join(lines)
        parts = [self._heading(), self._memory()]
        if self.activations:
            parts.append(self._stages())
        if len(self.pareto) > 1:
            parts.append(self._budgets())
        if self.parallel["bypass"]:
            parts.append(parallel_lines(self.parallel, candidates=tensors))
        if self.peers:
            parts.append(self._peers())
        if tensors and self.saved:
            parts.append(self._tensors())
        parts += [self._fit(fit) for fit in self.fits]
        parts.append(self._formulas(("activations", "kv_cache", "total")))
        if self.notes:
            parts.append(
                [fill(note, 98, initial_indent="* ", subsequent_indent="  ") for note in self.notes]
            )
        return "\n\n".join("\n".join(lines) for lines in parts)

    # --------------------------------------------------------------------------------- text

    def _heading(self) -> list[str]:
        base, trainable = self.parameters["base"], self.parameters["trainable"]
        share = f" ({trainable / base:.2%} of the base)" if trainable else ""
        ranks = "one rank" if self.tp == 1 else f"{self.tp} ranks"
        step = f"batch {self.batch} × {self.seq:,} tokens"
        return [
            f"{self.model}  ·  {self.architecture}  ·  {self.layers} layers  ·  {self.dtype}",
            f"{self.peft or 'no adapters'}  ·  {step}  ·  {ranks}",
            "",
            f"parameters   {count_text(base)} base, {count_text(trainable)} trainable{share}",
        ]

    def _memory(self) -> list[str]:
        total = self.memory_bytes["total"]
        lines = ["memory of a rank       GiB"]
        for kind in (*KINDS, "total"):
            size = self.memory_bytes[kind]
            line = f"  {kind.replace('kv_', 'KV '):<14}{gib(size):>10}  {bar(size, total)}"
            lines.append(line.rstrip())
        return lines

    def _stages(self) -> list[str]:
        most = max(stage.bytes for stage in self.activations)
        wide = max(14, *(len(stage.stage) + 1 for stage in self.activations))
        lines = [f"{'kept for backward':<{wide + 3}}      GiB   MiB a layer   recomputed"]
        lines += [
            f"  {stage.stage:<{wide}}{gib(stage.bytes):>10}{stage.bytes_per_block / 2**20:>14,.1f}"
            f"{stage.recompute_flops_ratio:>13.0%}  {bar(stage.bytes, most, 16):<16}"
            f"  {_STAGES.get(stage.stage, '')}".rstrip()
            for stage in self.activations
        ]
        return lines

    def _budgets(self) -> list[str]:
        """The corners of the front; the plans between two of them mix them over the layers."""
        shares = [point.bytes for point in self.pareto if not point.restored]
        most, least = shares[0], shares[-1]
        lines = ["memory budgets         GiB   recomputed"]
        for point in self.pareto:
            share = 1.0 if most == least else (point.bytes - least) / (most - least)
            name = "in bytes" if point.restored else f"{share:.3f}"
            line = f"  {name:<14}{gib(point.bytes):>10}{point.recompute_flops_ratio:>13.1%}"
            if point.restored:
                line += f"   {point.restored} layers share the saved input of one before"
            lines.append(line)
        lines.append("  between two, layers mix their plans: --memory-budget 0 to 1, or bytes")
        return lines

    def kept_at(self, recompute_flops_ratio: float) -> int | None:
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

    def _peers(self) -> list[str]:
        """The points of torch's partitioner, and pcg where as many operations are made again."""
        lines = ["torch's partitioner    GiB   MiB a layer   recomputed   pcg there, GiB"]
        for point in self.peers:
            ours = self.kept_at(point.recompute_flops_ratio)
            lines.append(
                f"  budget {point.budget:<7}{gib(point.bytes):>10}"
                f"{point.bytes_per_block / 2**20:>14,.1f}{point.recompute_flops_ratio:>13.1%}"
                f"{'-' if ours is None else gib(ours):>17}"
            )
        return lines

    @staticmethod
    def _fit(fit: Fit) -> list[str]:
        verdict = "fits" if fit.fits else "does not fit"
        lines = [
            f"{fit.gpu}   {gib(fit.usable_bytes)} GiB of {gib(fit.memory_bytes)} usable: {verdict}",
            f"  largest batch  {fit.largest_batch:>10,}   {fit.least_largest_batch:>10,} with "
            "--memory-budget 0",
            f"  longest seq    {fit.largest_seq:>10,}   {fit.least_largest_seq:>10,} with "
            "--memory-budget 0",
        ]
        return lines + [f"  to make it fit: {option}" for option in fit.advice]

    def _tensors(self) -> list[str]:
        wide = max(len(row.tensor) for row in self.saved)
        lines = [f"{'tensor':<{wide}}  {'MiB':>9}  layers  what becomes of it, and why"]
        for row in self.saved:
            shape = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
            lines.append(
                f"{row.tensor:<{wide}}  {row.bytes / 2**20:>9,.3f}  {row.layers:>6}  "
                f"{row.decision}: {row.reason}"
            )
            readers = f", read by {', '.join(row.needed_by)}" if row.needed_by else ""
            lines.append(f"{'':<{wide}}  {shape}{readers}")
        return lines

    def _formulas(self, names: Iterable[str]) -> list[str]:
        rank = " and adapters of rank r" if self.rank_region else ""
        over = " over tp ranks" if self.formula_degrees else ""
        lines = [f"bytes, for B sequences of S tokens{rank}{over}"]
        return lines + [
            f"  {name.replace('kv_', 'KV '):<12}= {self.formulas[name]}" for name in names
        ]

    def _region(self) -> list[str]:
        if self.region is None:
            return []
        low, high = self.region
        where = f"for S from {low:,} to {high:,} at B = {self.batch}"
        if self.rank_region is not None:
            where += ", and for r from {:,} to {:,}".format(*self.rank_region)
        return [
            "",
            *self._degrees(),
            f"The plan is the budget's optimum {where}:",
            "no other choice of saved tensors keeps fewer bytes for as few operations made again,",
            "where a tensor is kept whole or made again from what is, and weights are resident.",
        ]

    def _degrees(self) -> list[str]:
        """At which degrees which formulas are exact, a line for each set of degrees."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, degrees in self.formula_degrees.items():
            groups.setdefault(degrees, []).append(name.replace("kv_", "KV "))
        return [
            f"Exact at tp = {', '.join(map(str, degrees))}: {', '.join(names)}."
            for degrees, names in groups.items()
        ]


def comparison(reports: Mapping[str, Report]) -> str:
    """Reports of one model side by side, as text: a line each.

    Args:
        reports: by what each is called.
    """
    first = next(iter(reports.values()))
    wide = max(len(name) for name in reports)
    lines = [
        f"{first.model}  ·  {first.dtype}  ·  batch {first.batch} × {first.seq:,} tokens",
        "",
        f"{'':<{wide}}  {'trainable':>10}  {'states':>8}  {'kept':>8}  {'recomputed':>10}"
        f"  {'workspace':>9}  {'total':>8}  GiB",
    ]
    most = max(report.memory_bytes["total"] for report in reports.values())
    for name, report in reports.items():
        memory = report.memory_bytes
        states = sum(memory[kind] for kind in ("adapters", "gradients", "optimizer"))
        ours = [stage for stage in report.activations if stage.stage == "compressed"]
        again = f"{ours[0].recompute_flops_ratio:.0%}" if ours else "-"
        lines.append(
            f"{name:<{wide}}  {count_text(report.parameters['trainable']):>10}  {gib(states):>8}"
            f"  {gib(memory['activations']):>8}  {again:>10}  {gib(memory['workspace']):>9}"
            f"  {gib(memory['total']):>8}  {bar(memory['total'], most, 12)}"
        )
    for gpu in first.fits:
        fitting = [
            f"{name} (batch {fit.largest_batch:,})"
            for name, report in reports.items()
            for fit in report.fits
            if fit.gpu == gpu.gpu and fit.fits
        ]
        lines += ["", f"{gpu.gpu} holds {', '.join(fitting) or 'none of them'}"]
    return "\n".join(lines)


def gib(size_bytes: int) -> str:
    """Bytes in GiB; two more places for what is small."""
    size = size_bytes / 2**30
    return "0" if not size_bytes else f"{size:,.{2 if size >= 0.01 else 4}f}"


def bar(part: int, whole: int, cells: int = _BAR_CELLS) -> str:
    """A bar whose length is the share of the whole, to an eighth of a cell; never none for some."""
    eighths = round(8 * cells * part / whole) if whole else 0
    if part:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


def count_text(number: int) -> str:
    """A number of parameters as people say it: 8.03 B, 41.9 M."""
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:,.{2 if number < 100 * size else 1}f}{unit}"
    return f"{number}"
