"""Workload of a machine (finetuning steps, requests at a rate), and the options of `pcg.plan`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pcg.errors import UnsupportedError
from pcg.options import OptimizerChoice, dtype_name

MEAN_PROMPT_TOKENS = 161
MEAN_OUTPUT_TOKENS = 338
"""Means of ShareGPT's single turns (vLLM, SOSP 2023, figure 11)."""
MOST_SEQUENCES = 2**16
"""Maximum number of sequences of an optimizer step: the search tries each divisor as a batch."""


@dataclass(frozen=True)
class Training:
    """A finetuning job, by its optimizer step: `batch` sequences of `seq` tokens."""

    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        """The tokens of an optimizer step."""
        return self.batch * self.seq

    def __str__(self) -> str:
        return f"finetuning steps of {self.batch} × {self.seq:,} tokens"


@dataclass(frozen=True)
class Serving:
    """Requests at a rate, with their mean prompt and output tokens."""

    rate_per_s: float
    prompt_tokens: int = MEAN_PROMPT_TOKENS
    output_tokens: int = MEAN_OUTPUT_TOKENS

    @property
    def tokens(self) -> int:
        """The tokens of a request when it ends."""
        return self.prompt_tokens + self.output_tokens

    def __str__(self) -> str:
        lengths = f"{self.prompt_tokens:,} tokens, {self.output_tokens:,} generated"
        return f"{self.rate_per_s:g} requests/s of {lengths}"


@dataclass(frozen=True)
class MachineWorkload:
    """The work of a machine: training, serving, or both."""

    training: Training | None = None
    serving: Serving | None = None

    def __str__(self) -> str:
        return ", beside ".join(str(part) for part in (self.training, self.serving) if part)


_FORMS = {
    "train": (r"(\d+)x(\d+)", "train:BATCHxTOKENS, as train:4x2048"),
    "serve": (
        r"(\d+\.?\d*|\.\d+)req/s(?::(\d+)x(\d+))?",
        "serve:RATEreq/s or serve:RATEreq/s:PROMPTxOUTPUT, as serve:20req/s:512x128",
    ),
}


def parse_workload(text: str) -> MachineWorkload:
    """Read a workload such as `train:4x2048,serve:20req/s`.

    Raises:
        UnsupportedError: a part is unknown, given twice, or has a size out of range.
    """
    parts: dict[str, tuple[str | None, ...]] = {}
    for part in (part.strip() for part in text.split(",")):
        kind, _, sizes = part.partition(":")
        if kind not in _FORMS:
            forms = " or ".join(form for _, form in _FORMS.values())
            raise UnsupportedError(f"workload {part!r}; use {forms}, separated by a comma")
        if kind in parts:
            raise UnsupportedError(f"workload {text!r} has {kind} twice; give it once")
        pattern, form = _FORMS[kind]
        matched = re.fullmatch(pattern, sizes)
        if matched is None:
            raise UnsupportedError(f"workload {part!r}; use {form}")
        parts[kind] = matched.groups()
    training = serving = None
    if "train" in parts:
        batch, seq = (int(size or 0) for size in parts["train"])
        _require("sequences a step", batch, 1)
        if batch > MOST_SEQUENCES:
            raise UnsupportedError(f"sequences a step: {batch}; use {MOST_SEQUENCES} at most")
        _require("tokens of a sequence", seq, 2)
        training = Training(batch, seq)
    if "serve" in parts:
        rate, prompt, output = parts["serve"]
        if not 0 < float(rate or 0) < 1e9:
            raise UnsupportedError(f"{rate} requests a second; use a rate above 0")
        lengths = (MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS)
        if prompt is not None and output is not None:
            lengths = (int(prompt), int(output))
        _require("tokens of a prompt", lengths[0], 1)
        _require("generated tokens", lengths[1], 2)
        serving = Serving(float(rate or 0), *lengths)
    return MachineWorkload(training, serving)


def _require(what: str, size: int, least: int) -> None:
    if size < least:
        raise UnsupportedError(f"{what}: {size}; use at least {least}")


# ------------------------------------------------------------------------------------------ options


