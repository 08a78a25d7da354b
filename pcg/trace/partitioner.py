"""torch's min-cut partitioner: what it passes from forward to backward, under its memory budgets.

Bytes are storages, each once, without the graph's inputs. FLOPs are those of matrix products and
attention; a causal query sees (S + 1) / 2 keys on average. What is computed again is

    FLOPs of forward and backward − the same with nothing computed again

so that what attention's backward costs, the same in both, need not be known.

Importing this costs seconds (functorch, inductor's decompositions): only who asks for it pays.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from functorch.compile import aot_function
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._inductor.decomposition import select_decomp_table
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (1, 2),
}


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token; ids: [B, S]."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def flops_of(func: Any, args: Sequence[Any]) -> int:
    """FLOPs of a forward product or attention; 0 for what is neither."""
    if func in PRODUCTS:
        left, right = (args[index] for index in PRODUCTS[func])
        return int(2 * left.numel() * right.shape[-1])
    if func is CPU_ATTENTION.default:
        query, key = args[:2]
        return int(2 * query.numel() * (key.shape[-2] + 1))  # two products over (S + 1) / 2 keys
    return 0


@contextlib.contextmanager
def attention_as_on_cuda() -> Iterator[None]:
    """Have the partitioner know the CPU's attention as it knows CUDA's.

    Its list of operators that cost much, and its table of FLOPs, lack the one for the CPU: there it
    recomputes attention as if that were free.
    """
    ours = partitioners.get_default_op_list

    def with_attention() -> Any:
        operators = ours()
        operators.compute_intensive_ops.add(CPU_ATTENTION)
        return operators

    def flops(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
        return 4 * query.numel() * key.shape[-2]  # CUDA's formula, which knows no causal half

    with (
        mock.patch.object(partitioners, "get_default_op_list", with_attention),
        mock.patch.dict(flop_counter.flop_registry, {CPU_ATTENTION: flops}),
    ):
        yield


class _Captured(Exception):
    """Ends a capture once the joint graph is known."""


@dataclass(frozen=True)
class Partition:
    """What torch's partitioner made of a model.

    Attributes:
        kept: bytes.
        outside: of them, logits and what is made of them.
        forward_flops: of the whole forward, without what is computed again.
        head_flops: of the product that gives the logits.
        again_flops: computed again in backward.
        backward_peak: most bytes alive in the backward graph, run as it stands and not fused.
        forward: the graph from parameters, buffers and ids to the loss and what is kept.
    """

    kept: int
    outside: int
    forward_flops: int
    head_flops: int
    again_flops: int
    backward_peak: int
    forward: fx.GraphModule


class Partitioner:
    """The joint graph of a model, captured once, and its partitions under budgets.

    AOTAutograd traces loss and gradients with inductor's decompositions. The graph has no mask and
    repeats no keys and values, which is kinder to torch than what dynamo traces. Parameters and
    buffers are marked as resident, as torch.compile marks them.
    """

    def __init__(self, joint: fx.GraphModule, residents: int, vocabulary: int) -> None:
        self.joint, self.residents, self.vocabulary = joint, residents, vocabulary

    @classmethod
    def traced(cls, model: Any, ids: torch.Tensor) -> Partitioner:
        """Trace a model's loss and its gradients."""
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found: list[fx.GraphModule] = []

        def loss(values: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
            named = dict(zip(tensors, values, strict=True))
            arguments = {"input_ids": ids, "labels": ids, "use_cache": False}
            return torch.func.functional_call(model, named, (), arguments).loss

        compiled = aot_function(loss, _unchanged, _unchanged, _keep(found), select_decomp_table())
        with contextlib.suppress(_Captured):
            compiled(list(tensors.values()), ids)
        return cls(found[0], len(tensors), model.config.vocab_size)

    @classmethod
    def compiled(cls, model: Any, ids: torch.Tensor) -> Partitioner:
        """Trace as torch.compile does: dynamo's graph, with the mask that transformers makes.

        Dynamo wants real tensors; they may be empty, and are never touched.
        """
        found: list[fx.GraphModule] = []
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=_unchanged,
            bw_compiler=_unchanged,
            partition_fn=_keep(found),
            decompositions=select_decomp_table(),
        )
        try:
            torch.compile(loss_of, backend=backend)(model, ids)
        except Exception:  # dynamo's own, around the one that ends the capture
            if not found:
                raise
        residents = len(found[0].graph.find_nodes(op="placeholder"))
        return cls(found[0], residents, model.config.vocab_size)

    def partition(self, budget: float) -> Partition:
        """Divide a copy of the joint graph under an activation memory budget."""
        joint = copy.deepcopy(self.joint)
        plain = _graph_flops(joint.graph)
        with functorch_config.patch(activation_memory_budget=budget):
            forward, backward = partitioners.min_cut_rematerialization_partition(
                joint,
                None,
                num_fwd_outputs=1,
                static_lifetime_input_indices=list(range(self.residents)),
            )
        head = next(node for node in forward.graph.nodes if self._is_head(node))
        inputs = forward.graph.find_nodes(op="placeholder")
        resident = {key for node in inputs for key in _storages(node)}
        kept, outside = _passed_on(forward.graph, head, resident)
        flops = _graph_flops(forward.graph)
        again = flops + _graph_flops(backward.graph) - plain
        peak = _peak(backward.graph, resident)
        return Partition(kept, outside, flops, _node_flops(head), again, peak, forward)

    def _is_head(self, node: fx.Node) -> bool:
        return node.target in PRODUCTS and node.meta["val"].shape[-1] == self.vocabulary


def _unchanged(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
    return graph


def _keep(found: list[fx.GraphModule]) -> Any:
    def partition(joint: fx.GraphModule, _: Any, **__: Any) -> Any:
        found.append(copy.deepcopy(joint))
        raise _Captured

    return partition


def _storages(node: fx.Node) -> dict[int, int]:
    """Size by identity of what a node's value lies in; views share it."""
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _passed_on(graph: fx.Graph, head: fx.Node, resident: set[int]) -> tuple[int, int]:
    """Bytes of the storages passed to backward, but inputs; of them those from the head on."""
    after = {head}
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    kept: dict[int, tuple[int, bool]] = {}
    for node in graph.output_node().args[0][1:]:
        for key, size in _storages(node).items():
            if key not in resident:
                kept.setdefault(key, (size, node in after))
    sizes = kept.values()
    return sum(size for size, _ in sizes), sum(size for size, outside in sizes if outside)


def _node_flops(node: fx.Node) -> int:
    return flops_of(node.target, [getattr(arg, "meta", {}).get("val") for arg in node.args])


def _graph_flops(graph: fx.Graph) -> int:
    return sum(map(_node_flops, graph.nodes))


def _peak(graph: fx.Graph, resident: set[int]) -> int:
    """Most bytes alive in a backward graph run as it stands, without what is resident."""
    nodes = list(graph.nodes)  # the last one is the output, which holds the gradients to the end
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(_storages(used), index))
    alive: dict[int, int] = {}
    now = most = 0
    for index, node in enumerate(nodes):
        for key, size in _storages(node).items():
            if key not in resident and key not in alive:
                alive[key] = size
                now += size
        most = max(most, now)
        for used in (node, *node.all_input_nodes):
            for key in _storages(used):
                if last[key] == index:
                    now -= alive.pop(key, 0)
    return most
