"""Measure what the peers save for backward: transformers + peft, checkpointed, and partitioned.

The models have true shapes and no weights: they are those of `pcg.explain.baselines.peer_model`, of
fake tensors, and nothing is computed. Measured are storages, each once, without parameters, buffers
and the token ids: in `step` those that autograd holds after the forward with loss, in `Partitioner`
those that torch's min-cut partitioner (`pcg.explain.baselines.partitioner`) passes from forward to
backward of a whole model.

FLOPs are those of matrix products and attention; a causal query sees (S + 1) / 2 keys on average.
The recomputed FLOPs are

    FLOPs of forward and backward − the same with nothing recomputed

so that what attention's backward costs, the same in both, need not be known.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from pcg.explain.baselines.partitioner import (
    PRODUCTS,
    JointGraph,
    capture,
    node_flops,
    operator_flops,
    storages,
    unchanged,
)
from pcg.explain.baselines.peer_model import MASKLESS, UNPADDED, loss_of, peer_model, tensors_of

CONFIGS = Path(__file__).parent.parent / "pcg" / "configs"


@dataclass(frozen=True)
class Case:
    """A model, a LoRA recipe, and the shape of a step.

    Attributes:
        model: an id that ships with pcg, or the contents of a config.json.
        targets: peft's `target_modules`.
    """

    model: str | Mapping[str, Any]
    rank: int
    targets: str | tuple[str, ...]
    batch: int = 1
    seq: int = 1024

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        fields = self.model
        if isinstance(fields, str):
            fields = json.loads((CONFIGS / f"{fields.replace('/', '--')}.json").read_text())
        return dict(fields)

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def lora(self) -> peft.LoraConfig:
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return peft.LoraConfig(r=self.rank, target_modules=targets, task_type="CAUSAL_LM")

    def ids(self) -> torch.Tensor:
        return torch.zeros(self.batch, self.seq, dtype=torch.long)


def build(case: Case, layers: int, adapters: torch.dtype, attention: str) -> Any:
    """Return the bf16 model with adapters, of empty CPU tensors; fake under a FakeTensorMode."""

    def wrap(model: Any) -> Any:
        is_default = adapters == torch.float32
        return peft.get_peft_model(model, case.lora, autocast_adapter_dtype=is_default)

    config = {**case.config, **UNPADDED, "num_hidden_layers": layers}
    return peer_model(config, "bfloat16", wrap, attention)[0]


# --------------------------------------------------------------------------------------- eager


@dataclass(frozen=True)
class Measured:
    """One training step: bytes saved, those of them after the last block, FLOPs, peak bytes."""

    kept: int
    outside: int
    forward_flops: int
    flops: int
    peak: int


class _Step(TorchDispatchMode):
    """Counts FLOPs, and the bytes of the storages that are alive after every operator."""

    def __init__(self, resident: set[int]) -> None:
        super().__init__()
        self.resident, self.flops, self.peak = resident, 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.resident:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: row for key, row in self._alive.items() if not row[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def step(model: Any, ids: torch.Tensor) -> Measured:
    """Run forward and backward; see `Measured`."""
    tensors = [*model.parameters(), *model.buffers(), ids]
    resident = {tensor.untyped_storage()._cdata for tensor in tensors}
    storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    ended = False

    def end(*_: Any) -> None:
        nonlocal ended
        ended = True

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in resident:
            storages.setdefault(storage._cdata, (storage, ended))  # held: no address twice
        return tensor

    handle = blocks[-1].register_forward_hook(end)
    with _Step(resident) as counted:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, ids)
        forward_flops = counted.flops
        kept = sum(storage.nbytes() for storage, _ in storages.values())
        outside = sum(storage.nbytes() for storage, after in storages.values() if after)
        handle.remove()
        storages.clear()  # so that backward can free them
        loss.backward()
    return Measured(kept, outside, forward_flops, counted.flops, counted.peak)


def prepared(case: Case, layers: int, adapters: torch.dtype, how: str) -> Any:
    """Return the model to `step`; how: sdpa, eager (attention), or checkpointing (every block)."""
    model = build(case, layers, adapters, "eager" if how == "eager" else MASKLESS)
    if how == "checkpointing":
        # There is no dropout whose random state could matter, and fake tensors have none.
        options = {"use_reentrant": False, "preserve_rng_state": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers 6 will have another name for it
            model.train().gradient_checkpointing_enable(options)
    return model


# --------------------------------------------------------------------------- torch's partitioner


@dataclass(frozen=True)
class Partition:
    """The result of torch's partitioner on a model.

    Attributes:
        outside: bytes of them in logits and what is made of them.
        forward_flops: FLOPs of the whole forward, without what is recomputed.
        head_flops: FLOPs of the product that gives the logits.
        again_flops: FLOPs that are recomputed in backward.
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

    The graph has no mask and repeats no keys and values, which is kinder to torch than what dynamo
    traces.
    """

    def __init__(self, joint: JointGraph, vocabulary: int) -> None:
        self.joint, self.vocabulary = joint, vocabulary

    @classmethod
    def of(cls, case: Case, layers: int, adapters: torch.dtype) -> Partitioner:
        """Trace a model of fake tensors."""
        with FakeTensorMode():
            return cls.traced(build(case, layers, adapters, MASKLESS), case.ids())

    @classmethod
    def traced(cls, model: Any, ids: torch.Tensor) -> Partitioner:
        """Trace a model's loss and its gradients; inputs are the ids, parameters and buffers."""
        tensors = tensors_of(model)

        def loss(ids: Sequence[Any], values: Sequence[Any], _: Sequence[Any]) -> torch.Tensor:
            named = dict(zip(tensors, values, strict=True))
            arguments = {"input_ids": ids[0], "labels": ids[0], "use_cache": False}
            return torch.func.functional_call(model, named, (), arguments).loss

        joint = JointGraph.trace(loss, [ids], list(tensors.values()))
        return cls(joint, model.config.vocab_size)

    def partition(self, budget: float) -> Partition:
        """Divide a copy of the joint graph under an activation memory budget."""
        found = self.joint.partition(budget)
        forward = found.forward
        head = next(node for node in forward.graph.nodes if self._is_head(node))
        ids = forward.graph.find_nodes(op="placeholder")[: self.joint.carried]
        resident = found.resident.union(*map(storages, ids))
        kept, outside = _passed_on(forward.graph, head, resident)
        peak = _peak(found.backward.graph, resident)
        flops = found.forward_flops
        return Partition(
            kept, outside, flops, node_flops(head), found.recomputed_flops, peak, forward
        )

    def _is_head(self, node: fx.Node) -> bool:
        return node.target in PRODUCTS and node.meta["val"].shape[-1] == self.vocabulary


