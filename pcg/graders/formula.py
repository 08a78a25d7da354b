"""Formulas of multi graders: arithmetic on the rewards of other graders.

A formula has numbers, the names of graders, + - * / and ^ (or **), parentheses, and the functions
in `FUNCTIONS`. The formula is parsed to Python's syntax tree; each node must be on a list, and is
evaluated in floating point by this file, without running Python code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pcg.errors import GraderError, GradingError

MOST_CHARACTERS = 1024
MOST_NODES = 256
MOST_DEPTH = 32
_GREATEST = 1e300

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
FUNCTIONS: dict[str, tuple[Callable[..., float], int | None]] = {
    "abs": (abs, 1),
    "ceil": (math.ceil, 1),
    "exp": (math.exp, 1),
    "floor": (math.floor, 1),
    "log": (math.log, 1),
    "max": (lambda *values: max(values), None),
    "min": (lambda *values: min(values), None),
    "sqrt": (math.sqrt, 1),
}
"""The functions with their number of arguments; None for any number of at least 1."""


@dataclass(frozen=True)
class Formula:
    """A checked formula.

    Attributes:
        names: the names in the formula.
    """

    text: str
    tree: ast.expr
    names: frozenset[str]

    @classmethod
    def of(cls, text: str, where: str, known: Collection[str]) -> Formula:
        """Read a formula.

        Args:
            where: name of the field, for errors.
            known: the allowed names.
        Raises:
            GraderError: the text is not a formula, or too large.
        """
        if len(text) > MOST_CHARACTERS:
            raise GraderError(f"{where} has {len(text)} characters; use at most {MOST_CHARACTERS}")
        try:
            tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise GraderError(
                f"{where} is no formula; use numbers, names of graders, + - * / ^ and "
                f"{', '.join(FUNCTIONS)}"
            ) from None
        names, nodes = set[str](), 0
        waiting = [(tree, 1)]
        while waiting:
            node, depth = waiting.pop()
            nodes += 1
            if nodes > MOST_NODES or depth > MOST_DEPTH:
                raise GraderError(
                    f"{where} is too large; use at most {MOST_NODES} operations and numbers, "
                    f"{MOST_DEPTH} in each other"
                )
            waiting += [(part, depth + 1) for part in _checked(node, where)]
            if isinstance(node, ast.Name):
                names.add(node.id)
        if unknown := sorted(names - set(known)):
            raise GraderError(
                f"{where} names {unknown[0][:64]!r}; its graders are {', '.join(sorted(known))}"
            )
        return cls(text, tree, frozenset(names))

    def compute(self, values: Mapping[str, float]) -> float:
        """Return the value for the given rewards.

        Raises:
            GradingError: the value is undefined, for example by a division by 0, or too large.
        """
        try:
            value = _value(self.tree, values)
        except (ArithmeticError, ValueError) as error:
            value, reason = math.nan, str(error)
        else:
            reason = f"its value is {value}"
        if not math.isfinite(value):
            shown = ", ".join(f"{name}={values[name]:g}" for name in sorted(self.names))
            message = f"calculate_output cannot be computed with {shown}: {reason}"
            raise GradingError(message, "formula_parse_error")
        return value


def _checked(node: ast.expr, where: str) -> list[ast.expr]:
    """Return the parts of a node. GraderError: it is not on the list."""
    match node:
        case ast.Constant(value=int() | float() as value):
            if not isinstance(value, bool) and abs(value) <= _GREATEST:
                return []
        case ast.Name():
            return []
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return [node.operand]
        case ast.BinOp() if type(node.op) in _BINARY:
            return [node.left, node.right]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            count = FUNCTIONS[name][1]
            if not node.args or (count is not None and len(node.args) != count):
                wanted = "at least one argument" if count is None else f"{count} argument"
                raise GraderError(f"{where}: give {name} {wanted}")
            return node.args
    raise GraderError(
        f"{where} has what is no arithmetic: {type(node).__name__}; use numbers, names of graders, "
        f"+ - * / ^ and {', '.join(FUNCTIONS)}"
    )


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp():
            return _UNARY[type(node.op)](_value(node.operand, values))
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Call(func=ast.Name(id=name)):
            arguments = [_value(argument, values) for argument in node.args]
            return float(FUNCTIONS[name][0](*arguments))
    raise AssertionError(node)
