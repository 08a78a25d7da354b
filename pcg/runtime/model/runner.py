"""The model runner: runs an emitted serving program's prologue, layers and epilogue."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.errors import ProgramError
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph, Serving
from pcg.ir.types import TOKENS, TORCH_NAMES
from pcg.kernels.torch.products import ProductRequest
from pcg.ranks.group import SINGLE_RANK, Ranks
from pcg.ranks.stages import StageLink, deferred_places
from pcg.ranks.step_parts import LEAST_TOKENS, chosen_rows, rows_of_rank
from pcg.runtime.adapters.padded_tables import BoundAdapters
from pcg.runtime.model.batch import Batch
from pcg.runtime.model.bound_weights import BaseWeights
from pcg.runtime.model.merged_execution import run_single
from pcg.runtime.sampling.drawing import Drawing

Functions = Mapping[str, Callable[..., Any]]


def load_functions(source: str, name: str) -> Functions:
    """Execute emitted source, with lines in tracebacks. ProgramError: the source fails."""
    # Triton reads a kernel's source when it first runs, so each source needs its own file name.
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<pcg {name} {digest}>"
    namespace: dict[str, Any] = {"__name__": f"pcg_program_{name}"}
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    try:
        exec(compile(source, filename, "exec"), namespace)
    except Exception as error:
        raise ProgramError(f"the emitted source of {name} cannot be loaded: {error}") from error
    return namespace


class LayerInputs:
    """The prologue's outputs that each graph reads, without values passed between layers."""

    def __init__(self, model: ModelGraph) -> None:
        self.carried = len(model.blocks[0].outputs)
        self._indices = {
            graph.name: tuple(
                model.prologue.outputs.index(value.name) for value in graph.inputs[self.carried :]
            )
            for graph in (*model.blocks, model.epilogue)
        }

    def of(self, graph: Graph, shared: Sequence[Any]) -> list[Tensor]:
        return [shared[index] for index in self._indices[graph.name]]


def is_sequence_parallel(model: ModelGraph) -> bool:
    """Return True if layers exchange a rank's part of the tokens instead of all tokens."""
    return bool(model.epilogue.inputs[0].type.shape[0] != TOKENS)


def _drawing(functions: Functions) -> Drawing | None:
    """Return a program's sampling kernels; None to sample by PyTorch's operators."""
    if not {"greedy", "draw", "keep"} <= functions.keys():
        return None
    return Drawing.by_kernels(functions["greedy"], functions["draw"], functions["keep"])


