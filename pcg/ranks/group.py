"""The ranks of a group: processes that torchrun or `pcg run --tp` has started.

Every rank runs the same calls in the same order. Bytes that a rank sends, by ring algorithms over n
ranks: 2 (n - 1) / n of a tensor for an all-reduce, n - 1 times its part for an all-gather or a
reduce-scatter. A gather takes each rank's part to the first, which sends nothing. An all-to-all
sends the rows for other ranks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pcg.errors import ParallelError, RankLostError

ROLL_CALL_S = 2.0
"""The time that a rank waits to hear which others are still there, once one is gone."""
COLLECTIVES = (
    "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "gather", "broadcast", "send",
)  # fmt: skip
"""The kinds of messages that ranks exchange."""

PendingCollective: TypeAlias = Callable[[], Any]
"""A collective that has begun: called once, it waits for it and returns its result."""


class RowsToAll(NamedTuple):
    """Rows for each rank, those of a rank together, and how many to each and from each."""

    rows: Tensor
    sent: Sequence[int]
    received: Sequence[int]


class Ranks:
    """A group of ranks, as a member sees it; this class is the group of a single rank.

    In larger groups each method raises a RankLostError if another rank is gone.

    Attributes:
        rank: the number of this rank in the group.
        size: the number of ranks of the group.
        device: the device of the tensors that they exchange.
        moved_bytes: bytes that this rank has sent, by kind of collective.
        messages: number of messages that it has sent, by kind of collective.
    """

    rank = 0
    size = 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.moved_bytes = dict.fromkeys(COLLECTIVES, 0)
        self.messages = dict(self.moved_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, in a new tensor."""
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the ranks' tensors, in their order."""
        return [x]

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of the ranks' tensors for this rank; `parts` has a part for each rank."""
        return parts[0]

    def all_to_all(self, x: RowsToAll) -> Tensor:
        """Return the rows that the ranks have for this rank, in their order."""
        return x.rows

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the ranks' tensors, in their order, on the first rank; an empty list on others."""
        return [x]

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's tensor; others pass a tensor of its shape and dtype to fill."""
        return x

    def begin_send(self, x: Tensor, to: int) -> PendingCollective:
        """Begin to send a flat tensor to another rank; do not change it until the wait is over.

        Messages from one rank to another arrive in their order.
        """
        raise ParallelError("a group of one rank has no other to send to")

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Receive the next message of another rank, into a flat tensor of its shape and dtype."""
        raise ParallelError("a group of one rank has no other to receive from")

    def exchange(self, x: Tensor, out: Tensor, other: int) -> Tensor:
        """Send a flat tensor to a rank that sends one in the same exchange, and receive that.

        Messages and collectives of a rank run in turn on a GPU, and a message lasts
        until it is received: two ranks that send to each other and then receive would wait for each
        other for ever. So both directions are a single exchange, on both ranks.
        """
        raise ParallelError("a group of one rank has no other to exchange with")

    def tell(self, word: bytes) -> list[bytes]:
        """Return the ranks' words, of equal length, in their order; they do not count as sent."""
        return [word]

    def begin(self, collective: str, x: Any) -> PendingCollective:
        """Begin a collective but a broadcast, by its name; it runs while this rank does other work.

        Do not change its argument until the wait is over; on a GPU the stream waits, not the host.
        """
        return partial(getattr(self, collective), x)

    def begin_gather_into(self, whole: Tensor, part: Tensor) -> PendingCollective:
        """Begin an all-gather of flat parts of equal size, part by part, into `whole`."""
        return partial(whole.copy_, part)


SINGLE_RANK = Ranks()


