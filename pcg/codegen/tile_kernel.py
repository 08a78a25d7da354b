"""Emission of the Triton function of a group of nodes: a kernel, or a part of a kernel.

Each value is an expression over a position, (group, column) among its features, so a reader of
another column (rotary embedding) or with other features (a reshape) recomputes it there. Arithmetic
is at least in fp32; each operator's result is rounded to its dtype, as in PyTorch. An append to the
KV cache stores at its token's row, slots[token], unless that is negative.

A program has a tile of ROWS rows and COLUMNS columns. Without sums, a row is a token with all its
features; otherwise a row is a summed run of features, and a token has several rows:

    row = token · R + group          R rows a token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from pcg.codegen.lines import filled, statement, wrapped
from pcg.ir.analysis.kernel_group import KernelGroup
from pcg.ir.graph import Node
from pcg.ir.operators import operator
from pcg.ir.operators.base import Tile
from pcg.ir.printer import scope_text
from pcg.ir.program.program import python_name
from pcg.ir.types import TensorType
from pcg.kernels.sizes import DEFERRED_NUMBERS, DEFERRED_POINTERS

# -------------------------------------------------------------------------------------- tile layout


_TILE = 2048
"""Elements of a tile with short rows: four warps load 16 bytes of bf16 a thread, twice."""
_MOST_ROWS = 16
_WARP_ELEMENTS = 512
"""Elements of a tile per warp: 16 registers a thread for each value in fp32."""


@dataclass(frozen=True)
class TilePosition:
    """A position among a value's features: expressions of row and column, "0" for a single one.

    The mask is the condition of existing elements; empty if all exist.
    """

    group: str
    column: str
    mask: str = ""


@dataclass(frozen=True)
class TileShape:
    """R, the columns of a row, and ROWS, COLUMNS and warps of a program."""

    rows_a_token: int
    columns: int
    row_block: int
    column_block: int
    warps: int

    @classmethod
    def of(cls, group: KernelGroup, elements: int = _TILE) -> TileShape:
        """Return the shape for a group; `elements` is the size of a tile with shorter rows."""
        features = group.type.features
        if group.sums_rows:
            rows, columns = prod(features[:-1]), features[-1]
            column_block = _power_of_two(columns)
        else:
            rows, columns = 1, prod(features)
            column_block = min(_power_of_two(columns), _TILE)
        row_block = max(1, min(elements // column_block, _MOST_ROWS))
        held = row_block * column_block
        warps = max(1, min(_power_of_two(held // _WARP_ELEMENTS), 32))
        return cls(rows, columns, row_block, column_block, warps)

    @property
    def elements(self) -> int:
        return self.row_block * self.column_block

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.column_block)

    @property
    def is_padded(self) -> bool:
        return bool(self.columns % self.column_block)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def position_read(
    read: TensorType, output: TensorType, place: TilePosition, op: str
) -> TilePosition:
    """Return the position of the input element that an operator needs for an output position."""
    features, of_output = read.features, output.features
    if op == "reshape" and features[-1:] != of_output[-1:]:
        linear = _linear(place, of_output[-1])
        if prod(features[:-1]) == 1:
            return TilePosition("0", linear)
        return TilePosition(f"({linear} // {features[-1]})", f"({linear} % {features[-1]})")
    column = "0" if features[-1] == 1 else place.column
    rows, rows_made = prod(features[:-1]), prod(of_output[:-1])
    if rows == rows_made:
        return TilePosition(place.group, column)
    if rows == 1:
        return TilePosition("0", column)
    return TilePosition(_broadcast_group(features[:-1], of_output[:-1], place.group), column)


def _broadcast_group(input_rows: tuple[int, ...], output_rows: tuple[int, ...], group: str) -> str:
    """Return the row of an input that is repeated along some dims of rows."""
    terms, stride, own_stride = [], 1, 1
    padded = (1,) * (len(output_rows) - len(input_rows)) + input_rows
    for size, size_made in zip(reversed(padded), reversed(output_rows), strict=True):
        if size != 1:
            terms.append(f"{group} // {stride} % {size_made} * {own_stride}")
        stride, own_stride = stride * size_made, own_stride * size
    return f"({' + '.join(terms)})"


def _linear(place: TilePosition, size: int) -> str:
    if place.group == "0":
        return place.column
    return f"({place.group} * {size} + {place.column})"


# -------------------------------------------------------------------------------------- tile kernel


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
_OWN_NAMES = (
    *("row", "rows", "column", "group", "token", "inside", "in_row", "in_rows", "tl", "K"),
    *("program", "slot", "cell", "head"),
)


def arguments_of(group: KernelGroup) -> list[str]:
    """Return a group kernel's arguments: pointers, then strides of tokens, heads and the cache.

    Instead of its pointer and strides, a deferred LoRA has those of `DEFERRED_POINTERS`, and the
    numbers of `DEFERRED_NUMBERS`.
    """
    types, deferred = group.graph.types, set(group.deferred)
    pointers: list[str] = []
    for name in (*group.inputs, *group.outputs):
        parts = DEFERRED_POINTERS if name in deferred else ("ptr",)
        pointers += (f"{python_name(name)}_{part}" for part in parts)
    token_wise = [n for n in group.inputs if types[n].is_token_wise and n not in deferred]
    appended = [python_name(name) for name in group.outputs if group.appended(name)]
    return [
        *pointers,
        *(["slots_ptr"] if appended else []),
        *(f"{python_name(name)}_stride" for name in token_wise),
        *(f"{python_name(name)}_head" for name in group.apart),
        *deferred_numbers(group),
        *(f"{name}_{step}" for name in appended for step in ("page", "head", "token")),
    ]


def deferred_numbers(group: KernelGroup) -> list[str]:
    """Return the numbers of a group's deferred LoRA; kernels are not specialised for them."""
    names = map(python_name, group.deferred)
    return [f"{name}_{number}" for name in names for number in DEFERRED_NUMBERS]


