"""Requests that an engine can never run, or whose SLOs it cannot keep.

A step that runs a request is kept within its SLO per token, for everyone's prompts. So one that no
step can keep would hold up all others, and help nobody.
"""

from __future__ import annotations

from pcg.runtime.engine.latency import Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.model.load import Load
from pcg.runtime.requests.sequence import Sequence


def why_never(sequence: Sequence, of_adapter: int, most: int) -> str | None:
    """Return the reason why a sequence will never have the pages that it needs; None if it will.

    Args:
        of_adapter: pages of its adapter.
        most: pages that there are.
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
    """Return the reason why a request's own SLOs cannot be kept; None if they can, or it has none.

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
