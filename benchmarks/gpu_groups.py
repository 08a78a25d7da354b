"""The kernels that the emitter writes for groups of nodes, against torch.compile of the same group.

The groups are those of Llama-3.1-8B's programs with LoRA on all linears: a layer served, trained
forward and backward, and the loss; those that share a kernel are measured one by one. Each becomes
a function of its own by both emitters, on random inputs of 4,096 tokens; its bytes are those of
what it reads and makes, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from gpu_case import Bench, Case, Row, Setting, check_close
from gpu_model import config
from gpu_work import Work

TOKENS = 4096
MOST: int | None = None
"""The most groups that are measured; None for all."""
LEAST_BYTES = 32 * 2**20
"""The fewest bytes of a group that is measured: less takes as long as its launch."""
TOLERANCE = {"f64": 1e-12, "f32": 1e-4, "bf16": 2e-2, "f16": 4e-3}
"""Tolerance between two ways to round, relative to the largest element."""


def group_graphs(model: Any) -> list[Any]:
    """The groups of a model's programs, each different one as a graph of its own."""
    from pcg.codegen.group_kernel import group_kernel
    from pcg.compiler import compile_program
    from pcg.ir.analysis.kernel_group import group_of
    from pcg.ir.graph import Value
    from pcg.passes.fusion.group_kernels import GroupKernels

    program = compile_program(model, "lora", dtype="bfloat16")
    found: dict[str, Any] = {}
    for where, graph in _graphs(program):
        grouped = GroupKernels().run(graph)
        for kernel in grouped.kernels:
            group = group_of(grouped, kernel)
            inputs = tuple(Value(name, graph.types[name]) for name in group.inputs)
            alone = graph.replace(
                name=f"{where}: {_operators(group.nodes)}",
                inputs=inputs, parameters=(), nodes=group.nodes, outputs=group.outputs,
            )  # fmt: skip
            found.setdefault(group_kernel(group, "fused").source, alone)
    names = Counter[str]()
    graphs = []
    for graph in found.values():
        names[graph.name] += 1
        number = f" ({names[graph.name]})" if names[graph.name] > 1 else ""
        graphs.append(graph.replace(name=f"{graph.name}{number}"))
    return graphs


def _graphs(program: Any) -> Iterator[tuple[str, Any]]:
    for graph in program.serving.model.graphs:
        yield "serving", graph
    for plan in program.training.plans:
        yield "forward", plan.forward
        if plan.backward is not None:
            yield "backward", plan.backward
    yield "loss", program.training.epilogue


def _operators(nodes: Sequence[Any]) -> str:
    return " ".join(dict.fromkeys(node.op for node in nodes))


def emitted(graph: Any, backend: str) -> Any:
    """A graph's function, of its inputs."""
    from pcg.codegen.emit import emit_module
    from pcg.codegen.program_functions import Function
    from pcg.ir.program.program import python_name
    from pcg.passes.fusion.group_kernels import GroupKernels, OrderKernels
    from pcg.runtime.model.runner import load_functions

    if backend == "triton":
        graph = OrderKernels().run(GroupKernels().run(graph))
    name = "group"
    source = emit_module("One group.", "", [Function(graph, name, "A group.")], backend)
    function = load_functions(source, f"{python_name(backend)}_group")[name]
    return lambda *inputs: function(None, None, None, *inputs)


def made_inputs(graph: Any, tokens: int, device: str) -> list[Any]:
    """Random inputs of a graph."""
    return [_made(value.type, tokens, device) for value in graph.inputs]


def _made(type_: Any, tokens: int, device: str) -> Any:
    import torch

    from pcg.ir.types import TORCH_NAMES

    shape = [tokens] * type_.is_token_wise + list(type_.features)
    dtype = getattr(torch, TORCH_NAMES[type_.dtype])
    if type_.is_float:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 100, shape, device=device).to(dtype)


def group_work(graph: Any, tokens: int) -> Work:
    """Bytes of what a graph reads and makes."""
    types = [*(value.type for value in graph.inputs), *(graph.types[n] for n in graph.outputs)]
    return Work(sum(_bytes(type_, tokens) for type_ in types))


def _bytes(type_: Any, tokens: int) -> int:
    from pcg.ir.types import DTYPE_BYTES

    return (tokens if type_.is_token_wise else 1) * prod(type_.features) * DTYPE_BYTES[type_.dtype]


def check_same(graph: Any, ours: Any, theirs: Any) -> None:
    """AssertionError: an output differs by more than rounding."""
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    for name, one, other in zip(graph.outputs, ours, theirs, strict=True):
        allowed = TOLERANCE.get(graph.types[name].dtype, 0.0)
        check_close(f"{name} of {graph.name}", one, other, allowed)


def group_settings(bench: Bench) -> Iterator[Setting]:
    """The groups that move much, those of most bytes first."""
    graphs = group_graphs(config())
    graphs.sort(key=lambda graph: -group_work(graph, TOKENS).bytes)
    graphs = [graph for graph in graphs if group_work(graph, TOKENS).bytes >= LEAST_BYTES]
    for graph in graphs[:MOST]:
        yield graph.name, lambda graph=graph: _group(bench, graph)


def _group(bench: Bench, graph: Any) -> Row:
    import torch

    inputs = made_inputs(graph, TOKENS, bench.eager_device)
    ours, eager = emitted(graph, "triton"), emitted(graph, "torch")
    check_same(graph, ours(*inputs), eager(*inputs))
    compiled = torch.compile(eager)
    peers, wrong = bench.peers_us(
        {"torch": lambda: eager(*inputs), "torch.compile": lambda: compiled(*inputs)}
    )
    ours_us = bench.timer.median_us(lambda: ours(*inputs))
    needed = group_work(graph, TOKENS)
    row = bench.row(ours_us, needed, peers_us=peers, note=wrong)
    return bench.aimed(row, "85 % of copy bandwidth", 0.85)


CASES = (Case("groups", 60, group_settings),)
