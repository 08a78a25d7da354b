"""The workload of `pcg bench serve`, from its options: made here, or read from a trace."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pcg.simulate.workloads.arrivals import Arrivals
    from pcg.simulate.workloads.lengths import Lengths
    from pcg.simulate.workloads.popularity import Popularity
    from pcg.simulate.workloads.workload import Workload

ARRIVALS = ("gamma", "constant", "bursty", "s-lora")
POPULARITIES = ("zipf", "distinct", "uniform", "skewed", "identical")


@dataclass(frozen=True)
class WorkloadOptions:
    """What the options say.

    Attributes:
        request_rate: requests a second; infinite for all at once, None for a trace's own or 1.
        burstiness: shape of the intervals' Gamma distribution, 1/cv².
        arrivals: one of `ARRIVALS`.
        num_prompts: requests; None for as many as come within `duration`.
        duration: seconds.
        input_len, output_len: tokens: a number, a range as 8-512, or sharegpt.
        adapters: how many there are; 0 for the base alone.
        popularity: one of `POPULARITIES`.
        zipf_alpha: of `zipf`.
        tenants: that own the adapters; 0 for none.
        seed: of all of it.
        trace: file to read instead; what it says of times, lengths and adapters holds.
    """

    request_rate: float | None
    burstiness: float
    arrivals: str
    num_prompts: int | None
    duration: float | None
    input_len: str
    output_len: str
    adapters: int
    popularity: str
    zipf_alpha: float
    tenants: int
    seed: int
    trace: Path | None

    def workload(self, most_positions: int | None) -> Workload:
        """The requests.

        Args:
            most_positions: of the model; ShareGPT's lengths are cut off at half of them.
        Raises:
            typer.BadParameter: an option that says nothing, or goes against another.
            BenchmarkError: numbers out of range, or a trace that cannot be used.
        """
        made = self._read() if self.trace is not None else self._made(most_positions)
        if self.tenants:
            from pcg.simulate.workloads.synthetic import assign_tenants

            made = assign_tenants(made, [f"tenant-{index}" for index in range(self.tenants)])
        return made

    # ------------------------------------------------------------------------------- a trace

    def _read(self) -> Workload:
        from pcg.simulate.workloads.public_trace import read_public_trace
        from pcg.simulate.workloads.workload import Workload

        assert self.trace is not None
        is_csv = self.trace.suffix.lower() == ".csv"
        found = read_public_trace(self.trace) if is_csv else Workload.load(self.trace)
        if self.duration is not None:
            found = found.part(0.0, self.duration)
        if self.num_prompts is not None:
            found = Workload(found.requests[: self.num_prompts])
        if self.request_rate is not None:
            found = (
                _at_once(found)
                if math.isinf(self.request_rate)
                else found.at_rate(self.request_rate)
            )
        return found if found.adapters else self._spread(found)

    # ------------------------------------------------------------------------------- synthetic

    def _made(self, most_positions: int | None) -> Workload:
        from pcg.simulate.workloads.popularity import PowerLaw
        from pcg.simulate.workloads.synthetic import s_lora, synthetic

        prompts = _lengths("--input-len", self.input_len, most_positions)
        outputs = _lengths("--output-len", self.output_len, most_positions)
        rate = 1.0 if self.request_rate is None else self.request_rate
        requests = 100 if self.num_prompts is None and self.duration is None else self.num_prompts
        if self.arrivals == "s-lora":
            if self.duration is None or requests is not None or not self.adapters:
                raise typer.BadParameter(
                    "s-lora has a process for each adapter; give --duration, --adapters and no "
                    "--num-prompts",
                    param_hint="--arrivals",
                )
            law = PowerLaw(self.adapters, self.zipf_alpha)
            return s_lora(
                law, rate, self._cv, prompts, outputs, seed=self.seed, duration_s=self.duration
            )
        if requests is not None and self.duration is not None:
            raise typer.BadParameter("it does not go with --num-prompts", param_hint="--duration")
        if math.isinf(rate) and requests is None:
            raise typer.BadParameter(
                "at an infinite rate it has no end; give --num-prompts", param_hint="--duration"
            )
        arrivals = self._arrivals(1.0 if math.isinf(rate) else rate)
        made = synthetic(
            arrivals,
            prompts,
            outputs,
            seed=self.seed,
            requests=requests,
            duration_s=self.duration,
        )
        return self._spread(_at_once(made) if math.isinf(rate) else made)

    @property
    def _cv(self) -> float:
        if not 0 < self.burstiness < math.inf:
            raise typer.BadParameter(
                f"{self.burstiness:g}; use a finite number above 0", param_hint="--burstiness"
            )
        return 1 / math.sqrt(self.burstiness)

    def _arrivals(self, rate_per_s: float) -> Arrivals:
        from pcg.simulate.workloads.arrivals import Bursty, Constant, Gamma

        if self.arrivals == "gamma":
            return Gamma(rate_per_s, self._cv)
        if self.arrivals == "bursty":
            return Bursty(rate_per_s, self._cv)
        if self.arrivals == "constant":
            return Constant(rate_per_s)
        raise typer.BadParameter(
            f"{self.arrivals!r} is none of {', '.join(ARRIVALS)}", param_hint="--arrivals"
        )

    def _spread(self, workload: Workload) -> Workload:
        """Give requests adapters, of those there are."""
        if not self.adapters:
            return workload
        from pcg.simulate.workloads.synthetic import assign_adapters

        names = [f"adapter-{index}" for index in range(self.adapters)]
        return assign_adapters(workload, self._popularity(), seed=self.seed, adapters=names)

    def _popularity(self) -> Popularity:
        from pcg.simulate.workloads.popularity import (
            Distinct,
            Identical,
            PowerLaw,
            Skewed,
            Uniform,
        )

        known: dict[str, Popularity] = {
            "zipf": PowerLaw(self.adapters, self.zipf_alpha),
            "distinct": Distinct(),
            "uniform": Uniform(self.adapters),
            "skewed": Skewed(),
            "identical": Identical(),
        }
        if self.popularity not in known:
            raise typer.BadParameter(
                f"{self.popularity!r} is none of {', '.join(POPULARITIES)}",
                param_hint="--popularity",
            )
        return known[self.popularity]


def _at_once(workload: Workload) -> Workload:
    from pcg.simulate.workloads.workload import Workload

    return Workload(tuple(dataclasses.replace(one, time_s=0.0) for one in workload))


def _lengths(option: str, value: str, most_positions: int | None) -> Lengths:
    from pcg.simulate.workloads.lengths import (
        SHAREGPT_OUTPUTS,
        SHAREGPT_PROMPTS,
        Between,
        Fixed,
    )

    if value == "sharegpt":
        whole = SHAREGPT_PROMPTS if option == "--input-len" else SHAREGPT_OUTPUTS
        most = None if most_positions is None else most_positions // 2
        return dataclasses.replace(whole, most=most)
    least, dash, most_text = value.partition("-")
    try:
        return Between(int(least), int(most_text)) if dash else Fixed(int(least))
    except ValueError as error:
        raise typer.BadParameter(
            f"{value!r}; use a number, a range as 8-512, or sharegpt", param_hint=option
        ) from error