def compiled_block(case: Case, adapters: torch.dtype) -> int:
    """Return the bytes a block that torch.compile saves at budget 1, transformers' mask included.

    Dynamo wants real tensors; they stay empty, and are never touched.
    """
    kept = []
    for layers in (2, 3):
        model, found = build(case, layers, adapters, "sdpa"), []
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=unchanged,
            bw_compiler=unchanged,
            partition_fn=capture(found),
            decompositions=select_decomp_table(),
        )
        try:
            torch.compile(loss_of, backend=backend)(model, case.ids())
        except Exception:  # dynamo's own, around the one that ends the capture
            if not found:
                raise
        residents = len(found[0].graph.find_nodes(op="placeholder"))
        kept.append(JointGraph(found[0], 0, residents).partition(1.0).size_bytes)
    return kept[1] - kept[0]


def _passed_on(graph: fx.Graph, head: fx.Node, resident: Set[int]) -> tuple[int, int]:
    """Return the bytes passed to backward without inputs, and those of them from the head on."""
    after = {head}
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    kept: dict[int, tuple[int, bool]] = {}
    for node in graph.output_node().args[0][1:]:
        for key, size in storages(node).items():
            if key not in resident:
                kept.setdefault(key, (size, node in after))
    sizes = kept.values()
    return sum(size for size, _ in sizes), sum(size for size, outside in sizes if outside)


def _peak(graph: fx.Graph, resident: Set[int]) -> int:
    """Return the peak bytes of a backward graph run as it stands, without resident tensors."""
    nodes = list(graph.nodes)  # the last one is the output, which holds the gradients to the end
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(storages(used), index))
    alive: dict[int, int] = {}
    now = most = 0
    for index, node in enumerate(nodes):
        for key, size in storages(node).items():
            if key not in resident and key not in alive:
                alive[key] = size
                now += size
        most = max(most, now)
        for used in (node, *node.all_input_nodes):
            for key in storages(used):
                if last[key] == index:
                    now -= alive.pop(key, 0)
    return most
