"""Base class of the table's operators, and the context in which gradients are built.

A subclass states all about an operator: its output types (`infer`), its meaning as a PyTorch
expression (`source`), its gradient as nodes of the backward graph (`gradient`; its forward reads
are the values that backward needs, Algorithm 1's UPDATEINPUT), how the ranks of a tensor-parallel
group can share it (`aligned`, `linear_in`, `shardings`), its cost (`flops`, `moved_bytes`), and an
element in Triton, if kernels fuse it (`tile`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import sympy

from pcg.errors import TypeCheckError, UnsupportedError
from pcg.ir.graph import Attribute, Graph, Node, Parameter
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, ROUTED, WHOLE, Sharding, partitioned
from pcg.ir.printer import INTEGERS
from pcg.ir.types import DTYPE_BYTES, TensorType, counts_tokens

Types: TypeAlias = tuple[TensorType, ...]
Attributes: TypeAlias = Mapping[str, Any]
"""A node's attributes by name; `Operator.attributes` declares them."""
Aligned: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A dim of each input and of each output, counted from the end; 0 for a tensor without it."""

Bounds = MappingProxyType
"""For some inputs by index, the error of the result if the input has an error of e."""

Measured: TypeAlias = tuple[Types, Attributes, tuple[int, ...]]
"""A measurement of a profile: types, attributes, and the indices of the adapter's inputs."""


class Kind(NamedTuple):
    """The values that an attribute may have.

    Attributes:
        text: the values in words, for messages.
        is_needed: False if the attribute is optional.
    """

    text: str
    holds: Callable[[Any], bool]
    is_needed: bool = True


def optional(kind: Kind) -> Kind:
    """Return the same kind for an optional attribute."""
    return kind._replace(is_needed=False)


def word(*words: str) -> Kind:
    """Return the kind of an attribute with a value among some words."""
    return Kind(" or ".join(map(repr, words)), lambda value: type(value) is str and value in words)


def integer(least: int, most: int = INTEGERS[-1]) -> Kind:
    """Return the kind of an attribute that is an int within bounds."""
    bounds = f"of at least {least}" if most == INTEGERS[-1] else f"from {least} to {most}"
    return Kind(f"an int {bounds}", lambda value: type(value) is int and least <= value <= most)


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


COUNT, NATURAL = integer(1), integer(0)
DIM = Kind("a negative int, a dim counted from the end", integer(INTEGERS[0], -1).holds)
FLOAT = Kind("a finite float", _is_finite)
NUMBER = Kind(
    "an int of 64 bits or a finite float",
    lambda value: value in INTEGERS if type(value) is int else _is_finite(value),
)
FLAG = Kind("True or False", lambda value: type(value) is bool)
PRESENT = Kind("True, or missing", lambda value: value is True, is_needed=False)
TEXT = Kind("a string", lambda value: type(value) is str)
SIZES = Kind(
    "a tuple of ints of 64 bits",
    lambda value: (
        type(value) is tuple and all(type(item) is int and item in INTEGERS for item in value)
    ),
)
DTYPE = word(*DTYPE_BYTES)


def declared(**kinds: Kind) -> Mapping[str, Kind]:
    """Return the kinds of an operator's attributes by name."""
    return MappingProxyType(kinds)


