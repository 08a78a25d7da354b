"""The options of compiling and of explaining: their meaning, and which of them go together.

The library's functions take these fields as keywords (`pcg.keywords`), a program carries them, and
the command line makes its options of them. Importing this file costs next to nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pcg.errors import ParallelError, UnsupportedError
from pcg.files import expanded, json_value, read_bytes, shown_path
from pcg.units import parse_bytes, shown

BACKENDS = ("torch", "triton")
Backend = Literal["auto", "torch", "triton"]
PolicyName = Literal["fair-share", "fcfs", "adapter-clustering", "early-abort"]
"""The names of the policies of admission (`pcg.runtime.admission.policies`)."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
STYLES = ("colwise", "rowwise", "replicated")
"""transformers' words for how a module is sharded, which a plan over ranks may have."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that decide how a finetuning step is planned.

    Attributes:
        tp: tensor-parallel degree.
        costs: the device that adapters are parallelized for: a name, as H100, or H100:4 for nodes
            of 4 ranks, or a file of `pcg profile`; by default the sheet of the device that there
            is, or its profile, else H100.
        tp_plan: the base's plan over the ranks: a style (colwise, rowwise or replicated) for each
            module path of a layer, as self_attn.q_proj, or a JSON file of such; with transformers'
            keys, as layers.*.self_attn.q_proj, too. Megatron's, read off the graph, by default.
        sequence_parallel: hold parts of the tokens of norms and residuals on each rank.
        gradient_accumulation_steps: batches an optimizer step, over which the search for adapters'
            strategies spreads the sums of copied weights' gradients.
        dtype: float32, bfloat16, float16 or float64; the configuration's own by default.
        memory_budget: what finetuning may save for backward: from 1, all that spares a matrix
            product (the default), to 0, the least; or bytes, as 8GiB.
        batch: sequences of the finetuning step that the budget is planned for.
        seq: tokens of each of these sequences.
        lossy_activations: fp8 to save activations in 8 bits where the gradient's error has a bound
            (docs/compiler.md); by default all that is saved is exact.
        packed_weights: False to hold each of the base's weights once, on CPUs where serving has
            oneDNN's packed copies of them beside those that training reads: slower decoding.
    Raises:
        ParallelError: an option of ranks is out of range, or has no effect.
        UnsupportedError: another option is out of range.
    """

    title: ClassVar[str] = "Precision, memory and ranks"

    tp: int = 1
    costs: str | os.PathLike[str] | None = None
    tp_plan: str | os.PathLike[str] | Mapping[str, str] | None = None
    sequence_parallel: bool = False
    gradient_accumulation_steps: int = 1
    dtype: str | None = None
    memory_budget: float | str | None = None
    batch: int = 1
    seq: int = 1024
    lossy_activations: Literal["fp8"] | None = None
    packed_weights: bool = True

    def __post_init__(self) -> None:
        self._check_ranks()
        if type(self.packed_weights) is not bool:
            raise UnsupportedError(f"packed_weights={self.packed_weights!r}; use True or False")
        if self.lossy_activations not in (None, "fp8"):
            raise UnsupportedError(
                f"lossy_activations={self.lossy_activations!r}; use 'fp8', or leave it out to save "
                "exact values"
            )
        dtype_name(self.dtype)
        _ = self.budget

    def _check_ranks(self) -> None:
        for name in ("tp", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ParallelError(f"{name}={value!r}; use an int of at least 1")
        if self.tp > 1:
            return
        defaults = {"costs": None, "tp_plan": None, "gradient_accumulation_steps": 1}
        for name, default in defaults.items():
            count = getattr(self, name)
            if count != default:
                raise ParallelError(
                    f"{name}={count!r} has no effect with tp=1, where nothing is parallelized; "
                    f"give tp=2 or more (--tp 2), or leave {name} out"
                )
        if self.sequence_parallel:
            raise ParallelError(
                "sequence_parallel=True shares norms and residuals over ranks, and tp=1 is one "
                "rank; use tp=2 or more, or leave it out"
            )

    @property
    def budget(self) -> MemoryBudget:
        """The memory budget with the step that it is for."""
        return MemoryBudget.parse(self.memory_budget, self.batch, self.seq)

    @property
    def names_step(self) -> bool:
        """True if a certain step is planned: by a budget in bytes, a batch or a length."""
        fields = type(self).__dataclass_fields__
        is_other = any(getattr(self, name) != fields[name].default for name in ("batch", "seq"))
        return is_other or self.budget.size_bytes is not None

    @property
    def styles(self) -> dict[str, str]:
        """The base's plan over the ranks by module path; empty where none is given.

        Raises:
            ParallelError: the file cannot be read, or a style is none of `STYLES`.
        """
        return {} if self.tp_plan is None else _styles(self.tp_plan)


def _styles(plan: str | os.PathLike[str] | Mapping[str, str]) -> dict[str, str]:
    name = "tp_plan"
    if not isinstance(plan, Mapping):
        path = expanded(plan)
        name = f"tp_plan {shown_path(path)}"
        plan = json_value(read_bytes(path, ParallelError), name, ParallelError)
    if not isinstance(plan, Mapping) or not plan:
        raise ParallelError(f"{name} has to be an object with a style for each module path")
    for module, style in plan.items():
        if not isinstance(style, str) or style not in STYLES:
            raise ParallelError(
                f"{name}: {module} is {shown(style)}; use one of {', '.join(STYLES)}"
            )
    return {str(module): str(style) for module, style in plan.items()}


@dataclass(frozen=True, kw_only=True)
class CompileOptions(PlanOptions):
    """Options of a program.

    Attributes:
        backend: what source is emitted for: torch, which runs on any device; triton, fused for
            NVIDIA GPUs; or auto, triton where the device is such a GPU of capability 8.0 or later
            and kernels know the model (docs/kernels.md), else torch.
        adapter_copies: the dtype of the copies that LoRA is served from (docs/adapters.md), as a
            step is as fast as they are read: that of the base by default, for Triton and on CPUs
            with native bfloat16; bfloat16; or float32, the adapters' own, which training and saving
            keep in any case.
        attention: who computes attention in a program for Triton: own, for its own kernels; names
            of libraries, with commas, as flashinfer for prompts and flash_attn for training, where
            they know the heads (docs/kernels.md); or auto, those that are installed.
    """

    title: ClassVar[str] = PlanOptions.title

    backend: Backend = "auto"
    adapter_copies: Literal["bfloat16", "float32"] | None = None
    attention: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.attention, str):
            raise UnsupportedError(
                f"attention={self.attention!r}; use 'auto', 'own' or names of libraries"
            )
        if self.backend not in ("auto", *BACKENDS):
            raise UnsupportedError(f"backend={self.backend!r}; use one of {', '.join(BACKENDS)}")
        if self.adapter_copies not in (None, "bfloat16", "float32"):
            raise UnsupportedError(
                f"adapter_copies={self.adapter_copies!r}; use 'bfloat16' or 'float32', or leave it "
                "out to serve them in the base's dtype where that is fast"
            )
        if self.adapter_copies == "bfloat16" and self.backend == "torch" and self.tp > 1:
            raise UnsupportedError(
                f"adapter_copies='bfloat16' over ranks is for backend='triton', and not for "
                f"backend={self.backend!r} with tp={self.tp}; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """The choice of an optimizer.

    Attributes:
        optimizer: the optimizer that updates the adapters: torch's adadelta, adafactor, adagrad,
            adam, adamax, adamw, asgd, muon, nadam, radam, rmsprop, rprop or sgd, or, with states of
            8 bits, bitsandbytes' adam8bit, adamw8bit or lion8bit. paged_adamw_8bit and the like are
            names for one of these with `offload_optimizer`.
        optimizer_options: options of the optimizer that have no field here, by its library's names,
            as momentum=0.9; the library's defaults for the others.
        offload_optimizer: keep the optimizer's states in host memory, and on the GPU those of one
            parameter at a time, for its update; the numbers stay the same.
    """

    title: ClassVar[str] = "Optimizer and schedule"

    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] | None = None
    offload_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(OptimizerChoice, CompileOptions):
    """Options of a report.

    Attributes:
        gpus: names of GPUs to fit the step to, as H200, A100-80 or L40S.
        serve_tokens: tokens of requests that are served beside the step: their keys and values, and
            the copies that the adapters are served from, are in the total; none by default, and the
            tokens of the batch where nothing is finetuned.
        device: where the base lies: cuda, or cpu, where oneDNN's packed copies of its weights are
            counted, too, unless `packed_weights` is False.
        shard_base: replicas that hold parts of the layers' weights, and gather a layer to run it.
        find_region: give formulas in the rank, too, and find for which lengths and ranks the plan
            stays the optimum; over ranks, where strategies change with tokens, rank, degree and
            link. Takes seconds.
        peers: report what torch's min-cut partitioner saves, too, on one rank; takes seconds.
        cp: ranks that share the tokens of each sequence of the step, of which this is one.
        pp: pipeline stages that have some of the layers each; memory is of the largest one's rank.
    """

    gpus: Sequence[str] = ()
    serve_tokens: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    shard_base: int = 1
    find_region: bool = False
    peers: bool = False
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gpus, str):  # as on the command line
            object.__setattr__(self, "gpus", tuple(map(str.strip, self.gpus.split(","))))
        tokens = self.serve_tokens
        if tokens is not None and (type(tokens) is not int or tokens < 0):
            raise UnsupportedError(f"serve_tokens={tokens!r}; use an int of at least 0")
        for name in ("cp", "pp", "shard_base"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ParallelError(f"{name}={value!r}; use an int of at least 1")
        if self.device not in ("cuda", "cpu"):
            raise UnsupportedError(f"device={self.device!r}; use cuda or cpu")
        if self.device == "cpu" and self.gpus:
            raise UnsupportedError(
                f"device='cpu' counts a CPU's memory, and gpus={tuple(self.gpus)} are none; leave "
                "one of them out"
            )


@dataclass(frozen=True)
class SplitLink:
    """The link between a client and a base.

    Attributes:
        latency_s: time that a round trip takes beside its bytes: both ways, and both sides' code.
        bytes_per_s: bandwidth in each direction.
    """

    name: str
    latency_s: float
    bytes_per_s: float

    @classmethod
    def parse(cls, text: str) -> SplitLink:
        """The link of a name of `SPLIT_LINKS`, or of `LATENCY_MS,GBIT`.

        Raises:
            UnsupportedError: it is neither.
        """
        if text in SPLIT_LINKS:
            return cls(text, *SPLIT_LINKS[text])
        numbers: list[float] = []
        with contextlib.suppress(ValueError):
            numbers = [float(part) for part in text.split(",")]
        if len(numbers) != 2 or not all(map(math.isfinite, numbers)):
            raise UnsupportedError(
                f"link={text!r}; use {', '.join(SPLIT_LINKS)}, or a round trip's milliseconds and "
                "a bandwidth in Gbit/s as '1,10'"
            )
        latency_ms, gbit = numbers
        if latency_ms < 0 or gbit <= 0:
            raise UnsupportedError(f"link={text!r}; use ms of at least 0, and Gbit/s above 0")
        return cls(f"{latency_ms:g} ms, {gbit:g} Gbit/s", latency_ms / 1e3, gbit * 1e9 / 8)


SPLIT_LINKS: Mapping[str, tuple[float, float]] = {
    "shared": (50e-6, 10e9),
    "lan": (1e-3, 10e9 / 8),
    "wan": (30e-3, 1e9 / 8),
}
"""Links by name, the seconds of a round trip and bytes a second. That of memory which two processes
share is an assumption: a wake-up of each process, and one copy at 10 GB/s."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Options of a base that is apart from its client (docs/explain.md).

    Attributes:
        link: the link between client and base: shared (memory of one machine), lan (1 ms and
            10 Gbit/s), wan (30 ms and 1 Gbit/s), or a round trip's milliseconds and a bandwidth in
            Gbit/s, as 5,2.5.
        client: the client's device: a data sheet's name, as CPU or L40S, or a file of
            `pcg profile`.
        base: the base's device, likewise.
        privacy: send linear operators alone, whose inputs noise can hide.
    Raises:
        UnsupportedError: a link is none.
    """

    title: ClassVar[str] = "Client and base"

    link: str = "lan"
    client: str = "CPU"
    base: str = "H100"
    privacy: bool = False

    def __post_init__(self) -> None:
        _ = self.between

    @property
    def between(self) -> SplitLink:
        """The link."""
        return SplitLink.parse(self.link)


@dataclass(frozen=True)
class MemoryBudget:
    """A bound of what a finetuning step saves for backward: a share of what it could, or bytes.

    Attributes:
        share: 1 saves all that spares a matrix product, 0 the least; between, bytes are as far
            between those two. None where `size_bytes` is given.
        size_bytes: bytes that a step of `batch` sequences of `seq` tokens saves at most. None where
            `share` is given.
        batch: sequences of the step that the plan is made for.
        seq: tokens of each.
        parts: ranks that share the tokens of a sequence, of which `seq` are those of one.
    """

    share: float | None = 1.0
    size_bytes: int | None = None
    batch: int = 1
    seq: int = 1024
    parts: int = 1

    def __post_init__(self) -> None:
        for name, number in (("batch", self.batch), ("seq", self.seq)):
            if type(number) is not int or number < 1:
                raise UnsupportedError(f"{name}={number!r}; use an int of at least 1")
        if (self.share is None) == (self.size_bytes is None):
            raise UnsupportedError("a memory budget is either a share or a number of bytes")

    @classmethod
    def parse(cls, value: object, batch: int = 1, seq: int = 1024) -> MemoryBudget:
        """The budget that a user writes: None (1), 0 to 1, bytes above 1, "0.3" or "8GiB".

        Raises:
            UnsupportedError: it is none of these.
        """
        if value is None:
            return cls(batch=batch, seq=seq)
        size = parse_bytes(value) if isinstance(value, str) else None
        if size is not None:
            return cls(None, size, batch, seq)
        number = math.nan
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError, ValueError):
                number = float(value)
        if 0 <= number <= 1:
            return cls(number, None, batch, seq)
        if not number.is_integer() or number < 0:
            raise UnsupportedError(
                f"memory_budget={value!r}; use a number from 0 (least memory) to 1 (no matrix "
                "product recomputed), or bytes such as '8GiB'"
            )
        return cls(None, int(number), batch, seq)

    @property
    def written(self) -> float | str:
        """The budget as `parse` reads it."""
        return self.share if self.share is not None else f"{self.size_bytes}B"

    def __str__(self) -> str:
        return f"{self.share:g}" if self.share is not None else f"{self.size_bytes} bytes"


def dtype_name(dtype: object) -> str | None:
    """Torch's name of a dtype, which is given as such or by name; None for None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"dtype={name!r}; use one of {', '.join(DTYPES)}")
    return name
