"""A base executor over the ranks of a group: this process drives them, and has its own shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from signal import SIG_IGN, SIGINT, SIGTERM, signal

from torch import Tensor

from pcg.compiler import compile_program, make_executor
from pcg.ir.program.program import Program
from pcg.kernels.triton.backend import machine_device
from pcg.ranks.join import join_group, own_device
from pcg.ranks.mesh import SINGLE_MESH
from pcg.ranks.same_program import check_same_program
from pcg.runtime.executor import Executor
from pcg.runtime.model.weights import Checkpoint
from pcg.source import resolve
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.options import BaseOptions
from pcg.split.base.serve_base import serve_base
from pcg.split.base.shards import ShardedSource, Shards
from pcg.split.messages import Message
from pcg.split.pieces import GRADIENT, Piece


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
    """Serve a base over so many ranks; each calls this, as torchrun or `launch` starts them.

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
        for number in (SIGINT, SIGTERM):
            signal(number, SIG_IGN)
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
