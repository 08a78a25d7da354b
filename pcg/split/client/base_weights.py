"""The base's weights at a client: few tensors are local, products run at a base executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from pcg.errors import SplitError, WeightsError
from pcg.ir.operators.linear import piece_of
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch.products import RemoteWeight, stand_in_tensor
from pcg.ranks.shards import Ranges
from pcg.runtime.model.weights import DTYPE_NAMES, Weights, slices_of
from pcg.split.client.caller import Caller
from pcg.split.client.noise import Noise
from pcg.split.messages import DTYPES, GRADIENT, GRAPH, LINEAR, Piece, graph_digest
from pcg.tensor_file import TensorInfo


@dataclass(frozen=True, eq=False)
class CalledWeight(RemoteWeight):
    """A weight [out, in], or several side by side; a base executor runs the products.

    Attributes:
        names: in the base's checkpoint.
        serves: True if a user waits for tokens.
        squares: the sums of squares of weights' rows, by name, once requested.
        noise: hides the sent rows; None to send them unchanged.
    """

    names: tuple[str, ...]
    serves: bool
    caller: Caller
    squares: dict[str, Tensor]
    noise: Noise | None

    def linear(self, x: Tensor, others: Sequence[Self]) -> Tensor:
        weight = self.joined(others) if others else self
        return self._run(Piece(LINEAR, weight.names), x)

    def input_gradient(self, dy: Tensor) -> Tensor:
        return self._run(Piece(GRADIENT, self.names), dy)

    def adapted_lengths(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return ||W + scale · B A|| of each output, [out], in A's dtype.

        ||w + s·b A||² = ||w||² + 2 s b (A w) + s² b (A Aᵀ) bᵀ for a row w of W, and b of B: W is
        read by the product A Wᵀ, and by the squares of its rows' lengths.
        """
        (name,) = self.names
        if name not in self.squares:
            kinds = [((len(b),), torch.float32)]
            (squares,) = self.caller.tensors("lengths", kinds, name=name)
            self.squares[name] = squares.double()
        wide_a, scaled = a.double(), b.double() * scale
        through = self._run(Piece(LINEAR, self.names), a.float()).double()
        total = self.squares[name].to(a.device) + 2 * (through.t() * scaled).sum(1)
        total += ((scaled @ (wide_a @ wide_a.t())) * scaled).sum(1)
        return total.clamp_(min=0).sqrt_().to(a.dtype)

    def piece(self, text: str, layer: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.noise is not None:
            raise SplitError("noise hides linear operators' inputs, and a graph is none")
        if not len(inputs[0]):
            raise SplitError("a piece was given no tokens")
        piece = Piece(GRAPH, (graph_digest(text),), layer)
        graph = piece_of(text)
        types = [graph.types[name] for name in graph.outputs]
        wanted = [
            ((len(inputs[0]), *type_.features), getattr(torch, TORCH_NAMES[type_.dtype]))
            for type_ in types
        ]
        outputs = self.caller.run_graph(str(piece), text, wanted, inputs, self.serves)
        return [tensor.to(inputs[0].device) for tensor in outputs]

    def digest(self) -> str:
        return str(self.caller.facts.digests[self.names[0]])

    def _run(self, piece: Piece, x: Tensor) -> Tensor:
        if not len(x):
            raise SplitError(f"{piece} was given no tokens")
        if self.noise is None:
            return self._ask(piece, x).to(x.device)
        return self.noise.run(piece, x, partial(self._ask, piece)).to(x.device)

    def _ask(self, piece: Piece, x: Tensor) -> Tensor:
        return self.caller.product(piece, x, self.serves)


class CalledBase(Weights):
    """A base executor's weights: products run there, and other tensors are fetched once."""

    def __init__(self, caller: Caller, base_prefix: str, noise: Noise | None = None) -> None:
        facts = caller.facts
        dtype = DTYPES[facts.dtype]
        index = {
            name: TensorInfo(DTYPE_NAMES[dtype], tuple(shape))
            for name, shape in facts.fetched.items()
        }
        super().__init__(index, base_prefix, facts.config, f"the base {facts.name}")
        self._caller = caller
        self._noise = noise
        self._dtype = dtype
        self._squares: dict[str, Tensor] = {}

    def remote(self, name: str, shape: Sequence[int], serves: bool = False) -> Tensor | None:
        if name not in self._caller.facts.pieces:
            return None
        self._check_shape("pieces", name, shape)
        weight = CalledWeight((name,), serves, self._caller, self._squares, self._noise)
        return stand_in_tensor(shape, self._dtype, weight)

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Fetch a tensor, which the base has as graphs read it; see `Weights.load`."""
        if name not in self.index:
            raise WeightsError(self._missing(name))
        self._check_shape("fetched", name, shape)
        tensor = self._take(name, ranges)
        return tensor.to(device, dtype).contiguous() if out is None else out.copy_(tensor)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        wanted = [(self._caller.facts.fetched[name], self._dtype)]
        (tensor,) = self._caller.tensors("fetch", wanted, name=name)
        return tensor if ranges is None else tensor[slices_of(ranges)]

    def _check_shape(self, kind: str, name: str, shape: Sequence[int]) -> None:
        known = getattr(self._caller.facts, kind)[name]
        if list(known) != list(shape):
            raise SplitError(
                f"{name} is {list(known)} at the base executor, and {list(shape)} here; install "
                "the same versions of pcg and transformers on both"
            )
