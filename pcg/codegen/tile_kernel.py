"""Write the Triton kernel of a group of nodes.

A program has a tile of ROWS rows and COLUMNS columns. Where nothing is summed a row is a token,
with all its features side by side; else it is what is summed, and a token has several:

    row = token · R + group          R rows a token

Each value is an expression over the place that is asked for, (group, column) among its own
features, so what reads a value at another column (rotary embedding) or with other features (a
reshape) makes it again there. Arithmetic is in fp32 at least; each operator's result is rounded to
its dtype, as in PyTorch.

The file is long by a few lines: the writer of a kernel, and of the places that its values are at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from pcg.ir.graph import Node
from pcg.ir.operators import operator
from pcg.ir.operators.tile import Tile
from pcg.ir.program import python_name
from pcg.ir.types import TensorType
from pcg.passes.groups import Group

_WIDE = {"f16": "f32", "bf16": "f32"}
_TRITON_NAMES = {
    "f64": "tl.float64",
    "f32": "tl.float32",
    "bf16": "tl.bfloat16",
    "f16": "tl.float16",
    "i64": "tl.int64",
    "i32": "tl.int32",
    "u8": "tl.uint8",
    "bool": "tl.int1",
}
_TILE = 2048
"""Elements of a tile where rows are short: four warps load 16 bytes of bf16 a thread, twice."""
_MOST_ROWS = 16
_WARP_ELEMENTS = 512
"""Elements of a tile that a warp holds: 16 registers a thread for each value in fp32."""
WIDTH = 100
_OWN_NAMES = ("row", "rows", "column", "group", "token", "inside", "in_row", "in_rows", "tl", "K")


@dataclass(frozen=True)
class Place:
    """Where in a value's features: which of its rows, and where in that.

    Attributes:
        group: expression; "0" where there is one row a token.
        column: expression; "0" where a row has one element.
        mask: condition of elements that are there; empty where all are.
    """

    group: str
    column: str
    mask: str = ""


@dataclass(frozen=True)
class TileKernel:
    """A kernel's source, and what its launcher has to know.

    Attributes:
        name: of the function.
        source: Triton source, from its decorator on.
        inputs: values that it is given, in order.
        outputs: values that it makes, in order.
    """

    name: str
    source: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def tile_kernel(group: Group, name: str) -> TileKernel:
    """The kernel of a group, under a name."""
    return _Writer(group, name).written()


@dataclass(frozen=True)
class _Shape:
    """How a kernel's tiles lie.

    Attributes:
        rows_a_token: R.
        columns: of a row.
        row_block: ROWS.
        column_block: COLUMNS.
        warps: of a program.
    """

    rows_a_token: int
    columns: int
    row_block: int
    column_block: int
    warps: int

    @classmethod
    def of(cls, group: Group) -> _Shape:
        features = group.type.features
        if group.sums_rows:
            rows, columns = prod(features[:-1]), features[-1]
            column_block = _power_of_two(columns)
        else:
            rows, columns = 1, prod(features)
            column_block = min(_power_of_two(columns), _TILE)
        row_block = max(1, min(_TILE // column_block, _MOST_ROWS))
        elements = row_block * column_block
        warps = max(1, min(_power_of_two(elements // _WARP_ELEMENTS), 32))
        return cls(rows, columns, row_block, column_block, warps)

    @property
    def is_padded(self) -> bool:
        """Whether some columns of a tile are behind a row's end."""
        return bool(self.columns % self.column_block)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@dataclass
