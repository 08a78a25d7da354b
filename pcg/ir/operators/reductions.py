"""Operators along one feature dim that reduce or normalise it: sum, mean, softmax, top-k."""

from __future__ import annotations

from collections.abc import Iterator

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import (
    COUNT,
    DIM,
    FLAG,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Tile,
    Types,
    declared,
    feature_dim,
    same_dims,
)
from pcg.ir.operators.shape import other_dims


class Reduction(Operator):
    """A feature dim reduced; it stays with size 1 where `keepdim`."""

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
        """dy repeated over the reduced dim."""
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
    """The k largest of the last dim, and their indices."""

    name = "topk"
    attributes = declared(k=COUNT)
    template = "torch.topk({0}, {k}, dim=-1)"
    suffixes = ("", "indices")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if attributes["k"] > int(types[0].shape[feature_dim(types[0], -1)]):
            raise TypeCheckError(f"topk of {types[0]} with k={attributes['k']}")
        values = types[0].with_shape((*types[0].shape[:-1], attributes["k"]))
        return values, values.with_dtype("i64")

    def gradient(self, context: Gradient) -> list[str | None]:
        size = int(context.input_type(0).shape[-1])
        return [context.add("topk_backward", context.incoming, context.output(1), size=size)]


class TopKBackward(Operator):
    """The gradient dy of the k largest, in their places among `size`; zeros elsewhere."""

    name = "topk_backward"
    attributes = declared(size=COUNT)
    template = "{0}.new_zeros(*{0}.shape[:-1], {size}).scatter_(-1, {1}, {0})"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, indices = types
        if dy.shape != indices.shape or indices.is_float or int(dy.shape[-1]) > attributes["size"]:
            raise TypeCheckError(
                f"gradient {dy} does not fit indices {indices} of {attributes['size']}"
            )
        return (dy.with_shape((*dy.shape[:-1], attributes["size"])),)
