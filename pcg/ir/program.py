"""What the compiler hands to the runtime: the folded model, and the program compiled from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pcg.ir.graph import Graph, Parameter


@dataclass(frozen=True)
class ModelGraph:
    """A model as prologue · blocks · epilogue.

    Attributes:
        prologue: (input_ids, position_ids) to the first layer's input and what all layers share.
        blocks: the distinct layers.
        layers: for each layer of the model, the index of its block.
        epilogue: the last layer's output to the logits.
    """

    prologue: Graph
    blocks: tuple[Graph, ...]
    layers: tuple[int, ...]
    epilogue: Graph

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All graphs in order: prologue, blocks, epilogue."""
        return (self.prologue, *self.blocks, self.epilogue)

    @property
    def dtype(self) -> str:
        """The dtype of the activations between layers."""
        return self.epilogue.inputs[0].type.dtype

    @property
    def hidden_size(self) -> int:
        return self.epilogue.inputs[0].type.features[-1]

    def map(self, change: Callable[[Graph], Graph]) -> ModelGraph:
        """The model with each graph changed."""
        return dataclasses.replace(
            self,
            prologue=change(self.prologue),
            blocks=tuple(change(block) for block in self.blocks),
            epilogue=change(self.epilogue),
        )

    def parameters(self) -> Iterator[tuple[Parameter, int | None]]:
        """Every parameter of every layer, with the layer's index; None outside the layers."""
        for parameter in self.prologue.parameters:
            yield parameter, None
        for layer, block in enumerate(self.layers):
            for parameter in self.blocks[block].parameters:
                yield parameter, layer
        for parameter in self.epilogue.parameters:
            yield parameter, None
