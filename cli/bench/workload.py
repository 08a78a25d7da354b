"""The workload of `pcg bench serve`, from its options: made here, or read from a trace."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import typer

from ..options.fields import flags_of

if TYPE_CHECKING:
    from pcg.peft.lora import LoraConfig
    from pcg.simulate.workloads.arrivals import Arrivals
    from pcg.simulate.workloads.lengths import Lengths
    from pcg.simulate.workloads.popularity import Popularity
    from pcg.simulate.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of the adapters that are served.

    Attributes:
        adapters: the number of fresh LoRA adapters; 0 serves the base alone. Those of a trace have
            its names.
        ranks: the ranks of the adapters, in turn, as 8,16.
        targets: the modules to adapt, separated by commas; all linear ones by default.
        popularity: how requests fall to adapters: by S-LoRA's power law (zipf), or as one of
            Punica's four.
        zipf_alpha: the exponent of zipf and s-lora.
        tenants: the number of tenants that own the adapters; 0 for none.
    """

    title: ClassVar[str] = "Adapters"

    adapters: int = 8
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    targets: Sequence[str] | str = "all-linear"
    popularity: Literal["zipf", "distinct", "uniform", "skewed", "identical"] = "zipf"
    zipf_alpha: float = 1.0
    tenants: int = 0

    def recipe(self, index: int) -> LoraConfig:
        """The configuration of an adapter."""
        from pcg.peft.lora import LoraConfig

        rank = self.ranks[index % len(self.ranks)]
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=self.targets)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(AdapterOptions):
    """Options of the requests that come.

    Attributes:
        request_rate: requests a second; inf for all at once. 1 by default, of a trace its own.
        burstiness: shape of the Gamma distribution of intervals, 1/cv²; 1 is Poisson, less is
            burstier.
        arrivals: how requests come: bursty has a rate that changes, s-lora a process for each
            adapter.
        num_prompts: the number of requests; 100 without `duration`.
        duration: seconds of requests, instead of `num_prompts`.
        input_len: tokens of a prompt: a number, a range as 8-512, or sharegpt.
        random_prefix_len: tokens that all prompts begin with, before those of `input_len`.
        output_len: tokens that are generated: a number, a range as 8-512, or sharegpt.
        trace: a file to replay instead: JSON lines, or the CSV of Azure's and BurstGPT's traces.
            What it says of times, lengths and adapters holds.
        seed: the seed of the workload, prompts and random weights.
    """

    title: ClassVar[str] = "Workload"

    request_rate: float | None = None
    burstiness: float = 1.0
    arrivals: Literal["gamma", "constant", "bursty", "s-lora"] = "gamma"
    num_prompts: int | None = None
    duration: float | None = None
    input_len: str = "8-64"
    random_prefix_len: int = 0
    output_len: str = "8-64"
    trace: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("adapters", self.adapters, 0)
        at_least("tenants", self.tenants, 0)
        at_least("random_prefix_len", self.random_prefix_len, 0)
        at_least("ranks", min(self.ranks), 1)
        if self.num_prompts is not None:
            at_least("num_prompts", self.num_prompts, 1)

    def workload(self, most_positions: int | None) -> Workload:
        """The requests.

        Args:
            most_positions: the model's positions; ShareGPT's lengths are cut off at half of them.
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
            is_finite = math.isfinite(self.request_rate)
            found = found.at_rate(self.request_rate) if is_finite else _at_once(found)
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
            arrivals, prompts, outputs, seed=self.seed, requests=requests, duration_s=self.duration
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

        if self.arrivals == "constant":
            return Constant(rate_per_s)
        return (Bursty if self.arrivals == "bursty" else Gamma)(rate_per_s, self._cv)

    def _spread(self, workload: Workload) -> Workload:
        """Give requests adapters, of those there are."""
        if not self.adapters:
            return workload
        from pcg.simulate.workloads.synthetic import assign_adapters

        names = [f"adapter-{index}" for index in range(self.adapters)]
        return assign_adapters(workload, self._popularity(), seed=self.seed, adapters=names)

    def _popularity(self) -> Popularity:
        from pcg.simulate.workloads import popularity

        known: dict[str, Popularity] = {
            "zipf": popularity.PowerLaw(self.adapters, self.zipf_alpha),
            "distinct": popularity.Distinct(),
            "uniform": popularity.Uniform(self.adapters),
            "skewed": popularity.Skewed(),
            "identical": popularity.Identical(),
        }
        return known[self.popularity]


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a value of an option that is less than another."""
    if value < least:
        raise typer.BadParameter(f"{value}; use at least {least}", param_hint=flags_of(name)[0])


def _at_once(workload: Workload) -> Workload:
    from pcg.simulate.workloads.workload import Workload

    return Workload(tuple(dataclasses.replace(one, time_s=0.0) for one in workload))


def _lengths(option: str, value: str, most_positions: int | None) -> Lengths:
    from pcg.simulate.workloads import lengths

    if value == "sharegpt":
        is_input = option == "--input-len"
        whole = lengths.SHAREGPT_PROMPTS if is_input else lengths.SHAREGPT_OUTPUTS
        most = None if most_positions is None else most_positions // 2
        return dataclasses.replace(whole, most=most)
    least, dash, most_text = value.partition("-")
    try:
        return lengths.Between(int(least), int(most_text)) if dash else lengths.Fixed(int(least))
    except ValueError as error:
        raise typer.BadParameter(
            f"{value!r}; use a number, a range as 8-512, or sharegpt", param_hint=option
        ) from error