class _Writer:
    """Writes one kernel.

    Attributes:
        group: of nodes.
        name: of the function.
        lines: of its body, so far.
        variables: by what they hold: a value at a place, an expression, a sum.
        taken: names in use.
    """

    group: Group
    name: str
    lines: list[str] = field(default_factory=list)
    variables: dict[object, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: set(_OWN_NAMES))

    def __post_init__(self) -> None:
        self.shape = _Shape.of(self.group)
        self.types = self.group.graph.types
        self.makers = {node.name: node for node in self.group.nodes}

    def written(self) -> TileKernel:
        stored = [self._stored(name) for name in self.group.outputs]
        source = "\n".join(self._head() + self.lines + stored)
        return TileKernel(self.name, source, self.group.inputs, self.group.outputs)

    # ------------------------------------------------------------------------- the function

    def _head(self) -> list[str]:
        shape = self.shape
        pointers = [
            f"{python_name(name)}_ptr" for name in (*self.group.inputs, *self.group.outputs)
        ]
        strides = [f"{python_name(name)}_stride" for name in self._token_wise_inputs()]
        arguments = [*pointers, *strides, "rows", "ROWS: tl.constexpr", "COLUMNS: tl.constexpr"]
        types = [str(self.types[name]).replace("T, ", "", 1) for name in self.group.outputs]
        outputs = ", ".join(f'"{type_}"' for type_ in types)
        flags = ", ".join(str(self.types[name].is_token_wise) for name in self.group.inputs)
        lines = [
            "@K.fused(",
            *_filled([f"token_wise=({flags},),", f"outputs=({outputs},),"]),
            f"    rows_a_token={shape.rows_a_token}, columns={shape.columns}, "
            f"block=({shape.row_block}, {shape.column_block}), warps={shape.warps},",
            ")",
            '@triton.jit(do_not_specialize=["rows"])',
            f"def {self.name}(",
            *_filled([f"{argument}," for argument in arguments]),
            "):",
            f'    """{self._summary()}',
            "",
            *(f"    {line}" for line in self._nodes()),
            '    """',
            "    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]",
        ]
        if shape.columns == shape.column_block:
            lines.append("    column = tl.arange(0, COLUMNS)[None, :]")
        else:
            lines.append("    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]")
        lines.append("    in_rows = row < rows")
        if shape.is_padded:
            lines.append(f"    in_row = column < {shape.columns}")
            lines.append("    inside = in_rows & in_row")
        if shape.rows_a_token == 1:
            return [*lines, "    token = row.to(tl.int64)"]
        lines.append(f"    token = (row // {shape.rows_a_token}).to(tl.int64)")
        return [*lines, f"    group = row % {shape.rows_a_token}"]

    def _summary(self) -> str:
        operators = dict.fromkeys(node.op for node in self.group.nodes)
        return f"{', '.join(operators)}."

    def _nodes(self) -> list[str]:
        """The nodes that it came from, as text IR without types, under their modules."""
        lines, scope = [], None
        for node in self.group.nodes:
            if node.scope != scope:
                scope = node.scope
                lines.append(f"{scope or 'layer'}:")
            attributes = "".join(f", {name}={value!r}" for name, value in node.attributes)
            lines.append(f"    {node.name} = {node.op}({', '.join(node.inputs)}{attributes})")
        return lines

    def _token_wise_inputs(self) -> list[str]:
        return [name for name in self.group.inputs if self.types[name].is_token_wise]

    def _stored(self, name: str) -> str:
        type_ = self.types[name]
        place = self.main(type_)
        value = self.value(name, place)
        address = f"{python_name(name)}_ptr + token * {prod(type_.features)}"
        mask = "inside" if self.shape.is_padded else "in_rows"
        return _line(f"tl.store({address} + {self._offset(place, type_)}, {value}, {mask})")

    # ------------------------------------------------------------------------- values

    def main(self, type_: TensorType) -> Place:
        """The place of a program's own elements among a value's features."""
        rows, size = prod(type_.features[:-1]), type_.features[-1]
        if self.shape.rows_a_token > 1:
            return Place("group", "column")
        if rows == 1:
            return Place("0", "column")
        which = self.let("which", f"column // {size}")
        return Place(which, self.let("within", f"column % {size}"))

    def value(self, name: str, place: Place) -> str:
        """A variable with a value at a place."""
        key = (name, place)
        if key not in self.variables:
            node = self.makers.get(name)
            if node is None:
                self.variables[key] = self._loaded(name, place)
            else:
                tile = _NodeTile(self, node, place)
                found = operator(node.op).tile(tile, dict(node.attributes))
                rounded = tile.rounded(found, node.output.type.dtype)
                self.variables[key] = self.assign(name, rounded)
        return self.variables[key]

    def _loaded(self, name: str, place: Place) -> str:
        type_, padded = self.types[name], self.shape.is_padded
        has_rows, is_flat = place.group != "0", self.shape.rows_a_token == 1
        terms = [f"{python_name(name)}_ptr"]
        if type_.is_token_wise:
            terms.append(f"token * {python_name(name)}_stride")
        offset = self._offset(place, type_)
        if offset != "0":
            terms.append(offset)
        by_row = type_.is_token_wise or (has_rows and not is_flat)
        by_column = padded and (place.column != "0" or (has_rows and is_flat))
        masks = {(True, True): "inside", (True, False): "in_rows", (False, True): "in_row"}
        found = (masks.get((by_row, by_column), ""), place.mask)
        mask = " & ".join(one for one in found if one)
        guard = f", {mask}, other=0.0" if mask else ""
        wide = _WIDE.get(type_.dtype)
        cast = f".to({_TRITON_NAMES[wide]})" if wide else ""
        return self.assign(name, f"tl.load({' + '.join(terms)}{guard}){cast}")

    def _offset(self, place: Place, type_: TensorType) -> str:
        """A value's element among its features."""
        if self.shape.rows_a_token == 1 and replace(place, mask="") == self.main(type_):
            return "column"
        if place.group == "0":
            return place.column
        return f"{place.group} * {type_.features[-1]} + {place.column}"

    def assign(self, name: str, expression: str) -> str:
        """A new variable whose name begins so."""
        stem = python_name(name)
        variable, count = stem, 1
        while variable in self.taken:
            variable, count = f"{stem}_{count}", count + 1
        self.taken.add(variable)
        self.lines.append(_line(f"{variable} = {expression}"))
        return variable

    def let(self, name: str, expression: str) -> str:
        """A variable with an expression's value; one for equal ones."""
        key = ("let", expression)
        if key not in self.variables:
            self.variables[key] = self.assign(name, expression)
        return self.variables[key]