class ModelRunner:
    """The serving program with weights bound: tokens in, hidden states and logits out.

    All ranks of a group run the same batches, and compute the same logits.

    Attributes:
        ranks: ranks with the other shards of each matrix.
        alike: ranks that run the same steps, with tokens drawn by the group's rank 0.
    """

    def __init__(
        self,
        serving: Serving,
        weights: BaseWeights,
        ranks: Ranks = SINGLE_RANK,
        alike: Ranks | None = None,
        link: StageLink | None = None,
    ) -> None:
        """Create a runner.

        Args:
            weights: the base's weights, bound to serve.
            alike: see `alike` above; `ranks` by default.
            link: this stage's link to its neighbours; None with a single stage.
        """
        self.model = serving.model
        self.ranks = ranks
        self.alike = ranks if alike is None else alike
        self.weights = weights
        self.link = link
        self._own = range(len(serving.model.layers)) if link is None else link.stage.layers
        self._functions = load_functions(serving.source, "serving")
        self.drawing = _drawing(self._functions)
        self._inputs = LayerInputs(serving.model)
        self._blocks = [self._functions[block.name] for block in serving.model.blocks]
        self._is_sequence_parallel = is_sequence_parallel(serving.model)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of logits."""
        epilogue = self.model.epilogue
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[epilogue.types[epilogue.outputs[0]].dtype])
        return dtype

    @torch.inference_mode()
    def hidden(self, batch: Batch, adapters: BoundAdapters) -> list[Tensor]:
        """Return the inputs of the epilogue for all tokens, and fill the cache.

        Only the last pipeline stage returns the epilogue's inputs.
        """
        return run_single(self.hidden_requests(batch, adapters))

    def hidden_requests(
        self, batch: Batch, adapters: BoundAdapters
    ) -> ProductRequest[list[Tensor]]:
        """Compute `hidden`, requesting the base's products from the caller."""
        batch.ranks = self.ranks
        batch.chosen = None
        shared = self._begun(batch, adapters)
        carried: Sequence[Any] = shared[: self._inputs.carried]
        extra = [self._inputs.of(block, shared) for block in self.model.blocks]
        self.weights.follow(self._own)
        for layer in self._own:
            batch.layer, block = layer, self.model.layers[layer]
            weights, adapter = self.weights.layer(layer), adapters.layers[layer]
            carried = _as_tuple(
                (yield from self._blocks[block](weights, adapter, batch, *carried, *extra[block]))
            )
        if self.link is not None and not self.is_last:
            self.link.send(carried, shared)
        return [*carried, *self._inputs.of(self.model.epilogue, shared)]

    @property
    def is_last(self) -> bool:
        """True for the last pipeline stage, or without stages."""
        return self.link is None or self.link.stage.is_last

    def parts_of(self, tokens: int) -> int:
        """Return the number of parts of a step, for concurrent work of pipeline stages.

        A step stays whole if ranks hold parts of the tokens between layers.
        """
        if self.link is None or self._is_sequence_parallel:
            return 1
        return self.link.parts_of(tokens)

    def shares(self, batch: Batch) -> bool:
        """Return True if ranks of context parallelism share a batch with long prompts.

        Batches are not shared if ranks hold parts of the tokens between layers.
        """
        of_prompts = sum(span.length for span in batch.longer_spans)
        return of_prompts >= LEAST_TOKENS and not self._is_sequence_parallel

    def _begun(self, batch: Batch, adapters: BoundAdapters) -> Sequence[Any]:
        if self.link is not None and not self.link.stage.is_first:
            received: list[Any] = list(self.link.receive(batch.tokens))
            kernels: Any = self._functions["K"]
            for place in deferred_places(self.model):
                received[place] = kernels.nothing_deferred()
            return received
        prologue, weights = self._functions["prologue"], self.weights.prologue
        return _as_tuple(prologue(weights, adapters.outer, batch, batch.input_ids, batch.positions))

    @torch.inference_mode()
    def logits(
        self,
        batch: Batch,
        adapters: BoundAdapters,
        rows: Tensor | None = None,
        row_adapters: BoundAdapters | None = None,
    ) -> Tensor:
        """Compute logits [rows, V] of the tokens `rows`, or of all tokens.

        `row_adapters` are bound to the rows, for bypass networks of the epilogue.
        """
        return self.logits_of(self.hidden(batch, adapters), batch, adapters, rows, row_adapters)

    @torch.inference_mode()
    def logits_of(
        self,
        inputs: Sequence[Tensor],
        batch: Batch,
        adapters: BoundAdapters,
        rows: Tensor | None = None,
        row_adapters: BoundAdapters | None = None,
    ) -> Tensor:
        """Compute logits from the epilogue's inputs; see `logits` for the other arguments."""
        return self._ended("epilogue", inputs, batch, adapters, rows, row_adapters)

    @torch.inference_mode()
    def last_hidden_of(
        self,
        inputs: Sequence[Tensor],
        batch: Batch,
        adapters: BoundAdapters,
        rows: Tensor | None = None,
        row_adapters: BoundAdapters | None = None,
    ) -> Tensor:
        """Compute the last hidden state, the head's input, [rows, hidden]; see `logits_of`.

        ProgramError: the program was compiled by an older pcg without this function.
        """
        if "last_hidden" not in self._functions:
            raise ProgramError(
                "the program has no function last_hidden, as it was compiled by an earlier pcg; "
                "compile it again for embeddings"
            )
        return self._ended("last_hidden", inputs, batch, adapters, rows, row_adapters)

    def _ended(
        self,
        function: str,
        inputs: Sequence[Tensor],
        batch: Batch,
        adapters: BoundAdapters,
        rows: Tensor | None,
        row_adapters: BoundAdapters | None,
    ) -> Tensor:
        batch.ranks = self.ranks  # the batch may have run through the layers in parts
        if rows is not None:
            batch.chosen = rows
        if self.link is not None and not self.is_last:
            return self.link.ended(batch.tokens, batch.logits_on_first)
        if rows is not None:
            carried = self._inputs.carried
            inputs = [
                self._chosen(x, rows) if index < carried else x[rows]
                for index, x in enumerate(inputs)
            ]
        outer = (adapters if row_adapters is None else row_adapters).outer
        result: Tensor = self._functions[function](self.weights.epilogue, outer, batch, *inputs)
        return result if self.link is None else self.link.tell_end(result, batch.logits_on_first)

    def _chosen(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return rows of a layer's output, or this rank's part of them."""
        if not self._is_sequence_parallel:
            return x[rows]
        size = self.ranks.size
        chosen = chosen_rows(x, rows, self.ranks.rank)
        return self.ranks.reduce_scatter([rows_of_rank(chosen, rank, size) for rank in range(size)])


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