class Operator:
    """An entry of the operator table."""

    name: ClassVar[str]
    attributes: ClassVar[Mapping[str, Kind]] = declared()
    """The kind of each required or optional attribute; other attributes are refused."""
    template: ClassVar[str] = "K.{name}({inputs})"
    """The PyTorch expression: `{0}` is the first input, `{inputs}` all inputs; attributes appear by
    name. K are the functions of `pcg.kernels`."""
    inputs: ClassVar[tuple[int, int]] = (1, 1)
    """Fewest and most inputs."""
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    """Suffixes of the outputs' names; operators with more outputs than suffixes number them."""
    returns_sequence: ClassVar[bool] = False
    """True if the expression is a sequence even for a single output."""
    is_view: ClassVar[bool] = False
    """True if eager PyTorch returns a view of the first input, which costs no memory."""
    is_product: ClassVar[bool] = False
    """True for matrix products and attention, which a memory budget of 1 never recomputes."""
    is_random: ClassVar[bool] = False
    """True for an operator with random numbers; it redraws the same for the same step and layer."""
    counts_on_host: ClassVar[bool] = False
    """True if the host waits for numbers of the device, so that steps with it are not recorded."""
    sees_sequences: ClassVar[bool] = False
    """True if a token's result depends on other tokens; only attention's does."""
    sees_rows: ClassVar[bool] = False
    """True if it asks the batch for the token of a row, as rows may be virtual tokens."""
    sums_rows: ClassVar[bool] = False
    """True if an element depends on all of its row, the last dim."""
    linear_in: ClassVar[tuple[tuple[int, ...], ...]] = ()
    """Sets of inputs in which it is jointly linear, with the other inputs fixed."""
    constant_in: ClassVar[tuple[int, ...]] = ()
    """Inputs that it treats as constants: no gradient flows back to them."""
    bounded_in: ClassVar[Mapping[int, str]] = Bounds({})
    """Inputs with an error of e in each element, and the bound of the output's error.

    `pcg.passes.graphs.lossy` may save such an input less precisely.
    """
    row_bounded_in: ClassVar[Mapping[int, str]] = Bounds({})
    """As `bounded_in`, for inputs that only count in row sums: e may be relative to the row."""
    finely_bounded_in: ClassVar[Mapping[int, str]] = Bounds({})
    """As `bounded_in`, for inputs with an exponential effect of e: e must be almost 0."""
    adjoint: ClassVar[str] = ""
    """The operator of its gradient, if that takes only the upstream gradient and its attributes."""
    computes_in_first: ClassVar[bool] = False
    """True if arithmetic is in the first input's dtype, regardless of the others."""
    has_kernel: ClassVar[bool] = False
    """True if it has its own Triton kernel, in addition to kernels that fuse its `tile`."""
    made_rows: ClassVar[tuple[bool, ...]] = ()
    """For each input, if all are weights: True if its rows determine the output's rows."""
    executable: ClassVar[bool] = True
    """False if a program with this operator can only be explained."""

    def infer(self, types: Types, attributes: Attributes) -> Types:
        """Return the types of the outputs; raise TypeCheckError for unsupported types."""
        return (types[0],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        """Return the PyTorch expression, over Python expressions of the inputs."""
        if not self.executable:
            raise UnsupportedError(
                f"operator {self.name!r} cannot run yet; it can only be explained"
            )
        fields = {field for _, field, _, _ in Formatter().parse(self.template) if field}
        named = {name: attributes[name] for name in fields & set(attributes)}
        return self.template.format(*inputs, name=self.name, inputs=", ".join(inputs), **named)

    def request_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        """Return the expression that requests a base product (`pcg.kernels.torch.products`)."""
        return None

    def tiles(self, attributes: Attributes) -> bool:
        """Return whether `tile` returns an element: by default, if the operator defines it."""
        return type(self).tile is not Operator.tile

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        """Return the Triton expression of an element of the first output."""
        raise UnsupportedError(f"operator {self.name!r} is no part of a fused kernel")

    def gradient(self, context: Gradient) -> list[str | None]:
        """Add the backward nodes; return the gradient of each input, None if not needed."""
        if not self.adjoint:
            raise UnsupportedError(f"operator {self.name!r} has no gradient")
        return [context.add(self.adjoint, context.incoming, **context.attributes)]

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        """Yield feature dims along which entries are independent and treated equally."""
        return iter(())

    def dims_behind(
        self, types: Types, output: TensorType, attributes: Attributes, dim: int
    ) -> Mapping[int, int] | None:
        """Return the dims of inputs, by index, that alone determine an output dim's entries.

        None if an entry also depends on others, or is random by its place.
        """
        if self.is_random:
            return None
        if self.made_rows and dim == -len(output.dims):
            return {i: -len(types[i].dims) for i, part in enumerate(self.made_rows) if part}
        size = output.shape[dim]
        for inputs, outputs in self.aligned(types, attributes):
            dims = {place: at for place, at in enumerate(inputs) if at}
            if outputs == (dim,) and all(types[i].shape[at] == size for i, at in dims.items()):
                return dims
        return None

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        """Yield the ways in which ranks can run it without communication.

        All whole, all replicated, parts of an aligned dim, summands of a linear input, and rows of
        experts. Operators that sum over a dim add their own.
        """
        outputs = self.infer(types, attributes)
        for layout in (WHOLE, REPLICATED):
            yield Sharding((layout,) * len(types), (layout,) * len(outputs))
        for summed in self.linear_in:
            if max(summed) < len(types):
                layouts = [PRE_REDUCE if i in summed else REPLICATED for i in range(len(types))]
                yield Sharding(tuple(layouts), (PRE_REDUCE,) * len(outputs))
        dims = list(self.aligned(types, attributes))
        if not (self.sees_sequences or self.sees_rows or self.is_random):
            yield from _of_choices(types, outputs, dims)
            dims.append((_token_dims(types), _token_dims(outputs)))
        for ins, outs in dims:
            if all(outs):
                yield Sharding(
                    tuple(partitioned(dim) if dim else REPLICATED for dim in ins),
                    tuple(map(partitioned, outs)),
                )

    def local_attributes(
        self, attributes: Attributes, outputs: Types, parts: int = 1
    ) -> Attributes:
        """Return the attributes on a rank with outputs of these types, and part of the experts."""
        return attributes

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        """Return floating-point operations, a formula in `T`; elementwise unless overridden."""
        return sympy.Integer(0) if self.is_view else outputs[0].elements

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        """Return the least bytes that a kernel reads and writes, a formula in `T`; 0 for a view."""
        if self.is_view:
            return sympy.Integer(0)
        return sympy.Add(*(type_.size_bytes for type_ in (*inputs, *outputs)))

    def compute_dtype(self, inputs: Types) -> str:
        """Return the dtype of its arithmetic: the widest float input, else the first input's."""
        floats = [type_.dtype for type_ in inputs if type_.is_float and not self.computes_in_first]
        return max(floats, key=DTYPE_BYTES.__getitem__) if floats else inputs[0].dtype

    def measured(self, size: int, rank: int, dtype: str) -> Iterator[Measured]:
        """Yield a profile's measurements of an operator that reads only adapters' parameters.

        `size` is a module's number of inputs or outputs; rank and dtype are the adapter's.
        """
        return iter(())

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        """Return the peak bytes of PyTorch's kernel besides inputs, outputs and a few per token."""
        return sympy.Integer(0)

    def context_inputs(self, inputs: Types) -> Types:
        """Return the inputs that a token reads over its whole sequence, such as keys and values.

        Ranks that share the tokens of a sequence gather these.
        """
        return ()

    def output_suffixes(self, count: int) -> tuple[str, ...]:
        if count > len(self.suffixes):
            return ("", *map(str, range(1, count)))
        return self.suffixes[:count]

    def check_attributes(self, attributes: Attributes) -> None:
        """Raise TypeCheckError for an undeclared, wrong or missing attribute."""
        for name, value in attributes.items():
            kind = self.attributes.get(name)
            if kind is None:
                known = f" (it has {', '.join(self.attributes)})" if self.attributes else ""
                raise TypeCheckError(f"{self.name} has no attribute {name}; remove it{known}")
            if not kind.holds(value):
                raise TypeCheckError(f"{self.name} takes {name} as {kind.text}, not {value!r}")
        for name, kind in self.attributes.items():
            if kind.is_needed and name not in attributes:
                raise TypeCheckError(f"{self.name} needs the attribute {name}, {kind.text}")

    def check_arity(self, types: Types) -> None:
        fewest, most = self.inputs
        if not fewest <= len(types) <= most:
            expected = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            raise TypeCheckError(f"{self.name} takes {expected} inputs, not {len(types)}")


def _of_choices(types: Types, outputs: Types, dims: Sequence[Aligned]) -> Iterator[Sharding]:
    """Yield the rule for rows [T, k, …], of which a rank has those of its experts."""
    if any(len(type_.dims) < 3 or not type_.is_token_wise for type_ in outputs):
        return
    rows = tuple(1 - len(type_.dims) if type_.is_token_wise else 0 for type_ in types)
    choices = tuple(1 - len(type_.dims) for type_ in outputs)
    every = [ins for ins, outs in dims if outs == choices]
    tokenwise = (type_ for type_ in (*types, *outputs) if type_.is_token_wise)
    if all(type_.shape[1:2] in ((), (1,)) for type_ in tokenwise):
        every = [rows]  # the rows of an only choice are those of tokens
    for ins in every:
        of_choices = [bool(at and row) for at, row in zip(ins, rows, strict=True)]
        read = [type_ for type_, of in zip(types, of_choices, strict=True) if of]
        keeps_dim = all(at in (0, row) for at, row in zip(ins, rows, strict=True) if row)
        if keeps_dim and {type_.shape[1] for type_ in read} == {outputs[0].shape[1]}:
            layouts = [ROUTED if of else REPLICATED for of in of_choices]
            yield Sharding(tuple(layouts), (ROUTED,) * len(outputs))
            return


def _token_dims(types: Types) -> tuple[int, ...]:
    return tuple(-len(type_.dims) if type_.is_token_wise else 0 for type_ in types)


def same_dims(type_: TensorType, count: int = 1) -> Iterator[Aligned]:
    """Yield each feature dim, the same in `count` inputs and in the output."""
    for dim in range(-len(type_.features), 0):
        yield (dim,) * count, (dim,)


def broadcast_dims(types: Types, output: TensorType) -> Iterator[Aligned]:
    """Yield each feature dim of the output, with the inputs' dims of its size."""
    for dim in range(-len(output.features), 0):
        size = output.shape[dim]
        yield tuple(dim if _has(type_, dim, size) else 0 for type_ in types), (dim,)


def _has(type_: TensorType, dim: int, size: object) -> bool:
    return len(type_.features) >= -dim and type_.shape[dim] == size


class Tile(Protocol):
    """A tile of an operator's output: rows, along the last dim, and columns.

    An element (`Operator.tile`) depends on inputs at the same place, at another column of the row,
    or summed over the row. Values have the dtype of arithmetic: fp32 for half precision.
    """

    @property
    def column(self) -> str:
        """Return the expression of each element's index in the last dim."""

    @property
    def inputs(self) -> int:
        """The number of the operator's inputs."""

    def size(self, index: int) -> int:
        """Size of an input's last dim."""

    def dtype(self, index: int) -> str:
        """Return an input's dtype, such as `bf16`."""

    def read(self, index: int, column: str | None = None, where: str = "") -> str:
        """Return an input at the output's position, or at another column, broadcast to the output.

        `where` is the condition for the column to exist; elsewhere any number is correct.
        """

    def let(self, name: str, expression: str) -> str:
        """Assign an expression to a variable whose name starts with `name`."""

    def rounded(self, expression: str, dtype: str) -> str:
        """Return the expression rounded to a dtype."""

    def row_sum(self, name: str, summand: Callable[[Tile], str]) -> str:
        """Assign the sum of an expression over the row to a variable."""


class GraphBuilder(Protocol):
    """The part of `pcg.ir.analysis.builder.Builder` that gradient rules use."""

    types: dict[str, TensorType]
    reserved: Container[str]

    def input(self, name: str, type_: TensorType) -> str: ...

    def parameter(self, parameter: Parameter) -> str: ...

    def add(
        self, op: str, inputs: Sequence[str], *, name: str, scope: str, **attributes: Attribute
    ) -> str: ...

    def add_many(
        self, op: str, inputs: Sequence[str], *, name: str, scope: str, **attributes: Attribute
    ) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Gradient:
    """The context in which a gradient rule adds its nodes.

    Attributes:
        builder: the builder of the backward graph.
        node: the differentiated node of `forward`.
        upstream: gradient of each output of the node; None for outputs without a gradient.
        needs: for each input of the node, True if its gradient is needed.
    """

    builder: GraphBuilder
    forward: Graph
    node: Node
    upstream: tuple[str | None, ...]
    needs: tuple[bool, ...]

    def __post_init__(self) -> None:
        # A forward value keeps its name in the backward graph, so no backward node may take it.
        self.builder.reserved = self.forward.types

    @property
    def incoming(self) -> str:
        gradient = self.upstream[0]
        if gradient is None:
            raise TypeCheckError(f"no gradient flows into %{self.node.name}")
        return gradient

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.node.attributes)

    def input_type(self, index: int) -> TensorType:
        return self.forward.types[self.node.inputs[index]]

    def input(self, index: int) -> str:
        return self.saved(self.node.inputs[index])

    @property
    def inputs(self) -> list[str]:
        return [self.saved(name) for name in self.node.inputs]

    def output(self, index: int = 0) -> str:
        return self.saved(self.node.outputs[index].name)

    def saved(self, name: str) -> str:
        """Read a forward value in backward, as a parameter or as an input."""
        if name in self.builder.types:
            return name
        parameter = self.forward.parameters_by_name.get(name)
        if parameter is not None:
            return self.builder.parameter(parameter)
        return self.builder.input(name, self.forward.types[name])

    def add(self, op: str, *inputs: str, **attributes: Attribute) -> str:
        return self.builder.add(op, inputs, name=op, scope=self.node.scope, **attributes)

    def add_many(self, op: str, *inputs: str, **attributes: Attribute) -> tuple[str, ...]:
        return self.builder.add_many(op, inputs, name=op, scope=self.node.scope, **attributes)

    def reduced(self, gradient: str, index: int) -> str:
        """Sum the gradient over the broadcast dims of input `index`, in the input's dtype."""
        wanted = self.input_type(index)
        have = self.builder.types[gradient]
        if wanted.is_token_wise != have.is_token_wise:
            raise UnsupportedError(
                f"the gradient of {wanted} %{self.node.inputs[index]} in {self.node.op} sums over "
                "tokens, which only a bypass network's own operators do"
            )
        padded = (1,) * (len(have.shape) - len(wanted.shape)) + wanted.shape
        for dim, (size, target) in enumerate(zip(have.shape, padded, strict=True)):
            if size != target:
                gradient = self.add("sum", gradient, dim=dim - len(have.shape), keepdim=True)
        if self.builder.types[gradient].shape != wanted.shape:
            gradient = self.add("reshape", gradient, shape=wanted.reshape_sizes)
        return self.cast(gradient, wanted.dtype)

    def cast(self, name: str, dtype: str) -> str:
        if self.builder.types[name].dtype == dtype:
            return name
        return self.add("cast", name, dtype=dtype)


