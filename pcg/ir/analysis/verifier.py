"""Verifier of a graph against the rules of the IR.

    names       letters, digits, `_` and `.`; each value defined once, before it is read
    sizes       positive ints or expressions that read back; `T` leads, alone or as a rank's part,
                or is absent
    parameters  a known role, a name in the checkpoint, no token dim
    nodes       an operator of the table, with its number of inputs, sorted attributes of its
                declared kinds, and its inferred output types
    outputs     defined

Parallel states are left to the parallel passes: types are compared by dtype and global sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NoReturn

import sympy

from pcg.errors import IrError, VerifyError
from pcg.ir.graph import Graph, Node, Parameter, Value
from pcg.ir.operators import operator
from pcg.ir.parser import ROLES, parse_type
from pcg.ir.printer import NAME, print_node, print_parameter
from pcg.ir.types import TOKENS, Dim, TensorType, counts_tokens


def verify(graph: Graph) -> None:
    """Check that the graph follows the rules of the IR.

    Raises:
        VerifyError: a rule is broken; the message shows the line, the expected form, and the fix.
    """
    _Verifier(graph).run()


@dataclass
class _Verifier:
    graph: Graph
    defined: dict[str, TensorType] = field(default_factory=dict)
    shown: Callable[[], str] = str
    """Prints the item under verification."""

    def run(self) -> None:
        if not NAME.fullmatch(self.graph.name):
            self._fail(
                f"the graph's name {self.graph.name!r} is not of letters, digits, '_' and '.'"
            )
        for value in self.graph.inputs:
            self.shown = partial(str, value)
            self._value(value)
        for parameter in self.graph.parameters:
            self.shown = partial(print_parameter, parameter)
            self._parameter(parameter)
        for node in self.graph.nodes:
            self.shown = partial(_shown, node)
            self._node(node)
        self.shown = lambda: f"return {', '.join(f'%{name}' for name in self.graph.outputs)}"
        for name in self.graph.outputs:
            if name not in self.defined:
                self._fail(f"output %{name} is not defined; return a value of the graph")

    def _fail(self, message: str) -> NoReturn:
        line = self.shown()
        shown = f"\n  {line}" if line else ""
        raise VerifyError(f"graph @{self.graph.name}: {message}{shown}")

    # ---------------------------------------------------------------------------------- values

    def _value(self, value: Value) -> None:
        if not NAME.fullmatch(value.name):
            self._fail(f"the name {value.name!r} is not of letters, digits, '_' and '.'; rename it")
        if value.name in self.defined:
            self._fail(f"%{value.name} is defined twice; give one of the two another name")
        for position, dim in enumerate(value.type.dims):
            self._size(value, position, dim)
        self.defined[value.name] = value.type

    def _size(self, value: Value, position: int, dim: Dim) -> None:
        if isinstance(dim.size, int):
            if dim.size < 1:
                self._fail(
                    f"dim {position} of %{value.name} has size {dim.size}; a size is positive"
                )
            return
        if TOKENS in dim.size.free_symbols and (position or not counts_tokens(dim.size)):
            self._fail(
                f"dim {position} of %{value.name} has size {dim.size}; the token dim is the first, "
                f"and of size {TOKENS}, or a rank's part as ceiling({TOKENS}/2)"
            )
        if not _reads_back(dim.size):
            self._fail(
                f"size {dim.size} of %{value.name} does not read back; build it of ints, symbols "
                "(integer=True, positive=True), + - * / **, Min, Max, ceiling and floor, evaluated"
            )

    def _parameter(self, parameter: Parameter) -> None:
        if parameter.role not in ROLES:
            self._fail(f"role {parameter.role!r} is none of {', '.join(ROLES)}")
        if not parameter.source:
            self._fail(f"%{parameter.name} has no source; name its tensor in the checkpoint")
        if parameter.type.is_token_wise:
            self._fail(f"%{parameter.name} has a token dim; make it an input of the graph")
        if parameter.transposed and len(parameter.type.dims) < 2:
            self._fail(f"%{parameter.name} is transposed, and has no two dims")
        self._value(parameter.value)

    # ----------------------------------------------------------------------------------- nodes

    def _node(self, node: Node) -> None:
        for name in node.inputs:
            if name not in self.defined:
                later = name in self.graph.types
                problem = "is read before it is defined" if later else "is not defined"
                fix = "order the nodes" if later else "define it as an input, parameter or output"
                self._fail(f"%{name} {problem}; {fix}")
        self._attributes(node)
        self._types(node, self._inferred(node))
        for value in node.outputs:
            self._value(value)

    def _attributes(self, node: Node) -> None:
        names = [name for name, _ in node.attributes]
        if names != sorted(set(names)):
            self._fail(f"attributes {', '.join(names)} are not sorted, or not distinct; sort them")

    def _inferred(self, node: Node) -> tuple[TensorType, ...]:
        types = tuple(self.defined[name] for name in node.inputs)
        attributes = dict(node.attributes)
        try:
            entry = operator(node.op)
            entry.check_attributes(attributes)
            entry.check_arity(types)
            return entry.infer(types, attributes)
        except IrError as error:
            self._fail(str(error))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The table's rules index and count their inputs; report other errors as wrong types.
            input_types = ", ".join(map(str, types))
            self._fail(f"{node.op} does not take {input_types} with these attributes: {error}")

    def _types(self, node: Node, inferred: tuple[TensorType, ...]) -> None:
        if len(node.outputs) != len(inferred):
            wanted = ", ".join(map(str, inferred))
            self._fail(f"{node.op} has {len(inferred)} outputs ({wanted}), not {len(node.outputs)}")
        for value, type_ in zip(node.outputs, inferred, strict=True):
            if (value.type.dtype, value.type.shape) != (type_.dtype, type_.shape):
                input_types = ", ".join(str(self.defined[name]) for name in node.inputs)
                self._fail(
                    f"%{value.name} is declared {value.type}, but {node.op} of {input_types} gives "
                    f"{type_}; declare that, or change what the node reads"
                )


@lru_cache(4096)
def _reads_back(size: sympy.Expr) -> bool:
    try:
        return bool(parse_type(str(TensorType("f32", (Dim(size),)))).dims[0].size == size)
    except IrError:
        return False


def _shown(node: Node) -> str:
    try:
        return print_node(node)
    except VerifyError:
        return repr(node)
