"""The roofline of emitted steps by count: launches, bytes, FLOPs, floor and expected time.

Llama-3.1-8B on an H200, neither of which is needed. The engine and the training runner run each
step as they would on a device: tensors are the tests' stand-in's
(`tests/support/interpreter/stand_in.py`), and each launch is specialised and compiled by Triton
itself, and then not run. Weights are zeros. Processes count models of one and of two layers, whose
difference is a layer's. The bytes and FLOPs of a launch are counted from its arguments
(`roofline_counts.py`), its occupancy from the machine code, and the time by these formulas:

    floor      max(bytes / bandwidth, FLOPs / product rate) of the whole step
    resident   programs that a processor holds: by registers, shared memory, threads and its limit
    in flight  resident programs · max(their threads' loads, shared memory), at most what they read
    busy time  max(bytes / (bandwidth · hidden), FLOPs / (products · busy))
    expected   Σ over launches of  launch + fill + busy time
    hidden     min(1, in flight · processors / (bandwidth · memory latency))      (Little's law)
    busy       min(1, resident warps / 8) · programs / (waves · resident · processors)

Two launches on branches of a recorded step take launch + fill once, and launch for the branch; then
the longer one's busy time, and no less than the bytes of both take. A step that the host launches
is expected to take no less than its launches take the host. Rates of a library's products have no
occupancy: hidden = busy = 1.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import harness as bench
import torch
from gpu_bench import LlamaShape, Work
from gpu_model import config
from roofline_counts import Launch, counted

from pcg.parallel.costs.step_costs import HOST_LAUNCH_S

sys.path.insert(0, str(bench.ROOT))

# ------------------------------------------------------------------------------------------- GPU

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
        device_us = sum(map(self.expected_us, launches))
        return device_us if recorded else max(device_us, self.host_us * len(launches))


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
    sources=(
        "limits of a processor: CUDA C++ Programming Guide, compute capability 9.0",
        "4.3 TB/s: a large copy, read and written bytes together; the data sheet says 4.8",
        "790 TFLOP/s: an 8192-cubed product in bf16 by cuBLAS; the data sheet says 989",
        "0.8 us of latency: assumed, about 1,400 cycles of a loaded memory",
        "0.5 us: NVIDIA, Getting Started with CUDA Graphs (2019), 3.4 us a kernel of 2.9",
        "3.0 us to fill and drain: assumed, of four loads that wait for one another",
        "29 us: `HOST_LAUNCH_S` of pcg/parallel/costs/step_costs.py, on a host without GPU",
    ),
)
"""Rates measured, latencies assumed; `benchmarks/first_hour.py` measures steps beside them."""


# ------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Sizes:
    """The sizes of the steps.

    Attributes:
        batch: sequences that decode; `keys` each one sees, and the rank of `adapters`.
        prompts: prompts of a prefill, and `prompt_tokens` of each.
        trained: sequences of a finetuning step, and `trained_tokens` of each.
        recipe: the LoRA's.
        cache_bytes: room for keys, values and adapters.
    """

    batch: int = 32
    keys: int = 560
    adapters: int = 32
    rank: int = 16
    prompts: int = 8
    prompt_tokens: int = 1024
    trained: int = 4
    trained_tokens: int = 1024
    cache_bytes: int = 2**31

    @property
    def recipe(self) -> dict[str, Any]:
        return {**bench.LORA, "r": self.rank, "lora_alpha": 2 * self.rank}


class Zeros:
    """A source of weights that are all zero."""

    def load(
        self, name: str, shape: Any, dtype: Any, transposed: bool = False, device: Any = "cpu",
        ranges: Any = None, out: Any = None,
    ) -> Any:  # fmt: skip
        if out is not None:
            return out.zero_()
        sizes = shape if ranges is None else [stop - start for start, stop in ranges]
        return torch.zeros(*sizes, dtype=dtype, device=device)

    def shared(self, *_: Any) -> None:
        """None: no weight lies in memory already."""

    def remote(self, *_: Any) -> None:
        """None: no other process multiplies by a weight."""

    def release(self) -> None:
        """Do nothing: no file is open."""


class _Recorder:
    """Counts what a decode step records, as it is recorded."""

    def __init__(self, count: Callable[[Callable[[], None]], list[Launch]]) -> None:
        self._count = count
        self.launches: list[Launch] | None = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        from tests.support.interpreter.streams import ORDER

        run()
        with ORDER.capture():
            self.launches = self._count(run)
        return lambda: None


def executor_of(config: Mapping[str, Any], sizes: Sizes, peft: Any, **options: Any) -> Any:
    """An executor of a model of zeros by the triton backend."""
    from pcg.compiler import compile_program, make_executor

    program = compile_program(
        {**config, "torch_dtype": "bfloat16"}, peft, dtype="bfloat16", backend="triton", **options
    )
    return make_executor(program, Zeros(), peft, None, "cuda")


def _names(executor: Any, sizes: Sizes, count: int) -> list[str | None]:
    for number in range(count):
        executor.add_adapter(f"adapter-{number}", sizes.recipe, seed=number)
    return [f"adapter-{number}" for number in range(count)] or [None]


def _engine(executor: Any, sizes: Sizes, tokens: int) -> Any:
    from pcg.runtime.admission.limits import Limits
    from pcg.simulate.flexllm import InferenceOnly

    return executor.engine(
        Limits(tokens=tokens),
        kv_cache_bytes=sizes.cache_bytes,
        sharing=InferenceOnly(),
        prefix_caching=False,
    )


def _step(engine: Any) -> None:
    for chunk in engine.step():
        if chunk.error is not None:
            raise RuntimeError("a request of the step failed") from chunk.error


Count = Callable[[Callable[[], object]], list[Launch]]


def decode(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """A recorded decode step, each sequence with an adapter of its own where there are any."""
    from pcg.runtime.model.step_graphs import EAGER_STEPS

    executor = executor_of(config, sizes, "lora")
    names = _names(executor, sizes, adapters)
    engine = _engine(executor, sizes, sizes.batch * sizes.keys)
    recorder = engine.device.graphs.recorder = _Recorder(count)
    # The first token comes of the prompt; each step after it sees a key more.
    prompt = [1] * (sizes.keys - EAGER_STEPS - 1)
    for number in range(sizes.batch):
        name = names[number % len(names)]
        request = executor.request(prompt, name, max_new_tokens=64, ignore_eos=True)
        engine.submit(request)
    for _ in range(EAGER_STEPS + 2):
        _step(engine)
    if recorder.launches is None:
        raise RuntimeError(f"no decode step was recorded in {EAGER_STEPS + 2} steps")
    return recorder.launches


def prefill(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """A step of whole prompts, each with an adapter of its own where there are any."""
    executor = executor_of(config, sizes, "lora")
    names = _names(executor, sizes, adapters)
    engine = _engine(executor, sizes, sizes.prompts * sizes.prompt_tokens)
    for name in names:  # adapters come into memory
        engine.submit(executor.request([1], name, max_new_tokens=1))
    while not engine.is_idle:
        _step(engine)
    for number in range(sizes.prompts):
        name = names[number % len(names)]
        prompt = [1] * sizes.prompt_tokens
        engine.submit(executor.request(prompt, name, max_new_tokens=2, ignore_eos=True))
    return count(lambda: _step(engine))


def finetune(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """Forward and backward of a batch of LoRA on all linears."""
    from pcg.runtime.data.example import Example

    batch, tokens = sizes.trained, sizes.trained_tokens
    executor = executor_of(config, sizes, {"mine": sizes.recipe}, batch=batch, seq=tokens)
    runner = executor.training_runner("mine")
    examples = [Example([1] * tokens, [1] * tokens) for _ in range(batch)]

    def step() -> object:
        return runner.forward_backward(examples, batch * (tokens - 1))

    step()  # tables of adapters are copied to the device once
    for tensor in runner.parameters.values():
        tensor.grad = None
    return count(step)


STEPS: Mapping[str, Callable[[Mapping[str, Any], Sizes, int, Count], list[Launch]]] = {
    "decode": decode,
    "prefill": prefill,
    "finetune": finetune,
}


# -------------------------------------------------------------------------------------- processes


def launches(step: str, adapters: int, layers: int) -> list[Launch]:
    """Return the launches of a step of a model with so many layers, in a process of its own."""
    from triton.runtime import driver

    from tests.support.interpreter.device_tensors import DeviceTensor
    from tests.support.interpreter.launched import GpuDriver
    from tests.support.interpreter.stand_in import tensors_on_cuda
    from tests.support.interpreter.streams import ORDER

    driver.set_active(GpuDriver(H200.architecture))
    ORDER.is_watched = False
    capability = divmod(H200.architecture, 10)
    properties = SimpleNamespace(
        name="stand-in", total_memory=2**37, multi_processor_count=132,
        major=capability[0], minor=capability[1],
    )  # fmt: skip

    def count(run: Callable[[], object]) -> list[Launch]:
        before = len(notes)
        run()
        return notes[before:]

    with (
        tensors_on_cuda(),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        counted(DeviceTensor, False, lambda: ORDER.is_on_branch) as notes,
    ):
        fields = {**config(), "num_hidden_layers": layers}
        return STEPS[step](fields, Sizes(), adapters, count)


# ---------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Step:
    """The launches of a step, and those of one of its layers."""

    every: Sequence[Launch]
    layer: Sequence[Launch]
    recorded: bool

    @property
    def work(self) -> Work:
        return sum((launch.whole_work for launch in self.every), Work(0))

    @property
    def launches(self) -> int:
        return sum(launch.count for launch in self.every)

    @property
    def layer_launches(self) -> int:
        return sum(launch.count for launch in self.layer)

    @property
    def expected_us(self) -> float:
        return H200.step_us(self.every, self.recorded)


def of_layers(one: Sequence[Launch], two: Sequence[Launch], layers: int, recorded: bool) -> Step:
    """Return the step of a model, by its launches with one and with two layers.

    A launch that is larger with two layers, as a copy of what all layers read, grows by as much
    with each.

    Raises:
        ValueError: a launch of the smaller model is not in the larger one.
    """
    smaller, larger = Counter(one), Counter(two)
    more = list((larger - smaller).elements())
    every = list((smaller & larger).elements())
    for launch in (smaller - larger).elements():
        grown = next((other for other in more if other.kernel == launch.kernel), None)
        if grown is None:
            raise ValueError(f"{launch.kernel} is launched with one layer and not with two")
        more.remove(grown)
        growth = Work(grown.work.bytes - launch.work.bytes, grown.work.flops - launch.work.flops)
        every.append(replace(grown, work=launch.work + growth.times(layers - 1)))
    return Step([*every, *more * (layers - 1)], more, recorded)


def numbers(step: Step) -> dict[str, Any]:
    """Return the numbers of a step, each with its formula."""
    bound = "" if step.recorded else f", at least {H200.host_us} us of the host a launch"
    floor = f"max(bytes / {H200.bytes_per_s:.3g}, FLOPs / {H200.flops_per_s:.3g})"
    expected = (
        f"sum over launches of {H200.launch_us} + {H200.fill_us} us + max(bytes / (bandwidth "
        f"hidden), FLOPs / (rate busy)){bound}; of two side by side once that of the longer "
        f"one, at least bytes of both / bandwidth, and {H200.launch_us} us to join"
    )
    found: dict[str, tuple[float, str]] = {
        "launches": (step.launches, "with one layer + 31 times (with two - with one)"),
        "launches_a_layer": (step.layer_launches, "with two layers - with one"),
        "bytes": (step.work.bytes, "sum over launches of the bytes that they read and write once"),
        "flops": (step.work.flops, "sum over launches of 2 a multiplication and its sum"),
        "floor_us": (H200.floor_us(step.work), floor),
        "expected_us": (step.expected_us, expected),
    }
    return {
        name: {"value": round(value, 3), "formula": formula}
        for name, (value, formula) in found.items()
    }


def goals(steps: Mapping[str, Step], shape: LlamaShape) -> dict[str, float]:
    """Return the goals of the steps that were counted."""
    found: dict[str, float] = {}
    sizes = Sizes()
    if {"decode, base", "decode, adapters"} <= {*steps}:
        step, base = steps["decode, adapters"], steps["decode, base"]
        needed = shape.decode_work(sizes.batch, sizes.keys)
        own_us = 1e6 * (step.work.bytes - base.work.bytes) / H200.bytes_per_s
        found |= {
            "bytes of decode with adapters / (weights + keys and values) (at most 1.17)": (
                step.work.bytes / needed.bytes
            ),
            "launches of a layer of decode with adapters (at most 14)": step.layer_launches,
            "expected decode step with adapters / its floor (at most 1.35)": (
                step.expected_us / H200.floor_us(step.work)
            ),
            "adapters' time in decode / their bytes' (at most 1.25)": (
                (step.expected_us - base.expected_us) / own_us
            ),
        }
    if {"prefill, base", "prefill, adapters"} <= {*steps}:
        with_, without = steps["prefill, adapters"], steps["prefill, base"]
        ratio = with_.expected_us / without.expected_us
        found["prefill with adapters / without (at most 1.15)"] = ratio
    if "finetuning" in steps:
        step = steps["finetuning"]
        found["finetuning step, ms (at most 240)"] = step.expected_us / 1e3
        # Half of those when they were counted first.
        found["launches of a layer of finetuning (at most 53)"] = step.layer_launches
    return {name: round(value, 3) for name, value in found.items()}


COUNTED: Mapping[str, tuple[str, int]] = {
    "decode, base": ("decode", 0),
    "decode, adapters": ("decode", Sizes().adapters),
    "prefill, base": ("prefill", 0),
    "prefill, adapters": ("prefill", Sizes().prompts),
    "finetuning": ("finetune", 0),
}
"""Name of a step and number of its adapters, by setting."""


@bench.case("roofline", only=("prefill, base",))
def roofline(only: tuple[str, ...] = tuple(COUNTED)) -> dict[str, Any]:
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    shape = LlamaShape.of(config())
    steps: dict[str, Step] = {}
    for name in only:
        step, adapters = COUNTED[name]
        one, two = (bench.fresh(launches, step, adapters, layers) for layers in (1, 2))
        steps[name] = of_layers(one, two, shape.layers, step == "decode")
        bench.note(f"counted {name}")
    return {
        "gpu": {"name": H200.name, "sources": list(H200.sources)},
        "steps": {name: numbers(step) for name, step in steps.items()},
        "goals": goals(steps, shape),
    }


if __name__ == "__main__":
    bench.main()
