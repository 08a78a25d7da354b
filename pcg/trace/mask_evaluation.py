"""Evaluation of an attention's bias on its scores at chosen positions, with PyTorch.

Token dims have only the chosen positions, and operators that depend on a token's index take its
position: a range, a triangle, a slice of a table. Only operators that are piecewise linear in
positions are accepted, and their corners recorded; all others are refused by name. A corner results
from a chain of at most three constants, such as 48 for (i - j) * 2 + 4 < 100. Positions may be
divided into chunks only for the condition that two of them are in the same chunk.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pcg.errors import TraceError
from pcg.trace.in_place_writes import memory_of, written

ADDED = torch.ops.aten.baddbmm.default
"""The product that adds another tensor to its result."""
_ALIKE = (
    "alias", "clone", "contiguous", "detach", "lift_fresh_copy", "permute", "squeeze", "transpose",
    "unsqueeze", "_to_copy", "to", "type_as",
)  # fmt: skip
_RESHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
_EXPANDED = ("expand", "broadcast_to", "expand_as")
_MADE = {
    "full": 1, "full_like": 1, "new_full": 2, "ones": None, "ones_like": None, "new_ones": None,
    "zeros": None, "zeros_like": None, "new_zeros": None,
}  # fmt: skip
"""Operators that fill a tensor, with the index of the value's argument."""
_LINEAR = ("add", "sub", "rsub", "mul", "div", "neg", "where", "masked_fill", "copy")
_LOGICAL = (
    "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor", "__and__", "__or__", "__xor__",
)  # fmt: skip
_CORNERED = (
    "lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal",
    "minimum", "maximum", "max", "min", "clamp", "clamp_min", "clamp_max", "abs", "relu",
    "sign",
)  # fmt: skip
_LOWER_BOUNDS = ("max", "maximum", "clamp", "clamp_min")
_OF_LENGTH = (
    operator.add, operator.sub, operator.mul, operator.neg, torch.sym_max, torch.sym_min,
    operator.getitem,
)  # fmt: skip
"""Functions of the number of tokens that are piecewise linear."""
_HALF = (torch.bfloat16, torch.float16)
_NEVER = -1e4
"""A bound that no score reaches."""
_MOST_COMBINED, _MOST_CONDITIONS = 3, 64
"""Maximum numbers of values combined by a condition, and of conditions that differ by head."""
_MOST_TURNS = 24
"""Maximum number of corners of a table."""
_FARTHEST = 2**24
"""The largest position of a corner of a mask."""