class ProcessRanks(Ranks):
    """A group of processes, over a process group of torch: NCCL's for a GPU, else gloo's.

    Ranks that notice a loss report in the store, if it exists.

    Args:
        numbers: the numbers of its ranks among all of the job, for errors.
        total: the number of ranks of the job.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        store: Any = None,
        numbers: Sequence[int] | None = None,
        total: int | None = None,
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self._group = group
        self._store = store
        self._numbers = range(self.size) if numbers is None else numbers
        self._total = self.size if total is None else total

    def all_reduce(self, x: Tensor) -> Tensor:
        return cast("Tensor", self._begin("all_reduce", x, False)())

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return cast("list[Tensor]", self._begin("all_gather", x, False)())

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        return cast("Tensor", self._begin("reduce_scatter", parts, False)())

    def all_to_all(self, x: RowsToAll) -> Tensor:
        return cast("Tensor", self._begin("all_to_all", x, False)())

    def gather(self, x: Tensor) -> list[Tensor]:
        return cast("list[Tensor]", self._begin("gather", x, False)())

    def broadcast(self, x: Tensor) -> Tensor:
        self.moved_bytes["broadcast"] += 0 if self.rank else x.nbytes * (self.size - 1)
        self.messages["broadcast"] += 1
        with self._naming_lost("a broadcast"):
            dist.broadcast(x, group_src=0, group=self._group)
        return x

    def begin_send(self, x: Tensor, to: int) -> PendingCollective:
        return self._begin_messages(x, to, x)

    def receive(self, out: Tensor, source: int) -> Tensor:
        return cast("Tensor", self._begin_messages(None, source, out)())

    def exchange(self, x: Tensor, out: Tensor, other: int) -> Tensor:
        return cast("Tensor", self._begin_messages(x, other, out)())

    def _begin_messages(self, sent: Tensor | None, other: int, out: Tensor) -> PendingCollective:
        """Begin to send to a rank and to receive from it, as a single batch; return `out`."""
        messages = []
        if sent is not None:
            self.moved_bytes["send"] += sent.nbytes
            self.messages["send"] += 1
            messages.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=other))
        if out is not sent:
            messages.append(dist.P2POp(dist.irecv, out, group=self._group, group_peer=other))
        what = "a message"
        # A batch of one, too: NCCL would have another communicator for a message by itself.
        with self._naming_lost(what):
            begun = dist.batch_isend_irecv(messages)

        def wait() -> Tensor:
            for work in begun:
                self._ended(messages, work, out, what)
            return out

        return wait

    def tell(self, word: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(word), dtype=torch.uint8).to(self.device)
        words = [torch.empty_like(sent) for _ in range(self.size)]
        with self._naming_lost("a comparison"):
            dist.all_gather(words, sent, group=self._group)
        return [bytes(each.cpu().numpy()) for each in words]

    def begin(self, collective: str, x: Any) -> PendingCollective:
        return self._begin(collective, x, True)

    def begin_gather_into(self, whole: Tensor, part: Tensor) -> PendingCollective:
        self.moved_bytes["all_gather"] += part.nbytes * (self.size - 1)
        self.messages["all_gather"] += 1
        run, what = partial(dist.all_gather_into_tensor, whole, part), "an all-gather"
        with self._naming_lost(what):
            work = run(group=self._group, async_op=True)
        return partial(self._ended, run, work, whole, what)

    def _begin(self, collective: str, x: Any, meanwhile: bool) -> PendingCollective:
        result: Any
        if collective == "all_reduce":
            result = x.clone(memory_format=torch.contiguous_format)
            run, what = partial(dist.all_reduce, result), "an all-reduce"
            moved_bytes = 2 * x.nbytes * (self.size - 1) // self.size
        elif collective == "all_gather":
            sent = x.contiguous()
            result = [torch.empty_like(sent) for _ in range(self.size)]
            run, what = partial(dist.all_gather, result, sent), "an all-gather"
            moved_bytes = sent.nbytes * (self.size - 1)
        elif collective == "gather":
            sent = x.contiguous()
            result = [] if self.rank else [torch.empty_like(sent) for _ in range(self.size)]
            run, what = partial(dist.gather, sent, result or None, group_dst=0), "a gather"
            moved_bytes = sent.nbytes if self.rank else 0
        elif collective == "all_to_all":
            rows, sent, received = x
            result = rows.new_empty(sum(received), *rows.shape[1:])
            run = partial(dist.all_to_all_single, result, rows, received, sent)
            what, others = "an all-to-all", len(rows) - sent[self.rank]
            moved_bytes = others * rows.shape[1:].numel() * rows.element_size()
        else:
            result = torch.empty_like(x[self.rank])
            run, what = partial(dist.reduce_scatter, result, x), "a reduce-scatter"
            moved_bytes = result.nbytes * (self.size - 1)
        self.moved_bytes[collective] += moved_bytes
        self.messages[collective] += 1
        with self._naming_lost(what):
            work = run(group=self._group, async_op=meanwhile)
        return partial(self._ended, run, work, result, what)

    def _ended(self, run: object, work: dist.Work | None, result: Any, what: str) -> Any:
        if work is not None:
            with self._naming_lost(what):
                work.wait()
        return result

    @contextlib.contextmanager
    def _naming_lost(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"{self._lost()} of {self._total} ended, or waits for something else, while rank "
                f"{self._numbers[self.rank]} was in {what} with it; its own message says why. All "
                "ranks have to start again"
            ) from error

    def _lost(self) -> str:
        """Return the names of the ranks that do not answer, or of all others if unknown."""
        number = self._numbers[self.rank]
        others = [rank for rank in self._numbers if rank != number]
        missing, is_told = others, False
        # The store is gone where the rank that kept it is; a user's own group gives none.
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                word = "pcg/still-there/{}".format
                self._store.set(word(number), "here")
                end = time.monotonic() + ROLL_CALL_S
                while missing and time.monotonic() < end:
                    missing = [rank for rank in missing if not self._store.check([word(rank)])]
                    time.sleep(0.05)
                is_told = bool(missing)
        names = missing or others
        listed = ", ".join(map(str, names))
        if len(names) == 1:
            return f"rank {listed}"
        return f"ranks {listed}" if is_told else f"one of the ranks {listed}"


def run_on_first(ranks: Ranks, act: Callable[[], object]) -> None:
    """Do something on the first rank, such as writing a file, while the others wait for it.

    Raises:
        BaseException: the error of `act`; the other ranks raise a ParallelError.
    """
    error: BaseException | None = None
    if ranks.rank == 0:
        try:
            act()
        except BaseException as raised:  # whatever it is, the others have to hear of it
            error = raised
    failed = ranks.all_reduce(torch.tensor(float(error is not None), device=ranks.device))
    if error is not None:
        raise error
    if float(failed):
        raise ParallelError("rank 0 could not do its work for all ranks; its own message says why")


def broadcast_from_first(ranks: Ranks, values: Tensor) -> Tensor:
    """Return the first rank's values on every rank, for common decisions."""
    if ranks.size == 1:
        return values
    return ranks.broadcast(values.to(ranks.device, copy=True)).to(values.device)


