"""Read an exported FX graph into a token-flat graph of the operator table.

An exported activation has a batch dim of size 1 and a token dim of symbolic size, anywhere among
its dims. Its *layout* tags each dim `b`, `t` or `d`; the flat value has the token dim first and
then the `d` dims in order. So a transpose of heads and tokens is no operator, a view is a reshape
of feature dims, and broadcasting is checked dim by dim. An operator that would mix tokens has no
rule and is refused with its module path.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from pcg.errors import TraceError, TypeCheckError
from pcg.ir.builder import Builder
from pcg.ir.graph import Attribute, Graph, Parameter, Value
from pcg.ir.types import TOKENS, TORCH_NAMES, tensor
from pcg.trace.export import Exported
from pcg.trace.score_attention import ScoreAttention, find_scores

_DTYPES = {getattr(torch, name): short for short, name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class Imported:
    """A traced tensor: the flat value's name, and a tag for each traced dim."""

    name: str
    tags: str
    shape: tuple[int | None, ...]
    """Traced sizes; None for the token dim."""

    @property
    def token_dim(self) -> int | None:
        return self.tags.index("t") if "t" in self.tags else None

    def features(self) -> tuple[int, ...]:
        return tuple(s for s, tag in zip(self.shape, self.tags, strict=True) if tag == "d")  # type: ignore[misc]

    def feature_dim(self, dim: int) -> int:
        """A traced dim as a dim of the flat value, counted from the end."""
        return -self.tags[dim % len(self.tags) :].count("d")


