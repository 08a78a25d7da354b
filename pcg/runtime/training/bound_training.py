"""A training program with a bound adapter: prologue, layers, loss and their backward.

The loss is the sum over target tokens divided by a normaliser, such as the number of target tokens
in a mini-batch, so that gradients of parts of the mini-batch add up. The epilogue runs forward and
backward in chunks of target tokens, so that logits never exist for all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph
from pcg.ir.program.layer_order import layers_of_pass
from pcg.ir.program.program import Training, python_name
from pcg.ir.types import TensorType
from pcg.kernels.torch.products import ProductRequest, Result, has_stand_in
from pcg.peft.adapter import Adapter
from pcg.peft.prompt_encoder import EncodedTraining
from pcg.ranks.mesh import SINGLE_MESH, RankMesh
from pcg.ranks.stages import StageLink, Stages
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.memory.host_memory import FreedMemory
from pcg.runtime.memory.kv_cache import KvCache, kv_types
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.bound_weights import BaseWeights
from pcg.runtime.model.runner import LayerInputs, is_sequence_parallel, load_functions
from pcg.runtime.model.step_graphs import recorder_for
from pcg.runtime.training.recorded.loss_graphs import UpdateGraphs
from pcg.runtime.training.recorded.warm_job import drops_in, why_not_recorded
from pcg.runtime.training.recorded.window_graphs import WindowGraphs
from pcg.runtime.training.windows import LossChunk, LossChunks, WindowLoss, layers_back

_ALL_TOKENS = 2**31


class BoundTraining:
    """A training program with the base's weights and an adapter bound.

    Attributes:
        noise: the factor of NEFTune's noise in the first layer's input; 0 without noise.
        head_rows: rows of the head if the loss is computed in blocks of rows, as on CPUs, where
            reading the whole head for each small chunk of tokens would dominate; else 0.
    """

    noise = 0.0

    def __init__(
        self,
        training: Training,
        weights: BaseWeights,
        adapter: Adapter,
        mesh: RankMesh = SINGLE_MESH,
        link: StageLink | None = None,
        training_for: Callable[[tuple[int, int]], Training] | None = None,
        freed: FreedMemory | None = None,
        windows: bool = False,
    ) -> None:
        """Bind an adapter.

        Args:
            mesh: the ranks with other shards, stages, and parts of each sequence.
            link: the link to other pipeline stages; None for a single stage.
            training_for: returns the program for a step of a number of sequences and of tokens per
                sequence; None to train all steps by `training`.
            freed: returns freed memory to the system; None to keep freed memory.
            windows: True to train by windows within an engine.
        """
        self.training = training
        self._freed = freed
        self._training_for = training_for
        self.weights = weights
        self.adapter = adapter
        self.mesh = mesh
        self.ranks = mesh.tp
        self.cp = mesh.cp
        self.link = link
        self.windows = windows
        self.stages = Stages((0, len(training.layers))) if link is None else link.stages
        self.stage = self.stages[0] if link is None else link.stage
        self._functions = load_functions(training.source, "training")
        self._inputs = LayerInputs(training.model)
        model = self.stage.own(training.model)
        self.shards = shards = AdapterShards(model, adapter, self.device, mesh.tp, mesh.pp)
        self._layers = [
            shards.bind(model.blocks[block].parameters, layer)
            for layer, block in enumerate(model.layers)
        ]
        self._is_sequence_parallel = is_sequence_parallel(training.model)
        self._first = shards.bind(model.prologue.parameters, 0)
        self._outer = shards.bind(model.epilogue.parameters, 0)
        self.parameters: Mapping[str, Tensor] = shards.tensors
        self._trained = {id(tensor) for tensor in self.parameters.values()}
        self._encoder: EncodedTraining | None = None
        if adapter.recipe.encoder is not None:
            self._encoder = EncodedTraining(adapter.recipe, adapter.encoder, adapter.weights)
            self.parameters = self._encoder.parameters
        # The fused operator cuts the tokens into chunks itself.
        is_fused = any(node.op == "linear_cross_entropy" for node in training.epilogue.nodes)
        self.loss_chunk = _ALL_TOKENS if is_fused else training.model.loss_chunk
        self.head_rows = self._head_rows() if self.device.type == "cpu" else 0
        self._drops_in_loss = drops_in(training.model.epilogue)
        self._graphs: WindowGraphs | None = None
        self._graphs_of: KvCache | None = None

    def use_noise(self, alpha: float | None) -> None:
        """Add NEFTune's noise to the embeddings in further passes; None for no noise.

        Raises:
            UnsupportedError: the first layer's input is no linear function of the embeddings, or
                ranks divide the tokens among them.
        """
        self.noise = 0.0
        if alpha is not None:
            if self._is_sequence_parallel:
                raise UnsupportedError(
                    f"neftune_noise_alpha={alpha:g} over {self.mesh.sizes}: each rank has a part "
                    "of the embeddings; leave it out, or use tp=1"
                )
            self.noise = alpha * noise_scale(self.training.model.prologue)

    def plan_for(self, sequences: int, tokens: int, for_all: bool = False) -> None:
        """Switch to a plan within the memory budget for a number of sequences and tokens.

        May be called between two passes. The model and its bound weights stay.

        Args:
            for_all: keep the plan for all further steps, so that replicas read layers in the same
                order.
        Raises:
            MemoryBudgetError: the sequences need more than the budget.
        """
        if self._training_for is None:
            return
        training = self._training_for((sequences, -(-tokens // sequences)))
        if training is not self.training:
            self.training = training
            self._functions = load_functions(training.source, "training")
        if for_all:
            self._training_for = None

    def begin_pass(self, trains: bool) -> None:
        """Start a pass, which reads layers' weights in the order of the plan."""
        if self.weights.gathered is not None:
            self.weights.gathered.follow(layers_of_pass(self.training, trains))
        if self._encoder is not None:  # which computes the virtual tokens of the pass
            self._encoder.make()
            self.shards.scatter()

    def pass_by(self, trains: bool) -> None:
        """Join the gathers of a pass without sequences on this replica."""
        if self.weights.gathered is not None:
            self.weights.gathered.pass_by(layers_of_pass(self.training, trains))

    @property
    def layers_back(self) -> int:
        """The number of layers in a window's backward; over stages, the maximum per stage."""
        return max(map(len, layers_back(self.stages, self.training.first_back)), default=0)

    @property
    def device(self) -> torch.device:
        held = (self.weights.prologue, *self.weights.layers, self.weights.epilogue)
        tensors = (tensor for weights in held for tensor in vars(weights).values())
        device: torch.device = next(t.device for t in tensors if not has_stand_in(t))
        return device

    @cached_property
    def kv_types(self) -> tuple[tuple[TensorType, TensorType], ...]:
        """The types of each layer's keys and values."""
        return kv_types(self.training.model)

    def targets_of(self, example: Example) -> list[int]:
        """Return the target of each token, virtual tokens first; negative for none."""
        skipped = 0 if self.adapter.recipe.learns_first_token else 1
        unlearned = [IGNORED] * (self.adapter.prompt_tokens + skipped)
        return [*unlearned, *example.labels[skipped:], IGNORED][1:]

    def encode_prompts_backward(self) -> None:
        """Run the encoder's backward from the gradients of the virtual tokens of a pass."""
        if self._encoder is None:
            return
        if self.ranks.size > 1:  # gather the gradients of its outputs from their shards
            self.shards.sum_gradients()
            gradients = {n: t.grad for n, t in self.shards.tensors.items() if t.grad is not None}
            for path, gradient in self.shards.joined(gradients).items():
                weight = self.adapter.parameter(path)
                assert weight is not None
                weight.weight.grad = gradient.to(weight.weight.device)
            for tensor in self.shards.tensors.values():
                tensor.grad = None
        self._encoder.backward()

    # ------------------------------------------------------------------------------- functions

    def prologue(self, batch: Batch) -> tuple[Sequence[Any], Sequence[Tensor | None]]:
        """Run the prologue; return the first layer's inputs, and the values that all layers read.

        A later pipeline stage receives both from the previous stage.
        """
        shared: Sequence[Any]
        if self.link is not None and not self.stage.is_first:
            shared = self.link.receive(batch.tokens)
        else:
            function, weights = self._functions["prologue"], self.weights.prologue
            outputs = function(weights, self._first, batch, batch.input_ids, batch.positions)
            shared = outputs if isinstance(outputs, tuple) else (outputs,)
        count = self._inputs.carried
        # Only the first layer reads its inputs, and frees them unless backward needs them.
        return shared[:count], (*(None,) * count, *shared[count:])

    def layer(
        self, layer: int, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> ProductRequest[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Run a layer forward; return its outputs, and the tensors saved for backward."""
        training = self.training
        batch.layer = layer
        forward = self._functions[training.plans[training.layers[layer]].forward.name]
        graph = training.model.blocks[training.model.layers[layer]]
        inputs = (*carried, *self._inputs.of(graph, shared))
        requests = forward(self.weights.layer(layer), self._layers[layer], batch, *inputs)
        del inputs
        result: tuple[Sequence[Tensor], Sequence[Tensor]] = yield from self._watched(requests)
        return result

    def loss_chunks(self, targets: Tensor) -> LossChunks:
        """Return the target tokens of a window."""
        return LossChunks(targets, self.device, self.ranks, self._is_sequence_parallel)

    def _head_rows(self) -> int:
        epilogue = self.training.epilogue
        for node in epilogue.nodes:
            parameter = epilogue.parameters_by_name.get(node.inputs[-1])
            if node.op == "linear_backward" and parameter is not None:
                weight = getattr(self.weights.epilogue, python_name(parameter.name), None)
                return 0 if weight is None or weight.is_meta else len(weight)
        return 0

    def loss_tokens(self, tokens: int, left: int) -> int:
        """Return the size of the next loss chunk: up to `tokens` of `left` remaining tokens."""
        return tokens if self._graphs is None else self._graphs.loss.fitting(tokens, left)

    def loss(self, window: WindowLoss, chunk: LossChunk) -> ProductRequest[Tensor]:
        """Return the summed loss of a window's chunk, fp64, and add its gradients to the window."""
        batch = window.batch
        shared = self._inputs.of(self.training.model.epilogue, window.shared)
        if self._graphs is not None:
            whole = self.loss_inputs(window.carried, window.shared)
            weights = window.weight if window.slopes is None else chunk.of_whole(window.slopes)
            dropped = batch if self._drops_in_loss else None
            recorded = self._graphs.loss.run(whole, chunk.rows, chunk.targets, weights, dropped)
            if recorded is not None:
                for gradient, d in zip(window.gradients, recorded.gradients, strict=False):
                    chunk.put_own(d, gradient)
                window.put(chunk, recorded.losses)
                return recorded.total
        batch.chosen = chunk.rows
        part = [chunk.of_own(x) for x in window.carried] + [chunk.of_whole(x) for x in shared]
        if self._freed is not None:
            self._freed.look()
        if window.weight is None:
            loss = yield from self.loss_alone(batch, part, chunk.targets)
        else:
            dtype = torch.float64 if part[0].dtype == torch.float64 else torch.float32
            slopes = torch.full(chunk.rows.shape, window.weight, dtype=dtype, device=self.device)
            if window.slopes is not None:
                slopes = chunk.of_whole(window.slopes).to(dtype)
            loss, back = yield from self.loss_of(batch, part, chunk.targets, slopes)
            # The loss reads the first of the carried values alone.
            for gradient, d in zip(window.gradients, back, strict=False):
                chunk.put_own(d, gradient)
        batch.chosen = None
        window.put(chunk, loss)
        return loss.sum(dtype=torch.float64)

    def loss_alone(
        self, batch: Batch, part: Sequence[Tensor], targets: Tensor
    ) -> ProductRequest[Tensor]:
        """Return the losses of tokens, without gradients; see `loss_of`."""
        batch.layer = len(self._layers)  # after the layers
        arguments = (self.weights.epilogue, self._outer, batch, *part, targets)
        loss: Tensor = yield from self._watched(self._functions["epilogue_loss"](*arguments))
        return loss

    def loss_of(
        self, batch: Batch, part: Sequence[Tensor], targets: Tensor, slopes: Tensor
    ) -> ProductRequest[tuple[Tensor, Sequence[Tensor]]]:
        """Return the losses of tokens, and the gradients of their hidden states."""
        batch.layer = len(self._layers)  # after the layers
        arguments = (self.weights.epilogue, self._outer, batch, *part, targets, slopes)
        (loss,), dx, trained = yield from self._watched(
            self._functions["epilogue_train"](*arguments)
        )
        self._accumulate(self._outer, self.training.epilogue_trained, trained)
        return loss, dx

    def layer_backward(
        self, layer: int, batch: Batch, saved: list[Any], gradients: list[Tensor]
    ) -> ProductRequest[list[Tensor]]:
        """Run a layer backward, which empties `saved` and `gradients`.

        Returns the gradients of the layer's inputs; none if nothing below is trained.
        """
        plan = self.training.plans[self.training.layers[layer]]
        if plan.backward is None:
            return []
        batch.layer = layer
        requests = self._functions[plan.backward.name](
            self.weights.layer(layer), self._layers[layer], batch, saved, gradients
        )
        below, trained = yield from self._watched(requests)
        self._accumulate(self._layers[layer], plan.trained, trained)
        return list(below)

    def trained_in(self, layer: int) -> list[Tensor]:
        """Return the trained tensors of a layer."""
        plan = self.training.plans[self.training.layers[layer]]
        return [] if plan.backward is None else self._trained_of(self._layers[layer], plan.trained)

    def trained_in_loss(self) -> list[Tensor]:
        """Return the trained tensors after the layers."""
        return self._trained_of(self._outer, self.training.epilogue_trained)

    def _trained_of(self, bound: object, names: Sequence[str]) -> list[Tensor]:
        weights = (getattr(bound, python_name(name)).weight for name in names)
        return [weight for weight in weights if id(weight) in self._trained]

    def hold_gradients(self) -> None:
        """Move gradients into the fixed memory of recorded functions."""
        if self._graphs is None:
            return
        held = [*self.trained_in_loss()]
        if self.training.prologue is not None:
            held += self._trained_of(self._first, self.training.prologue_trained)
        for layer in range(len(self._layers)):
            held += self.trained_in(layer)
        self._graphs.gradients.hold(held)

    def update_graphs(
        self, optimizer: torch.optim.Optimizer, clip: Callable[[], Tensor]
    ) -> UpdateGraphs | None:
        """Return graphs for clipping and update; None if nothing is recorded."""
        if self._graphs is None or not self._graphs.records:
            return None
        return UpdateGraphs(optimizer, clip, self._graphs.gradients, self._graphs.recorder)

    def window_graphs(self, cache: KvCache) -> WindowGraphs | None:
        """Return the recorded windows of the adapter over a cache; None if not recordable."""
        if self.noise:  # which recorded prologues have not
            return None
        if self._graphs_of is not cache:
            recorder = None
            if self.ranks.size == 1 and self.link is None and cache.pages is not None:
                recorder = recorder_for(self.device)
            model, restored = self.training.model, self.training.restored
            if why_not_recorded(model, restored, self.adapter.prompt_tokens) is not None:
                recorder = None
            self._graphs = None if recorder is None else WindowGraphs(self, cache, recorder)
            self._graphs_of = cache
        return self._graphs

    @property
    def is_recorded(self) -> bool:
        """True if the runner has recorded windows, and uses a single program for all steps."""
        return self._graphs is not None and self._training_for is None

    def loss_inputs(
        self, carried: Sequence[Tensor], shared: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Return the epilogue's inputs for a window."""
        return [*carried, *self._inputs.of(self.training.model.epilogue, shared)]

    def prologue_backward(self, batch: Batch, gradients: list[Tensor]) -> None:
        """Run the prologue backward, if it has trained tensors."""
        training = self.training
        if training.prologue is None:
            return
        batch.layer = 0  # as in the forward
        trained = self._functions[training.prologue.name](
            self.weights.prologue, self._first, batch, gradients, batch.input_ids, batch.positions
        )
        self._accumulate(self._first, training.prologue_trained, trained)

    def add_noise(self, batch: Batch, x: Tensor, lengths: Sequence[int]) -> None:
        """Add noise to the first layer's input x of a batch, [T, d], in place.

        Args:
            lengths: the number of tokens of each of the batch's sequences, by their spans.
        """
        bounds = [self.noise / math.sqrt(length * x.shape[1]) for length in lengths]
        for span, bound in zip(batch.spans, bounds, strict=True):
            for part in batch.random_parts(span, _NOISE_KEY):
                drawn = torch.empty(part.whole, x.shape[1], dtype=torch.float32, device=x.device)
                drawn.uniform_(-bound, bound, generator=part.generator)
                virtual = max(span.start + span.virtual - part.start, 0)
                noise = drawn[part.skipped : part.skipped + part.count][virtual:]
                x[part.start : part.start + part.count][virtual:] += noise.to(x.dtype)

    def _watched(self, requests: ProductRequest[Result]) -> ProductRequest[Result]:
        return requests if self._freed is None else self._freed.between(requests)

    def _accumulate(self, bound: object, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        taken: set[int] = set()
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for name, gradient in zip(names, gradients, strict=True):
            weight = getattr(bound, python_name(name)).weight
            if id(weight) not in self._trained:
                continue
            gradient = gradient.to(weight.dtype)
            if weight.grad is not None:
                sums.append(weight.grad)
                added.append(gradient)
                continue
            # Biases of the same sum share a gradient tensor, which must be copied. Fused optimizers
            # need contiguous gradients.
            is_taken = gradient.data_ptr() in taken
            weight.grad = gradient.clone() if is_taken else gradient.contiguous()
            taken.add(gradient.data_ptr())
        if sums:  # a single launch on a GPU
            torch._foreach_add_(sums, added)


_LINEAR = ("mul", "div", "add", "cast", "expand_add", "virtual_tokens", "all_reduce")
_NOISE = "neftune_noise_alpha adds noise to embeddings of tokens"
_NOISE_KEY = -1
"""The key of random numbers for NEFTune; the keys of dropout are not negative."""


def noise_scale(prologue: Graph) -> float:
    """Return the factor by which the first layer's input depends on the embeddings.

    Scalars within the embedding's module, as of Gemma, are part of the embeddings, to which
    transformers' hook adds the noise.

    Raises:
        UnsupportedError: the dependence is no factor.
    """
    embedding = next(
        (n for n in prologue.nodes if n.op.startswith("embedding") and "input_ids" in n.inputs),
        None,
    )
    if embedding is None:
        raise UnsupportedError(
            f"{_NOISE}, and this model's prologue has no embedding of tokens, as with tp above 1; "
            "leave it out"
        )
    value, factor = embedding.output.name, 1.0
    while value != prologue.outputs[0]:
        readers = prologue.consumers.get(value, ())
        node = readers[0] if len(readers) == 1 else None
        is_scalar = node is not None and node.op in ("mul", "div")
        if (
            node is None
            or value in prologue.outputs
            or node.op not in _LINEAR
            or (is_scalar and (len(node.inputs) > 1 or node.get("reversed")))
        ):
            what = "several operators" if node is None else node.op
            raise UnsupportedError(
                f"{_NOISE}, which {what} reads before the first layer of this model; leave it out"
            )
        if is_scalar and node.scope != embedding.scope:
            scalar = float(node.attribute("scalar"))  # type: ignore[arg-type]
            factor *= scalar if node.op == "mul" else 1.0 / scalar
        value = node.output.name
    return factor
