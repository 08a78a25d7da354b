"""One finetuning step's gradients: forward that saves, loss in chunks, backward layer by layer.

The loss is the sum over target tokens divided by a normaliser that the caller gives, as all target
tokens of a mini-batch, so that gradients of its parts add up. The epilogue runs forward and
backward for a chunk of tokens at a time, on tokens with a target only, so logits never exist for
all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.ir.program import Training, python_name
from pcg.parallel.ranks import ALONE, Ranks
from pcg.runtime.adapter_binding import bind
from pcg.runtime.adapter_pieces import AdapterPieces
from pcg.runtime.adapters import Adapter
from pcg.runtime.base_weights import BaseWeights
from pcg.runtime.batch import Batch, whole_sequences
from pcg.runtime.data import IGNORED, Example
from pcg.runtime.model_runner import LayerInputs, load_functions
from pcg.runtime.prompt_encoder import EncodedTraining

CHUNK_BYTES = 16 * 2**20
"""Logits of one chunk in fp32; backward holds their gradient beside them."""


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
        self.pieces = pieces = AdapterPieces(model, adapter, self._device, ranks)
        self._layers = [
            bind(model.blocks[block].parameters, pieces, layer, weights.layers[layer])
            for layer, block in enumerate(model.layers)
        ]
        self._restored = frozenset(training.restored)
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
        if self._encoder is not None:
            self._encoder.make()
            self.pieces.take()
        with torch.no_grad():
            batch, targets = self._shifted(examples)
            batch.dropout_seed = dropout_seed
            shared, carried, kept = self._forward(batch)
            loss, gradients = self._loss(batch, targets, carried, shared, 1.0 / normaliser)
            del carried
            if not self.training.restored:
                shared = ()
            gradients = self._backward(batch, gradients, kept, shared)
            self._backward_prologue(batch, gradients)
        if self._encoder is not None:
            self._hand_encoder_gradients()
            self._encoder.backward()
        return loss

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
        with torch.no_grad():
            batch, targets = self._shifted(examples)
            shared, carried, _ = self._forward(batch, keep=False)
            loss, _ = self._loss(batch, targets, carried, shared, None)
        return loss, int((targets >= 0).sum())

    def count_targets(self, examples: Sequence[Example]) -> int:
        """Target tokens; the first is one where a prompt comes before it, as in peft."""
        firsts = sum(example.labels[0] != IGNORED for example in examples)
        of_prompt = firsts if self.adapter.recipe.learns_first_token else 0
        return sum(example.targets for example in examples) + of_prompt

    def _shifted(self, examples: Sequence[Example]) -> tuple[Batch, Tensor]:
        """The batch, and for each token the token that it has to predict; negative for none."""
        count = self.adapter.prompt_tokens
        batch = whole_sequences([e.ids for e in examples], self._device, [count] * len(examples))
        batch.ranks = self.ranks
        skipped = 0 if self.adapter.recipe.learns_first_token else 1
        targets: list[int] = []
        for example in examples:
            unlearned = [IGNORED] * (count + skipped)
            targets += [*unlearned, *example.labels[skipped:], IGNORED][1:]
        return batch, torch.tensor(targets, dtype=torch.long, device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(vars(self.weights.prologue).values())).device  # type: ignore[no-any-return]

    def _forward(
        self, batch: Batch, keep: bool = True
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], list[Any]]:
        model = self.training.model
        prologue = self._functions["prologue"]
        shared = prologue(
            self.weights.prologue, self._first, batch, batch.input_ids, batch.positions
        )
        shared = shared if isinstance(shared, tuple) else (shared,)
        count = self._inputs.carried
        carried: Sequence[Tensor] = shared[:count]
        # Nobody but the first layer reads these, and it frees them if it need not keep them.
        shared = (*(None,) * count, *shared[count:])
        kept: list[Any] = []
        for layer in range(len(model.layers)):
            carried, saved = self._layer(layer, batch, carried, shared)
            kept.append(list(saved) if keep else None)
            del saved
            if keep and layer in self._restored:
                self._hand(layer, kept[layer], (None,) * count)
        return shared, carried, kept

    def _layer(
        self, layer: int, batch: Batch, carried: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """A layer's forward: what it hands on, and what it keeps."""
        training = self.training
        batch.layer = layer
        forward = self._functions[training.plans[training.layers[layer]].forward.name]
        graph = training.model.blocks[training.model.layers[layer]]
        return forward(  # type: ignore[no-any-return]
            self.weights.layers[layer],
            self._layers[layer],
            batch,
            *carried,
            *self._inputs.of(graph, shared),
        )

    def _hand(self, layer: int, kept: list[Any], carried: Sequence[Tensor | None]) -> None:
        """Put what a layer is handed in its place among what the layer keeps."""
        for index, value in zip(self._input_places(layer), carried, strict=True):
            kept[index] = value

    def _input_places(self, layer: int) -> list[int]:
        training = self.training
        graph = training.model.blocks[training.model.layers[layer]]
        plan = training.plans[training.layers[layer]]
        return [plan.kept.index(value.name) for value in graph.inputs[: self._inputs.carried]]

    def _loss(
        self,
        batch: Batch,
        targets: Tensor,
        carried: Sequence[Tensor],
        shared: Sequence[Tensor],
        weight: float | None,
    ) -> tuple[float, list[Tensor]]:
        """The summed loss, and with a weight the gradient of each carried value."""
        epilogue = self.training.model.epilogue
        inputs = [*carried, *self._inputs.of(epilogue, shared)]
        rows = torch.nonzero(targets >= 0).squeeze(-1)
        gradients = [torch.zeros_like(x) for x in carried] if weight is not None else []
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        for index, chunk in enumerate(rows.split(self._chunk)):
            # Behind the layers, and each chunk drops other elements.
            batch.layer = len(self._layers) + index
            part = [x[chunk] for x in inputs]
            arguments = (self.weights.epilogue, self._outer, batch, *part, targets[chunk])
            if weight is None:
                total += self._functions["epilogue_loss"](*arguments).sum(dtype=torch.float64)
                continue
            dtype = torch.float64 if part[0].dtype == torch.float64 else torch.float32
            slope = torch.full(chunk.shape, weight, dtype=dtype, device=targets.device)
            (loss,), dx, trained = self._functions["epilogue_train"](*arguments, slope)
            total += loss.sum(dtype=torch.float64)
            for gradient, d in zip(gradients, dx, strict=True):
                gradient[chunk] = d
            self._accumulate(self._outer, self.training.epilogue_trained, trained)
        return float(total), gradients

    def _restore(self, layer: int, batch: Batch, kept: list[Any], shared: Sequence[Tensor]) -> None:
        """Make a layer's input again, from that of the nearest layer before that kept its own."""
        first = layer
        while first in self._restored:
            first -= 1
        carried: Sequence[Tensor] = [kept[first][index] for index in self._input_places(first)]
        for i in range(first, layer):
            carried, _ = self._layer(i, batch, carried, shared)
            self._hand(i + 1, kept[i + 1], carried)

    def _backward(
        self,
        batch: Batch,
        gradients: list[Tensor],
        kept: list[Any],
        shared: Sequence[Tensor],
    ) -> list[Tensor]:
        """Layer by layer from the last; each empties what it is given.

        Args:
            batch: the batch.
            gradients: of what the last layer hands on.
            kept: of each layer.
            shared: what all layers read, where layers run again.
        Returns:
            The gradients of what the first layer was handed; none where nobody needs them.
        """
        training = self.training
        for layer in reversed(range(len(training.layers))):
            plan = training.plans[training.layers[layer]]
            if plan.backward is None:
                return []
            if layer in self._restored and kept[layer][self._input_places(layer)[0]] is None:
                self._restore(layer, batch, kept, shared)
            batch.layer = layer
            below, trained = self._functions[plan.backward.name](
                self.weights.layers[layer], self._layers[layer], batch, kept.pop(), gradients
            )
            gradients = list(below)
            del below
            self._accumulate(self._layers[layer], plan.trained, trained)
        return gradients

    def _backward_prologue(self, batch: Batch, gradients: list[Tensor]) -> None:
        training = self.training
        if training.prologue is None:
            return
        batch.layer = 0  # as it was forward
        backward = self._functions[training.prologue.name]
        trained = backward(
            self.weights.prologue,
            self._first,
            batch,
            gradients,
            batch.input_ids,
            batch.positions,
        )
        self._accumulate(self._first, training.prologue_trained, trained)

    def _accumulate(self, bound: object, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            weight = getattr(bound, python_name(name)).weight
            if id(weight) not in self._trained:
                continue
            gradient = gradient.to(weight.dtype)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