_ALIGNMENT = 16


def united(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return this rank's tensors and the others', by name; all ranks call this.

    Those of the others are new, on the device that ranks exchange tensors on.
    """
    if ranks.size == 1:
        return dict(tensors)
    facts = [
        [name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]
        for name, tensor in tensors.items()
    ]
    head = json.dumps(facts).encode()
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [
        tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()
    ]
    sizes = [padded(part.nbytes) for part in parts]
    mine = torch.tensor([len(head), sum(sizes)], device=ranks.device)
    lengths = [tensor.tolist() for tensor in ranks.all_gather(mine)]
    sent = torch.zeros(max(size for _, size in lengths), dtype=torch.uint8, device=ranks.device)
    for place, part in zip(sent[: sum(sizes)].split(sizes), parts, strict=True):
        place[: part.nbytes] = part
    every = dict(tensors)
    for rank, (came, (length, _)) in enumerate(zip(ranks.all_gather(sent), lengths, strict=True)):
        if rank == ranks.rank:
            continue
        start = padded(length)
        for name, kind, shape in json.loads(bytes(came[:length].cpu().numpy())):
            dtype: torch.dtype = getattr(torch, kind)
            size = prod(shape) * dtype.itemsize
            every[name] = came[start : start + size].view(dtype).view(shape)
            start += padded(size)
    return every


def padded(size_bytes: int) -> int:
    """Return the bytes of a tensor in a message, so that the next tensor is aligned."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
