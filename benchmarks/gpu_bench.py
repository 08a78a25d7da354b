"""What the measurements on a GPU share: counts of bytes and FLOPs, timers, rows and cases.

A roofline is made of the bytes and FLOPs that a task cannot do without, counted by formula:

    floor = max(bytes / copy bandwidth, FLOPs / matrix product rate)

Bytes are those that must be read or written once, whatever the order of work: a weight that a
kernel reads twice counts once. FLOPs are 2 for a multiplication and its sum, of products alone.

Times of kernels are medians between CUDA events. Before each the L2 cache is overwritten, which
also gives the host time to launch, so that small kernels are not measured by their launches. The
kernels of a decode step are replayed from a CUDA graph, ours and the peers' alike, and kernels of a
few microseconds run several times, each with tensors of its own, as in a model's layers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any, TypeAlias

import harness as bench

# ----------------------------------------------------------------------------------------- counts


@dataclass(frozen=True)
class Work:
    """The bytes and FLOPs that a task cannot do without."""

    bytes: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def times(self, count: int) -> Work:
        return Work(self.bytes * count, self.flops * count)


@dataclass(frozen=True)
class Ceilings:
    """The device's best rates: of a large copy, a large bf16 product, a copy from the host."""

    bytes_per_s: float
    flops_per_s: float
    host_bytes_per_s: float

    def floor_us(self, work: Work) -> float:
        return 1e6 * max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s)


def loss_work(tokens: int, hidden: int, vocabulary: int, size: int) -> Work:
    """Linear cross-entropy with the input's gradient: x, W and targets in, dx and the loss out.

    Two products; logits need not leave the chip. Targets are int64, the loss and its weight fp32.
    """
    moved = (2 * tokens * hidden + vocabulary * hidden) * size + tokens * (8 + 4 + 4)
    return Work(moved, 4 * tokens * vocabulary * hidden)


def ranks_work(ranks: Sequence[int], slots: Sequence[int], in_: int, out: int, size: int) -> Work:
    """LoRA of tokens, y += x Aᵀ Bᵀ; each adapter is read once, `slots` are the tokens' adapters."""
    moved = sum(ranks) * (in_ + out) + len(slots) * (in_ + 2 * out)
    return Work(moved * size, 2 * sum(ranks[slot] for slot in slots) * (in_ + out))


