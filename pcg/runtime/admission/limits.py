"""The limits of an engine's steps, and its SLOs.

An engine refuses requests that it can never run, and requests with impossible SLOs: steps stay
within the SLOs per token of their requests, so that an impossible SLO would delay all other
requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcg.errors import GenerationError
from pcg.runtime.admission.latency import Latency
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Load
from pcg.units import shown


@dataclass(frozen=True)
class Limits:
    """The limits of a step, and the service level objectives (SLOs) of requests.

    Attributes:
        running: maximum number of running sequences.
        tokens: maximum number of tokens in a step, inference and finetuning together.
        least_chunk: minimum number of tokens in a prompt's chunk, as smaller chunks are
            inefficient.
        prompt_stretch: the longest step with prompts, relative to a step that only decodes, without
            a `tpot_slo_s`; `math.inf` for no bound. Learned latencies determine the chunks of
            prompts, also while nothing decodes, as a new request waits for the step.
        ttft_slo_s: SLO of the time to the first token, seconds; None for no SLO.
        tpot_slo_s: SLO of the time per further token, seconds: the longest gap between two tokens
            of a request; None for no SLO.
        tpot_percentile: the percentage of steps, among steps filled with prompts or finetuning,
            that are to end within `tpot_slo_s`.
        finetuning_floor: the minimum share of time for finetuning while requests without a
            `tpot_slo_s` run; finetuning also has the time that requests leave.
        serving_share: the minimum share of steps' time for requests with a `tpot_slo_s`, from 0 to
            below 1, so that their streams are faster than the SLO.
        least_tpot_slo_s: the minimum TPOT SLO of a request, seconds; None for the time of a step
            with `least_chunk` tokens of a prompt.
        idle_step_s: the longest step of finetuning while nothing is served, and of a heavy tenant
            while no other runs, seconds: a new request waits that long, or for a window of
                `least_chunk`
            tokens if that is predicted to take longer.
        logprobs: maximum number of likeliest tokens in each place of a request, as in OpenAI's API
            and vLLM.
        lora_rank: maximum rank of loaded or trained adapters; None for no maximum. A copy of rank r
            has r · (inputs + outputs) numbers for each module.
        prefetched: the number of further waiting requests with adapters to copy ahead.
    Raises:
        GenerationError: a value is out of range.
    """

    running: int = 256
    tokens: int = 4096
    least_chunk: int = 16
    prompt_stretch: float = 10.0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    tpot_percentile: float = 99.0
    finetuning_floor: float = 0.1
    serving_share: float = 0.0
    least_tpot_slo_s: float | None = None
    idle_step_s: float = 0.2
    logprobs: int = 20
    lora_rank: int | None = None
    prefetched: int = 8

    def __post_init__(self) -> None:
        for name in ("running", "tokens", "least_chunk", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GenerationError(f"{name}={value}; use at least 1")
        for name in ("ttft_slo_s", "tpot_slo_s", "least_tpot_slo_s", "idle_step_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise GenerationError(f"{name}={value!r}; use seconds above 0")
        if not self.prompt_stretch > 1:
            raise GenerationError(
                f"prompt_stretch={self.prompt_stretch!r}; use a number above 1, or math.inf"
            )
        for name in ("finetuning_floor", "serving_share"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise GenerationError(f"{name}={value:g}; use a share from 0 to below 1")
        if not 50 <= self.tpot_percentile < 100:
            raise GenerationError(f"tpot_percentile={self.tpot_percentile:g}; use 50 to below 100")

    def promise(self, sequence: Sequence) -> None:
        """Set the SLOs of a new sequence: the request's own SLOs, or these."""
        request = sequence.request
        sequence.times.ttft_slo_s = request.ttft_slo_s or self.ttft_slo_s
        sequence.times.tpot_slo_s = request.tpot_slo_s or self.tpot_slo_s

    def check(self, request: Request) -> None:
        """Raise a GenerationError if a request exceeds these limits."""
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(request.params, name)
            if asked is not None and asked > self.logprobs:
                raise GenerationError(
                    f"{name}={shown(asked)}, and the engine gives at most {self.logprobs} in each "
                    "place; ask for fewer, or raise Limits(logprobs=…) of the engine"
                )


def why_never(sequence: Sequence, of_adapter: int, most: int) -> str | None:
    """Return the reason if a sequence needs more pages than exist; else None.

    Args:
        of_adapter: number of pages of the adapter.
        most: number of existing pages.
    """
    need = sequence.most_pages
    if need + of_adapter <= most:
        return None
    with_adapter = f" and {of_adapter} for its adapter" if of_adapter else ""
    return (
        f"{sequence.id} needs {need} pages{with_adapter}, and the engine has {most}; "
        "generate fewer tokens, or give the engine more memory"
    )


def why_unreachable(sequence: Sequence, forward: Latency, limits: Limits) -> str | None:
    """Return the reason if a request's own SLOs cannot be kept; else None.

    Args:
        forward: the predicted latency of a step.
    """
    request, sampled = sequence.request, Load(sampled=1)
    if request.tpot_slo_s is not None:
        least_s, why = limits.least_tpot_slo_s, "this engine takes none below"
        if least_s is None:
            chunk = Load.of(limits.least_chunk, 0) + Load(chunks=1)
            load = Load.of(1, request.length) + chunk + sampled
            least_s, why = forward.seconds(load), "a step is predicted to take"
        if request.tpot_slo_s < least_s:
            return _reason(sequence, "tpot_slo_s", request.tpot_slo_s, why, least_s)
    if request.ttft_slo_s is not None:
        # Nearly all of the prompt may be in the cache.
        least_s = forward.seconds(Load.of(1, request.length) + sampled)
        if request.ttft_slo_s < least_s:
            why = "a step is predicted to take"
            return _reason(sequence, "ttft_slo_s", request.ttft_slo_s, why, least_s)
    return None


def _reason(sequence: Sequence, name: str, asked_s: float, why: str, least_s: float) -> str:
    return (
        f"{name}={asked_s:g} of {sequence.id} cannot be kept: {why} {least_s:.3g} s; ask for more, "
        "or leave it out"
    )
