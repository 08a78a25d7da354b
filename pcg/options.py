"""Options of compiling and of explaining, with their meaning and their consistency checks.

The library's functions take these fields as keywords (`pcg.keywords`), a program carries them, and
the command line derives its options from them. The import of this file is cheap.
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
"""Names of the admission policies (`pcg.runtime.admission.policies`)."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
AUTO = "auto"
"""A dtype or quantization that is chosen by a measurement."""
NONE = "none"
"""The quantization that decodes a quantized checkpoint to floating point."""
STYLES = ("colwise", "rowwise", "replicated")
"""transformers' words for a module's sharding, which a plan over ranks may use."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options that determine the plan of a finetuning step.

    Attributes:
        tp: tensor-parallel degree.
        ep: expert-parallel degree: the experts are in ep parts, and tp / ep ranks share those of a
            part, each with a part of their matrices. By default what costs least, or what the ranks
            divide.
        costs: the device that adapters are parallelized for: a name, such as H100, or H100:4 for
            nodes of 4 ranks, or a file of `pcg profile`; by default the data sheet of the present
            device, or its profile, else H100.
        tp_plan: the base's plan over the ranks: a style (colwise, rowwise or replicated) for each
            module path of a layer, such as self_attn.q_proj, or a JSON file of these; transformers'
            keys, such as layers.*.self_attn.q_proj, also work. By default Megatron's plan, derived
            from the graph.
        sequence_parallel: split the tokens of norms and residuals over the ranks.
        gradient_accumulation_steps: batches per optimizer step; the search for adapters' strategies
            spreads the sums of replicated weights' gradients over them.
        dtype: float32, bfloat16, float16 or float64; the configuration's dtype by default. A
            program's may be auto: the fastest on its device, measured once on a CPU.
        quantization: the format to quantize the layers' float weights to on loading, such as nf4
            or int8 (docs/models.md); by default a checkpoint keeps its own format, and none decodes
            it to the dtype on loading. A program's may be auto: int8 where it was measured to be
            faster than the dtype.
        memory_budget: the memory that finetuning may save for backward: from 1 (the default), which
            recomputes no matrix product, to 0, the least memory; or bytes, such as 8GiB.
        batch: sequences of the finetuning step that the budget is planned for.
        seq: tokens of each of these sequences.
        lossy_activations: fp8 to save activations in 8 bits where the gradient's error has a bound
            (docs/compiler.md); by default all saved values are exact.
        packed_weights: False to hold each of the base's weights once. On CPUs serving otherwise
            holds oneDNN's packed copies in addition to the weights for training; False slows down
            decoding.
        latent_cache: cache the latents that keys and values are products of (DeepSeek-V3, MiniCPM3)
            instead of the keys and values of all heads; for the torch backend (docs/models.md).
    Raises:
        ParallelError: an option of ranks is out of range, or has no effect.
        UnsupportedError: another option is out of range.
    """

    title: ClassVar[str] = "Precision, memory and ranks"
    measures: ClassVar[bool] = False
    """True if the options are of a program for this machine, where `auto` can be measured."""

    tp: int = 1
    ep: int | None = None
    costs: str | os.PathLike[str] | None = None
    tp_plan: str | os.PathLike[str] | Mapping[str, str] | None = None
    sequence_parallel: bool = False
    gradient_accumulation_steps: int = 1
    dtype: str | None = None
    quantization: str | None = None
    memory_budget: float | str | None = None
    batch: int = 1
    seq: int = 1024
    lossy_activations: Literal["fp8"] | None = None
    packed_weights: bool = True
    latent_cache: bool = False

    def __post_init__(self) -> None:
        self._check_ranks()
        for name in ("packed_weights", "latent_cache"):
            if type(value := getattr(self, name)) is not bool:
                raise UnsupportedError(f"{name}={value!r}; use True or False")
        if self.lossy_activations not in (None, "fp8"):
            raise UnsupportedError(
                f"lossy_activations={self.lossy_activations!r}; use 'fp8', or leave it out to save "
                "exact values"
            )
        measures = self.measures and self.tp == 1
        if self.dtype != AUTO or not measures:
            dtype_name(self.dtype)
        if self.quantization != AUTO or not measures:
            format_name(self.quantization)
        _ = self.budget

    def _check_ranks(self) -> None:
        for name in ("tp", "ep", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and (name != "ep" or value is not None):
                raise ParallelError(f"{name}={value!r}; use an int of at least 1")
        if self.ep is not None and self.tp % self.ep:
            divisors = ", ".join(str(n) for n in range(1, self.tp + 1) if self.tp % n == 0)
            fitting = f"one of {divisors}" if self.tp > 1 else f"tp={self.ep} with it"
            raise ParallelError(
                f"ep={self.ep} and tp={self.tp}: the ranks that share matrices also share the "
                f"experts, in equal parts; use {fitting}, or leave out ep={self.ep}"
            )
        if self.ep is not None and self.tp_plan is not None:
            raise ParallelError(
                f"ep={self.ep} and a tp_plan, which has the styles of the experts; leave one of "
                "them out"
            )
        if self.tp > 1:
            return
        defaults = {"ep": None, "costs": None, "tp_plan": None, "gradient_accumulation_steps": 1}
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
        """The memory budget with its step."""
        return MemoryBudget.parse(self.memory_budget, self.batch, self.seq)

    @property
    def names_step(self) -> bool:
        """True if a specific step is planned: by a budget in bytes, a batch or a length."""
        fields = type(self).__dataclass_fields__
        is_other = any(getattr(self, name) != fields[name].default for name in ("batch", "seq"))
        return is_other or self.budget.size_bytes is not None

    @property
    def styles(self) -> dict[str, str]:
        """The base's plan over the ranks by module path; empty by default.

        Raises:
            ParallelError: the file cannot be read, or a style is not in `STYLES`.
        """
        return {} if self.tp_plan is None else _styles(self.tp_plan)


def _check_labels(labels: Sequence[str]) -> None:
    is_list = isinstance(labels, list | tuple) and all(isinstance(x, str) and x for x in labels)
    if not is_list or len(set(labels)) != len(labels) or len(labels) < 2:
        raise UnsupportedError(
            f"labels={labels!r}; give the names of two or more classes, such as "
            "['negative', 'positive']"
        )


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
        backend: the backend of the emitted source: torch, for any device; triton, fused for NVIDIA
            GPUs; or auto, which selects triton on such a GPU of capability 8.0 or later if kernels
            support the model (docs/kernels.md), else torch.
        adapter_copies: the dtype of the copies that LoRA is served from (docs/adapters.md); the
            time of a step is the time to read them. By default the base's dtype, for Triton and on
            CPUs with native bfloat16; bfloat16; or float32, the adapters' own dtype. Training and
            saving always keep the adapters' own dtype.
        attention: the attention of a program for Triton: own, for its own kernels; names of
            libraries, separated by commas, such as flashinfer for prompts and flash_attn for
            training, for heads that they support (docs/kernels.md); or auto, the installed
            libraries.
        labels: the names of classes; the program is a sequence classifier over the model's layers,
            whose head an adapter brings (docs/finetuning.md). Repeatable.
    """

    title: ClassVar[str] = PlanOptions.title
    measures: ClassVar[bool] = True

    backend: Backend = "auto"
    adapter_copies: Literal["bfloat16", "float32"] | None = None
    attention: str = "auto"
    labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels:
            _check_labels(self.labels)
        object.__setattr__(self, "labels", tuple(self.labels or ()))  # lists in files
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
            adam, adamax, adamw, asgd, muon, nadam, radam, rmsprop, rprop or sgd, or, with 8-bit
            states, bitsandbytes' adam8bit, adamw8bit or lion8bit. paged_adamw_8bit and similar
            names also set `offload_optimizer`.
        optimizer_options: options of the optimizer without a field here, by its library's names,
            such as momentum=0.9; other options have the library's defaults.
        offload_optimizer: keep the optimizer's states in host memory, and on the GPU only those of
            the parameter in update; the numbers stay the same.
    """

    title: ClassVar[str] = "Optimizer and schedule"

    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] | None = None
    offload_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(OptimizerChoice):
    """The choice of an optimizer, and its learning rates.

    Attributes:
        loraplus_lr_ratio: the learning rate of LoRA's matrices B, and of trained biases and DoRA's
            magnitudes, as a multiple of the learning rate (LoRA+, peft's
            create_loraplus_optimizer); None for equal rates.
    """

    loraplus_lr_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(OptimizerChoice, CompileOptions):
    """Options of a report.

    Attributes:
        gpus: names of GPUs to fit the step to, such as H200, A100-80 or L40S.
        serve_tokens: tokens of concurrent requests: their keys and values, and the served copies of
            the adapters, count in the total; none by default, or the tokens of the batch without
            finetuning.
        device: the base's device: cuda, or cpu, which also counts oneDNN's packed copies of the
            weights unless `packed_weights` is False.
        shard_base: replicas that shard the layers' weights and gather a layer to run it.
        find_region: also give formulas in the rank, and find for which lengths and ranks the plan
            stays optimal; over ranks, how strategies change with tokens, rank, degree and link.
            Takes seconds.
        peers: also report the memory that torch's min-cut partitioner saves, on one rank; takes
            seconds.
        cp: context-parallel degree: ranks that share the tokens of each sequence of the step.
        pp: pipeline stages that have some of the layers each; memory is that of the largest stage.
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
        if self.latent_cache and self.cp > 1:
            raise UnsupportedError(
                f"latent_cache=True and cp={self.cp}: ranks that share the tokens of sequences "
                "exchange keys and values; leave one of them out"
            )
        if self.device == "cpu" and self.gpus:
            raise UnsupportedError(
                f"device='cpu' counts a CPU's memory, and gpus={tuple(self.gpus)} are none; leave "
                "one of them out"
            )


@dataclass(frozen=True)
class SplitLink:
    """The link between a client and a base.

    Attributes:
        latency_s: time of a round trip without its bytes: both directions, and both sides' code.
        bytes_per_s: bandwidth in each direction.
    """

    name: str
    latency_s: float
    bytes_per_s: float

    @classmethod
    def parse(cls, text: str) -> SplitLink:
        """Parse a name of `SPLIT_LINKS`, or `LATENCY_MS,GBIT`.

        Raises:
            UnsupportedError: the text is neither.
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
"""Links by name: seconds of a round trip, and bytes per second. Those of memory shared by two
processes are an assumption: a wake-up of each process, and a copy at 10 GB/s."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Options of a base that is split from its client (docs/explain.md).

    Attributes:
        link: the link between client and base: shared (memory of a machine), lan (1 ms and 10
            Gbit/s), wan (30 ms and 1 Gbit/s), or a round trip's milliseconds and a bandwidth in
            Gbit/s, such as 5,2.5.
        client: the client's device: a data sheet's name, such as CPU or L40S, or a file of `pcg
            profile`.
        base: the base's device, in the same form.
        privacy: send only linear operators, as noise can hide their inputs.
    Raises:
        UnsupportedError: an invalid link.
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
class LossForm:
    """The form of a training program's loss.

    Attributes:
        smoothing: the label smoothing.
        temperature: the divisor of the logits.
    """

    smoothing: float = 0.0
    temperature: float = 1.0


PLAIN_LOSS = LossForm()


@dataclass(frozen=True)
class MemoryBudget:
    """A bound of the memory that a finetuning step saves for backward: a share, or bytes.

    Attributes:
        share: 1 saves all values whose recomputation takes a matrix product, 0 the least memory;
            other shares interpolate the bytes. None if `size_bytes` is set.
        size_bytes: maximum saved bytes of a step of `batch` sequences of `seq` tokens. None if
            `share` is set.
        batch: sequences of the planned step.
        seq: tokens of a sequence.
        parts: ranks that share the tokens of a sequence; `seq` then counts a rank's tokens.
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
        """Parse a user's budget: None (1), 0 to 1, bytes above 1, "0.3" or "8GiB".

        Raises:
            UnsupportedError: the value is none of these.
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
        """The budget in the form that `parse` reads."""
        return self.share if self.share is not None else f"{self.size_bytes}B"

    def __str__(self) -> str:
        return f"{self.share:g}" if self.share is not None else f"{self.size_bytes} bytes"


def _not_measured(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}='auto' is measured on the machine that compiles a program, and ranks and reports "
        f"may be of others; give a {name}, or leave it out"
    )


def format_name(name: str | None) -> str | None:
    """Return the name of a weight format, or NONE; UnsupportedError if there is none."""
    if name in (None, NONE):
        return name
    if name == AUTO:
        raise _not_measured("quantization")
    from pcg.formats.registry import FORMATS  # imports torch

    if name not in FORMATS:
        known = ", ".join((NONE, *FORMATS))
        raise UnsupportedError(f"quantization={name!r}; use one of {known}")
    return name


def dtype_name(dtype: object) -> str | None:
    """Return torch's name of a dtype, given as a dtype or by name; None for None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name == AUTO:
        raise _not_measured("dtype")
    if name not in DTYPES:
        raise UnsupportedError(f"dtype={name!r}; use one of {', '.join(DTYPES)}")
    return name
