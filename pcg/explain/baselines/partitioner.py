"""torch's min-cut partitioner, the peer of pcg's memory plan, and the bytes that it saves.

AOTAutograd traces a function and its gradients to a joint graph, with inductor's decompositions,
and the partitioner divides the graph under an activation memory budget:

    saved      = storages passed to backward, each once, without parameters; those computed only
                 from shared inputs (rotary tables, masks) count separately, once for all layers
    recomputed = FLOPs of forward and backward − FLOPs of the joint graph, equal nodes once

The FLOPs of attention's backward, equal in both, cancel. FLOPs are those of matrix products and
attention; a causal query sees (S + 1) / 2 keys on average, even if a separate product computes the
scores. Parameters count as resident, as torch.compile marks them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
PRODUCTS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""Matrix products, with the argument indices of their factors."""
BATCHED_PRODUCTS = {aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}
"""The products of attention: [.., S, D] by [.., D, S], or [.., S, S] by [.., S, D]."""


Shared: TypeAlias = Mapping[tuple[str, torch.Size, frozenset[int]], int]
"""Bytes by operator, shape and shared inputs of a tensor."""


@dataclass(frozen=True)
class Partition:
    """A divided joint graph.

    Attributes:
        saved: the bytes passed to backward, by storage.
        shared: the bytes passed to backward that were computed only from shared inputs.
        forward_flops: the FLOPs of the forward.
        recomputed_flops: the FLOPs that backward recomputes.
        forward: the graph from inputs to outputs and saved tensors.
        backward: the graph from saved tensors and the outputs' gradients to the inputs' gradients.
        resident: the storages of parameters and shared inputs.
    """

    saved: Mapping[int, int]
    shared: Shared
    forward_flops: int
    recomputed_flops: int
    forward: fx.GraphModule
    backward: fx.GraphModule
    resident: frozenset[int]

    @property
    def size_bytes(self) -> int:
        """The saved bytes without the shared bytes."""
        return sum(self.saved.values())


class _Captured(Exception):
    """Exception that ends a capture after the joint graph is known."""


@dataclass(frozen=True)
class JointGraph:
    """A function and its gradients as a joint graph.

    Attributes:
        graph: the graph from inputs and the output's gradient to output and inputs' gradients.
        carried: the number of the first inputs, which are saved if backward reads them.
        parameters: the number of the next inputs, which are resident.
        shared: the number of the last inputs, which are also resident.
    """

    graph: fx.GraphModule
    carried: int
    parameters: int
    shared: int = 0

    @classmethod
    def trace(
        cls,
        function: Callable[..., Tensor],
        carried: Sequence[Tensor],
        parameters: Sequence[Tensor],
        shared: Sequence[Tensor] = (),
    ) -> JointGraph:
        """Trace a function of three sequences of (possibly fake) tensors."""
        graphs: list[fx.GraphModule] = []
        compiled = aot_function(
            function, unchanged, unchanged, capture(graphs), select_decomp_table()
        )
        with contextlib.suppress(_Captured):
            compiled(list(carried), list(parameters), list(shared))
        return cls(graphs[0], len(carried), len(parameters), len(shared))

    def partition(self, budget: float) -> Partition:
        """Divide a copy of the graph under an activation memory budget, from 0 to 1."""
        joint = copied(self.graph)
        last = self.carried + self.parameters + self.shared
        with functorch_config.patch(activation_memory_budget=budget):
            forward, backward = partitioners.min_cut_rematerialization_partition(
                joint,
                None,
                num_fwd_outputs=1,
                static_lifetime_input_indices=list(range(self.carried, last)),
            )
        inputs = forward.graph.find_nodes(op="placeholder")[self.carried :]
        resident = frozenset(key for node in inputs for key in storages(node))
        sources = self._sources(forward.graph)
        saved: dict[int, int] = {}
        shared: dict[tuple[str, torch.Size, frozenset[int]], int] = {}
        passed: Any = forward.graph.output_node().args[0]
        for node in passed[1:]:
            sizes = storages(node)
            if node in sources:
                key = (str(node.target), node.meta["val"].shape, sources[node])
                shared[key] = sum(sizes.values())
            else:
                saved |= {of: size for of, size in sizes.items() if of not in resident}
        flops = graph_flops(forward.graph)
        again = flops + graph_flops(backward.graph) - graph_flops(fx_graph_cse(self.graph.graph))
        return Partition(saved, shared, flops, again, forward, backward, resident)

    def _sources(self, graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
        """Return the indices of shared inputs of each node that depends on shared inputs only."""
        sources: dict[fx.Node, frozenset[int]] = {}
        if self.shared:
            inputs = graph.find_nodes(op="placeholder")[self.carried + self.parameters :]
            sources = {node: frozenset([place]) for place, node in enumerate(inputs)}
            for node in graph.nodes:
                read = node.all_input_nodes
                if node.op == "call_function" and all(source in sources for source in read):
                    sources[node] = frozenset[int]().union(*(sources[source] for source in read))
        return sources


def unchanged(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    """Return the graph unchanged, as a compiler."""
    return gm


def capture(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """Return a partitioner that appends the joint graph to a list and ends the tracing."""

    def partition(joint: fx.GraphModule, _: Any, **__: Any) -> Any:
        graphs.append(copied(joint))
        raise _Captured

    return partition


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph without its constants, as fake tensors cannot be copied."""
    return fx.GraphModule(graph, copy.deepcopy(graph.graph))


def storages(node: fx.Node) -> dict[int, int]:
    """Return the bytes of the storages of a node's value, by identity; views share them."""
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def operator_flops(operator: Any, args: Sequence[Any]) -> int:
    """Return the FLOPs of a forward product or attention; 0 for other operators."""
    if operator in PRODUCTS:
        left, right = (args[index] for index in PRODUCTS[operator])
        return int(2 * left.numel() * right.shape[-1])
    if operator in BATCHED_PRODUCTS:
        left, right = (args[index] for index in BATCHED_PRODUCTS[operator])
        keys = max(left.shape[-1], right.shape[-1])
        return int(left.numel() * right.shape[-1] * (keys + 1) // keys)
    if operator is CPU_ATTENTION.default:
        query, key = args[:2]
        return int(2 * query.numel() * (key.shape[-2] + 1))  # two products
    return 0


def node_flops(node: fx.Node) -> int:
    """Return the FLOPs of a node."""
    args = [arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in node.args]
    return operator_flops(node.target, args)


def graph_flops(graph: fx.Graph) -> int:
    """Return the FLOPs of all nodes."""
    return sum(map(node_flops, graph.nodes))


@contextlib.contextmanager
def attention_as_on_cuda() -> Iterator[None]:
    """Let the partitioner treat the CPU's attention like CUDA's.

    The partitioner's list of expensive operators and table of FLOPs lack the CPU's attention, so
    that the partitioner would treat its recomputation as free.
    """
    known = partitioners.get_default_op_list

    def with_attention() -> Any:
        operators = known()
        operators.compute_intensive_ops.add(CPU_ATTENTION)
        return operators

    def flops(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
        return 4 * query.numel() * key.shape[-2]  # CUDA's formula, which ignores causality

    partitioners.get_default_op_list = with_attention
    flop_counter.flop_registry[CPU_ATTENTION] = flops
    try:
        yield
    finally:
        partitioners.get_default_op_list = known
        del flop_counter.flop_registry[CPU_ATTENTION]
