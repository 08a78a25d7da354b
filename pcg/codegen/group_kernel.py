"""Emission of the Triton kernel of a group of nodes, and of the decorator that launches it.

A group is a function over a grid of row blocks and column blocks. Groups that run side by side are
separate functions, and each program calls its own:

    program = program_id        part i runs where first_i <= program < first_(i + 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from pcg.codegen.lines import filled
from pcg.codegen.tile_kernel import (
    TileShape,
    TileWriter,
    arguments_of,
    constants_of,
    deferred_numbers,
    unspecialised,
)
from pcg.ir.analysis.kernel_group import KernelGroup
from pcg.ir.program.program import python_name


@dataclass(frozen=True)
class GroupKernel:
    """A kernel's Triton source, including its parts, and data for its launch.

    Attributes:
        scope: path of the innermost module that holds all nodes.
        appends: True if some outputs go to the KV cache; it then also reads the batch.
    """

    name: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: str
    appends: bool


def group_kernel(group: KernelGroup, name: str) -> GroupKernel:
    """Return the kernel of a group, under a name."""
    write = _side_by_side if group.parts else _alone
    levels = zip(*(node.scope.split(".") for node in group.nodes), strict=False)
    scope = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    source, appends = write(group, name), any(group.appended(output) for output in group.outputs)
    return GroupKernel(name, source, group.inputs, group.outputs, scope, appends)


def _alone(group: KernelGroup, name: str) -> str:
    shape = TileShape.of(group)
    lines = [
        "@K.fused(",
        *filled([f"{_inputs(group)},", f"outputs=({_outputs(group, group)}),"]),
        f"    {_cut(shape)}, warps={shape.warps},",
        ")",
        TileWriter(group, name, shape).written(),
    ]
    return "\n".join(lines)


def _side_by_side(group: KernelGroup, name: str) -> str:
    elements = max(TileShape.of(part).elements for part in group.parts)
    shapes = [TileShape.of(part, elements) for part in group.parts]
    names = [f"{name}_of_{python_name(part.outputs[0])}" for part in group.parts]
    functions = [
        TileWriter(part, part_names, shape, is_part=True).written()
        for part, part_names, shape in zip(group.parts, names, shapes, strict=True)
    ]
    firsts = [f"first_{i}" for i in range(1, len(group.parts))]
    constants = [f"{name}: tl.constexpr" for name in constants_of(group)]
    arguments = [*arguments_of(group), "tokens", *firsts, *constants]
    kernel = [
        "@K.side_by_side(",
        f"    {_inputs(group)}, warps={max(shape.warps for shape in shapes)},",
        "    parts=(",
        *_parts(group, shapes),
        "    ),",
        ")",
        unspecialised(["tokens", *firsts, *deferred_numbers(group)]),
        f"def {name}(",
        *filled([f"{argument}," for argument in arguments]),
        "):",
        *filled(f'"""{"; ".join(map(_operators, group.parts))}."""'.split()),
        "    program = tl.program_id(0)",
    ]
    for i, (part, part_names, shape) in enumerate(zip(group.parts, names, shapes, strict=True)):
        kernel.append(f"    {_condition(i, len(group.parts))}:")
        kernel += _call(part, part_names, shape, f"program - first_{i}" if i else "program")
    return "\n\n\n".join([*functions, "\n".join(kernel)])


def _inputs(group: KernelGroup) -> str:
    flags = ", ".join(str(group.graph.types[name].is_token_wise) for name in group.inputs)
    source = f"token_wise=({flags},)"
    for kind, names in (("apart", group.apart), ("deferred", group.deferred)):
        if names:
            source += f", {kind}=({', '.join(str(group.inputs.index(n)) for n in names)},)"
    return source


def _cut(shape: TileShape) -> str:
    return (
        f"rows_a_token={shape.rows_a_token}, columns={shape.columns}, "
        f"block=({shape.row_block}, {shape.column_block})"
    )


def _outputs(part: KernelGroup, group: KernelGroup) -> str:
    return "".join(f'"{_output(name, group)}", ' for name in part.outputs).removesuffix(" ")


def _output(name: str, group: KernelGroup) -> str:
    """Return an output's type without tokens; for an appended output, with its cache and source."""
    whole = group.graph.types[name]
    type_ = f"{whole.dtype}[{', '.join(map(str, whole.features))}]"
    node = group.appended(name)
    if node is None:
        return type_
    values = (*group.inputs, *group.outputs)
    origin = f" of {values.index(node.inputs[0])}" if node.inputs[0] in values else ""
    return f"{node.attribute('to')} {type_}{origin}"


def _parts(group: KernelGroup, shapes: list[TileShape]) -> Iterator[str]:
    for part, shape in zip(group.parts, shapes, strict=True):
        yield "        K.FusedPart("
        yield from filled([f"{_cut(shape)},", f"outputs=({_outputs(part, group)}),"], 12)
        yield "        ),"


def _operators(group: KernelGroup) -> str:
    return ", ".join(dict.fromkeys(node.op for node in group.nodes))


def _condition(number: int, count: int) -> str:
    if number == count - 1:
        return "else"
    return f"{'elif' if number else 'if'} program < first_{number + 1}"


def _call(part: KernelGroup, name: str, shape: TileShape, program: str) -> list[str]:
    rows = "tokens" if shape.rows_a_token == 1 else f"tokens * {shape.rows_a_token}"
    constants = [f"ROWS={shape.row_block}", f"COLUMNS={shape.column_block}"]
    constants += [f"{name}={name}" for name in constants_of(part)]
    words = [f"{word}," for word in (program, *arguments_of(part), rows, *constants)]
    return [f"        {name}(", *filled(words, 12), "        )"]
