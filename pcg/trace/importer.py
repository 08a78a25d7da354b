"""Import of an exported FX graph to a token-flat graph of the operator table.

Each node becomes nodes of the flat graph by the rule of its operator (`pcg.trace.rules`). An
operator that would mix tokens has no rule and is refused with its module path.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from pcg.errors import TraceError, TypeCheckError
from pcg.ir.graph import Graph, Parameter, Value
from pcg.ir.types import TOKENS, tensor
from pcg.trace.complex_rules import COMPLEX_RULES, VIEWS, ComplexValue, by_parts
from pcg.trace.elementwise_rules import carried, detached
from pcg.trace.export import Exported, quiet
from pcg.trace.flat_graph import FlatGraph, FlatValue, dtype_of, refusal, scope_of, traced_shape
from pcg.trace.in_place_writes import check_writes, written
from pcg.trace.rules import RULES
from pcg.trace.score_attention import ScoreAttention, find_scores

_REGION = "wrap_with_set_grad_enabled"
"""The operator of a part with enabled or disabled gradients."""


def import_graph(exported: Exported) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Return the token-flat graph of an exported model, and the values of its constants.

    The graph takes `input_ids` and `position_ids`, both [T], and returns the logits [T, V]; frozen
    parameters have the checkpoint's names, and a node's scope is its module's path.

    Raises:
        TraceError: an operator is neither in the table nor token-wise; names it and its module.
    """
    try:
        importer = _Importer(exported)
        graph = importer.run()
    except TraceError as refused:
        functional = _functional(exported)
        if functional is None:
            raise
        try:
            importer = _Importer(functional)
            graph = importer.run()
        except TraceError:
            raise refused from None
    used = {p.name for p in graph.parameters}
    return graph, {name: value for name, value in importer.flat.constants.items() if name in used}


def _functional(exported: Exported) -> Exported | None:
    """Return the program with new tensors instead of in-place writes; None if it writes buffers."""
    program = exported.program
    if not any(True for node in program.graph.nodes for _ in written(node)):
        return None
    for region in [node for node in program.graph.nodes if _is_without_gradients(node)]:
        # PyTorch's functionalization forgets torch.no_grad().
        for result in list(region.users):
            with program.graph.inserting_after(result):
                cut = program.graph.call_function(torch.ops.aten.detach.default, (result,))
            cut.meta = dict(result.meta)
            result.replace_all_uses_with(cut, lambda user, cut=cut: user is not cut)
    with quiet():
        program = program.run_decompositions({})
    if program.graph_signature.buffers_to_mutate or program.graph_signature.user_inputs_to_mutate:
        return None
    return replace(exported, program=program)


def _is_without_gradients(node: Node) -> bool:
    return str(node.target) == _REGION and not node.args[0]


