"""The work of a machine: finetuning steps, requests that come at a rate, or both."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pcg.errors import UnsupportedError

MEAN_PROMPT_TOKENS = 161
MEAN_OUTPUT_TOKENS = 338
"""Means of ShareGPT's single turns (vLLM, SOSP 2023, figure 11)."""
MOST_SEQUENCES = 2**16
"""The most sequences of an optimizer step: each of their divisors is tried as a batch."""


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
    """Requests that come at a rate: their mean tokens in, and tokens out."""

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
    """The work of a machine; at least one of the two."""

    training: Training | None = None
    serving: Serving | None = None

    def __str__(self) -> str:
        return ", beside ".join(str(one) for one in (self.training, self.serving) if one)


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
        UnsupportedError: a part is none, is there twice, or has a size out of range.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    for part in (part.strip() for part in text.split(",")):
        kind, _, sizes = part.partition(":")
        if kind not in _FORMS:
            forms = " or ".join(form for _, form in _FORMS.values())
            raise UnsupportedError(f"workload {part!r}; use {forms}, separated by a comma")
        if kind in found:
            raise UnsupportedError(f"workload {text!r} has {kind} twice; give it once")
        pattern, form = _FORMS[kind]
        matched = re.fullmatch(pattern, sizes)
        if matched is None:
            raise UnsupportedError(f"workload {part!r}; use {form}")
        found[kind] = matched.groups()
    training = serving = None
    if "train" in found:
        batch, seq = (int(size or 0) for size in found["train"])
        _require("sequences a step", batch, 1)
        if batch > MOST_SEQUENCES:
            raise UnsupportedError(f"sequences a step: {batch}; use {MOST_SEQUENCES} at most")
        _require("tokens of a sequence", seq, 2)
        training = Training(batch, seq)
    if "serve" in found:
        rate, prompt, output = found["serve"]
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
