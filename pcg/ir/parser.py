"""Reads the text IR: `parse_graph(print_graph(graph)) == graph`.

    graph      := "graph" @name "(" [value {"," value} [","]] ")" "{" {parameter} {node} return "}"
    value      := %name ":" type
    parameter  := role value "=" string ["transposed"]         role: frozen | constant | adapter
    node       := value {"," value} "=" op "(" [%name {"," %name}] ")" [attributes] [@scope]
    attributes := "{" name "=" attribute {"," name "=" attribute} "}"
    attribute  := "True" | "False" | ["-"] number | ["-"] "inf" | string | "(" {int ","} [int] ")"
    return     := "return" [%name {"," %name}]
    type       := dtype "[" [dim {"," dim}] "]"
    dim        := product [("|" | "=" | "+") degree]
    sum        := product {("+" | "-") product}
    product    := ["-"] power {("*" | "/") power}
    power      := atom ["**" ["-"] int | "**" "(" "-" int ")"]
    atom       := int | symbol | "(" sum ")" | ("Min" | "Max" | "ceiling" | "floor") "(" sums ")"

Spaces and newlines only part tokens; `#` opens a comment. A number with a point or an exponent is a
float, any other an int. Nothing is evaluated but sizes, and those by the grammar above: text of
unknown origin can at worst be refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import sympy

from pcg.errors import ParseError
from pcg.ir.graph import Attribute, Graph, Node, Parameter, Value
from pcg.ir.printer import ESCAPES, INTEGERS, NAME
from pcg.ir.types import DTYPE_BYTES, Dim, Size, State, TensorType

ROLES = ("frozen", "constant", "adapter")
FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "ceiling": sympy.ceiling,
    "floor": sympy.floor,
}
# Sizes of tensors need far less; without limits, text such as 9**9**9 would never be done.
LARGEST_EXPONENT = 16
DEEPEST_NESTING = 64

_Read = TypeVar("_Read")
_STRING = r'"(?:[^"\\\n]|\\[^\n])*"'
_TOKEN = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)
    |(?P<value>%{NAME.pattern})
    |(?P<label>@(?:{NAME.pattern}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>\*\*|[(){{}}\[\],:=|+*/-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u\{([0-9a-fA-F]{1,6})\}|(.))")
_UNESCAPES = {escape[1]: character for character, escape in ESCAPES.items()}


def parse_graph(text: str) -> Graph:
    """The one graph that the text holds.

    Raises:
        ParseError: the text is no graph, or more than one; the message shows the place.
    """
    parser = _Parser(text)
    graph = parser.graph()
    if parser.token.kind != "end":
        parser.fail("the end of the text, after one graph")
    return graph


def parse_graphs(text: str) -> tuple[Graph, ...]:
    """All graphs of the text, in order.

    Raises:
        ParseError: the text is not IR; the message shows the place.
    """
    parser = _Parser(text)
    graphs: list[Graph] = []
    while parser.token.kind != "end":
        graphs.append(parser.graph())
    return tuple(graphs)


def parse_type(text: str) -> TensorType:
    """A tensor type such as `bf16[T, 4096|4]`.

    Raises:
        ParseError: the text is no type.
    """
    parser = _Parser(text)
    type_ = parser.type()
    if parser.token.kind != "end":
        parser.fail("the end of the text, after one type")
    return type_


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


class _Parser:
    """Recursive descent; each method reads what its name says, from the current token on."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize()
        self._position = 0
        self._depth = 0

    # ---------------------------------------------------------------------------------- tokens

    def _tokenize(self) -> list[_Token]:
        tokens: list[_Token] = []
        start = 0
        while start < len(self._text):
            match = _TOKEN.match(self._text, start)
            if match is None:
                if self._text[start : start + 2].lstrip("@").startswith('"'):
                    self._raise(start, "expected a closing '\"' on the same line")
                self._raise(
                    start, f"expected a token, found {self._text[start]!r}, which no IR has"
                )
            if match.lastgroup != "space":
                tokens.append(_Token(str(match.lastgroup), match.group(), start))
            start = match.end()
        tokens.append(_Token("end", "", len(self._text)))
        return tokens

    @property
    def token(self) -> _Token:
        return self._tokens[self._position]

    def fail(self, expected: str, token: _Token | None = None) -> NoReturn:
        """Raise a ParseError at the token, the current one unless given."""
        token = token or self.token
        found = "the end of the text" if token.kind == "end" else repr(token.text)
        self._raise(token.start, f"expected {expected}, found {found}")

    def _raise(self, start: int, message: str) -> NoReturn:
        number = self._text.count("\n", 0, start) + 1
        begin = self._text.rfind("\n", 0, start) + 1
        line = self._text[begin:].split("\n", 1)[0]
        gutter = f"{number} | "
        indent = "".join(c if c == "\t" else " " for c in line[: start - begin])
        caret = f"{' ' * (len(gutter) - 2)}| {indent}^"
        where = f"line {number}, column {start - begin + 1}"
        raise ParseError(f"{where}: {message}\n{gutter}{line}\n{caret}")

    def _advance(self) -> _Token:
        token = self.token
        self._position += 1
        return token

    def _next_is(self, *texts: str) -> bool:
        return self.token.kind in ("sign", "word") and self.token.text in texts

    def _accept(self, text: str) -> bool:
        found = self._next_is(text)
        self._position += found
        return found

    def _expect(self, *texts: str) -> str:
        if not self._next_is(*texts):
            *others, last = map(repr, texts)
            self.fail(f"{', '.join(others)} or {last}" if others else last)
        return self._advance().text

    def _take(self, kind: str, expected: str) -> _Token:
        if self.token.kind != kind:
            self.fail(expected)
        return self._advance()

    # ---------------------------------------------------------------------------------- graphs

    def graph(self) -> Graph:
        self._expect("graph")
        label = self._take("label", "the graph's name, as in @block")
        if label.text.startswith('@"'):
            self.fail("a name of letters, digits, '_' and '.'", label)
        self._expect("(")
        inputs: list[Value] = []
        while not self._accept(")"):
            inputs.append(self._value())
            if not self._next_is(")"):
                self._expect(",", ")")
        self._expect("{")
        parameters: list[Parameter] = []
        while self._next_is(*ROLES):
            parameters.append(self._parameter())
        nodes: list[Node] = []
        while self.token.kind == "value":
            nodes.append(self._node())
        if not self._accept("return"):
            before = "" if nodes else f"a parameter ({', '.join(ROLES)}), "
            self.fail(f"{before}a node (%name: type = …) or 'return'")
        outputs = self._names() if self.token.kind == "value" else ()
        self._expect("}")
        return Graph(label.text[1:], tuple(inputs), tuple(parameters), tuple(nodes), outputs)

    def _value(self) -> Value:
        name = self._take("value", "a value, as in %x: f32[T, 4]")
        self._expect(":")
        return Value(name.text[1:], self.type())

    def _names(self) -> tuple[str, ...]:
        names = [self._take("value", "a value's name, as in %x").text[1:]]
        while self._accept(","):
            names.append(self._take("value", "a value's name, as in %x").text[1:])
        return tuple(names)

    def _parameter(self) -> Parameter:
        role = self._advance().text
        value = self._value()
        self._expect("=")
        token = self._take("string", "the tensor's name in the checkpoint, in double quotes")
        source = self._unquote(token.text, token.start)
        return Parameter(value, role, source, self._accept("transposed"))

    def _node(self) -> Node:
        outputs = [self._value()]
        while self._accept(","):
            outputs.append(self._value())
        self._expect("=")
        op = self._take("word", "an operator's name").text
        self._expect("(")
        inputs = self._names() if self.token.kind == "value" else ()
        self._expect(")")
        attributes = self._attributes() if self._next_is("{") else ()
        return Node(op, inputs, tuple(outputs), attributes, self._scope())

    def _scope(self) -> str:
        if self.token.kind != "label":
            return ""
        token = self._advance()
        name = token.text[1:]
        return self._unquote(name, token.start + 1) if name.startswith('"') else name

    # ------------------------------------------------------------------------------ attributes

    def _attributes(self) -> tuple[tuple[str, Attribute], ...]:
        self._expect("{")
        attributes: dict[str, Attribute] = {}
        while True:
            token = self._take("word", "an attribute's name")
            if token.text in attributes:
                self.fail("an attribute that was not given before", token)
            self._expect("=")
            attributes[token.text] = self._attribute()
            if self._expect(",", "}") == "}":
                return tuple(attributes.items())

    def _attribute(self) -> Attribute:
        token = self.token
        if token.kind == "string":
            return self._unquote(self._advance().text, token.start)
        if self._next_is("True", "False"):
            return self._advance().text == "True"
        if self._accept("("):
            return self._tuple()
        if token.kind == "number" or self._next_is("-", "inf"):
            return self._number()
        self.fail("a number but nan, True, False, a string in double quotes, or a tuple of ints")

    def _tuple(self) -> tuple[int, ...]:
        items: list[int] = []
        while not self._accept(")"):
            items.append(self._integer())
            # A tuple of one keeps its comma, as in Python.
            if len(items) == 1 or not self._next_is(")"):
                self._expect(",")
        return tuple(items)

    def _integer(self) -> int:
        token = self.token
        number = self._number()
        if not isinstance(number, int):
            self.fail("an int", token)
        return number

    def _number(self) -> int | float:
        first = self.token
        sign = -1 if self._accept("-") else 1
        if self._accept("inf"):
            return sign * math.inf
        text = self._take("number", "a number or inf").text
        if not text.isdecimal():
            if math.isinf(float(text)):
                self.fail("a float of 64 bits, or inf", first)
            return sign * float(text)
        return self._checked_integer(sign, text, first)

    def _checked_integer(self, sign: int, text: str, first: _Token) -> int:
        if len(text) > 19 or (number := sign * int(text)) not in INTEGERS:
            self.fail("an int of 64 bits", first)
        return number

    def _unquote(self, text: str, start: int) -> str:
        """The string that a literal at this place of the text stands for."""

        def character(match: re.Match[str]) -> str:
            code, letter = match.groups()
            if code and int(code, 16) <= 0x10FFFF:
                return chr(int(code, 16))
            if letter not in _UNESCAPES:
                known = ", ".join(ESCAPES.values())
                self._raise(
                    start + 1 + match.start(), f"expected {known} or \\u{{hex}}, found {match[0]!r}"
                )
            return _UNESCAPES[letter]

        return _ESCAPE.sub(character, text[1:-1])

    # ----------------------------------------------------------------------------------- types

    def type(self) -> TensorType:
        dtype = self._take("word", "a dtype")
        if dtype.text not in DTYPE_BYTES:
            self.fail(f"a dtype ({', '.join(DTYPE_BYTES)})", dtype)
        self._expect("[")
        dims: list[Dim] = []
        while not self._accept("]"):
            dims.append(self._dim())
            if not self._next_is("]"):
                self._expect(",", "]", *(() if dims[-1].degree > 1 else ("|", "=", "+")))
        return TensorType(dtype.text, tuple(dims))

    def _dim(self) -> Dim:
        expression = self._product()
        size: Size = int(expression) if expression.is_Integer else expression
        if not self._next_is("|", "=", "+"):
            return Dim(size)
        state = State(self._advance().text)
        token = self._take("number", "a degree of at least 2")
        if (
            not token.text.isdecimal()
            or (degree := self._checked_integer(1, token.text, token)) < 2
        ):
            self.fail("a degree of at least 2", token)
        return Dim(size, state, degree)

    # ----------------------------------------------------------------------------------- sizes

    # Sympy orders and distributes as it builds: 2*(S + r) becomes a sum, but 2*(S + r)/S does not.
    # So what printed as one product must be built as one, from all of its factors.

    def _sum(self) -> sympy.Expr:
        return sympy.Mul(*self._sum_factors())

    def _product(self) -> sympy.Expr:
        return sympy.Mul(*self._factors())

    def _sum_factors(self) -> list[sympy.Expr]:
        """The factors of a sum of one term; a longer sum is its own factor."""
        factors = self._factors()
        if not self._next_is("+", "-"):
            return factors
        terms = [sympy.Mul(*factors)]
        start = self.token
        while self._next_is("+", "-"):
            sign = 1 if self._advance().text == "+" else -1
            terms.append(sympy.Mul(sign, *self._factors()))
        return [self._bounded(sympy.Add(*terms), start)]

    def _factors(self) -> list[sympy.Expr]:
        """A product, as its factors."""
        start = self.token
        factors = [sympy.Integer(-1)] if self._accept("-") else []
        factors += self._power()
        while self._next_is("*", "/"):
            sign = self._advance()
            more = self._power()
            if sign.text == "/" and any(factor.is_zero for factor in more):
                self.fail("a divisor other than 0", sign)
            factors += more if sign.text == "*" else [1 / factor for factor in more]
        self._bounded(sympy.Mul(*factors), start)
        return factors

    def _power(self) -> list[sympy.Expr]:
        factors = self._atom()
        sign = self.token
        if not self._accept("**"):
            return factors
        base = sympy.Mul(*factors)
        parenthesized = self._accept("(")
        token = self.token
        exponent = self._integer()
        if parenthesized:
            self._expect(")")
        if abs(exponent) > LARGEST_EXPONENT or (exponent < 0 and base.is_zero):
            self.fail(f"an exponent of at most {LARGEST_EXPONENT}", token)
        return [self._bounded(base**exponent, sign)]

    def _atom(self) -> list[sympy.Expr]:
        token = self.token
        if token.kind == "number" and token.text.isdecimal():
            return [sympy.Integer(self._checked_integer(1, self._advance().text, token))]
        if token.kind == "word":
            name = self._advance().text
            if name in FUNCTIONS and self._next_is("("):
                return [self._call(name, token)]
            return [sympy.Symbol(name, integer=True, positive=True)]
        if self._accept("("):
            return self._nested(self._sum_factors, ")")
        self.fail(
            "a size: an int, a symbol, an expression in parentheses, Min, Max, ceiling or floor"
        )

    def _call(self, name: str, token: _Token) -> sympy.Expr:
        self._expect("(")
        arguments = [self._nested(self._sum, ",", ")")]
        while self._tokens[self._position - 1].text == ",":
            arguments.append(self._nested(self._sum, ",", ")"))
        if name in ("ceiling", "floor") and len(arguments) != 1:
            self.fail(f"one argument, not {len(arguments)}, of {name}", token)
        return self._bounded(FUNCTIONS[name](*arguments), token)

    def _nested(self, read: Callable[[], _Read], *closing: str) -> _Read:
        """What `read` reads, and one of the signs that may follow it."""
        self._depth += 1
        if self._depth > DEEPEST_NESTING:
            self.fail(f"a size of at most {DEEPEST_NESTING} levels of parentheses")
        expression = read()
        self._expect(*closing)
        self._depth -= 1
        return expression

    def _bounded(self, expression: sympy.Expr, token: _Token) -> sympy.Expr:
        numbers = expression.atoms(sympy.Rational)
        if not all(number.p in INTEGERS and number.q in INTEGERS for number in numbers):
            self.fail("a size of ints of 64 bits", token)
        return expression
