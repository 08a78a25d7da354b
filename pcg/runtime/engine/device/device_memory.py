"""The memory of a GPU outside an engine's pool, and the size of the pool.

    asked    gpu_memory_utilization · all memory of the GPU
    used     memory allocated by this process: weights, adapters, libraries' workspaces
    step     the peak of the largest step
    graphs   the same peak in graphs' memory, shared logits, and `GRAPH_BYTES` of each graph
    windows  saved values of the windows of known jobs, and their adapters
    states   recurrent states of the sequences that may run
    pool     asked - used - step - graphs - windows - states

The sizes are computed before the first step. If graphs and windows take more memory in the warm-up,
or a graph cannot be recorded for lack of memory, the pool becomes smaller.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from pcg.errors import DeviceMemoryError
from pcg.ir.program.program import ModelGraph
from pcg.ir.program.saved_memory import transient
from pcg.ir.types import DTYPE_BYTES
from pcg.kernels.devices import device_memory, is_out_of_memory
from pcg.kernels.triton.step_rooms import MOST_ROOMS
from pcg.ranks.group import Ranks
from pcg.runtime.admission.limits import Limits
from pcg.runtime.memory.recurrent_states import bytes_of_states, snapshots_of
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.warm_jobs import windows_bytes
from pcg.units import size_text

Made = TypeVar("Made")
_LOG = logging.getLogger("pcg.engine")

GRAPH_BYTES = 2 * 2**20
"""Upper estimate of a driver's memory per graph of about 400 launches; a warm-up measures it."""
SHRINKS = 16
"""A pool that is too large shrinks by 1/16 first, then by twice as much each time, as all graphs
are recorded again each time."""


def step_bytes(model: ModelGraph, limits: Limits, max_positions: int | None) -> int:
    """Return the peak bytes of a step with the maximum number of tokens."""
    tokens, rows = limits.tokens, limits.running
    seq = min(tokens, max_positions or tokens)
    sizes = [transient(block, tokens, seq).size_bytes(tokens, seq) for block in model.blocks]
    return max(*sizes, transient(model.epilogue, rows, 1).size_bytes(rows, 1))


