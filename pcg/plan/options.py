"""The options of `pcg.plan`: the workload, the machines, what is promised and what they cost.

Importing this file costs next to nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pcg.errors import UnsupportedError
from pcg.options import OptimizerChoice, dtype_name

MOST_GPUS = 4096
"""The most GPUs of a machine: each number of replicas is tried."""
MOST_SEQS = 65536
"""The most requests that a replica may be asked to serve at once."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(OptimizerChoice):
    """Options of a search for machines.

    Attributes:
        workload: what runs, separated by commas: train:4x2048 for finetuning steps of 4 sequences
            of 2,048 tokens; serve:20req/s for requests, of 161 tokens and 338 generated ones
            (ShareGPT's means) or as serve:20req/s:512x128 says; both for finetuning beside
            requests.
        gpus: names of the GPUs to choose from, separated by commas or repeated; A10G, A100-40,
            A100-80, H100, H200 and L40S by default.
        max_gpus: the most GPUs of a machine, all replicas together.
        tp: tensor-parallel degrees to try; the powers of two up to `max_gpus` by default.
        dtypes: formats of the base's weights to try: float32, bfloat16, float16 or float64; the
            configuration's own by default. Repeatable.
        price: dollars that a GPU costs an hour, by name. Without it nothing is said of dollars.
        tpot_slo_ms: promise of the mean time of an output token after the first, ms.
        ttft_slo_ms: promise of the mean time to the first token, ms.
        finetuning_tokens_per_s: promise of the tokens a second that all replicas train on.
        max_num_seqs: the most requests that a replica serves at once.
        adapters: adapters of the method that requests use, as often as each other; none by default,
            where the base alone serves.
        costs: a file of `pcg profile` that has measured the one GPU of `gpus`; data sheets by
            default.
    Raises:
        UnsupportedError: an option is out of range.
    """

    title: ClassVar[str] = "Workload and machines"

    workload: str
    gpus: Sequence[str] = ()
    max_gpus: int = 8
    tp: Sequence[int] = ()
    dtypes: Sequence[str] = ()
    price: Mapping[str, float] | None = None
    tpot_slo_ms: float | None = None
    ttft_slo_ms: float | None = None
    finetuning_tokens_per_s: float | None = None
    max_num_seqs: int = 256
    adapters: int = 0
    costs: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "dtypes"):
            if isinstance(getattr(self, name), str | int):  # one alone
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
        for degree in self.tp:
            if type(degree) is not int or not 1 <= degree <= self.max_gpus:
                raise UnsupportedError(
                    f"tp={degree!r}; use degrees from 1 to max_gpus={self.max_gpus}, or more GPUs"
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
        """The options of the command line that name the optimizer; none for the default."""
        words = [] if self.optimizer == "adamw" else ["--optimizer", self.optimizer]
        for name, value in (self.optimizer_options or {}).items():
            words += ["--optimizer-option", f"{name}={json.dumps(value)}"]
        return (*words, "--offload-optimizer") if self.offload_optimizer else tuple(words)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The names of the GPUs, those between commas, too, each once."""
        names = (name.strip() for given in self.gpus for name in given.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees to try."""
        powers = (2**power for power in range(self.max_gpus.bit_length()))
        return tuple(sorted(set(self.tp))) or tuple(powers)