def constants_of(group: KernelGroup) -> list[str]:
    """Return the constants of a group's kernel: the cache's page, and parts of deferred LoRA."""
    page = ["PAGE"] * any(group.appended(name) for name in group.outputs)
    return [*page, *(f"{python_name(name)}_PARTS" for name in group.deferred)]


def unspecialised(arguments: Sequence[str]) -> str:
    """Return the decorator of a kernel that is not specialised for some arguments' values."""
    names = [f'"{name}",' for name in arguments]
    names[-1] = names[-1].removesuffix(",")
    return "\n".join(wrapped(names, "@triton.jit(do_not_specialize=[", "])", 0))


@dataclass
class TileWriter:
    """Writes a function.

    Attributes:
        is_part: True if a kernel calls it with the number of one of its programs.
        lines: lines of its body so far.
        variables: variables by their content: a value at a position, or an expression.
        taken: names in use.
        flat: columns of a token by expressions of a row's number and a place in it.
    """

    group: KernelGroup
    name: str
    shape: TileShape
    is_part: bool = False
    lines: list[str] = field(default_factory=list)
    variables: dict[object, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: set(_OWN_NAMES))
    flat: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.types = self.group.graph.types
        self.makers = {node.name: node for node in self.group.nodes}
        self.apart = set(self.group.apart)
        self.deferred = set(self.group.deferred)

    def written(self) -> str:
        stored = [line for name in self.group.outputs for line in self._stored(name)]
        return "\n".join(self._head() + self.lines + stored)

    def _head(self) -> list[str]:
        shape = self.shape
        arguments = [*arguments_of(self.group), "rows"]
        constants = ["ROWS", "COLUMNS", *constants_of(self.group)]
        arguments += [f"{name}: tl.constexpr" for name in constants]
        lines = [unspecialised(["rows", *deferred_numbers(self.group)])]
        rows, columns = "tl.program_id(0)", "tl.program_id(1)"
        if self.is_part:
            lines, blocks = ["@triton.jit"], shape.column_blocks
            arguments.insert(0, "program")
            rows, columns = "program", f"program % {blocks}"
            rows = f"program // {blocks}" if blocks > 1 else rows
        lines += [
            f"def {self.name}(",
            *filled([f"{argument}," for argument in arguments]),
            "):",
            f'    """{", ".join(dict.fromkeys(node.op for node in self.group.nodes))}.',
            "",
            *self._nodes(),
            '    """',
            f"    row = {rows} * ROWS + tl.arange(0, ROWS)[:, None]",
        ]
        if shape.column_blocks == 1:
            lines.append("    column = tl.arange(0, COLUMNS)[None, :]")
        else:
            lines.append(f"    column = {columns} * COLUMNS + tl.arange(0, COLUMNS)[None, :]")
        lines.append("    in_rows = row < rows")
        if shape.is_padded:
            lines.append(f"    in_row = column < {shape.columns}")
            lines.append("    inside = in_rows & in_row")
        if shape.rows_a_token == 1:
            return [*lines, "    token = row.to(tl.int64)"]
        lines.append(f"    token = (row // {shape.rows_a_token}).to(tl.int64)")
        return [*lines, f"    group = row % {shape.rows_a_token}"]

    def _nodes(self) -> list[str]:
        lines: list[str] = []
        scope = None
        for node in self.group.nodes:
            if node.scope != scope:
                scope = node.scope
                lines.append(f"    {scope_text(scope) if scope else 'layer'}:")
            attributes = "".join(f", {name}={value!r}" for name, value in node.attributes)
            text = f"{node.name} = {node.op}({', '.join(node.inputs)}{attributes})"
            lines.append(statement(text, 8))
        return lines

    def _stored(self, name: str) -> list[str]:
        type_ = self.types[name]
        place = self.main(type_)
        node = self.group.appended(name)
        held = name if node is None else node.inputs[0]
        value = self.value(held, place)
        address = f"{python_name(name)}_ptr + token * {prod(type_.features)}"
        mask = "inside" if self.shape.is_padded else "in_rows"
        plain = f"tl.store({address} + {self._offset(place, type_)}, {value}, {mask})"
        if node is None:
            return [statement(plain)]
        stored = self._stored_in_cache(python_name(name), place, value, mask)
        if held in self.group.inputs or held in self.group.outputs:
            return stored
        return [*stored, "    else:", statement(plain, 8)]

    def _stored_in_cache(self, to: str, place: TilePosition, value: str, mask: str) -> list[str]:
        """Store a value at its token's cache row; the value's rows are heads."""
        head = "0" if place.group == "0" else f"{place.group}.to(tl.int64) * {to}_head"
        return [
            "    if PAGE:",
            statement("slot = tl.load(slots_ptr + token, in_rows, other=-1)", 8),
            statement(f"cell = slot // PAGE * {to}_page + slot % PAGE * {to}_token", 8),
            statement(f"head = {head}", 8),
            statement(
                f"tl.store({to}_ptr + cell + head + {place.column}, {value}, {mask} & (slot >= 0))",
                8,
            ),
        ]

    def main(self, type_: TensorType) -> TilePosition:
        """Return the position of a program's own elements among a value's features."""
        rows, size = prod(type_.features[:-1]), type_.features[-1]
        if self.shape.rows_a_token > 1:
            return TilePosition("group", "column")
        if rows == 1:
            return TilePosition("0", "column")
        which = self.let("which", f"column // {size}")
        within = self.let("within", f"column % {size}")
        # Loads are wide if adjacent addresses are recognizable.
        self.flat[f"({which} * {size} + {within})"] = "column"
        return TilePosition(which, within)

    def value(self, name: str, place: TilePosition) -> str:
        place = replace(place, column=self.flat.get(place.column, place.column))
        key = (name, place)
        if key not in self.variables:
            node = self.makers.get(name)
            if node is None:
                self.variables[key] = self._loaded(name, place)
            else:
                tile = _NodeTile(self, node, place)
                expression = operator(node.op).tile(tile, dict(node.attributes))
                rounded = tile.rounded(expression, node.output.type.dtype)
                self.variables[key] = self.assign(name, rounded)
        return self.variables[key]

    def _loaded(self, name: str, place: TilePosition) -> str:
        if name in self.deferred:
            return self._added_by_lora(name, place)
        type_ = self.types[name]
        terms = [f"{python_name(name)}_ptr"]
        mask = self._mask(type_, place)
        if type_.is_token_wise:
            terms.append(f"token * {python_name(name)}_stride")
        if name in self.apart:
            terms += [f"{place.group} * {python_name(name)}_head", place.column]
        elif (offset := self._offset(place, type_)) != "0":
            terms.append(offset)
        guard = f", {mask}, other=0.0" if mask else ""
        wide = _WIDE.get(type_.dtype)
        cast = f".to({_TRITON_NAMES[wide]})" if wide else ""
        return self.assign(name, f"tl.load({' + '.join(terms)}{guard}){cast}")

    def _added_by_lora(self, name: str, place: TilePosition) -> str:
        type_, stem = self.types[name], python_name(name)
        variable = self._taken(stem)
        pointers = [f"{stem}_{pointer}" for pointer in DEFERRED_POINTERS]
        numbers = [f"{stem}_{number}" for number in DEFERRED_NUMBERS]
        at = ["token", self._offset(place, type_), "in_rows", self._mask(type_, place)]
        call = f"K.deferred_rows({', '.join([*pointers, *numbers, *at, f'{stem}_PARTS'])})"
        self.lines += [
            f"    if {stem}_PARTS:",
            statement(f"{variable} = {call}", 8),
            "    else:",
            f"        {variable} = 0.0",
        ]
        return variable

    def _mask(self, type_: TensorType, place: TilePosition) -> str:
        """Return the condition of existing elements at a position; empty if all exist."""
        has_rows, is_flat = place.group != "0", self.shape.rows_a_token == 1
        by_row = type_.is_token_wise or (has_rows and not is_flat)
        by_column = self.shape.is_padded and (place.column != "0" or (has_rows and is_flat))
        masks = {(True, True): "inside", (True, False): "in_rows", (False, True): "in_row"}
        conditions = (masks.get((by_row, by_column), ""), place.mask)
        return " & ".join(condition for condition in conditions if condition)

    def _offset(self, place: TilePosition, type_: TensorType) -> str:
        if self.shape.rows_a_token == 1 and replace(place, mask="") == self.main(type_):
            return "column"
        if place.group == "0":
            return place.column
        return f"{place.group} * {type_.features[-1]} + {place.column}"

    def assign(self, name: str, expression: str) -> str:
        variable = self._taken(python_name(name))
        self.lines.append(statement(f"{variable} = {expression}"))
        return variable

    def _taken(self, stem: str) -> str:
        """Reserve and return a name that starts with a stem."""
        variable, count = stem, 1
        while variable in self.taken:
            variable, count = f"{stem}_{count}", count + 1
        self.taken.add(variable)
        return variable

    def let(self, name: str, expression: str) -> str:
        """Return a variable with an expression's value; equal expressions share a variable."""
        key = ("let", expression)
        if key not in self.variables:
            self.variables[key] = self.assign(name, expression)
        return self.variables[key]


