"""Parser of the text IR: `parse_graph(print_graph(graph)) == graph`.

A token is a `%value`, an `@label`, a string, a number, a word or a sign. Strings are in double
quotes, on one line, with the escapes that `pcg.ir.printer` writes.

    graph      := "graph" @name "(" [value {"," value} [","]] ")" "{" {parameter} {node} return "}"
    value      := %name ":" type
    parameter  := role value "=" string ["transposed"] ["rows" number number]
                  ["copies" number] ["experts" number] [part]
                                                               role: frozen | constant | adapter
    part       := (("dim" | "routed") "-" number [shared] | "copy" | "summand") "of" number
    shared     := "by" number ["dim" "-" number]
    node       := value {"," value} "=" op "(" [%name {"," %name}] ")" [attributes] [@scope]
    attributes := "{" name "=" attribute {"," name "=" attribute} "}"
    attribute  := "True" | "False" | ["-"] number | ["-"] "inf" | string | "(" {int ","} [int] ")"
    return     := "return" [%name {"," %name}]
    type       := dtype "[" [dim {"," dim}] "]"
    dim        := product [("|" | "=" | "+" | "~") degree]
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
from pcg.ir.layouts import WHOLE, Layout
from pcg.ir.printer import ESCAPES, INTEGERS, NAME, PARTS
from pcg.ir.types import DTYPE_BYTES, Dim, Size, State, TensorType, is_format

# -------------------------------------------------------------------------------------------- lexer


_STRING = r'"(?:[^"\\\n]|\\[^\n])*"'
_TOKEN = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)
    |(?P<value>%{NAME.pattern})
    |(?P<label>@(?:{NAME.pattern}|{_STRING}))
    |(?P<string>{_STRING})
    |(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>\*\*|[(){{}}\[\],:=|+*/~-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u\{([0-9a-fA-F]{1,6})\}|(.))")
_UNESCAPES = {escape[1]: character for character, escape in ESCAPES.items()}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the text, and its position."""

    kind: str
    text: str
    start: int


