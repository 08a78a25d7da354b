"""A base executor as a process, on one rank or over the ranks of a group."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from torch import Tensor

from pcg.compiler import compile_program, make_executor
from pcg.ir.program.program import Program
from pcg.kernels.triton.backend import machine_device
from pcg.keys import open_keys
from pcg.ranks.agreement import check_same_program
from pcg.ranks.join import join_group, own_device
from pcg.ranks.mesh import SINGLE_MESH
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint
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
        ParallelError: this process is not one of so many, or another rank is gone.
        PcgError: the model cannot be loaded, or the address not be listened at.
    """
    place = own_device(machine_device(device))
    ranks = join_group(degree, place)
    source = resolve(model, weights=True)

    def read() -> tuple[Program, Checkpoint, Shards]:
        program = compile_program(
            source.config, None, backend="torch", dtype=dtype, packed_weights=False
        )
        check_same_program(ranks, program)
        checkpoint = Checkpoint.open(source, program.base_prefix)
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
