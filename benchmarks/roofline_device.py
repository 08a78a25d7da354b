"""The time that launches take on a GPU, by count: floors, occupancy, and what is expected.

    floor      max(bytes / bandwidth, FLOPs / product rate) of the whole step
    resident   programs that a processor holds: by registers, shared memory, threads and its limit
    in flight  resident programs · max(their threads' loads, shared memory), at most what they read
    busy time  max(bytes / (bandwidth · hidden), FLOPs / (products · busy))
    expected   Σ over launches of  launch + fill + busy time
    hidden     min(1, in flight · processors / (bandwidth · memory latency))      (Little's law)
    busy       min(1, resident warps / 8) · programs / (waves · resident · processors)

Two launches on branches of a recorded step take launch + fill once, and launch for the branch; then
the longer one's busy time, and no less than the bytes of both take.

A step that the host launches, or graphs of parts of it, is expected to take no less than these
take the host. Rates of
a library's products have no occupancy: hidden = busy = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gpu_work import Work
from roofline_counts import REPLAY, Launch

from pcg.parallel.costs.step_costs import HOST_LAUNCH_S

BUSY_WARPS = 8
"""Warps that keep a processor's four tensor cores busy: two for each, one waits while one runs."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's limits, and the rates that programs reach on it.

    Attributes:
        bytes_per_s: the rate of a large copy.
        flops_per_s: the rate of a library's large product in bf16.
        latency_s: time of a load from memory.
        launch_us: time between two launches of a recorded step.
        fill_us: time that a launch takes to begin and to end with little to do.
        host_us: time of the host for a launch that is not recorded, the program's code included.
        replay_us: time of the host for the replay of a graph of a layer.
    """

    name: str
    architecture: int
    processors: int
    registers: int
    shared_bytes: int
    threads: int
    blocks: int
    bytes_per_s: float
    flops_per_s: float
    latency_s: float
    launch_us: float
    fill_us: float
    host_us: float
    replay_us: float
    sources: Sequence[str]

    def resident(self, launch: Launch) -> int:
        """Programs of a launch that a processor holds at once."""
        threads = 32 * launch.warps
        # Registers are given to a warp in units of 256; a program keeps 1 KiB of shared memory.
        registers = -(-launch.registers * 32 // 256) * 256 * launch.warps
        limits = [self.blocks, self.threads // threads]
        limits.append(self.registers // max(1, registers))
        limits.append(self.shared_bytes // (launch.shared_bytes + 1024))
        return max(1, min(limits))

    def floor_us(self, work: Work) -> float:
        """The time below which no order of work does it."""
        return 1e6 * max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def expected_us(self, launch: Launch) -> float:
        """The device's time for a launch, and what runs beside it; see the module."""
        if launch.kernel == REPLAY:
            return 0.0
        busy_us = self._busy_us(launch)
        branches_us, beside = 0.0, launch.beside
        while beside is not None:
            branches_us += self.launch_us
            busy_us = max(busy_us, self._busy_us(beside))
            beside = beside.beside
        shared_us = 1e6 * launch.whole_work.bytes / self.bytes_per_s
        return self.launch_us + self.fill_us + branches_us + max(busy_us, shared_us)

    def _busy_us(self, launch: Launch) -> float:
        """The time in which a launch moves its bytes and does its products."""
        hidden = busy = 1.0
        if launch.programs:
            resident = self.resident(launch)
            at_once = min(resident, launch.programs / self.processors)
            held = max(launch.load_bytes * 32 * launch.warps, launch.shared_bytes)
            in_flight = at_once * min(held, launch.work.bytes / launch.programs)
            needed = self.bytes_per_s * self.latency_s
            hidden = min(1.0, in_flight * self.processors / needed)
            waves = ceil(launch.programs / (resident * self.processors))
            share = launch.programs / (waves * resident * self.processors)
            busy = min(1.0, resident * launch.warps / BUSY_WARPS) * share
        bytes_us = 1e6 * launch.work.bytes / (self.bytes_per_s * hidden)
        flops_us = 1e6 * launch.work.flops / (self.flops_per_s * busy)
        return max(bytes_us, flops_us)

    def step_us(self, launches: Sequence[Launch], recorded: bool) -> float:
        """The time of a step."""
        device_us = self.device_us(launches)
        return device_us if recorded else max(device_us, self.of_host_us(launches))

    def device_us(self, launches: Sequence[Launch]) -> float:
        """The time that launches take the device."""
        return sum(map(self.expected_us, launches))

    def of_host_us(self, launches: Sequence[Launch]) -> float:
        """The time that launches take the host, those of graphs aside."""
        own = [launch for launch in launches if not launch.recorded]
        replays = sum(launch.kernel == REPLAY for launch in own)
        return self.host_us * (len(own) - replays) + self.replay_us * replays


H200 = Gpu(
    "H200",
    architecture=90,
    processors=132,
    registers=65_536,
    shared_bytes=228 * 1024,
    threads=2048,
    blocks=32,
    bytes_per_s=4.3e12,
    flops_per_s=790e12,
    latency_s=0.8e-6,
    launch_us=0.5,
    fill_us=3.0,
    host_us=round(1e6 * HOST_LAUNCH_S, 3),
    replay_us=20.0,
    sources=(
        "limits of a processor: CUDA C++ Programming Guide, compute capability 9.0",
        "4.3 TB/s: a large copy, read and written bytes together; the data sheet says 4.8",
        "790 TFLOP/s: an 8192-cubed product in bf16 by cuBLAS; the data sheet says 989",
        "0.8 us of latency: assumed, about 1,400 cycles of a loaded memory",
        "0.5 us: NVIDIA, Getting Started with CUDA Graphs (2019), 3.4 us a kernel of 2.9",
        "3.0 us to fill and drain: assumed, of four loads that wait for one another",
        "29 us: `HOST_LAUNCH_S` of pcg/parallel/costs/step_costs.py, on a host without GPU",
        "20 us a replay: assumed, Python and the launch of a graph of some 40 kernels in a line",
    ),
)
"""Rates measured, latencies assumed; `benchmarks/first_hour.py` measures steps beside them."""