@dataclass(frozen=True)
class DeviceParts:
    """Bytes of a GPU by use, before the pool is allocated.

    Attributes:
        device: the GPU.
        share: `gpu_memory_utilization`; None for a given size of the pool.
        total: all memory of the GPU.
        before: memory that was free when the model was loaded.
        used: memory allocated since then.
        step: the peak of a step.
        graphs: memory of the graphs of steps, with intermediate results.
        windows: memory of windows of jobs.
        states: memory of recurrent states.
        is_warm: True if graphs and windows are recorded before the first step.
    """

    device: torch.device
    share: float | None
    total: int
    before: int
    used: int
    step: int
    graphs: int
    windows: int
    states: int
    is_warm: bool

    @classmethod
    def of(
        cls, state: ModelState, limits: Limits, share: float | None, jobs: Sequence[WarmJob] | None
    ) -> DeviceParts:
        """Count the parts of an engine.

        Args:
            jobs: jobs to record in the warm-up, in addition to those that the program was compiled
                for; None without a warm-up.
        """
        torch.cuda.empty_cache()
        free, total = device_memory(state.device)
        base = state.program.base
        step = step_bytes(base, limits, state.max_positions)
        graphs = windows = 0
        if state.program.options.backend == "triton" and state.mesh.alike.size == 1:
            type_ = base.epilogue.types[base.epilogue.outputs[0]]
            logits = limits.running * base.vocabulary * DTYPE_BYTES[type_.dtype]
            graphs = step + logits + MOST_ROOMS * GRAPH_BYTES
            windows = 0 if jobs is None else windows_bytes(state, jobs)
        used = max(0, state.free_before - free)
        slots = limits.running + snapshots_of(limits.running)
        states = slots * bytes_of_states(base)
        measured = (state.free_before, used, step, graphs, windows, states)
        return cls(state.device, share, total, *measured, is_warm=jobs is not None)

    @property
    def asked(self) -> int:
        """The limit in bytes for all parts together."""
        return self.total if self.share is None else int(self.share * self.total)

    @property
    def pool(self) -> int:
        """The remaining bytes for the pool; below 0 if the other parts are too large."""
        needed = self.used + self.step + self.graphs + self.windows + self.states
        return self.asked - needed

    def check(self, least: int) -> None:
        """Raise a DeviceMemoryError if too little memory is free, or the pool is too small."""
        if self.before < self.asked:
            raise DeviceMemoryError(
                f"gpu_memory_utilization={self.share} asks for {size_text(self.asked)} of the "
                f"{size_text(self.total)} of {self.device}, of which other processes had left "
                f"{size_text(self.before)} when the model was loaded; end them, or use at most "
                f"{int(100 * self.before / self.total) / 100}"
            )
        if self.pool < least:
            raise self.refused(least)

    def refused(self, size_bytes: int, why: object = "the least") -> DeviceMemoryError:
        """Return the error for a pool that does not fit."""
        reason, _, _ = str(why).partition("\n")
        larger = "a smaller kv_cache_gib" if self.share is None else "a larger share up to 1"
        return DeviceMemoryError(
            f"{self.device} has no room for a KV cache of {size_text(size_bytes)} ({reason}): "
            f"{self}; use {larger}, a smaller max_num_batched_tokens or max_num_seqs, no warm "
            "jobs, or more GPUs (tp)"
        )

    @property
    def lacking(self) -> int:
        """The missing bytes after the warm-up.

        An excess of 1 % over `share` is accepted, as a smaller pool needs another warm-up.
        """
        torch.cuda.empty_cache()
        free, _ = device_memory(self.device)
        later = self.step + (0 if self.is_warm else self.graphs)
        over = self.before - free + later - self.asked
        return max(later - free, over if over > self.total // 100 else 0)

    def __str__(self) -> str:
        parts = {"weights and adapters": self.used, "steps": self.step, "graphs": self.graphs}
        parts |= {"windows of jobs": self.windows, "recurrent states": self.states}
        listed = " + ".join(f"{size_text(size)} {name}" for name, size in parts.items() if size)
        share = "" if self.share is None else f" and gpu_memory_utilization={self.share}"
        return f"of {size_text(self.total)}{share}, {listed} are needed beside it"


def fitted(make: Callable[[int], Made], parts: DeviceParts, least: int, ranks: Ranks) -> Made:
    """Allocate the pool that the other parts leave, or a smaller pool if they need more.

    Args:
        make: allocates the pool of a size, with the warm-up.
        least: the smallest size.
        ranks: ranks with pools of equal size; over several ranks, pools do not shrink.
    Raises:
        DeviceMemoryError: the smallest pool is too large.
    """
    pool_bytes = max(parts.pool, 0) if parts.before >= parts.asked else 0
    pools = ranks.tell(pool_bytes.to_bytes(8, "little"))
    parts.check(least)
    size_bytes = min(int.from_bytes(encoded, "little") for encoded in pools)
    gives = size_bytes // SHRINKS
    while size_bytes >= least:
        try:
            parts_made = make(size_bytes)
            lacking = parts.lacking
        except (RuntimeError, DeviceMemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if ranks.size > 1:
                raise parts.refused(size_bytes, error) from error
            lacking, why = 1, str(error).split("\n")[0]
        else:
            if lacking <= 0 or ranks.size > 1:
                _LOG.info("the KV cache has %s: %s", size_text(size_bytes), parts)
                return parts_made
            why = f"{size_text(lacking)} are missing"
            del parts_made
        gc.collect()  # graphs, which hold each other
        torch.cuda.empty_cache()
        smaller, gives = size_bytes - max(lacking, gives), 2 * gives
        _LOG.warning(
            "a KV cache of %s leaves too little memory for the rest (%s); it gets %s",
            size_text(size_bytes),
            why,
            size_text(max(smaller, 0)),
        )
        size_bytes = smaller
    raise parts.refused(least)