MOST_GPUS = 4096
"""Maximum number of GPUs of a machine: the search tries each number of replicas."""
MOST_SEQS = 65536
"""Maximum number of concurrent requests of a replica."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(OptimizerChoice):
    """Options of a search for machines.

    Attributes:
        workload: the work, separated by commas: train:4x2048 for finetuning steps of 4 sequences of
            2,048 tokens; serve:20req/s for requests of 161 prompt and 338 generated tokens
            (ShareGPT's means), or serve:20req/s:512x128 for other lengths. Both together finetune
            beside requests.
        gpus: names of the GPUs to choose from, separated by commas or repeated; A10G, A100-40,
            A100-80, H100, H200 and L40S by default.
        max_gpus: the maximum number of GPUs of a machine, in all replicas.
        tp: tensor-parallel degrees to try, up to `max_gpus`; by default the powers of two, or their
            multiples by `ep`.
        ep: expert-parallel degree: the experts are in ep parts, and tp / ep ranks share those of a
            part. By default what costs least, or what the ranks divide.
        dtypes: formats of the base's weights to try: float32, bfloat16, float16 or float64; the
            configuration's dtype by default. Repeatable.
        quantization: the format to quantize the layers' float weights to, such as nf4 or int8.
        price: the price of a GPU in dollars an hour, by name; required for costs in dollars.
        tpot_slo_ms: promised mean time of an output token after the first, ms.
        ttft_slo_ms: promised mean time to the first token, ms.
        finetuning_tokens_per_s: promised finetuned tokens per second, of all replicas.
        max_num_seqs: the maximum number of concurrent requests of a replica.
        adapters: the number of adapters, equally popular, that requests use; 0, the default, serves
            only the base.
        costs: a profile of `pcg profile` measured on the only GPU of `gpus`; data sheets by
            default.
    Raises:
        UnsupportedError: an option is out of range.
    """

    title: ClassVar[str] = "Workload and machines"

    workload: str
    gpus: Sequence[str] = ()
    max_gpus: int = 8
    tp: Sequence[int] = ()
    ep: int | None = None
    dtypes: Sequence[str] = ()
    quantization: str | None = None
    price: Mapping[str, float] | None = None
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    finetuning_tokens_per_s: float | None = None
    max_num_seqs: int = 256
    adapters: int = 0
    costs: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "dtypes"):
            if isinstance(getattr(self, name), str | int):  # a single value
                object.__setattr__(self, name, (getattr(self, name),))
        bounds = (
            ("max_gpus", 1, MOST_GPUS),
            ("max_num_seqs", 1, MOST_SEQS),
            ("adapters", 0, 2**20),
        )
        for name, least, most in bounds:
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UnsupportedError(f"{name}={value!r}; use an int from {least} to {most}")
        of_experts = () if self.ep is None else (self.ep,)
        for name, degrees in (("tp", self.tp), ("ep", of_experts)):
            for degree in degrees:
                if type(degree) is not int or not 1 <= degree <= self.max_gpus:
                    raise UnsupportedError(
                        f"{name}={degree!r}; use degrees from 1 to max_gpus={self.max_gpus}, or "
                        "more GPUs"
                    )
        for dtype in self.dtypes:
            dtype_name(dtype)
        for name in ("tpot_slo_ms", "ttft_slo_ms", "finetuning_tokens_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UnsupportedError(f"{name}={value!r}; use a number above 0")
        for gpu, dollars in (self.price or {}).items():
            if not 0 < dollars < math.inf:
                raise UnsupportedError(
                    f"price {gpu}={dollars!r}; use dollars an hour above 0, as {gpu}=2.5"
                )

    @property
    def optimizer_words(self) -> tuple[str, ...]:
        """The command-line options of the optimizer; empty for the default."""
        words = [] if self.optimizer == "adamw" else ["--optimizer", self.optimizer]
        for name, value in (self.optimizer_options or {}).items():
            words += ["--optimizer-option", f"{name}={json.dumps(value)}"]
        return (*words, "--offload-optimizer") if self.offload_optimizer else tuple(words)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The names of the GPUs, split at commas, each once."""
        names = (name.strip() for text in self.gpus for name in text.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees to try."""
        least = self.ep or 1
        powers = (2**power for power in range((self.max_gpus // least).bit_length()))
        return tuple(sorted(set(self.tp))) or tuple(least * power for power in powers)
