"""Memory of each pipeline stage's rank; a report shows the largest as its own.

    activations = n · saved for a micro-batch by the stage's layers
    workspace   = the rest of the peak, and the messages to and from other stages

Of S stages, numbered from 0, a stage has at most n = S - stage micro-batches in flight
(`pcg.runtime.training.step`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pcg.errors import UnsupportedError
from pcg.explain.planned_model import PipelineStep, PlannedModel
from pcg.explain.report.report import Report
from pcg.explain.report.report_data import KINDS
from pcg.explain.report_builder import host_bytes
from pcg.explain.step_memory import bytes_at, state_memory, step_memory, timeline
from pcg.ir.graph import Graph, Value
from pcg.ir.program.program import ModelGraph
from pcg.ir.program.saved_memory import SavedMemory, saved_memory
from pcg.options import ExplainOptions
from pcg.ranks.stages import UNDER_WAY, Stage, Stages, cut_stages, link_bytes
from pcg.runtime.training.step import parts_of_batch


def pipeline_step(options: ExplainOptions) -> PipelineStep:
    """Return the division of a report's step into pipeline stages.

    Raises:
        UnsupportedError: an option that reports of stages do not support.
    """
    for name in ("gpus", "serve_tokens", "find_region", "peers"):
        if value := getattr(options, name):
            raise UnsupportedError(
                f"{name}={value!r} with pp={options.pp}: it is not known of pipeline stages; leave "
                f"{name} out, or use pp=1"
            )
    for name in ("cp", "shard_base"):
        if (value := getattr(options, name)) > 1:
            raise UnsupportedError(
                f"{name}={value} with pp={options.pp}: a report is of one of them; use {name}=1, "
                "or pp=1"
            )
    if options.budget.size_bytes is not None:
        raise UnsupportedError(
            f"memory_budget={options.budget.written!r} with pp={options.pp}: it is planned for all "
            "layers of one rank; use a share such as 0.5, or pp=1"
        )
    batches = options.gradient_accumulation_steps
    parts = min(parts_of_batch(batches, options.pp), options.batch)
    return PipelineStep(options.pp, options.batch, parts * batches)


def with_stages(report: Report, planned: PlannedModel) -> Report:
    """Add the memory of each stage to a report; the report's own memory is that of the largest."""
    setup = planned.setup
    assert setup.pipeline is not None
    if planned.trained is None:
        raise UnsupportedError(
            f"pp={setup.pipeline.pp}: memory of stages is of a finetuning step; give a recipe "
            f"(--peft lora), or use pp=1 {planned.refusal}".rstrip()
        )
    stages = cut_stages(planned.whole, setup.pipeline.pp)
    rows = [_row(planned, stages, index) for index in range(stages.count)]
    largest = max(rows, key=lambda row: row["memory_bytes"]["total"])
    count, batch = setup.pipeline.micro_batches, setup.options.batch
    several = "the one micro-batch" if count == 1 else f"one of {count} micro-batches"
    note = f"B counts the sequences of {several}, {batch} each; what is saved is that of one"
    return dataclasses.replace(
        report,
        memory_bytes=largest["memory_bytes"],
        host_bytes=host_bytes(_part(planned, stages[largest["stage"]])),
        formulas={},
        timeline=(),
        gpus=(),
        pareto=tuple(point for point in report.pareto if not point.restored),
        pp=stages.count,
        stages=tuple(rows),
        notes=(*report.notes, note),
    )


def _row(planned: PlannedModel, stages: Stages, index: int) -> dict[str, Any]:
    setup, stage = planned.setup, stages[index]
    assert setup.pipeline is not None
    tokens, count = setup.options.batch * setup.options.seq, setup.pipeline.micro_batches
    under_way = min(count, stages.count - index)
    model = planned.training.model
    on, back = (0, 0) if stage.is_last else link_bytes(model, stages, index + 1, tokens)
    came, returned = (0, 0) if stage.is_first else link_bytes(model, stages, index, tokens)
    if not stage.is_last and not _goes_back(planned, stage.layers.stop - 1):
        back = 0
    if not stage.is_first and not _goes_back(planned, stage.layers.start - 1):
        returned = 0
    messages = UNDER_WAY * (on + returned) + came + back
    return {
        "stage": index,
        "layers": [stage.layers.start, stage.layers.stop - 1],
        "micro_batches": under_way,
        "memory_bytes": _memory(planned, stage, under_way, messages),
        "forward_bytes": on * count,
        "backward_bytes": returned * count,
    }


def _goes_back(planned: PlannedModel, layer: int) -> bool:
    plan = planned.training.plan
    return plan.plans[plan.layers[layer]].backward is not None


def _memory(planned: PlannedModel, stage: Stage, under_way: int, messages: int) -> dict[str, int]:
    part, at = _part(planned, stage), planned.setup.at
    formulas, _ = step_memory(dataclasses.replace(part, trained=None))
    sizes = {kind: bytes_at(formulas[kind], at) for kind in KINDS}
    saved = saved_memory(part.training.model, part.training.plan)
    if not stage.is_last:
        outside = [row for row in saved.outside if row.tensor.startswith("prologue.")]
        saved = SavedMemory(saved.layers, tuple(outside))
    moments = timeline(part, saved, has_loss=stage.is_last)
    batch_bytes = bytes_at(saved.total, at)
    peak = max(bytes_at(moment.saved + moment.workspace, at) for moment in moments)
    peak += (under_way - 1) * batch_bytes + messages
    sizes["activations"] = under_way * batch_bytes
    # An optimizer in host memory has a parameter's states on the device during an update.
    sizes["workspace"] = max(peak, state_memory(part).update_bytes) - under_way * batch_bytes
    return sizes | {"total": sum(sizes.values())}


def _part(planned: PlannedModel, stage: Stage) -> PlannedModel:
    trained = planned.training
    layers = slice(stage.layers.start, stage.layers.stop)
    plan = dataclasses.replace(
        trained.plan,
        layers=trained.plan.layers[layers],
        layer_flops=trained.plan.layer_flops[layers],
    )
    attached = planned.attached
    return dataclasses.replace(
        planned,
        base=_of_layers(planned.base, stage),
        attached=None if attached is None else _of_layers(attached, stage),
        trained=dataclasses.replace(trained, model=_of_layers(trained.model, stage), plan=plan),
    )


def _of_layers(model: ModelGraph, stage: Stage) -> ModelGraph:
    """Return a model with the stage's layers only, and pass-through graphs for missing ends."""
    prologue, epilogue = model.prologue, model.epilogue
    if not stage.is_first:
        prologue = _passing(prologue, prologue.inputs)
    if not stage.is_last:
        epilogue = _passing(epilogue, epilogue.inputs)
    layers = model.layers[stage.layers.start : stage.layers.stop]
    return ModelGraph(prologue, model.blocks, layers, epilogue)


def _passing(graph: Graph, inputs: tuple[Value, ...]) -> Graph:
    """Return a graph without nodes that takes its outputs as further inputs."""
    outputs = tuple(Value(name, graph.types[name]) for name in graph.outputs)
    return graph.replace(inputs=(*inputs, *outputs), parameters=(), nodes=())
