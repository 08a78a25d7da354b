"""The cut of a client: which pieces of its layers the base runs, chosen by what the link takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from pcg.errors import CostModelError
from pcg.options import SplitLink
from pcg.parallel.costs.catalog import own_sheet
from pcg.parallel.costs.own_rates import OwnRates, rated_model
from pcg.passes.placement.call_pieces import CallPieces, LayerCut
from pcg.passes.placement.split_costs import SplitCosts
from pcg.split.client.caller import Caller

SERVED_TOKENS, TRAINED_TOKENS = 1, 1024
"""Tokens of the steps that cuts are searched for: a step that decodes, and one that trains. In the
first a round trip counts most, so that its cut has the fewest; of these it moves the least."""
_PROBES = 5
_PROBE_BYTES = 2**20


@dataclass
class CutReport:
    """The cut that a client runs.

    Attributes:
        link: the link to the base, as it was given or measured.
        reason: why each product is a call, everywhere; empty where the cut was searched.
        layers: the cuts of the programs that were compiled so far, the latest last.
    """

    link: SplitLink | None
    reason: str = ""
    layers: list[LayerCut] = field(default_factory=list)

    def __str__(self) -> str:
        if self.link is None:
            return f"linear cut: {self.reason}"
        lines = [
            f"searched cut, link {self.link.name}: {self.link.latency_s * 1e3:.3g} ms a round "
            f"trip, {self.link.bytes_per_s * 8 / 1e9:.3g} Gbit/s"
        ]
        for one in self.layers:
            step = "training" if one.trains else "serving"
            if one.cut is None:
                lines.append(f"  {step} {one.name}: linear cut, as {one.reason}")
                continue
            costs = one.cut.costs
            lines.append(
                f"  {step} {one.name}: {costs.round_trips} round trips a layer, "
                f"each product a call {one.cut.fixed.round_trips}"
            )
        return "\n".join(lines)


def measured_link(caller: Caller) -> SplitLink:
    """Measure the link to a base: the fastest of a few round trips, without bytes and with some."""
    latency_s = min(_echo_s(caller, 1) for _ in range(_PROBES))
    long_s = min(_echo_s(caller, _PROBE_BYTES) for _ in range(2))
    bytes_per_s = 2 * _PROBE_BYTES / max(long_s - latency_s, 1e-6)
    return SplitLink("measured", latency_s, bytes_per_s)


def _echo_s(caller: Caller, size_bytes: int) -> float:
    tensor = torch.zeros(max(size_bytes // 4, 1), dtype=torch.float32)
    began_s = time.perf_counter()
    caller.call("echo", (tensor,))
    return time.perf_counter() - began_s


def searched_cut(
    link: SplitLink,
    base_sheet: str,
    client: torch.device,
    rates: tuple[OwnRates | None, OwnRates | None] = (None, None),
) -> tuple[CallPieces, CutReport]:
    """Return the pass that searches a client's cut, and the report that it writes.

    Args:
        base_sheet: the name of the data sheet of the base's device.
        client: the device of the client.
        rates: those that the base and the client reach, where they were measured.
    """
    try:
        own = own_sheet(client)
    except CostModelError:
        own = "H100"  # a GPU without a sheet
    models = rated_model(base_sheet, rates[0]), rated_model(own, rates[1])
    serving = SplitCosts(*models, link, SERVED_TOKENS, TRAINED_TOKENS)
    training = SplitCosts(*models, link, TRAINED_TOKENS, TRAINED_TOKENS)
    report = CutReport(link)
    return CallPieces(serving, training, report.layers.append), report