def widened(type_: TensorType) -> TensorType:
    """Return the type in which norms and losses compute: fp32 for half precision."""
    return type_ if type_.dtype in ("f32", "f64") else type_.with_dtype("f32")


def cast_bytes(type_: TensorType, dtype: str) -> sympy.Expr:
    """Return the bytes of a copy in another dtype; 0 if the dtype is the same."""
    return sympy.Integer(0) if type_.dtype == dtype else type_.with_dtype(dtype).size_bytes


def check_gradient(gradient: TensorType, of: TensorType) -> None:
    """Raise TypeCheckError if a gradient has another shape than its value."""
    if gradient.shape != of.shape:
        raise TypeCheckError(f"gradient {gradient} does not fit {of}")


def check_norm(x: TensorType, weights: Types) -> None:
    """Raise TypeCheckError if x has no features, or a weight does not broadcast to its last."""
    if len(x.dims) == x.is_token_wise:
        raise TypeCheckError(f"a norm of {x}, which has no feature dim")
    for weight in weights:
        count = len(weight.dims)
        fits = not weight.is_token_wise and 0 < count <= len(x.dims) - x.is_token_wise
        if not fits or any(
            size not in (1, target)
            for size, target in zip(weight.shape, x.shape[-count:], strict=True)
        ):
            raise TypeCheckError(f"a weight {weight} does not fit the last dims of {x}")


def feature_dim(type_: TensorType, dim: int) -> int:
    """Check and return a dim counted from the end; TypeCheckError for other dims and tokens."""
    rank = len(type_.dims)
    if not -rank <= dim < 0 or counts_tokens(type_.shape[dim]):
        raise TypeCheckError(f"dim {dim} is no feature dim of {type_}; dims count from the end")
    return dim