def _name(node: Node) -> str:
    """Return an operator's name without its overload and without the in-place underscore."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    return name if name.startswith("__") else name.removesuffix("_")


class Traced:
    """A graph with the number of its tokens; `is_half` is True for half-precision weights."""

    def __init__(self, graph: Graph, constants: Mapping[str, Tensor]) -> None:
        self.nodes = list(graph.nodes)
        self.constants = constants
        ids = next(node for node in self.nodes if node.name == "input_ids")
        self.tokens = ids.meta["val"].shape[1].node.expr
        held = [node.meta.get("val") for node in self.nodes if node.op == "placeholder"]
        self.is_half = any(isinstance(x, Tensor) and x.dtype in _HALF for x in held)
        self.writers: dict[int, list[Node]] = {}
        for node in self.nodes:
            for value, _ in written(node):
                self.writers.setdefault(memory_of(value) or 0, []).append(node)


class Subgraph:
    """The nodes that a value depends on, in order, including those that write into its inputs.

    Attributes:
        positional: nodes that depend on positions, or on the number of tokens.
        scored: nodes that depend on the product of queries and keys.
    """

    def __init__(self, traced: Traced, owner: Node, root: Node, product: Node | None) -> None:
        self.traced, self.owner, self.root, self.product = traced, owner, root, product
        order = {node: place for place, node in enumerate(traced.nodes)}
        needed: set[Node] = set()
        queue = [root]
        while queue:
            node = queue.pop()
            if node in needed:
                continue
            needed.add(node)
            if _reads_a_shape(node):
                continue
            if node is not product:
                queue.extend(node.all_input_nodes)
            elif node.target is ADDED:
                queue.append(node.args[0])  # type: ignore[arg-type]
            writers = traced.writers.get(memory_of(node) or 0, ())
            queue.extend(writer for writer in writers if order[writer] < order[owner])
        self.nodes = sorted(needed, key=order.__getitem__)


def _reads_a_shape(node: Node) -> bool:
    name = _name(node)
    return name == "sym_size" or (name in _MADE and name.startswith("new_")) or "_like" in name


def _is_product(node: Node) -> bool:
    return node.target is operator.mul


def _is_rounded(node: Node) -> bool:
    return _name(node) == "div" and node.kwargs.get("rounding_mode") is not None


class Evaluation:
    """A subgraph's values at some positions of a sequence.

    Attributes:
        positions: the positions, in order; all token dims have their number.
        corners: the positions, or distances of positions, where the value changes its formula.
        conditions: the nodes with corners at constants.
        tables: the lengths of tables indexed by the position.
        chunk: the size of chunks, within which a token may see keys; 0 without chunks.
    """

    def __init__(self, subgraph: Subgraph, tokens: int, positions: Sequence[int]) -> None:
        self._subgraph = subgraph
        self._tokens = tokens
        self.positions = torch.tensor(positions)
        self.corners: set[int] = set()
        self.conditions: set[Node] = set()
        self._chains: dict[Node, tuple[tuple[float, ...], ...]] = {}
        self.tables: set[int] = set()
        self.chunk = 0
        self._chunks: dict[Node, int] = {}
        self._values: dict[Node, Any] = {}
        self._positional: set[Node] = set()
        self._scored: set[Node] = set()
        self._squares: set[Node] = set()
        self._fill = 0.0

    def bias(self) -> tuple[Tensor, Tensor]:
        """Return the values added to scores [heads, n, n] of all 0, and of all 1."""
        count = len(self.positions)
        biases = []
        for fill in (0.0, 1.0) if self._subgraph.product is not None else (0.0,):
            self._fill = fill
            bias = self._run()
            if bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape).masked_fill_(~bias, -torch.inf)
            bias = bias.to(torch.float64)
            if bias.dim() < 2 or bias.shape[-1] != count:
                raise self._refused(self._subgraph.root, "its mask is not one of keys by queries")
            bias = bias.broadcast_to(*bias.shape[:-2], count, count)
            biases.append(bias.reshape(-1, count, count).clamp(min=-1e30))
        return biases[0], biases[1] if len(biases) > 1 else biases[0] + 1.0

    def _run(self) -> Tensor:
        self._values.clear()
        for node in self._subgraph.nodes:
            value = self._compute(node)
            if isinstance(value, Tensor) and node.meta["val"].dtype in _HALF:
                value = self._unrounded(node, value)
            self._values[node] = value
        result = self._values[self._subgraph.root]
        if not isinstance(result, Tensor):
            raise self._refused(self._subgraph.root, "its mask is not a tensor")
        return result

    def _unrounded(self, node: Node, value: Tensor) -> Tensor:
        """Return a half-precision value in fp32: in the model's dtype its bias is rounded."""
        if node in self._positional and not self._subgraph.traced.is_half:
            dtype = node.meta["val"].dtype
            raise self._refused(
                node, f"its bias is rounded to {dtype}, which pcg's is in that dtype alone"
            )
        return value.float()

    def _refused(self, node: Node, why: str) -> TraceError:
        return refused_attention(self._subgraph.owner, why)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self._values[argument]
        if isinstance(argument, list | tuple):
            return type(argument)(self._value(item) for item in argument)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _is_token(self, size: Any) -> bool:
        """Return whether a dim has all tokens; TraceError for other functions of their number."""
        if self._constant(size) is not None:
            return False
        if self._sizes(size) != [2, 3, self._tokens]:
            raise self._refused(self._subgraph.root, f"its mask has {size.node.expr} keys")
        return True

    def _sizes(self, size: Any) -> list[int]:
        symbol, expression = self._subgraph.traced.tokens, size.node.expr
        if expression == symbol:
            return [2, 3, self._tokens]
        return [int(expression.subs(symbol, n)) for n in (2, 3, self._tokens)]

    def _constant(self, size: Any) -> int | None:
        """Return a size that is equal for all n, as max(0, 1 - n) is 0; else None."""
        if isinstance(size, int):
            return size
        first, *others = self._sizes(size)
        return first if all(other == first for other in others) else None

    def _shape(self, node: Node) -> list[int]:
        sizes = node.meta["val"].shape
        count = len(self.positions)
        return [count if self._is_token(s) else self._constant(s) for s in sizes]  # type: ignore[misc]

    def _depends(self, node: Node, on: set[Node]) -> bool:
        return any(node_input in on for node_input in node.all_input_nodes)

    def _spread(self, node: Node) -> None:
        """Record a node's dependencies, and all names of the memory that it writes."""
        names = [node]
        memories = {memory_of(value) for value, _ in written(node)}
        if memories:
            names += [node_name for node_name in self._values if memory_of(node_name) in memories]
        for kept in (self._positional, self._scored):
            if self._depends(node, kept):
                kept.update(names)

    def _compute(self, node: Node) -> Any:
        subgraph = self._subgraph
        if node is subgraph.product:
            return self._product(node)
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr" or not callable(node.target):
            raise self._refused(node, f"its scores depend on {node.op} {node.target}")
        name = _name(node)
        if name == "sym_size":
            self._positional.add(node)
            size = node.args[0].meta["val"].shape[node.args[1]]  # type: ignore[union-attr]
            return self._tokens if self._is_token(size) else self._constant(size)
        if name == "_assert_tensor_metadata":
            return None
        if name in _MADE:
            place = _MADE[name]
            fill = (1 if "ones" in name else 0) if place is None else self._value(node.args[place])
            return torch.full(self._shape(node), fill, dtype=node.meta["val"].dtype)
        self._spread(node)
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            if self._depends(node, self._positional):
                varying = [x for x in node.all_input_nodes if x in self._positional]
                if node.target not in _OF_LENGTH or (_is_product(node) and len(varying) > 1):
                    operation = getattr(node.target, "__name__", str(node.target))
                    raise self._refused(node, f"its mask has {operation} of the length")
                self._note(node)
            return self._native(node)
        is_wide = any(not isinstance(size, int) for size in value.shape)
        if name == "arange":
            return self._arange(node, is_wide)
        is_wide |= any(self._is_wide(x) for x in node.all_input_nodes)
        if not is_wide and not self._depends(node, self._positional | self._scored):
            return self._native(node)
        self._compare_chunks(node, name)
        is_chunked = name == "floor_divide" or _is_rounded(node)
        return self._chunked(node) if is_chunked else self._over_tokens(node, name)

    def _is_wide(self, node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and any(not isinstance(s, int) for s in value.shape)

    def _native(self, node: Node, *arguments: Any) -> Any:
        """Run the node's own operator; constants of the meta device are on the CPU."""
        operands = arguments or tuple(map(self._value, node.args))
        keywords = {key: self._value(value) for key, value in node.kwargs.items()}
        return node.target(*operands, **keywords)  # type: ignore[operator]

    def _product(self, node: Node) -> Tensor:
        self._scored.add(node)
        scores = torch.full((), self._fill, dtype=torch.float64).expand(self._shape(node))
        if node.target is not ADDED:
            return scores
        self._spread(node)
        bias = self._values[node.args[0]].to(torch.float64)  # type: ignore[index]
        beta, alpha = (node.kwargs.get(name, 1.0) for name in ("beta", "alpha"))
        return beta * bias + alpha * scores  # type: ignore[operator,no-any-return]

    def _placeholder(self, node: Node) -> Any:
        constants = self._subgraph.traced.constants
        if node.name in constants:
            value = constants[node.name]
            if memory_of(node) in self._subgraph.traced.writers:
                raise self._refused(node, "its mask is written into a buffer")
            return value
        if node.name == "position_ids":
            self._positional.add(node)
            return self.positions.clone().view(1, -1)
        held = node.meta.get("val")
        if not isinstance(held, Tensor):
            return held
        what = "the tokens" if node.name == "input_ids" else "a weight"
        raise self._refused(node, f"its scores depend on {what}")

    def _arange(self, node: Node, is_wide: bool) -> Tensor:
        values = tuple(map(self._value, node.args))
        dtype = node.meta["val"].dtype
        if not is_wide:
            return torch.arange(*values, dtype=dtype)
        start, step = (values[0] if len(values) > 1 else 0), (values[2] if len(values) > 2 else 1)
        self._shape(node)
        self._positional.add(node)
        numbers = ((float(x),) for x in (start, step) if abs(x) not in (0, 1))
        self._chains[node] = tuple(numbers)
        return (start + step * self.positions).to(dtype)

    def _over_tokens(self, node: Node, name: str) -> Any:
        """Run a node on values with a token dim, or that depend on positions or scores."""
        if name in _ALIKE:
            dims = [self._value(a) for a in node.args[1:]]
            if name in ("to", "_to_copy", "type_as"):
                dtype = node.meta["val"].dtype
                dtype = torch.float32 if dtype in _HALF else dtype
                return self._values[node.args[0]].to(dtype)  # type: ignore[index]
            return self._native(node, self._values[node.args[0]], *dims)  # type: ignore[index]
        if name in _RESHAPED:
            return self._values[node.args[0]].reshape(self._shape(node))  # type: ignore[index]
        if name in _EXPANDED:
            return self._values[node.args[0]].expand(self._shape(node))  # type: ignore[index]
        if name in ("tril", "triu"):
            return self._triangle(node, name)
        if name == "repeat":
            if any(isinstance(times, Node) for times in node.args[1]):  # type: ignore[union-attr]
                raise self._refused(node, "its mask is repeated as often as there are tokens")
            self._shape(node)
            return self._native(node)
        if name == "slice":
            return self._slice(node)
        if name == "select" and not self._is_token(self._size(node.args[0], node.args[1])):
            return self._native(node)
        if name == "index":
            return self._index(node)
        if name == "cumsum":
            return self._cumsum(node)
        if name in _LINEAR:
            return self._linear(node, name)
        if name in _LOGICAL and node.meta["val"].dtype == torch.bool:
            return self._native(node)
        is_reduced = name in ("max", "min") and len(node.args) < 2
        if name in _CORNERED and not is_reduced:
            return self._cornered(node, name)
        raise self._refused(node, f"its scores go through {node.target}")

    @staticmethod
    def _size(node: Any, dim: Any) -> Any:
        return node.meta["val"].shape[dim]

    def _triangle(self, node: Node, name: str) -> Tensor:
        x, diagonal = self._value(node.args[0]), self._value((*node.args, 0)[1])
        sizes = [self._is_token(size) for size in node.meta["val"].shape[-2:]]
        if sizes == [False, False]:
            return self._native(node)  # type: ignore[no-any-return]
        if sizes != [True, True]:
            raise self._refused(node, f"its mask is {name} of another number of rows than columns")
        self._positional.add(node)
        self.corners.add(abs(diagonal))
        above = self.positions[None, :] - self.positions[:, None]
        is_kept = above <= diagonal if name == "tril" else above >= diagonal
        kept = torch.where(is_kept, x, torch.zeros((), dtype=x.dtype))
        return x.copy_(kept) if str(node.target).split(".")[1].endswith("_") else kept

    def _slice(self, node: Node) -> Tensor:
        x: Tensor = self._value(node.args[0])
        names = ("dim", "start", "end", "step")
        bounds: dict[str, Any] = {"dim": 0, "start": 0, "step": 1} | node.kwargs
        bounds |= dict(zip(names, map(self._value, node.args[1:]), strict=False))
        dim, start, step = bounds["dim"], bounds["start"] or 0, bounds["step"]
        size, sliced = self._size(node.args[0], dim), self._size(node, dim)
        if not self._is_token(sliced):
            if self._is_token(size):
                raise self._refused(node, "its mask is cut off")
            if self._constant(sliced) == self._constant(size):  # the whole dim, for every n
                if node.args[0] not in self._positional:
                    self._positional.discard(node)
                return x
            return self._native(node)  # type: ignore[no-any-return]
        if self._is_token(size):
            if start or step != 1:
                raise self._refused(node, "its mask is cut off")
            return x
        if step != 1:
            raise self._refused(node, "its table is read in steps")
        start += size if start < 0 else 0
        return self._of_table(node, x, dim, self.positions + start)

    def _of_table(self, node: Node, x: Tensor, dim: int, at: Tensor) -> Tensor:
        """Return a table's entries along a dim; record the corners of its values."""
        table: Any = node.args[0]
        if table in self._positional and table not in self._squares:
            raise self._refused(node, "its table is read by two positions")
        self._positional.add(node)
        self.tables.add(x.shape[dim])
        if int(at.min()) < 0 or int(at.max()) >= x.shape[dim]:
            raise self._refused(node, f"it reads {int(at.max()) + 1} of {x.shape[dim]} entries")
        if table not in self._positional:
            self.corners |= self._turns(node, x, dim)
        return x.index_select(dim, at)

    def _turns(self, node: Node, x: Tensor, dim: int) -> set[int]:
        """Return the positions or distances of the corners of a table's values."""
        table, count = x.detach().to(torch.float64).movedim(dim, -1), x.shape[dim]
        if x.dim() >= 2 and count > 1 and table.shape[-2] == count:
            # The other token dim is sliced next; the values are those of each distance.
            if not torch.equal(table[..., 1:, 1:], table[..., :-1, :-1]):
                raise self._refused(node, "its mask is a table of no function of the distance")
            lines = torch.cat([table[..., 0, :].flip(-1), table[..., 1:, 0]], -1)
            zero = count - 1
            self._squares.add(node)
        else:
            lines, zero = table, 0
        lines = lines.reshape(-1, lines.shape[-1])
        bend = (lines[:, 2:] - 2 * lines[:, 1:-1] + lines[:, :-2]).abs()
        turns = (bend > 1e-5 * lines.abs().clamp(min=1.0)[:, 1:-1]).any(0).nonzero()[:, 0] + 1
        if len(turns) > _MOST_TURNS:
            raise self._refused(node, "its mask is a table that is no function of the distance")
        # Neighbours form a single corner: a step has two.
        places = [abs(int(turn) - zero) for turn in turns]
        return {p for p in places if p - 1 not in places}

    def _index(self, node: Node) -> Tensor:
        x, indices = self._value(node.args[0]), list(map(self._value, node.args[1]))  # type: ignore[arg-type]
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        places = [dim for dim, index in enumerate(indices) if index is not None]
        if any(operand in self._scored for operand in node.args[1]):  # type: ignore[union-attr]
            raise self._refused(node, "its mask depends on the scores")
        for dim in places:
            index = indices[dim]
            if self._is_token(shape[dim]):
                first = x.narrow(dim, 0, 1)
                if not torch.equal(x, first.expand_as(x)):
                    raise self._refused(node, "its mask is read at computed positions")
                x, indices[dim] = first, torch.zeros_like(index)
            elif shape[dim] > 1 and index.dtype != torch.bool and index.numel() > 1:
                if int(index.min()) < 0:
                    raise self._refused(node, "its table is read from the end")
                self._of_table(node, x, dim, index.flatten())
                if len(places) > 1:
                    raise self._refused(node, "its table is read by two positions")
        if any(index is not None and index.dtype == torch.bool for index in indices):
            raise self._refused(node, "its mask is read where a condition holds")
        self._positional.add(node)
        return x[tuple(slice(None) if index is None else index for index in indices)]  # type: ignore[no-any-return]

    def _cumsum(self, node: Node) -> Tensor:
        x, dim = self._value(node.args[0]), self._value(node.args[1])
        if not self._is_token(self._size(node.args[0], dim)):
            return self._native(node)  # type: ignore[no-any-return]
        first = x.narrow(dim, 0, 1)
        if node.args[0] in self._scored or not torch.equal(x, first.expand_as(x)):
            raise self._refused(node, "its mask is a sum over tokens that are not alike")
        self._positional.add(node)
        shape = [1] * x.dim()
        shape[dim] = -1
        summed: Tensor = (self.positions + 1).view(shape) * first
        dtype = node.meta["val"].dtype
        return summed.to(torch.float32 if dtype in _HALF else dtype)

    def _linear(self, node: Node, name: str) -> Tensor:
        tensors = [a for a in node.args[:2] if isinstance(a, Node)]
        if name in ("mul", "div"):
            # A condition times a position is still piecewise linear.
            depend = self._positional | self._scored
            varying = [x for x in tensors if x in depend and not self._is_flag(x)]
            is_ratio = name == "div" and len(node.args) > 1 and node.args[1] in depend
            if len(varying) > 1 or is_ratio:
                raise self._refused(node, f"its scores have a {node.target} of two positions")
        condition = {"where": 0, "masked_fill": 1}.get(name)
        if condition is not None and node.args[condition] in self._scored:
            raise self._refused(node, "its mask depends on the scores")
        self._note(node)
        return self._native(node)  # type: ignore[no-any-return]

    def _chunked(self, node: Node) -> Tensor:
        """Return positions by the size of a chunk, rounded down."""
        x, size = (self._value(a) for a in node.args[:2])
        modes = {"floor", "trunc", None}
        is_position = isinstance(x, Tensor) and torch.equal(x.flatten(), self.positions)
        is_chunk = type(size) is int and size > 0 and node.kwargs.get("rounding_mode") in modes
        if not is_position or not is_chunk:
            raise self._refused(node, f"its scores go through {node.target}")
        self._chunks[node] = int(size)
        return x // size  # type: ignore[no-any-return]

    def _compare_chunks(self, node: Node, name: str) -> None:
        """Accept a view of chunks, and whether two are equal, which hides keys of other chunks."""
        if self._chunks.keys().isdisjoint(node.all_input_nodes):
            return
        first, *others = (self._chunks.get(x, 0) for x in node.all_input_nodes)
        if name in _ALIKE or name in _EXPANDED:
            self._chunks[node] = first
        elif name in ("eq", "ne") and others == [first] and self.chunk in (0, first):
            self.chunk = first
            self.corners |= {first, 2 * first, 3 * first}
        else:
            raise self._refused(node, f"its scores go through {node.target} of chunks")

    def _is_flag(self, node: Node) -> bool:
        """Return whether a node is a condition, possibly as 0 and 1."""
        value = self._values[node]
        is_flag = node not in self._scored and isinstance(value, Tensor)
        return is_flag and bool(((value == 0) | (value == 1)).all())

    def _cornered(self, node: Node, name: str) -> Tensor:
        if self._depends(node, self._scored):
            # Bounds that no score reaches, such as scores of at least -1e4.
            bounds = [self._value(a) for a in node.args if a not in self._scored]
            bounds += [self._value(a) for a in node.kwargs.values()]
            numbers = [float(torch.as_tensor(b).max()) for b in bounds if b is not None]
            if name not in _LOWER_BOUNDS or len(numbers) != 1 or numbers[0] > _NEVER:
                raise self._refused(node, f"its scores go through {node.target}")
        self._note(node)
        self._turn(node)
        self._check_factors(node)
        return self._native(node)  # type: ignore[no-any-return]

    def _check_factors(self, node: Node) -> None:
        """Refuse a condition on two positions with different factors, such as 2 j < i.

        Its corner is neither a position, nor a distance or a sum of two positions.
        """
        sides = [self._value(a) for a in node.args[:2]]
        left, right = (sides[0], sides[1] if len(sides) > 1 and sides[1] is not None else 0)
        gap = torch.as_tensor(left).to(torch.float64) - torch.as_tensor(right).to(torch.float64)
        if gap.dim() < 2 or 1 in gap.shape[-2:] or node.args[0] in self._scored:
            return
        steps = self.positions.diff()
        factors = [
            (gap.diff(dim=dim) / steps.view(shape)).abs().unique()
            for dim, shape in ((-2, (-1, 1)), (-1, (1, -1)))
        ]
        rows, columns = (
            {round(float(x), 6) for x in factor_set if x > 1e-9} for factor_set in factors
        )
        if rows and columns and rows != columns:
            raise self._refused(node, f"its mask compares positions of factors {rows | columns}")

    def _note(self, node: Node) -> None:
        numbers: list[tuple[float, ...]] = []
        for argument in (*node.args, *node.kwargs.values()):
            if isinstance(argument, Node) and argument in self._positional | self._scored:
                numbers += self._chains.get(argument, ())
                continue
            value = self._value(argument)
            if isinstance(value, Tensor):
                value = value.to(torch.float64).unique().tolist()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                value = [float(value)]
            else:
                continue
            value = tuple(x for x in value if math.isfinite(x) and abs(x) not in (0.0, 1.0))
            if value:
                numbers.append(value)
        self._chains[node] = tuple(dict.fromkeys(numbers))

    def _turn(self, node: Node) -> None:
        chain = self._chains[node]
        if len(chain) > _MOST_COMBINED:
            raise self._refused(node, f"its mask combines {len(chain)} numbers in a condition")
        count = math.prod(map(len, chain))
        if count > _MOST_CONDITIONS:
            raise self._refused(node, f"its mask has {count} conditions, as for each head")
        if chain:
            self.conditions.add(node)
        for numbers in itertools.product(*chain):
            self.corners |= combined(numbers)
        if node.meta["val"].dtype == torch.bool:
            self._chains[node] = ()


def combined(numbers: Sequence[float]) -> set[int]:
    """Return the corners of a chain of sums and products with these constants."""
    factors: set[float] = set()
    for count in range(1, len(numbers) + 1):
        for first, *others in itertools.permutations(numbers, count):
            reached = {first, 1 / first}
            for other in others:
                reached = {
                    result
                    for x in reached
                    for result in (x + other, x - other, x * other, x / other)
                    if result
                }
            factors |= reached
    factors = {abs(x) for x in factors if 1 <= abs(x) < _FARTHEST}
    return {whole(x) for x in factors for whole in (math.floor, math.ceil)}


def refused_attention(node: Node, why: str) -> TraceError:
    """Return the error for an attention that pcg does not support."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    where = stack[-1][0] if stack else node.name
    return TraceError(f"{where} has an attention that pcg cannot raise: {why}")
