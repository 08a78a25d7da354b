"""Run an emitted program: load its functions, bind weights, and call prologue, layers and epilogue."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from pcg.errors import ProgramError
from pcg.ir.graph import Graph, Parameter
from pcg.ir.program import ModelGraph, Program, Serving, python_name
from pcg.ir.types import TORCH_NAMES
from pcg.runtime.adapter_batch import Bound
from pcg.runtime.batch import Batch

Functions = Mapping[str, Callable[..., Any]]


class TensorSource(Protocol):
    """Where the base's weights come from: a checkpoint, or a state dict."""

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
    ) -> Tensor: ...


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights and constants, as the emitted functions read them: `w`."""

    outer: SimpleNamespace
    layers: tuple[SimpleNamespace, ...]
    size_bytes: int


def load_weights(program: Program, source: TensorSource, device: torch.device) -> BaseWeights:
    """Read every parameter of the program, once each, layer by layer.

    Raises:
        WeightsError: a tensor is missing, damaged or of another shape.
    """
    outer = SimpleNamespace()
    layers = tuple(SimpleNamespace() for _ in program.base.layers)
    loaded: dict[tuple[str, bool], Tensor] = {}
    for parameter, layer in program.base.parameters():
        key = (parameter.source.format(layer=layer), parameter.transposed)
        if key not in loaded:
            loaded[key] = _load(program, source, parameter, key[0], device)
        holder = outer if layer is None else layers[layer]
        setattr(holder, python_name(parameter.name), loaded[key])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.values()}
    return BaseWeights(outer, layers, sum(storages.values()))


def _load(
    program: Program, source: TensorSource, parameter: Parameter, name: str, device: torch.device
) -> Tensor:
    if parameter.role == "constant":
        return program.constants[name].to(device)
    type_ = parameter.type
    dtype = getattr(torch, TORCH_NAMES[type_.dtype])
    return source.load(name, type_.features, dtype, parameter.transposed, device)


def load_functions(source: str, name: str) -> Functions:
    """Execute emitted source; tracebacks show its lines.

    Raises:
        ProgramError: it is not valid Python, or cannot be imported.
    """
    filename = f"<pcg {name}>"
    namespace: dict[str, Any] = {"__name__": f"pcg_program_{name}"}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec"), namespace)
    except Exception as error:
        raise ProgramError(f"the emitted source of {name} cannot be loaded: {error}") from error
    return namespace


class LayerInputs:
    """Which of the prologue's outputs each graph reads, beside what one layer hands the next."""

    def __init__(self, model: ModelGraph) -> None:
        self._indices = {
            graph.name: tuple(
                model.prologue.outputs.index(value.name) for value in graph.inputs[carried:]
            )
            for graph, carried in self._carried(model)
        }
        self.carried = len(model.blocks[0].outputs)

    @staticmethod
    def _carried(model: ModelGraph) -> list[tuple[Graph, int]]:
        count = len(model.blocks[0].outputs)
        return [(graph, count) for graph in (*model.blocks, model.epilogue)]

    def of(self, graph: Graph, shared: Sequence[Tensor]) -> list[Tensor]:
        """The prologue's outputs that a graph reads."""
        return [shared[index] for index in self._indices[graph.name]]


class ModelRunner:
    """The serving program with weights bound: tokens in, hidden states and logits out."""

    def __init__(self, serving: Serving, weights: BaseWeights) -> None:
        self.model = serving.model
        self.weights = weights
        self._functions = load_functions(serving.source, "serving")
        self._inputs = LayerInputs(serving.model)
        self._blocks = [self._functions[block.name] for block in serving.model.blocks]

    @torch.inference_mode()
    def hidden(self, batch: Batch, adapters: Bound) -> list[Tensor]:
        """What the last layer hands the epilogue, for all tokens; the cache is filled on the way."""
        shared = _as_tuple(
            self._functions["prologue"](
                self.weights.outer, adapters.outer, batch, batch.input_ids, batch.positions
            )
        )
        carried: Sequence[Tensor] = shared[: self._inputs.carried]
        extra = [self._inputs.of(block, shared) for block in self.model.blocks]
        layers = zip(self.model.layers, self.weights.layers, adapters.layers, strict=True)
        for layer, (block, weights, adapter) in enumerate(layers):
            batch.layer = layer
            carried = _as_tuple(
                self._blocks[block](weights, adapter, batch, *carried, *extra[block])
            )
        return [*carried, *self._inputs.of(self.model.epilogue, shared)]

    @torch.inference_mode()
    def logits(self, batch: Batch, adapters: Bound, rows: Tensor | None = None) -> Tensor:
        """Logits [rows, V] of some tokens of the batch, or of all."""
        inputs = self.hidden(batch, adapters)
        if rows is not None:
            inputs = [x[rows] for x in inputs]
        outer = self.weights.outer
        return self._functions["epilogue"](outer, adapters.outer, batch, *inputs)  # type: ignore[no-any-return]


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
