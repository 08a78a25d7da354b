"""Operators along feature dims: move, join, repeat, reduce, softmax, top-k. Tokens never mix.

Dims count from the end (-1 is the last), so a dim keeps its number with and without a token dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import (
    COUNT,
    DIM,
    FLAG,
    NATURAL,
    PRESENT,
    SIZES,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Tile,
    Types,
    broadcast_dims,
    check_gradient,
    declared,
    feature_dim,
    optional,
    same_dims,
)
from pcg.ir.types import TensorType, promote, tensor


def other_dims(attributes: Attributes, dims: Iterator[Aligned]) -> Iterator[Aligned]:
    """Yield the dims other than the attribute `dim`'s."""
    return (pair for pair in dims if pair[0][0] != attributes["dim"])


def _full_shape(type_: TensorType, attributes: Attributes) -> TensorType:
    sizes = attributes["shape"]
    if (sizes[:1] == (-1,)) != type_.is_token_wise:
        raise TypeCheckError(f"shape {list(sizes)} of {type_}: -1 first if and only if tokens lead")
    return type_.with_shape(tuple(type_.shape[0] if size == -1 else size for size in sizes))


class Reshape(Operator):
    """The same numbers with other feature dims; `shape` is -1 for the token dim, then features."""

    name = "reshape"
    attributes = declared(shape=SIZES)
    is_view = True
    linear_in = ((0,),)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return tile.read(0)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        shape = _full_shape(types[0], attributes)
        if prod(shape.features) != prod(types[0].features):
            raise TypeCheckError(f"cannot reshape {types[0]} to {list(attributes['shape'])}")
        return (shape,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        """Yield dims preceded by equally many entries in both shapes: they have the same parts."""
        before = {prod(f[:i]): i - len(f) for f in [types[0].features] for i in range(len(f))}
        new = self.infer(types, attributes)[0].features
        for i in range(len(new)):
            old = before.get(prod(new[:i]))
            if old is not None and new[i] > 1 and types[0].features[old] > 1:
                yield (old,), (i - len(new),)

    def local_attributes(
        self, attributes: Attributes, outputs: Types, parts: int = 1
    ) -> Attributes:
        return {**attributes, "shape": outputs[0].reshape_sizes}

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"{inputs[0]}.{self.name}({', '.join(map(str, attributes['shape']))})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("reshape", context.incoming, shape=context.input_type(0).reshape_sizes)]


class Expand(Reshape):
    """Feature dims of size 1 repeated to `shape` (-1 for the token dim), without copying."""

    name = "expand"

    def tiles(self, attributes: Attributes) -> bool:
        return False

    def infer(self, types: Types, attributes: Attributes) -> Types:
        wanted = _full_shape(types[0], attributes)
        sizes = list(zip(types[0].shape, wanted.shape, strict=False))
        if len(wanted.dims) != len(types[0].dims) or any(a not in (1, b) for a, b in sizes):
            raise TypeCheckError(f"cannot expand {types[0]} to {list(attributes['shape'])}")
        return (wanted,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return broadcast_dims(types, self.infer(types, attributes)[0])

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.reduced(context.incoming, 0)]


class Permute(Operator):
    """Dims in another order, as torch.permute; the token dim stays first."""

    name = "permute"
    attributes = declared(dims=SIZES)
    is_view = True
    linear_in = ((0,),)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dims, shape = attributes["dims"], types[0].shape
        if sorted(dims) != list(range(len(shape))) or (types[0].is_token_wise and dims[0] != 0):
            raise TypeCheckError(f"permute dims {list(dims)} do not fit {types[0]}")
        return (types[0].with_shape(tuple(shape[dim] for dim in dims)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        dims = attributes["dims"]
        for i in range(int(types[0].is_token_wise), len(dims)):
            yield (dims[i] - len(dims),), (i - len(dims),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"{inputs[0]}.permute({', '.join(map(str, attributes['dims']))})"

    def gradient(self, context: Gradient) -> list[str | None]:
        dims = context.attributes["dims"]
        inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
        return [context.add("permute", context.incoming, dims=inverse)]


class Slice(Operator):
    """x[..., start:stop:step, ...] along a feature dim; a view."""

    name = "slice"
    attributes = declared(dim=DIM, start=NATURAL, stop=COUNT, step=optional(COUNT))
    is_view = True
    linear_in = ((0,),)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim = feature_dim(types[0], attributes["dim"])
        start, stop = attributes["start"], attributes["stop"]
        if not 0 <= start < stop <= int(types[0].shape[dim]):
            raise TypeCheckError(f"slice {start}:{stop} is outside dim {dim} of {types[0]}")
        shape = list(types[0].shape)
        shape[dim] = len(range(start, stop, attributes.get("step", 1)))
        return (types[0].with_shape(tuple(shape)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield from other_dims(attributes, same_dims(types[0]))
        # Of interleaved entries, as of a gate and an up projection, ranks have whole groups.
        step, dim = attributes.get("step", 1), attributes["dim"]
        size = int(types[0].shape[dim])
        if step > 1 and len(range(attributes["start"], attributes["stop"], step)) * step == size:
            yield (dim,), (dim,)

    def local_attributes(
        self, attributes: Attributes, outputs: Types, parts: int = 1
    ) -> Attributes:
        taken, step = int(outputs[0].shape[attributes["dim"]]), attributes.get("step", 1)
        return {**attributes, "stop": attributes["start"] + (taken - 1) * step + 1}

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        step = attributes.get("step", 1)
        bounds = f"{attributes['start']}:{attributes['stop']}" + (f":{step}" if step != 1 else "")
        return f"{inputs[0]}[..., {', '.join([bounds] + [':'] * (-attributes['dim'] - 1))}]"

    def gradient(self, context: Gradient) -> list[str | None]:
        size = int(context.input_type(0).shape[context.attributes["dim"]])
        return [context.add("slice_backward", context.incoming, size=size, **context.attributes)]


class SliceBackward(Operator):
    """Zeros except for the slice, which holds dy."""

    name = "slice_backward"
    attributes = declared(**Slice.attributes, size=COUNT)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim, size = feature_dim(types[0], attributes["dim"]), attributes["size"]
        shape = [*types[0].shape[:dim], size, *types[0].shape[dim:][1:]]
        whole = types[0].with_shape(tuple(shape))
        part = {name: value for name, value in attributes.items() if name != "size"}
        check_gradient(types[0], Slice().infer((whole,), part)[0])
        return (whole,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        arguments = [attributes.get(name, 1) for name in ("dim", "start", "stop", "step", "size")]
        return f"K.slice_backward({inputs[0]}, {', '.join(map(str, arguments))})"

    def tiles(self, attributes: Attributes) -> bool:
        return bool(attributes["dim"] == -1)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        start, stop, step = attributes["start"], attributes["stop"], attributes.get("step", 1)
        place = f"({tile.column} - {start})"
        taken = f"({place} >= 0) & ({tile.column} < {stop})"
        if step != 1:
            taken += f" & ({place} % {step} == 0)"
            place = f"({place} // {step})"
        return f"tl.where({taken}, {tile.read(0, place, taken)}, 0.0)"


class Concat(Operator):
    """Tensors joined along a feature dim."""

    name = "concat"
    attributes = declared(dim=DIM)
    inputs = (1, 64)

    def tiles(self, attributes: Attributes) -> bool:
        return bool(attributes["dim"] == -1)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        expression, start = "", 0
        for index in range(tile.inputs):
            end = start + tile.size(index)
            condition = f"({tile.column} >= {start}) & ({tile.column} < {end})"
            part = tile.read(index, f"{tile.column} - {start}", condition)
            expression = (
                f"tl.where({tile.column} >= {start}, {part}, {expression})" if expression else part
            )
            start = end
        return expression

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim = feature_dim(types[0], attributes["dim"])
        shape = list(types[0].shape)
        dtype = types[0].dtype
        for other in types[1:]:
            rest = list(other.shape)
            dtype = promote(dtype, other.dtype)
            size, rest[dim] = rest[dim], shape[dim]
            if rest != shape:
                raise TypeCheckError(f"concat of {types[0]} and {other} along dim {dim}")
            shape[dim] += size
        return (tensor(dtype, *shape),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return other_dims(attributes, same_dims(types[0], len(types)))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"torch.cat(({', '.join(inputs)},), {attributes['dim']})"

    def gradient(self, context: Gradient) -> list[str | None]:
        dim = context.attributes["dim"]
        gradients: list[str | None] = []
        start = 0
        for i, need in enumerate(context.needs):
            stop = start + int(context.input_type(i).shape[dim])
            part = None
            if need:
                part = context.add("slice", context.incoming, dim=dim, start=start, stop=stop)
                part = context.cast(part, context.input_type(i).dtype)
            gradients.append(part)
            start = stop
        return gradients


class RepeatInterleave(Operator):
    """Each entry of a feature dim repeated `repeats` times in place: abc becomes aabbcc."""

    name = "repeat_interleave"
    attributes = declared(dim=DIM, repeats=COUNT)
    template = "{0}.repeat_interleave({repeats}, {dim})"
    linear_in = ((0,),)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim = feature_dim(types[0], attributes["dim"])
        shape = list(types[0].shape)
        shape[dim] *= attributes["repeats"]
        return (types[0].with_shape(tuple(shape)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])

    def gradient(self, context: Gradient) -> list[str | None]:
        dim, repeats = context.attributes["dim"], context.attributes["repeats"]
        features = list(context.input_type(0).features)
        after = len(features) + dim + 1
        split = (*features[:after], repeats, *features[after:])
        tokens = (-1,) * context.input_type(0).is_token_wise
        grouped = context.add("reshape", context.incoming, shape=(*tokens, *split))
        return [context.add("sum", grouped, dim=dim, keepdim=False)]


# --------------------------------------------------------------------------------------- reductions


class Reduction(Operator):
    """A reduced feature dim; it stays with size 1 with `keepdim`."""

    attributes = declared(dim=DIM, keepdim=FLAG)
    template = "{0}.{name}({dim}, keepdim={keepdim})"
    sums_rows = True

    def tiles(self, attributes: Attributes) -> bool:
        return attributes["dim"] == -1 and bool(attributes["keepdim"])

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dim = feature_dim(types[0], attributes["dim"])
        shape = list(types[0].shape)
        shape[dim] = 1
        if not attributes["keepdim"]:
            del shape[dim]
        return (types[0].with_shape(tuple(shape)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for (dim,), _ in other_dims(attributes, same_dims(types[0])):
            yield (dim,), (dim + int(dim < attributes["dim"] and not attributes["keepdim"]),)

    def _repeated(self, context: Gradient) -> str:
        whole = context.input_type(0).reshape_sizes
        sizes = list(whole)
        sizes[context.attributes["dim"]] = 1
        column = context.add("reshape", context.incoming, shape=tuple(sizes))
        return context.add("expand", column, shape=whole)


class Mean(Reduction):
    """The mean over a feature dim."""

    name = "mean"
    linear_in = ((0,),)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return f"{tile.row_sum('total', lambda row: row.read(0))} / {tile.size(0)}"

    def gradient(self, context: Gradient) -> list[str | None]:
        size = int(context.input_type(0).shape[context.attributes["dim"]])
        return [context.add("div", self._repeated(context), scalar=float(size))]


class Sum(Reduction):
    """The sum over a feature dim."""

    name = "sum"
    linear_in = ((0,),)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return tile.row_sum("total", lambda row: row.read(0))

    def gradient(self, context: Gradient) -> list[str | None]:
        return [self._repeated(context)]


class Softmax(Operator):
    """Softmax over one feature dim; dx = y (dy - sum(y dy))."""

    name = "softmax"
    attributes = declared(dim=DIM)
    template = "torch.softmax({0}, {dim})"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        feature_dim(types[0], attributes["dim"])
        return (types[0],)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return other_dims(attributes, same_dims(types[0]))

    def gradient(self, context: Gradient) -> list[str | None]:
        weighted = context.add("mul", context.incoming, context.output())
        total = context.add("sum", weighted, dim=context.attributes["dim"], keepdim=True)
        return [context.add("sub", weighted, context.add("mul", context.output(), total))]


class TopK(Operator):
    """The k largest of the last dim, and their indices.

    With `routes`, the indices are those of experts, which a batch may record or replay.
    """

    name = "topk"
    attributes = declared(k=COUNT, routes=PRESENT)
    suffixes = ("", "indices")

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        if attributes.get("routes"):
            return f"K.routed_topk(batch, {inputs[0]}, {attributes['k']})"
        return f"torch.topk({inputs[0]}, {attributes['k']}, dim=-1)"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if attributes["k"] > int(types[0].shape[feature_dim(types[0], -1)]):
            raise TypeCheckError(f"topk of {types[0]} with k={attributes['k']}")
        values = types[0].with_shape((*types[0].shape[:-1], attributes["k"]))
        return values, values.with_dtype("i64")

    def gradient(self, context: Gradient) -> list[str | None]:
        size = int(context.input_type(0).shape[-1])
        return [context.add("take_along_backward", context.incoming, context.output(1), size=size)]


def _check_places(values: TensorType, indices: TensorType, size: int) -> None:
    if values.shape != indices.shape or indices.is_float or int(indices.shape[-1]) > size:
        raise TypeCheckError(f"{values} does not fit indices {indices} of {size}")


class TakeAlong(Operator):
    """The entries of the last dim at each token's indices."""

    name = "take_along"
    template = "torch.gather({0}, -1, {1})"
    inputs = (2, 2)
    constant_in = (1,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, indices = types
        values = x.with_shape((*x.shape[:-1], indices.shape[-1]))
        _check_places(values, indices, int(x.shape[-1]))
        return (values,)

    def gradient(self, context: Gradient) -> list[str | None]:
        size = int(context.input_type(0).shape[-1])
        dx = context.add("take_along_backward", context.incoming, context.input(1), size=size)
        return [dx, None]


class TakeAlongBackward(Operator):
    """The gradient dy of entries of the last dim, in their places among `size`; zeros elsewhere."""

    name = "take_along_backward"
    attributes = declared(size=COUNT)
    template = "{0}.new_zeros(*{0}.shape[:-1], {size}).scatter_add_(-1, {1}, {0})"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        _check_places(types[0], types[1], attributes["size"])
        return (types[0].with_shape((*types[0].shape[:-1], attributes["size"])),)