class TokenReader:
    """Reads a text token by token; errors show the line of the token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize()
        self._position = 0

    def _tokenize(self) -> list[Token]:
        tokens: list[Token] = []
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
                tokens.append(Token(str(match.lastgroup), match.group(), start))
            start = match.end()
        tokens.append(Token("end", "", len(self._text)))
        return tokens

    @property
    def token(self) -> Token:
        return self._tokens[self._position]

    @property
    def previous(self) -> Token:
        return self._tokens[self._position - 1]

    def fail(self, expected: str, token: Token | None = None) -> NoReturn:
        token = token or self.token
        token_text = "the end of the text" if token.kind == "end" else repr(token.text)
        self._raise(token.start, f"expected {expected}, found {token_text}")

    def _raise(self, start: int, message: str) -> NoReturn:
        number = self._text.count("\n", 0, start) + 1
        begin = self._text.rfind("\n", 0, start) + 1
        line = self._text[begin:].split("\n", 1)[0]
        gutter = f"{number} | "
        indent = "".join(c if c == "\t" else " " for c in line[: start - begin])
        caret = f"{' ' * (len(gutter) - 2)}| {indent}^"
        where = f"line {number}, column {start - begin + 1}"
        raise ParseError(f"{where}: {message}\n{gutter}{line}\n{caret}")

    def advance(self) -> Token:
        token = self.token
        self._position += 1
        return token

    def next_is(self, *texts: str) -> bool:
        return self.token.kind in ("sign", "word") and self.token.text in texts

    def accept(self, text: str) -> bool:
        accepted = self.next_is(text)
        self._position += accepted
        return accepted

    def expect(self, *texts: str) -> str:
        if not self.next_is(*texts):
            *others, last = map(repr, texts)
            self.fail(f"{', '.join(others)} or {last}" if others else last)
        return self.advance().text

    def take(self, kind: str, expected: str) -> Token:
        if self.token.kind != kind:
            self.fail(expected)
        return self.advance()

    def unquote(self, text: str, start: int) -> str:
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


# ------------------------------------------------------------------------------------------- parser


ROLES = ("frozen", "constant", "adapter")
FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    each.__name__: each for each in (sympy.Max, sympy.Min, sympy.ceiling, sympy.floor)
}
# Sizes of tensors need far less; without limits, text such as 9**9**9 would never finish.
LARGEST_EXPONENT = 16
DEEPEST_NESTING = 64

_Read = TypeVar("_Read")


def parse_graph(text: str) -> Graph:
    """Parse a text with exactly one graph; ParseError shows the place."""
    parser = _Parser(text)
    graph = parser.graph()
    parser.end("graph")
    return graph


def parse_graphs(text: str) -> tuple[Graph, ...]:
    """Parse all graphs of a text, in order; ParseError shows the place."""
    parser = _Parser(text)
    graphs: list[Graph] = []
    while parser.token.kind != "end":
        graphs.append(parser.graph())
    return tuple(graphs)


def parse_type(text: str) -> TensorType:
    """Parse a tensor type such as `bf16[T, 4096|4]`; raises ParseError."""
    parser = _Parser(text)
    type_ = parser.type()
    parser.end("type")
    return type_


class _Parser(TokenReader):
    """Recursive descent; each method reads its grammar rule from the current token on."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def end(self, what: str) -> None:
        if self.token.kind != "end":
            self.fail(f"the end of the text, after one {what}")

    # ---------------------------------------------------------------------------------- graphs

    def graph(self) -> Graph:
        self.expect("graph")
        label = self.take("label", "the graph's name, as in @block")
        if label.text.startswith('@"'):
            self.fail("a name of letters, digits, '_' and '.'", label)
        self.expect("(")
        inputs: list[Value] = []
        while not self.accept(")"):
            inputs.append(self._value())
            if not self.next_is(")"):
                self.expect(",", ")")
        self.expect("{")
        parameters: list[Parameter] = []
        while self.next_is(*ROLES):
            parameters.append(self._parameter())
        nodes: list[Node] = []
        while self.token.kind == "value":
            nodes.append(self._node())
        if not self.accept("return"):
            before = "" if nodes else f"a parameter ({', '.join(ROLES)}), "
            self.fail(f"{before}a node (%name: type = …) or 'return'")
        outputs = self._names()
        self.expect("}")
        return Graph(label.text[1:], tuple(inputs), tuple(parameters), tuple(nodes), outputs)

    def _value(self) -> Value:
        name = self.take("value", "a value, as in %x: f32[T, 4]")
        self.expect(":")
        return Value(name.text[1:], self.type())

    def _names(self) -> tuple[str, ...]:
        if self.token.kind != "value":
            return ()
        return self._several(lambda: self.take("value", "a value's name, as in %x").text[1:])

    def _several(self, read: Callable[[], _Read]) -> tuple[_Read, ...]:
        items = [read()]
        while self.accept(","):
            items.append(read())
        return tuple(items)

    def _parameter(self) -> Parameter:
        role = self.advance().text
        value = self._value()
        self.expect("=")
        token = self.take("string", "the tensor's name in the checkpoint, in double quotes")
        source = self.unquote(token.text, token.start)
        transposed = self.accept("transposed")
        number = "the number of a row"
        rows = (self._count(number), self._count(number)) if self.accept("rows") else None
        copies = self._count("a number of copies") if self.accept("copies") else 1
        experts = self._count("a number of experts") if self.accept("experts") else 1
        part, degree = self._part()
        return Parameter(
            value,
            role,
            source,
            transposed=transposed,
            part=part,
            degree=degree,
            rows=rows,
            copies=copies,
            experts=experts,
        )

    def _count(self, expected: str) -> int:
        return int(self.take("number", expected).text)

    def _part(self) -> tuple[Layout, int]:
        for state, word in PARTS.items():
            if self.accept(word):
                dim, sharers, part = 0, 1, 0
                if state in (State.PARTITIONED, State.ROUTED):
                    dim = self._place()
                if self.accept("by"):
                    sharers = self._count("a number of ranks")
                    part = self._place() if self.accept("dim") else 0
                self.expect("of")
                return Layout(state, dim, sharers, part), self._count("a number of ranks")
        return WHOLE, 1

    def _place(self) -> int:
        self.expect("-")
        return -self._count("the dim that ranks hold parts of")

    def _node(self) -> Node:
        outputs = self._several(self._value)
        self.expect("=")
        op = self.take("word", "an operator's name").text
        self.expect("(")
        inputs = self._names()
        self.expect(")")
        attributes = self._attributes() if self.next_is("{") else ()
        token = self.token
        scope = self.advance().text[1:] if token.kind == "label" else ""
        if scope.startswith('"'):
            scope = self.unquote(scope, token.start + 1)
        return Node(op, inputs, outputs, attributes, scope)

    # ------------------------------------------------------------------------------ attributes

    def _attributes(self) -> tuple[tuple[str, Attribute], ...]:
        self.expect("{")
        attributes: dict[str, Attribute] = {}
        while True:
            token = self.take("word", "an attribute's name")
            if token.text in attributes:
                self.fail("an attribute that was not given before", token)
            self.expect("=")
            attributes[token.text] = self._attribute()
            if self.expect(",", "}") == "}":
                return tuple(attributes.items())

    def _attribute(self) -> Attribute:
        token = self.token
        if token.kind == "string":
            return self.unquote(self.advance().text, token.start)
        if self.next_is("True", "False"):
            return self.advance().text == "True"
        if self.accept("("):
            return self._tuple()
        if token.kind == "number" or self.next_is("-", "inf"):
            return self._number()
        self.fail("a number but nan, True, False, a string in double quotes, or a tuple of ints")

    def _tuple(self) -> tuple[int, ...]:
        items: list[int] = []
        while not self.accept(")"):
            items.append(self._integer())
            # A tuple of one element keeps its comma, as in Python.
            if len(items) == 1 or not self.next_is(")"):
                self.expect(",")
        return tuple(items)

    def _integer(self) -> int:
        token = self.token
        number = self._number()
        if not isinstance(number, int):
            self.fail("an int", token)
        return number

    def _number(self) -> int | float:
        first = self.token
        sign = -1 if self.accept("-") else 1
        if self.accept("inf"):
            return sign * math.inf
        text = self.take("number", "a number or inf").text
        if not text.isdecimal():
            if math.isinf(float(text)):
                self.fail("a float of 64 bits, or inf", first)
            return sign * float(text)
        return self._checked_integer(sign, text, first)

    def _checked_integer(self, sign: int, text: str, first: Token) -> int:
        if len(text) > 19 or (number := sign * int(text)) not in INTEGERS:
            self.fail("an int of 64 bits", first)
        return number

    # ----------------------------------------------------------------------------------- types

    def type(self) -> TensorType:
        dtype = self.take("word", "a dtype")
        if dtype.text not in DTYPE_BYTES and not is_format(dtype.text):
            self.fail(f"a dtype ({', '.join(DTYPE_BYTES)}) or a weight format", dtype)
        self.expect("[")
        dims: list[Dim] = []
        while not self.accept("]"):
            dims.append(self._dim())
            if not self.next_is("]"):
                self.expect(",", "]", *(() if dims[-1].degree > 1 else ("|", "=", "+", "~")))
        return TensorType(dtype.text, tuple(dims))

    def _dim(self) -> Dim:
        expression = sympy.Mul(*self._factors())
        size: Size = int(expression) if expression.is_Integer else expression
        if not self.next_is("|", "=", "+", "~"):
            return Dim(size)
        state = State(self.advance().text)
        token = self.take("number", "a degree of at least 2")
        if (
            not token.text.isdecimal()
            or (degree := self._checked_integer(1, token.text, token)) < 2
        ):
            self.fail("a degree of at least 2", token)
        return Dim(size, state, degree)

    # ----------------------------------------------------------------------------------- sizes

    # Sympy orders and distributes on construction: 2*(S + r) becomes a sum, but 2*(S + r)/S does
    # not.
    # A printed product must therefore be built from all of its factors together.

    def _sum(self) -> sympy.Expr:
        return sympy.Mul(*self._sum_factors())

    def _sum_factors(self) -> list[sympy.Expr]:
        """Return the factors of a sum of one term; a longer sum is its own factor."""
        factors = self._factors()
        if not self.next_is("+", "-"):
            return factors
        terms = [sympy.Mul(*factors)]
        start = self.token
        while self.next_is("+", "-"):
            sign = 1 if self.advance().text == "+" else -1
            terms.append(sympy.Mul(sign, *self._factors()))
        return [self._bounded(sympy.Add(*terms), start)]

    def _factors(self) -> list[sympy.Expr]:
        start = self.token
        factors = [sympy.Integer(-1)] if self.accept("-") else []
        factors += self._power()
        while self.next_is("*", "/"):
            sign = self.advance()
            more = self._power()
            if sign.text == "/" and any(factor.is_zero for factor in more):
                self.fail("a divisor other than 0", sign)
            factors += more if sign.text == "*" else [1 / factor for factor in more]
        self._bounded(sympy.Mul(*factors), start)
        return factors

    def _power(self) -> list[sympy.Expr]:
        factors = self._atom()
        sign = self.token
        if not self.accept("**"):
            return factors
        base = sympy.Mul(*factors)
        parenthesized = self.accept("(")
        token = self.token
        exponent = self._integer()
        if parenthesized:
            self.expect(")")
        if abs(exponent) > LARGEST_EXPONENT or (exponent < 0 and base.is_zero):
            self.fail(f"an exponent of at most {LARGEST_EXPONENT}", token)
        return [self._bounded(base**exponent, sign)]

    def _atom(self) -> list[sympy.Expr]:
        token = self.token
        if token.kind == "number" and token.text.isdecimal():
            return [sympy.Integer(self._checked_integer(1, self.advance().text, token))]
        if token.kind == "word":
            name = self.advance().text
            if name in FUNCTIONS and self.next_is("("):
                return [self._call(name, token)]
            return [sympy.Symbol(name, integer=True, positive=True)]
        if self.accept("("):
            return self._nested(self._sum_factors, ")")
        self.fail(
            "a size: an int, a symbol, an expression in parentheses, Min, Max, ceiling or floor"
        )

    def _call(self, name: str, token: Token) -> sympy.Expr:
        self.expect("(")
        arguments = [self._nested(self._sum, ",", ")")]
        while self.previous.text == ",":
            arguments.append(self._nested(self._sum, ",", ")"))
        if name in ("ceiling", "floor") and len(arguments) != 1:
            self.fail(f"one argument, not {len(arguments)}, of {name}", token)
        return self._bounded(FUNCTIONS[name](*arguments), token)

    def _nested(self, read: Callable[[], _Read], *closing: str) -> _Read:
        """Read by `read`, then an operator that may follow."""
        self._depth += 1
        if self._depth > DEEPEST_NESTING:
            self.fail(f"a size of at most {DEEPEST_NESTING} levels of parentheses")
        expression = read()
        self.expect(*closing)
        self._depth -= 1
        return expression

    def _bounded(self, expression: sympy.Expr, token: Token) -> sympy.Expr:
        numbers = expression.atoms(sympy.Rational)
        if not all(number.p in INTEGERS and number.q in INTEGERS for number in numbers):
            self.fail("a size of ints of 64 bits", token)
        return expression