@dataclass(frozen=True)
class _NodeTile:
    """A node's output at a place; see `pcg.ir.operators.tile.Tile`."""

    writer: _Writer
    node: Node
    place: Place

    @property
    def column(self) -> str:
        return self.place.column

    @property
    def inputs(self) -> int:
        return len(self.node.inputs)

    def _type(self, index: int) -> TensorType:
        return self.writer.types[self.node.inputs[index]]

    def size(self, index: int) -> int:
        return self._type(index).features[-1]

    def dtype(self, index: int) -> str:
        return self._type(index).dtype

    def read(self, index: int, column: str | None = None, where: str = "") -> str:
        place = _read_at(self._type(index), self.node.output.type, self.place, self.node.op)
        masks = [mask for mask in (self.place.mask, f"({where})" if where else "") if mask]
        place = replace(place, mask=" & ".join(masks))
        if column is not None:
            place = replace(place, column=_atom(column))
        return self.writer.value(self.node.inputs[index], place)

    def let(self, name: str, expression: str) -> str:
        return self.writer.let(name, expression)

    def rounded(self, expression: str, dtype: str) -> str:
        if dtype not in _WIDE:
            return (
                f"({expression}).to({_TRITON_NAMES[dtype]})" if self._is_cast(dtype) else expression
            )
        return f"({expression}).to({_TRITON_NAMES[dtype]}).to(tl.float32)"

    def _is_cast(self, dtype: str) -> bool:
        arithmetic = {_WIDE.get(self.dtype(i), self.dtype(i)) for i in range(self.inputs)}
        return arithmetic != {dtype}

    def row_sum(self, name: str, summand: Callable[[Tile], str]) -> str:
        writer = self.writer
        type_ = self.node.output.type
        if operator(self.node.op).sums_rows and type_.features[-1] == 1:
            type_ = self._type(0)
        place = writer.main(type_)
        found = summand(replace(self, place=place))
        if writer.shape.is_padded:
            found = f"tl.where(in_row, {found}, 0.0)"
        return writer.let(name, f"tl.sum({found}, 1)[:, None]")


def _atom(expression: str) -> str:
    return expression if expression.isidentifier() or expression.isdigit() else f"({expression})"


def _read_at(read: TensorType, made: TensorType, place: Place, op: str) -> Place:
    """Where an operator reads an input, to make its output at a place."""
    own, of_output = read.features, made.features
    if op == "reshape" and own[-1:] != of_output[-1:]:
        linear = _linear(place, of_output[-1])
        if prod(own[:-1]) == 1:
            return Place("0", linear)
        return Place(f"({linear} // {own[-1]})", f"({linear} % {own[-1]})")
    column = "0" if own[-1] == 1 else place.column
    rows, rows_made = prod(own[:-1]), prod(of_output[:-1])
    if rows == rows_made:
        return Place(place.group, column)
    if rows == 1:
        return Place("0", column)
    return Place(_broadcast_group(own[:-1], of_output[:-1], place.group), column)


def _broadcast_group(own: tuple[int, ...], made: tuple[int, ...], group: str) -> str:
    """The row of an input that is repeated along some dims of rows."""
    terms, stride, own_stride = [], 1, 1
    padded = (1,) * (len(made) - len(own)) + own
    for size, size_made in zip(reversed(padded), reversed(made), strict=True):
        if size != 1:
            terms.append(f"{group} // {stride} % {size_made} * {own_stride}")
        stride, own_stride = stride * size_made, own_stride * size
    return f"({' + '.join(terms)})"


def _linear(place: Place, size: int) -> str:
    if place.group == "0":
        return place.column
    return f"({place.group} * {size} + {place.column})"


def _line(statement: str) -> str:
    """A statement of the body; what is too long for a line has a call's arguments on a second."""
    if len(statement) + 4 <= WIDTH or "(" not in statement:
        return f"    {statement}"
    opening, _, rest = statement.partition("(")
    depth, end = 1, 0
    while depth:
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    inner, closing = rest[: end - 1], rest[end - 1 :]
    return f"    {opening}(\n        {inner}\n    {closing}"


def _filled(words: list[str]) -> list[str]:
    lines = ["    " + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append("    " + word)
    return lines
