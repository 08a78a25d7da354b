"""The training program with one adapter: forward that saves, loss in chunks, backward.

`pass_through` takes sequences through it. The loss is the sum over target tokens divided by a
normaliser that the caller gives, as all target tokens of a mini-batch, so that gradients of its
parts add up. The epilogue runs forward and backward for a chunk of tokens at a time, on tokens with
a target only, so logits never exist for all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.ir.program.program import Training, python_name
from pcg.parallel.ranks.group import ALONE, Ranks
from pcg.peft.adapter import Adapter
from pcg.peft.prompt_encoder import EncodedTraining
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.adapters.binding import bind
from pcg.runtime.engine.units import run_alone
from pcg.runtime.model.base_weights import BaseWeights
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.merged_execution import ProductRequest
from pcg.runtime.model.runner import LayerInputs, load_functions, parts_tokens
from pcg.runtime.training.data import IGNORED, Example
from pcg.runtime.training.loss_chunks import loss_chunks
from pcg.runtime.training.training_pass import pass_through

CHUNK_BYTES = 16 * 2**20
"""Logits of one chunk in fp32; backward holds their gradient beside them."""
_ALL_TOKENS = 2**31


class TrainingRunner:
    """The training program with weights and one adapter bound.

    Over ranks each trains its pieces of the adapter, which `settle` makes whole.

    Attributes:
        parameters: that are trained, by name.
        pieces: what this rank has of the adapter.
        ranks: the group.
    """

    def __init__(
        self, training: Training, weights: BaseWeights, adapter: Adapter, ranks: Ranks = ALONE
    ) -> None:
        self.training = training
        self.weights = weights
        self.adapter = adapter
        self.ranks = ranks
        self._functions = load_functions(training.source, "training")
        self._inputs = LayerInputs(training.model)
        model = training.model
        self.pieces = pieces = AdapterShards(model, adapter, self.device, ranks)
        self._layers = [
            bind(model.blocks[block].parameters, pieces, layer, weights.layers[layer])
            for layer, block in enumerate(model.layers)
        ]
        self._parts_tokens = parts_tokens(model)
        self._first = bind(model.prologue.parameters, pieces, 0, weights.prologue)
        self._outer = bind(model.epilogue.parameters, pieces, 0, weights.epilogue)
        self.parameters: Mapping[str, Tensor] = pieces.tensors
        self._trained = {id(tensor) for tensor in self.parameters.values()}
        self._encoder: EncodedTraining | None = None
        if adapter.recipe.encoder is not None:
            self._encoder = EncodedTraining(adapter.recipe, adapter.encoder, adapter.weights)
            self.parameters = self._encoder.parameters
        vocabulary = int(model.epilogue.types[model.epilogue.outputs[0]].shape[-1])
        self._chunk = max(16, CHUNK_BYTES // (4 * vocabulary))
        if any(node.op == "linear_cross_entropy" for node in training.epilogue.nodes):
            self._chunk = _ALL_TOKENS  # it makes logits for some at a time by itself

    def forward_backward(
        self, examples: Sequence[Example], normaliser: float, dropout_seed: int | None = None
    ) -> float:
        """Add the gradients of sum(loss) / normaliser to each parameter's `grad`.

        Args:
            examples: whole sequences; their labels are shifted here, and the virtual tokens of the
                adapter's prompt come before them.
            normaliser: target tokens that the loss is a mean over.
            dropout_seed: of what the recipe drops; None drops nothing.
        Returns:
            The sum of the target tokens' losses.
        """
        return run_alone(pass_through(self, examples, normaliser, dropout_seed)).loss

    def make_prompts(self) -> None:
        """Have the encoder, where the recipe has one, make the virtual tokens of a pass."""
        if self._encoder is not None:
            self._encoder.make()
            self.pieces.take()

    def hand_on_prompts(self) -> None:
        """Give the encoder, where the recipe has one, the gradients of what it made for a pass."""
        if self._encoder is not None:
            self._hand_encoder_gradients()
            self._encoder.backward()

    def sum_gradients(self) -> None:
        """End a step's gradients: those of replicated pieces are summed over the ranks."""
        if self._encoder is None:
            self.pieces.sum_gradients()

    def gradient_norm(self) -> Tensor:
        """The norm of the whole adapter's gradients."""
        if self._encoder is None:
            return self.pieces.norm()
        gradients = [tensor.grad for tensor in self.parameters.values() if tensor.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def publish(self) -> None:
        """Make what follows from the parameters, after they have changed."""
        if self._encoder is not None:
            self._encoder.publish()
            self.pieces.take()

    def settle(self) -> None:
        """Make the adapter what all ranks have trained of it."""
        if self._encoder is None:
            self.pieces.publish()

    def _hand_encoder_gradients(self) -> None:
        """Give the adapter's weights, which an encoder made, the gradients of their pieces."""
        if self.ranks.size == 1:
            return
        self.pieces.sum_gradients()
        gradients = {n: t.grad for n, t in self.pieces.tensors.items() if t.grad is not None}
        for path, gradient in self.pieces.joined(gradients).items():
            weight = self.adapter.parameter(path)
            assert weight is not None
            weight.weight.grad = gradient.to(weight.weight.device)
        for tensor in self.pieces.tensors.values():
            tensor.grad = None

    def evaluate(self, examples: Sequence[Example]) -> tuple[float, int]:
        """Sum of the target tokens' losses, and their number."""
        done = run_alone(pass_through(self, examples))
        return done.loss, done.targets

    def count_targets(self, examples: Sequence[Example]) -> int:
        """Target tokens; the first is one where a prompt comes before it, as in peft."""
        firsts = sum(example.labels[0] != IGNORED for example in examples)
        of_prompt = firsts if self.adapter.recipe.learns_first_token else 0
        return sum(example.targets for example in examples) + of_prompt

    def targets_of(self, example: Example) -> list[int]:
        """What each token has to predict, virtual ones first; negative for nothing."""
        skipped = 0 if self.adapter.recipe.learns_first_token else 1
        unlearned = [IGNORED] * (self.adapter.prompt_tokens + skipped)
        return [*unlearned, *example.labels[skipped:], IGNORED][1:]

    @property
    def device(self) -> torch.device:
        return next(iter(vars(self.weights.prologue).values())).device  # type: ignore[no-any-return]

    # --------------------------------------------------------------------------------- a program

    def prologue(self, batch: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """What the first layer is handed, and what all graphs may read."""
        function = self._functions["prologue"]
        shared = function(
            self.weights.prologue, self._first, batch, batch.input_ids, batch.positions
        )
        shared = shared if isinstance(shared, tuple) else (shared,)
        count = self._inputs.carried
        # Nobody but the first layer reads these, and it frees them if it need not keep them.
        return shared[:count], (*(None,) * count, *shared[count:])

    def layer(
        self,
        layer: int,
        batch: Batch,
        carried: Sequence[Tensor],
        shared: Sequence[Tensor | None],
    ) -> ProductRequest[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """A layer's forward: what it hands on, and what it keeps."""
        training = self.training
        batch.layer = layer
        forward = self._functions[training.plans[training.layers[layer]].forward.name]
        graph = training.model.blocks[training.model.layers[layer]]
        result: tuple[Sequence[Tensor], Sequence[Tensor]] = yield from forward(
            self.weights.layers[layer],
            self._layers[layer],
            batch,
            *carried,
            *self._inputs.of(graph, shared),
        )
        return result

    def loss(
        self,
        batch: Batch,
        targets: Tensor,
        carried: Sequence[Tensor],
        shared: Sequence[Tensor | None],
        weight: float | None,
    ) -> tuple[float, list[Tensor]]:
        """The summed loss, and with a weight the gradient of each carried value."""
        epilogue = self.training.model.epilogue
        shared = self._inputs.of(epilogue, shared)
        gradients = [torch.zeros_like(x) for x in carried] if weight is not None else []
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        batch.layer = len(self._layers)  # behind the layers
        for chunk in loss_chunks(targets, self._chunk, self.ranks, self._parts_tokens):
            batch.chosen = chunk.rows
            part = [chunk.of_own(x) for x in carried] + [chunk.of_whole(x) for x in shared]
            arguments = (self.weights.epilogue, self._outer, batch, *part, chunk.targets)
            if weight is None:
                total += self._functions["epilogue_loss"](*arguments).sum(dtype=torch.float64)
                continue
            dtype = torch.float64 if part[0].dtype == torch.float64 else torch.float32
            slope = torch.full(chunk.rows.shape, weight, dtype=dtype, device=targets.device)
            (loss,), dx, trained = self._functions["epilogue_train"](*arguments, slope)
            total += loss.sum(dtype=torch.float64)
            for gradient, d in zip(gradients, dx, strict=True):
                chunk.put_own(d, gradient)
            self._accumulate(self._outer, self.training.epilogue_trained, trained)
        batch.chosen = None
        return float(total), gradients

    def layer_backward(
        self, layer: int, batch: Batch, kept: list[Any], gradients: list[Tensor]
    ) -> ProductRequest[list[Tensor]]:
        """A layer's backward, which empties what it is given.

        Returns:
            The gradients of what the layer was handed; none below all that is trained.
        """
        plan = self.training.plans[self.training.layers[layer]]
        if plan.backward is None:
            return []
        batch.layer = layer
        below, trained = yield from self._functions[plan.backward.name](
            self.weights.layers[layer], self._layers[layer], batch, kept, gradients
        )
        self._accumulate(self._layers[layer], plan.trained, trained)
        return list(below)

    def prologue_backward(self, batch: Batch, gradients: list[Tensor]) -> None:
        """The prologue's backward, where something in it is trained."""
        training = self.training
        if training.prologue is None:
            return
        batch.layer = 0  # as it was forward
        trained = self._functions[training.prologue.name](
            self.weights.prologue,
            self._first,
            batch,
            gradients,
            batch.input_ids,
            batch.positions,
        )
        self._accumulate(self._first, training.prologue_trained, trained)

    def _accumulate(self, bound: object, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        taken: set[int] = set()
        for name, gradient in zip(names, gradients, strict=True):
            weight = getattr(bound, python_name(name)).weight
            if id(weight) not in self._trained:
                continue
            gradient = gradient.to(weight.dtype)
            if weight.grad is not None:
                weight.grad.add_(gradient)
                continue
            # Biases that are added to one sum are given one tensor; it is scaled and added to.
            weight.grad = gradient.clone() if gradient.data_ptr() in taken else gradient
            taken.add(gradient.data_ptr())
