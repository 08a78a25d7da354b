"""Rules of sharing that co-serving is compared with (FlexLLM v2 §2 and §8.2, figure 11).

    TemporalSharing   nothing for n steps, then one whole mini-batch and no requests
    SpatialSharing    a fixed share of the time, whatever the SLOs
    InferenceOnly     nothing

While nothing is served, the first two train. In the paper the two of spatial sharing run at once on
parts of a GPU; here a share of each step's time stands for a part of the device.
"""

from __future__ import annotations

from pcg.errors import FinetuneError
from pcg.runtime.engine.scheduling.co_serving import CoServing
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.requests.step import Load
from pcg.runtime.training.work_units import Forward, Phase


class TemporalSharing(Sharing):
    """Alternates steps that serve with steps that run a whole mini-batch, forward and backward.

    `frequency` serving steps lie between two that train; FlexLLM v2 figure 11 has 64 to 512.
    """

    def __init__(self, frequency: int = 128) -> None:
        if frequency < 1:
            raise FinetuneError(f"frequency={frequency}; use at least 1 step that serves")
        self.frequency = frequency
        self._served = 0

    def serves(self, has_work: bool) -> bool:
        return not has_work or self._served < self.frequency

    def begin(self, work: Work) -> None:
        self._served = self._served + 1 if work.is_served else 0

    def forward(self, work: Work, unit: Forward) -> int:
        return 0 if work.is_served or work.load.windows else unit.remaining

    def fits(
        self, work: Work, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        return not work.is_served


class SpatialSharing(CoServing):
    """Gives finetuning a fixed share of the time of steps that serve, whatever the SLOs."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise FinetuneError(f"share={share:g}; use a part above 0 and below 1")
        self.share = share

    def _share(self, work: Work) -> float | None:
        return self.share if work.is_served else None


class InferenceOnly(Sharing):
    """Runs no finetuning: jobs wait."""

    trains = False

    def forward(self, work: Work, unit: Forward) -> int:
        return 0

    def fits(
        self, work: Work, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        return False
