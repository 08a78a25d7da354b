"""Peer `torch.compile`: the bytes torch's min-cut partitioner saves for backward.

    saved      = Σ layers saved(layer) + shared tensors, once + tensors saved by the loss
    recomputed = Σ layers recomputed(layer) / Σ layers forward FLOPs

The partitioner divides one layer at a time, and equal layers once, so that its activation memory
budget takes effect: for a whole shallow model torch silently ignores it. Logits and loss are
divided under the default budget. peft's adapters are as peft creates them, fp32 over half
precision, without dropout.

The import of this module takes seconds (functorch, inductor's decompositions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pcg.errors import PcgError, TraceError, UnsupportedError
from pcg.explain.baselines.partitioner import JointGraph, Partition, attention_as_on_cuda
from pcg.explain.baselines.peer_adapters import with_peft
from pcg.explain.baselines.peer_model import (
    MASKLESS,
    UNPADDED,
    LayerCall,
    layer_calls,
    peer_model,
    tensors_of,
    without_layers,
)
from pcg.trace.export import quiet

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""torch's activation memory budgets; 1 is its default."""

__all__ = ["BUDGETS", "MASKLESS", "torch_partitioner"]


@dataclass(frozen=True)
class PartitionedModel:
    """A model's training graphs, divided into forward and backward under a budget.

    Attributes:
        budget: torch's activation memory budget, from 1 to 0.
        layer_bytes: bytes that each layer saves, without shared tensors.
        outside_bytes: bytes of shared tensors, of logits and of the loss.
        forward_flops: FLOPs of the layers' forward, without recomputation.
        recomputed_flops: FLOPs that the layers' backward recomputes.
    """

    budget: float
    layer_bytes: tuple[int, ...]
    outside_bytes: int
    forward_flops: int
    recomputed_flops: int


@dataclass(frozen=True)
class _TracedModel:
    """The joint graphs of a model: one per kind of layer, and the loss's."""

    calls: Sequence[LayerCall]
    graphs: Mapping[Any, JointGraph]
    loss: JointGraph

    def partition(self, budget: float) -> PartitionedModel:
        """Divide the layers under a budget, and the loss under the default."""
        outside = self.loss.partition(1.0)
        of_kind = {kind: graph.partition(budget) for kind, graph in self.graphs.items()}
        layers = [of_kind[call.kind] for call in self.calls]
        shared: dict[Any, int] = {}
        for call in self.calls:
            shared |= self._shared(call, of_kind[call.kind])
        return PartitionedModel(
            budget,
            tuple(layer.size_bytes for layer in layers),
            outside.size_bytes + sum(shared.values()),
            sum(layer.forward_flops for layer in layers),
            sum(layer.recomputed_flops for layer in layers),
        )

    @staticmethod
    def _shared(call: LayerCall, layer: Partition) -> dict[Any, int]:
        """Return a layer's saved bytes of tensors that depend only on shared inputs."""
        inputs = [call.arguments[place].untyped_storage()._cdata for place in call.shared]
        return {
            (operator, shape, frozenset(inputs[place] for place in sources)): size
            for (operator, shape, sources), size in layer.shared.items()
        }


def torch_partitioner(
    config: Mapping[str, Any],
    dtype: str,
    adapter: Mapping[str, Any],
    batch: int,
    seq: int,
    *,
    budgets: Sequence[float] = BUDGETS,
    attention: str | None = None,
) -> tuple[PartitionedModel, ...]:
    """Return the bytes saved and operations recomputed by torch's partitioner at each budget.

    Args:
        config: the contents of a config.json.
        dtype: torch's name of the base's dtype.
        adapter: the contents of an adapter_config.json.
        batch: the number of sequences of a step.
        seq: the number of tokens of a sequence.
        budgets: activation memory budgets, from 0 to 1.
        attention: `MASKLESS`, or None for transformers' choice, with the mask that it builds when
            traced.
    Raises:
        UnsupportedError: an unsupported model or method; says why.
        TraceError: torch cannot trace the model; says why.
    """
    try:
        with quiet(), FakeTensorMode():
            traced = _trace(
                config, dtype, adapter, torch.zeros(batch, seq, dtype=torch.long), attention
            )
            with attention_as_on_cuda():
                return tuple(traced.partition(budget) for budget in budgets)
    except PcgError:
        raise
    except Exception as error:  # any error of transformers, peft or torch
        first = next(iter(str(error).strip().splitlines()), "")
        raise TraceError(f"{type(error).__name__}: {first}") from error


def _trace(
    config: Mapping[str, Any],
    dtype: str,
    adapter: Mapping[str, Any],
    ids: torch.Tensor,
    attention: str | None,
) -> _TracedModel:
    unpadded = {**config, **UNPADDED}
    model, layers = peer_model(unpadded, dtype, lambda base: with_peft(base, adapter), attention)
    calls, last = layer_calls(model, layers, ids)
    if [call.layer for call in calls] != list(layers):
        raise UnsupportedError("layers do not run once each, one after the other")
    graphs: dict[Any, JointGraph] = {}
    for call in calls:
        if call.kind not in graphs:
            shared = [call.arguments[place] for place in call.shared]
            parameters = list(call.parameters.values())
            graphs[call.kind] = JointGraph.trace(call.run, [call.hidden], parameters, shared)
    loss, hidden = without_layers(model, layers, last)
    after = JointGraph.trace(loss, [hidden], list(tensors_of(model).values()), [ids])
    return _TracedModel(calls, graphs, after)