class _TraceBuilder(Builder):
    """Keeps what the model computes twice, which eager PyTorch keeps twice for backward.

    What depends on positions and constants alone is still made once. The first rewrite of `raise`
    merges the rest.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._activations = {"input_ids"}

    def add_many(
        self,
        op: str,
        inputs: Sequence[str],
        *,
        name: str = "",
        scope: str = "",
        **attributes: Attribute,
    ) -> tuple[str, ...]:
        is_activation = any(i in self._activations for i in inputs)
        if is_activation:
            self.forget(op, inputs, attributes)
        names = super().add_many(op, inputs, name=name, scope=scope, **attributes)
        if is_activation:
            self._activations.update(names)
        return names


class Importer:
    """State of one import; `rules` in `pcg.trace.rules` add nodes through it."""

    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.builder = _TraceBuilder("model")
        self.values: dict[Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._scores: dict[Node, ScoreAttention] = {}
        self._data: dict[str, torch.Tensor] = {}
        self._scope = ""

    # ------------------------------------------------------------------ the whole graph

    def run(self) -> Graph:
        """Import everything that the logits depend on."""
        program = self.exported.program
        data = self._placeholder_data()
        by_node = {node.name: data[node.name] for node in program.graph.nodes if node.name in data}
        self._scores = find_scores(program.graph, by_node)
        output = next(node for node in program.graph.nodes if node.op == "output")
        logits = output.args[0][0]
        live = self._live_nodes(logits)
        for name in ("input_ids", "position_ids"):
            self.builder.input(name, tensor("i64", TOKENS))
        self._run_nodes(program.graph_module, live, by_node)
        return self.builder.build([self.tensor(logits).name])

    def _run_nodes(
        self, module: torch.fx.GraphModule, live: set[Node], data: Mapping[str, torch.Tensor]
    ) -> None:
        for node in module.graph.nodes:
            if node not in live or node.op in ("output", "get_attr"):
                continue
            if node.op == "placeholder":
                if node not in self.values:
                    self.values[node] = self._placeholder(node, data)
                continue
            self._scope = _scope(node)
            try:
                self.values[node] = self._call(node, module)
            except TypeCheckError as error:
                raise self.refusal(node, str(error)) from error

    def _call(self, node: Node, module: torch.fx.GraphModule) -> Any:
        from pcg.trace.rules import RULES, pointwise

        if node in self._scores:
            return self._score_attention(node)
        if str(node.target) == "wrap_with_set_grad_enabled":
            return self._subgraph(node, module)
        if node.target is python_operator.getitem:
            return self.value(node.args[0])[node.args[1]]
        if not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            return None  # symbolic integers; shapes are read off the metadata
        rule: Callable[[Importer, Node], Any] | None = RULES.get(_base_name(node.target))
        if rule is None:
            rule = pointwise
        folded = self._fold_constant(node)
        if folded is not None:
            return folded
        result = rule(self, node)
        if _base_name(node.target).endswith("_") and isinstance(node.args[0], Node):
            # An in-place operator: later readers of its operand see the result.
            self.values[node.args[0]] = result
        return result

    def _subgraph(self, node: Node, module: torch.fx.GraphModule) -> list[Any]:
        reference: Any = node.args[1]
        body = getattr(module, reference.target)
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for holder, argument in zip(holders, node.args[2:], strict=True):
            self.values[holder] = self.value(argument)
        self._run_nodes(body, set(body.graph.nodes), {})
        output = next(n for n in body.graph.nodes if n.op == "output")
        return [self.value(result) for result in output.args[0]]

    def _live_nodes(self, root: Node) -> set[Node]:
        live: set[Node] = set()
        queue = [root]
        while queue:
            node = queue.pop()
            if node in live:
                continue
            live.add(node)
            found = self._scores.get(node)
            queue.extend([found.q, found.k, found.v] if found else node.all_input_nodes)
            # An in-place operator on a live value is live too.
            queue.extend(
                user
                for user in node.users
                if _base_name(user.target).endswith("_")
                and user.args[:1] == (node,)
                and node not in self._scores
                and not _is_square(user)
            )
        return live

    # ------------------------------------------------------------------ leaves

    def _placeholder_data(self) -> dict[str, torch.Tensor]:
        """Values of the placeholders that are constants: buffers and lifted tensors."""
        signature = self.exported.program.graph_signature
        data: dict[str, torch.Tensor] = {}
        for holder, name in signature.inputs_to_buffers.items():
            if name in self.exported.constants:
                data[holder] = self.exported.constants[name]
        for holder, name in signature.inputs_to_lifted_tensor_constants.items():
            value = self.exported.program.constants[name]
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                data[holder] = value
        return data

    def _placeholder(self, node: Node, data: Mapping[str, torch.Tensor]) -> Any:
        value = node.meta.get("val")
        if node.name in ("input_ids", "position_ids"):
            return Imported(node.name, "bt", (1, None))
        if not isinstance(value, torch.Tensor):
            return None
        if node.name in data:
            return self.constant(node.name.removeprefix("b_").removeprefix("c_"), data[node.name])
        signature = self.exported.program.graph_signature
        name = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(
            node.name
        )
        if name is None:
            raise self.refusal(node, f"the constant {node.name} has no value")
        if name not in self.exported.checkpoint_names:
            raise self.refusal(node, f"the buffer {name} has no value without the model's weights")
        # Tied weights are one parameter, under the name that the checkpoint holds.
        source = self.exported.checkpoint_names[name]
        shape = tuple(int(size) for size in value.shape)
        parameter = Parameter(Value(source, tensor(self.dtype(value), *shape)), "frozen", source)
        return Imported(self.builder.parameter(parameter), "d" * len(shape), shape)

    def constant(self, name: str, value: torch.Tensor) -> Imported:
        """A tensor computed from the configuration, kept in the program."""
        shape = tuple(value.shape)
        for known, data in self._data.items():
            if data.shape == value.shape and data.dtype == value.dtype and torch.equal(data, value):
                return Imported(known, "d" * len(shape), shape)
        unique = self.builder.fresh(name)
        type_ = tensor(self.dtype(value), *shape)
        self.builder.parameter(Parameter(Value(unique, type_), "constant", unique))
        self._data[unique] = value
        self.constants[unique] = value
        return Imported(unique, "d" * len(shape), shape)

    def data(self, imported: Imported) -> torch.Tensor | None:
        """The value of a constant; None for what depends on tokens or weights."""
        return self._data.get(imported.name)

    def _fold_constant(self, node: Node) -> Imported | None:
        """The node computed here and now when all its tensors are constants."""
        inputs = [self.values.get(n) for n in node.all_input_nodes]
        tensors = [value for value in inputs if isinstance(value, Imported)]
        if not tensors or len(tensors) != len(inputs) or any(self.data(v) is None for v in tensors):
            return None
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
            return None
        arguments = torch.fx.node.map_arg(node.args, lambda n: self.data(self.values[n]))
        keywords = {k: v for k, v in node.kwargs.items() if k != "device"}
        if any(isinstance(a, torch.device) for a in arguments):
            return self.values[node.args[0]]  # type: ignore[index,no-any-return]
        result = node.target(*arguments, **keywords)  # type: ignore[operator]
        return self.constant(node.name, result.contiguous())

    # ------------------------------------------------------------------ for the rules

    def value(self, argument: Any) -> Any:
        """What an argument was imported as; anything but a node is itself."""
        return self.values[argument] if isinstance(argument, Node) else argument

    def tensor(self, argument: Any) -> Imported:
        imported = self.value(argument)
        if not isinstance(imported, Imported):
            raise TypeCheckError(f"{argument} is no tensor")
        return imported

    def dtype(self, value: torch.Tensor) -> str:
        if value.dtype not in _DTYPES:
            raise TypeCheckError(f"dtype {value.dtype} is not supported")
        return _DTYPES[value.dtype]

    def shape(self, node: Node) -> tuple[int | None, ...]:
        """The traced shape of a node's value, None for the token dim."""
        return tuple(s if isinstance(s, int) else None for s in node.meta["val"].shape)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.builder.add(op, inputs, scope=self._scope, **attributes)

    def add_many(self, op: str, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        return self.builder.add_many(op, inputs, scope=self._scope, **attributes)

    def reshape(self, name: str, features: tuple[int, ...]) -> str:
        """The flat value with other feature dims; itself where it has them."""
        type_ = self.builder.types[name]
        if type_.features == features:
            return name
        return self.add("reshape", name, shape=(-1,) * type_.is_token_wise + features)

    def cast(self, name: str, dtype: str) -> str:
        return (
            name if self.builder.types[name].dtype == dtype else self.add("cast", name, dtype=dtype)
        )

    def transpose_parameter(self, parameter: Parameter) -> str:
        """The parameter as [out, in], for a checkpoint that holds [in, out]."""
        type_ = parameter.type.with_shape(tuple(reversed(parameter.type.shape)))
        name = f"{parameter.name}.T"
        return self.builder.parameter(
            Parameter(Value(name, type_), parameter.role, parameter.source, transposed=True)
        )

    def refusal(self, node: Node, why: str) -> TraceError:
        where = _scope(node) or "the model"
        return TraceError(f"cannot trace {node.target} in {where}: {why}")

    def _score_attention(self, node: Node) -> Imported:
        """A recognised attention: q, k, v in whatever layout, to the layout of the product."""
        found = self._scores[node]
        q, k, v = (self.tensor(n) for n in (found.q, found.k, found.v))
        dtype = self.dtype(node.meta["val"])
        inputs = [self._narrowed(self.reshape(x.name, self._heads(x)), dtype) for x in (q, k, v)]
        attributes: dict[str, Any] = {"scale": found.scale, "window": found.window, "softcap": 0.0}
        if found.slopes:
            slopes = self.constant("alibi_slopes", torch.tensor(found.slopes, dtype=torch.float32))
            inputs.append(slopes.name)
            attributes["alibi"] = True
        out = self.add_many("attention", *inputs, **attributes)[0]
        shape = self.shape(node)
        tags = "".join("t" if s is None else "d" for s in shape)
        if len(shape) == 4:
            tags = "b" + tags[1:]
        result = Imported(out, tags, shape)
        return Imported(self.reshape(out, result.features()), tags, shape)

    def _narrowed(self, name: str, dtype: str) -> str:
        """The value in the attention's dtype; before the model widens it, as attention does too."""
        producer = next((node for node in self.builder.nodes if node.name == name), None)
        if producer and producer.op == "cast":
            source = producer.inputs[0]
            name = source if self.builder.types[source].dtype == dtype else name
        return self.cast(name, dtype)

    def _heads(self, x: Imported) -> tuple[int, ...]:
        features = x.features()
        return features if len(features) == 2 else (1, *features)


def import_graph(exported: Exported) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The token-flat graph of an exported model, and the values of its constants.

    The graph takes `input_ids` and `position_ids`, both [T], and gives the logits [T, V]; frozen
    parameters are named as the checkpoint names them, and a node's scope is its module's path.

    Raises:
        TraceError: an operator neither in the table nor token-wise; names it and its module.
    """
    importer = Importer(exported)
    graph = importer.run()
    used = {p.name for p in graph.parameters}
    return graph, {name: value for name, value in importer.constants.items() if name in used}


def _base_name(target: Any) -> str:
    """`aten.add` of aten.add.Tensor; the name itself of anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    return str(target)


def _is_square(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and sum(not isinstance(s, int) for s in value.shape) > 1


def _scope(node: Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