@dataclass(frozen=True)
class _NodeTile:
    """A node's output at a position; see `pcg.ir.operators.base.Tile`."""

    writer: TileWriter
    node: Node
    place: TilePosition

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
        place = position_read(self._type(index), self.node.output.type, self.place, self.node.op)
        masks = [mask for mask in (self.place.mask, f"({where})" if where else "") if mask]
        place = replace(place, mask=" & ".join(masks))
        if column is not None:
            place = replace(place, column=_atom(column))
        return self.writer.value(self.node.inputs[index], place)

    def let(self, name: str, expression: str) -> str:
        return self.writer.let(name, expression)

    def rounded(self, expression: str, dtype: str) -> str:
        rounded = f"({expression}).to({_TRITON_NAMES[dtype]})"
        if dtype in _WIDE:
            return f"{rounded}.to(tl.float32)"
        arithmetic = {_WIDE.get(self.dtype(i), self.dtype(i)) for i in range(self.inputs)}
        return expression if arithmetic == {dtype} else rounded

    def row_sum(self, name: str, summand: Callable[[Tile], str]) -> str:
        writer = self.writer
        type_ = self.node.output.type
        if operator(self.node.op).sums_rows and type_.features[-1] == 1:
            type_ = self._type(0)
        place = writer.main(type_)
        term = summand(replace(self, place=place))
        if writer.shape.is_padded:
            term = f"tl.where(in_row, {term}, 0.0)"
        return writer.let(name, f"tl.sum({term}, 1)[:, None]")


def _atom(expression: str) -> str:
    return expression if expression.isidentifier() or expression.isdigit() else f"({expression})"