def attention_work(
    parts: Sequence[tuple[int, int]], heads: int, kv_heads: int, head: int, size: int
) -> Work:
    """Causal attention of parts (tokens, keys before them): q, all keys and values in, out out.

    A token sees the keys before its part, those of its part up to its own, and does two products.
    """
    tokens = sum(count for count, _ in parts)
    keys = sum(count + before for count, before in parts)
    seen = sum(count * before + count * (count + 1) // 2 for count, before in parts)
    moved = 2 * tokens * heads * head + 2 * keys * kv_heads * head
    return Work(moved * size, 4 * seen * heads * head)


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, from its config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LlamaShape:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        return cls(*(config[n] for n in (*names, "num_key_value_heads", "vocab_size")))

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """In and out of a layer's products: q, k, v, o, gate, up, down."""
        kv = self.kv_heads * (self.hidden // self.heads)
        h, i = self.hidden, self.intermediate
        return ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h))

    @property
    def product_weights(self) -> int:
        """Elements of all matrices that a token is multiplied by, the head among them."""
        layer = sum(in_ * out for in_, out in self.linears)
        return self.layers * layer + self.vocabulary * self.hidden

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads)

    def adapter_elements(self, rank: int) -> int:
        """Elements of a LoRA on all linears of the layers."""
        return self.layers * rank * sum(in_ + out for in_, out in self.linears)

    def _attention(self, seen: int) -> int:
        return 4 * seen * self.layers * self.hidden

    def decode_work(
        self, batch: int, context: int, distinct: int = 0, rank: int = 0, adapter_size: int = 0
    ) -> Work:
        """One token of each sequence, in bf16: weights, keys and values, distinct adapters, once.

        Args:
            context: the number of keys that each token sees, its own among them.
            distinct: the number of adapters; all sequences have one, or none has.
            adapter_size: the bytes of an element of an adapter.
        """
        seen, adapter = batch * context, self.adapter_elements(rank)
        moved = 2 * self.product_weights + 2 * seen * self.kv_elements
        flops = 2 * batch * (self.product_weights + (adapter if distinct else 0))
        return Work(moved + adapter_size * distinct * adapter, flops + self._attention(seen))

    def prefill_work(self, batch: int, tokens: int) -> Work:
        """Whole prompts in bf16; the head runs for the last token of each alone."""
        head = self.vocabulary * self.hidden
        layers = self.product_weights - head
        moved = 2 * self.product_weights + 2 * batch * tokens * self.kv_elements
        seen = batch * tokens * (tokens + 1) // 2
        return Work(moved, 2 * batch * (tokens * layers + head) + self._attention(seen))

    def finetune_work(self, batch: int, tokens: int, rank: int) -> Work:
        """A step of LoRA on all linears, in bf16: forward, gradients of inputs and of adapters.

        Frozen weights are read forward and backward, and have no gradient: 4 FLOPs a weight and
        token, 6 for those that train. Attention's backward does five products for two forward.
        """
        count, seen = batch * tokens, batch * tokens * (tokens + 1) // 2
        flops = 4 * count * self.product_weights + 6 * count * self.adapter_elements(rank)
        return Work(4 * self.product_weights, flops + self._attention(seen) * 7 // 2)


# ------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        floor_us: the time of bytes and FLOPs at the ceilings.
        expected_us: the prediction by count: the time of all launches on this device.
        target: the bound in words, and `reached` the number that it is about.
        ours_bytes: our peak memory; 0 where it is not measured.
        took_s: the time of the measurement, compilation included.
    """

    case: str = ""
    setting: str = ""
    ours_us: float | None = None
    peers_us: Mapping[str, float] = field(default_factory=dict)
    floor_us: float | None = None
    expected_us: float | None = None
    bytes: int = 0
    flops: int = 0
    target: str = ""
    reached: float | None = None
    met: bool | None = None
    ours_bytes: int = 0
    peers_bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    took_s: float = 0.0

    @property
    def predicted_us(self) -> float | None:
        """The prediction by count: the expected time, or the floor where only that is counted."""
        return self.expected_us or self.floor_us

    @classmethod
    def failure(cls, case: str, setting: str, why: str) -> Row:
        return cls(case, setting, note=why, failed=True)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def at_most(self, target: str, reached: float | None, most: float) -> Row:
        """Return the row with a target; `reached` is None if the number is not known."""
        met = None if reached is None else reached <= most
        return replace(self, target=target, reached=reached, met=met)

    def of_ceiling(self, least: float) -> Row:
        """Return the row with a target for its share of copy bandwidth."""
        share = (self.floor_us or 0.0) / (self.ours_us or 1.0)
        target = f"{least:.0%} of copy bandwidth"
        return replace(self, target=target, reached=share, met=share >= least)


class Once:
    """A timer that only runs the calls, where kernels are checked and not timed."""

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        run()
        return 1.0


class CudaTimer:
    """Times between CUDA events, the L2 cache cold.

    Args:
        seconds: time for the repeats of one call, about.
    """

    def __init__(self, seconds: float = 0.1, most: int = 50) -> None:
        import torch

        self._seconds, self._most = seconds, most
        # Five times the L2 cache of an H200.
        self._flushed = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        """Return the median over repeats, after a warm-up, in microseconds.

        Args:
            captured: whether the call is recorded in a CUDA graph, whose replays are timed.
            times: how often one call does the work.
        """
        run()  # compiles
        if captured:
            run = self._graph(run)
        once_us = self._times(run, 2)[-1]
        return statistics.median(self._times(run, self.repeats(once_us))) / times

    def repeats(self, once_us: float) -> int:
        return max(3, min(self._most, int(1e6 * self._seconds / max(once_us, 1.0))))

    def _times(self, run: Callable[[], object], repeats: int) -> list[float]:
        import torch

        pairs = []
        for _ in range(repeats):
            self._flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]

    @staticmethod
    def _graph(run: Callable[[], object]) -> Callable[[], object]:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # outside of the capture, so that libraries make their workspaces
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


@dataclass(frozen=True)
class Bench:
    """The means of a case to measure.

    Attributes:
        known: the rows that are known, by case and setting; `measured` adds to them.
        until: time of `monotonic` from which on no setting begins.
        device: the device of engines.
        eager_device: the device of single kernels and of peers; the CPU where engines run on the
            stand-in of a GPU, which has no autograd.
    """

    timer: Any
    ceilings: Ceilings
    known: dict[tuple[str, str], Row] = field(default_factory=dict)
    until: float = float("inf")
    device: str = "cuda"
    eager_device: str = "cuda"

    def random(self, *shape: int, scale: float = 1.0, dtype: str = "bfloat16") -> Any:
        import torch

        return torch.randn(shape, device=self.eager_device, dtype=getattr(torch, dtype)) * scale

    def row(
        self,
        ours: Callable[[], object],
        needed: Work,
        peers: Mapping[str, Callable[[], object]],
        *,
        captured: bool = False,
        peers_captured: bool | None = None,
        times: int = 1,
        **more: Any,
    ) -> Row:
        """Time our call and the peers'; a peer that fails leaves a note."""
        theirs = captured if peers_captured is None else peers_captured
        found, wrong = {}, []
        for name, run in peers.items():
            try:
                found[name] = self.timer.median_us(run, theirs, times)
            except Exception as error:  # of theirs: ours is measured all the same
                first = next(iter(str(error).splitlines()), "")
                wrong.append(f"{name}: {type(error).__name__}: {first}")
        us = self.timer.median_us(ours, captured, times)
        return self.timed_row(us, needed, peers_us=found, note="; ".join(wrong), **more)

    def timed_row(self, ours_us: float, needed: Work, **more: Any) -> Row:
        floor_us = self.ceilings.floor_us(needed)
        counts: Any = {"bytes": needed.bytes, "flops": needed.flops, "floor_us": floor_us}
        return Row(ours_us=ours_us, **counts, **more)

    def expected_us(self, step: str) -> float:
        """Predict the time of a step of results/roofline.json on this device.

        time = floor here * (expected / floor), both counted for an H200
        """
        counted = json.loads((bench.RESULTS / "roofline.json").read_text())["steps"][step]
        bytes_, flops, floor_us, expected_us = (
            counted[name]["value"] for name in ("bytes", "flops", "floor_us", "expected_us")
        )
        here_us = self.ceilings.floor_us(Work(bytes_, flops))
        return float(here_us * expected_us / floor_us)


Setting: TypeAlias = tuple[str, Callable[[], Row]]
"""A measurement in words, and the function that makes it; the row's names are put in later."""


@dataclass(frozen=True)
class Case:
    """Rows that belong together.

    Attributes:
        seconds: the time after which no setting begins.
        settings: function that gives the measurements, the most valuable first.
    """

    name: str
    seconds: float
    settings: Callable[[Bench], Iterable[Setting]]


def measured(
    bench: Bench, case: Case, skipped: Collection[str] = ()
) -> Iterator[tuple[str, Row | None]]:
    """Yield each setting of a case with None as it begins, then with its row.

    The row of a setting that cannot be measured says why. TimeoutError: the bench's time is over,
    and settings are left.
    """
    for setting, measure in case.settings(bench):
        if setting in skipped:
            continue
        if monotonic() >= bench.until:
            raise TimeoutError
        yield setting, None
        began = monotonic()
        try:
            row = replace(measure(), case=case.name, setting=setting)
        except Exception as error:  # of whatever library: the other settings go on
            row = Row.failure(case.name, setting, f"{type(error).__name__}: {error}")
        row = replace(row, took_s=round(monotonic() - began, 2))
        bench.known[case.name, setting] = row
        yield setting, row


def check_close(name: str, found: Any, expected: Any, tolerance: float) -> None:
    """Raise an AssertionError if tensors differ by more than so much of the largest element."""
    expected = expected.double()
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise AssertionError(f"{name} is off by {error:.1e} of its largest; {tolerance} allowed")