class _Importer:
    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.flat = FlatGraph()
        self._scores: dict[Node, ScoreAttention] = {}

    def run(self) -> Graph:
        program = self.exported.program
        data = self._placeholder_data()
        by_node = {node.name: data[node.name] for node in program.graph.nodes if node.name in data}
        self._scores = find_scores(program.graph, by_node, self.exported.positions)
        results: Any = program.graph.output_node().args[0]
        logits = results[0]
        live = self._live_nodes(logits)
        masks = {node for node in program.graph.nodes if _is_square(node)}
        check_writes(program.graph, live, masks | self._scores.keys())
        for name in ("input_ids", "position_ids"):
            self.flat.builder.input(name, tensor("i64", TOKENS))
        self._run_nodes(program.graph_module, live, by_node)
        return self.flat.builder.build([self.flat.tensor(logits).name])

    def _run_nodes(
        self, module: torch.fx.GraphModule, live: set[Node], data: Mapping[str, torch.Tensor]
    ) -> None:
        values = self.flat.values
        for node in module.graph.nodes:
            if node not in live or node.op in ("output", "get_attr"):
                continue
            if node.op == "placeholder":
                if node not in values:
                    values[node] = self._placeholder(node, data)
                continue
            self.flat.scope = scope_of(node)
            try:
                values[node] = self._call(node, module, live)
            except TypeCheckError as error:
                raise refusal(node, str(error)) from error

    def _call(self, node: Node, module: torch.fx.GraphModule, live: set[Node]) -> Any:
        if node in self._scores:
            return self._score_attention(node, live)
        if str(node.target) == _REGION:
            return self._subgraph(node, module)
        if node.target is python_operator.getitem:
            return self.flat.value(node.args[0])[node.args[1]]
        if not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            return None  # symbolic integers; the metadata has the shapes
        folded = self._fold_constant(node)
        if folded is not None:
            return folded
        name = _base_name(node.target)
        if any(isinstance(self.flat.values.get(n), ComplexValue) for n in node.all_input_nodes):
            return self._complex(node, name)
        if name.endswith("_") and isinstance(node.args[0], Node):
            return self._in_place(node, name.removesuffix("_"))
        return RULES.get(name, carried)(self.flat, node)

    def _complex(self, node: Node, name: str) -> Any:
        if name in COMPLEX_RULES:
            return COMPLEX_RULES[name](self.flat, node)
        if name.removeprefix("aten.") in VIEWS:
            return by_parts(RULES[name], self.flat, node)
        raise refusal(node, "pcg computes products and views of complex numbers alone")

    def _in_place(self, node: Node, name: str) -> Any:
        """Import an operator that writes its operand; later readers see the result."""
        written = node.args[0]
        assert isinstance(written, Node)
        result = RULES.get(name, carried)(self.flat, node)
        if isinstance(result, FlatValue):
            result = result.named(self.flat.cast(result.name, dtype_of(node.meta["val"])))
        self.flat.values[written] = result
        return result

    def _subgraph(self, node: Node, module: torch.fx.GraphModule) -> list[Any]:
        reference: Any = node.args[1]
        body = getattr(module, reference.target)
        holders = body.graph.find_nodes(op="placeholder")
        for holder, argument in zip(holders, node.args[2:], strict=True):
            self.flat.values[holder] = self.flat.value(argument)
        self._run_nodes(body, set(body.graph.nodes), {})
        results = [self.flat.value(result) for result in body.graph.output_node().args[0]]
        if node.args[0]:
            return results
        return [detached(self.flat, x) if isinstance(x, FlatValue) else x for x in results]

    def _live_nodes(self, root: Node) -> set[Node]:
        live: set[Node] = set()
        queue = [root]
        while queue:
            node = queue.pop()
            if node in live:
                continue
            live.add(node)
            attention = self._scores.get(node)
            queue.extend(attention.inputs if attention else node.all_input_nodes)
            # An in-place operator on a live value is also live.
            queue.extend(
                user
                for user in node.users
                if _base_name(user.target).endswith("_")
                and user.args[:1] == (node,)
                and node not in self._scores
                and not _is_square(user)
            )
        return live

    def _placeholder_data(self) -> dict[str, torch.Tensor]:
        signature = self.exported.program.graph_signature
        data: dict[str, torch.Tensor] = {}
        for holder, name in signature.inputs_to_buffers.items():
            if name in self.exported.constants:
                data[holder] = self.exported.constants[name]
        for holder, name in signature.inputs_to_lifted_tensor_constants.items():
            value = self.exported.program.constants[name]
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                data[holder] = value.detach().cpu()
        return data

    def _placeholder(self, node: Node, data: Mapping[str, torch.Tensor]) -> FlatValue | None:
        value = node.meta.get("val")
        if node.name in ("input_ids", "position_ids"):
            return FlatValue(node.name, "bt", (1, None))
        if not isinstance(value, torch.Tensor):
            return None
        if node.name in data:
            name = node.name.removeprefix("b_").removeprefix("c_")
            return self.flat.constant(name, data[node.name])
        signature = self.exported.program.graph_signature
        held = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}.get(node.name)
        if held is None:
            raise refusal(node, f"the constant {node.name} has no value")
        if held not in self.exported.checkpoint_names:
            raise refusal(node, f"the buffer {held} has no value without the model's weights")
        # Tied weights are a single parameter, under the checkpoint's name.
        source = self.exported.checkpoint_names[held]
        shape = tuple(int(size) for size in value.shape)
        parameter = Parameter(Value(source, tensor(dtype_of(value), *shape)), "frozen", source)
        return FlatValue(self.flat.builder.parameter(parameter), "d" * len(shape), shape)

    def _fold_constant(self, node: Node) -> FlatValue | None:
        """Compute a node now if all its tensors are constants."""
        values, data = self.flat.values, self.flat.data
        inputs = [values.get(n) for n in node.all_input_nodes]
        if any(not isinstance(x, FlatValue) or data(x) is None for x in inputs):
            return None
        if not inputs and not _is_made_alike(node):
            return None
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or None in traced_shape(node):
            return None
        arguments: Any = torch.fx.node.map_arg(node.args, lambda n: data(values[n]))
        keywords = {k: v for k, v in node.kwargs.items() if k != "device"}
        if any(isinstance(a, torch.device) for a in arguments):
            if arguments[0].dtype == value.dtype:
                return values[node.args[0]]  # type: ignore[index,no-any-return]
            return self.flat.constant(node.name, arguments[0].to(value.dtype))
        result = node.target(*arguments, **keywords)  # type: ignore[operator]
        return self.flat.constant(node.name, result.contiguous())

    # ------------------------------------------------------------------------- score attention

    def _score_attention(self, node: Node, live: set[Node]) -> FlatValue:
        """Import a recognised attention, in the layout of its product.

        Attentions with the same queries and keys are a single one, with all their values.
        """
        flat, attention = self.flat, self._scores[node]
        if node in flat.values:
            return flat.values[node]  # type: ignore[no-any-return]
        dtype = dtype_of(node.meta["val"])
        alike = [
            other
            for other, each in self._scores.items()
            if other in live and each.v in flat.values and replace(each, v=attention.v) == attention
        ]

        def in_heads(of: Node) -> str:
            x = flat.tensor(of)
            heads = x.features if len(x.features) == 2 else (1, *x.features)
            return self._narrowed(flat.reshape(x.name, heads), dtype)

        values = [in_heads(self._scores[other].v) for other in alike]
        inputs = [in_heads(attention.q), in_heads(attention.k)]
        inputs.append(flat.add("concat", *values, dim=-1) if values[1:] else values[0])
        attributes: dict[str, Any] = {
            "scale": float(attention.scale),  # configurations may have ints
            "window": attention.window,
            "softcap": float(attention.softcap),
        }
        if attention.chunk:
            attributes["chunk"] = attention.chunk
        if attention.slopes:
            slopes = flat.constant(
                "alibi_slopes", torch.tensor(attention.slopes, dtype=torch.float32)
            )
            inputs.append(slopes.name)
            attributes["alibi"] = True
        if attention.sinks is not None:
            inputs.append(flat.tensor(attention.sinks).name)
            attributes["sinks"] = True
        whole = flat.add_many("attention", *inputs, **attributes)[0]
        stop = 0
        for other, value in zip(alike, values, strict=True):
            start, stop = stop, stop + flat.builder.types[value].features[-1]
            of_value = {"dim": -1, "start": start, "stop": stop}
            out = flat.add("slice", whole, **of_value) if values[1:] else whole
            shape = traced_shape(other)
            tags = "".join("t" if s is None else "d" for s in shape)
            tags = "b" + tags[1:] if len(shape) == 4 else tags
            flat.values[other] = flat.reshaped(out, tags, shape)
        return flat.values[node]  # type: ignore[no-any-return]

    def _narrowed(self, name: str, dtype: str) -> str:
        """Return the value in the attention's dtype, from before the model widens it."""
        builder = self.flat.builder
        producer = next((node for node in builder.nodes if node.name == name), None)
        if producer and producer.op == "cast":
            source = producer.inputs[0]
            name = source if builder.types[source].dtype == dtype else name
        return self.flat.cast(name, dtype)


def _is_made_alike(node: Node) -> bool:
    """Return whether an operator without tensors returns the same tensor each time."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not (is_random or "empty" in _base_name(node.target))


def _base_name(target: Any) -> str:
    """Return `aten.add` for aten.add.Tensor; other names stay."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    return str(target)


def _is_square(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and sum(not isinstance(s, int) for s in value.shape) > 1
