"""A base executor as a process, on a rank or over the ranks of a group, of all layers or some.

A base of some of a model's layers leaves the matrices of the others to other processes. Clients
connect with all of them, and a request goes to the base of its layer. The head's matrix is with the
last layer. Each base has embeddings, norms and biases, which clients fetch.
"""

from __future__ import annotations

import hashlib
import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from pcg.compiler import compile_program, make_executor
from pcg.errors import SplitError
from pcg.formats.registry import FORMATS
from pcg.ir.graph import Parameter
from pcg.ir.operators.linear import multiplied
from pcg.ir.program.program import Program
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch.products import RemoteWeight, stand_in_tensor
from pcg.kernels.torch.quantized import Block, QuantizedWeight
from pcg.kernels.triton.backend import machine_device
from pcg.keys import open_keys
from pcg.ranks.agreement import check_same_program
from pcg.ranks.join import join_group, own_device
from pcg.ranks.mesh import SINGLE_MESH
from pcg.ranks.shards import Ranges
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import row_digests
from pcg.runtime.model.gguf_weights import open_weights
from pcg.runtime.model.weights import Weights
from pcg.source import resolve
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.shards import ShardedSource, Shards
from pcg.split.messages import GRADIENT, Message, Piece
from pcg.split.zeromq import ZeroMqEndpoint
from pcg.units import size_text


def serve_base(
    options: BaseOptions,
    load: Callable[[], BaseExecutor],
    say: Callable[[str], None],
    files: Mapping[str, str],
) -> None:
    """Serve a base until SIGTERM or Ctrl-C; a second signal ends it immediately.

    Args:
        load: loads the base.
        say: receives lines for the user.
        files: the tokenizer's files, by name.
    Raises:
        SplitError: the address cannot be listened at.
        ServeError: a key is too short, or the file of keys is damaged.
    """
    keys, new_key = open_keys(options.api_key, options.api_keys)
    # The address is taken first, so that one which cannot be is an answer at once.
    most, curve = options.max_request_mib * 2**20, options.curve
    endpoint = ZeroMqEndpoint(options.host, options.port, most, curve)
    try:
        base = load()
        loop = BaseLoop(base, endpoint, options, files, keys)
        logging.getLogger("pcg.split").addHandler(_Lines(say))
        logging.getLogger("pcg.split").setLevel(logging.INFO)
        kept = {number: signal.signal(number, _ended_by(loop, say)) for number in _SIGNALS}
        say(
            f"{base.name} in {str(base.dtype).removeprefix('torch.')} on {base.device}, "
            f"{size_text(base.size_bytes)} of weights; policy {options.policy}"
        )
        if new_key is not None:
            say(f"key: {new_key}")
        if curve is not None:
            say(f"CURVE key: {curve.public.decode()}")
        say(f"listening at {endpoint.where}")
        try:
            loop.run()
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
        counts = loop.counts
        say(f"ended: {counts.requests} requests in {counts.batches} batches")
    finally:
        endpoint.close()


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _ended_by(loop: BaseLoop, say: Callable[[str], None]) -> Callable[[int, object], None]:
    def end(number: int, _: object) -> None:
        if loop.is_draining:
            loop.stop()
            return
        say(f"{signal.Signals(number).name}: no new clients; {loop.clients} are here")
        loop.drain()

    return end


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


class RankedBase(BaseExecutor):
    """Runs products on all ranks, and no graphs; the first rank calls it."""

    runs_graphs = False

    def __init__(self, executor: Executor, shards: Shards) -> None:
        super().__init__(executor)
        self._shards = shards

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self._shards.size_bytes

    def _product(self, piece: Piece, x: Tensor) -> Tensor:
        if piece.kind == GRADIENT:
            return self._shards.input_gradient(piece.weights[0], x)
        return self._shards.linear(piece.weights, x)

    def answer(self, message: Message) -> Message:
        if message.op not in ("lengths", "rows"):
            return super().answer(message)
        name = message.text("name")
        rows = len(self._weight(name))
        if message.op == "lengths":
            return Message("reply", message.seq, tensors=(self._shards.lengths(name),))
        end = message.number("end", rows)
        begin = message.number("begin", end)
        return Message("reply", message.seq, tensors=(self._shards.rows(name, begin - 1, end),))


def serve_over_ranks(
    model: str,
    dtype: str | None,
    device: str | None,
    degree: int,
    options: BaseOptions,
    files: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Serve a base over `degree` ranks; each calls this, as torchrun or `launch` starts them.

    Raises:
        ParallelError: this process is not a rank of that many, or another rank is gone.
        PcgError: the model cannot be loaded, or the address not be listened at.
    """
    place = own_device(machine_device(device))
    ranks = join_group(degree, place)
    source = resolve(model, weights=True)

    def read() -> tuple[Program, Weights, Shards]:
        program = compile_program(
            source.config, None, backend="torch", dtype=dtype, packed_weights=False
        )
        check_same_program(ranks, program)
        checkpoint = open_weights(source, program)
        return program, checkpoint, Shards(program, checkpoint, place, ranks)

    if ranks.rank:
        # The driver ends them, once its clients have left.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        read()[-1].follow()
        return
    with ExitStack() as stack:

        def load() -> BaseExecutor:
            program, checkpoint, shards = read()
            weights = ShardedSource(checkpoint, shards)
            stack.enter_context(shards.driving())
            return RankedBase(
                make_executor(program, weights, None, None, place, SINGLE_MESH), shards
            )

        serve_base(options, load, say, files)


def held_layers(text: str, count: int) -> range:
    """Read layers as `4-7` or `4`. SplitError: the model has no such layers."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if not 0 <= first <= last < count:
        raise SplitError(
            f"layers={text}; use the first and the last of those that this base has, as "
            f"0-{count - 1} for all {count}"
        )
    return range(first, last + 1)


def layers_executor(
    model: str,
    layers: str,
    device: str | None,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
) -> Executor:
    """Load some layers of a model. PcgError: it cannot be read, or has no such layers."""
    source = resolve(model, weights=True)
    program = compile_program(
        source.config,
        None,
        backend="torch",
        dtype=dtype,
        quantization=quantization,
        packed_weights=False,
    )
    return executor_of(program, open_weights(source, program), layers, device)


def executor_of(program: Program, source: Weights, layers: str, device: str | None) -> Executor:
    """Load some layers of a compiled model; errors are those of `layers_executor`."""
    held = held_layers(layers, len(program.base.layers))
    weights = HeldLayers(program, source, held)
    return make_executor(program, weights, None, None, device, SINGLE_MESH)


class HeldLayers(Weights):
    """A model's tensors without the matrices of layers that others hold."""

    def __init__(self, program: Program, source: Weights, held: range) -> None:
        super().__init__(source.index, source.base_prefix, source.config, source.where)
        self._source = source
        self._absent: dict[str, Parameter] = {}
        self._dtype: torch.dtype = getattr(torch, TORCH_NAMES[program.dtype])
        base, last = program.base, len(program.base.layers) - 1
        layers = [(base.blocks[block], layer) for layer, block in enumerate(base.layers)]
        for graph, layer in [(base.prologue, 0), *layers, (base.epilogue, last)]:
            if layer not in held:
                for name in multiplied(graph):
                    parameter = graph.parameters_by_name[name]
                    self._absent[parameter.source.format(layer=layer)] = parameter

    def remote(self, name: str, shape: Sequence[int], serves: bool = False) -> Tensor | None:
        parameter = self._absent.get(name)
        if parameter is None:
            return None
        absent = _Absent((name,), parameter, self._dtype, self)
        return stand_in_tensor(shape, self._dtype, absent)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        return self._source._read(name, ranges)


@dataclass(frozen=True, eq=False)
class _Absent(RemoteWeight):
    """A matrix of a layer that another process holds."""

    names: tuple[str, ...]
    parameter: Parameter
    dtype: torch.dtype
    source: HeldLayers

    @property
    def refusal(self) -> str:
        return f"this base executor does not hold {self.names[0]}"

    def digest(self) -> str:
        name, parameter = self.names[0], self.parameter
        shape = parameter.type.features
        if parameter.type.dtype in FORMATS:
            format_ = FORMATS[parameter.type.dtype]
            every = self.source.quantized(name, shape, format_, parameter.transposed)
            return QuantizedWeight(tuple(Block(format_, parts) for parts in every)).digest()
        weight = self.source.load(name, shape, self.dtype, parameter.transposed)
        return hashlib.sha256(row_digests(weight)).hexdigest()
