"""`pcg profile`: measure the times of operators and collectives on this device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pcg.units import counted
from pcg.version import __version__

from .options.console import check_page, err, out, print_json, print_table, table
from .options.fields import Json

if TYPE_CHECKING:
    import torch

    from pcg.parallel.costs.accelerators import Link
    from pcg.parallel.costs.catalog import KeptProfile
    from pcg.parallel.costs.device_profile import CollectiveTime, DeviceProfile


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of a profile.

    Attributes:
        output: the file to write the profile to, in addition to the user's cache.
        tp: also measure collectives over this many ranks.
        dtype: float32, bfloat16, float16 or float64 of the base model; by default bfloat16 on a GPU
            and float32 on a CPU.
        device: the device, as torch names it; by default a GPU if available, else the CPU.
        quick: measure a few small shapes, in seconds.
        fresh: measure again even if the cache has a profile.
    """

    output: Path | None = None
    tp: int = 1
    dtype: str | None = None
    device: str | None = None
    quick: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise typer.BadParameter("use at least 1", param_hint="--tp")


def profile_command(options: ProfileOptions, json: Json = False) -> None:
    """Measure operators and collectives on this device.

    The profile is a cost model for parallel plans. It is cached by device and versions.
    """
    from pcg.ranks.join import started_ranks

    if options.output is not None:
        check_page(options.output, "--output")
    where = _device(options.device)
    base_dtype = _dtype(options.dtype, where)
    if started_ranks() > 1:
        kept = _of_ranks(where, base_dtype, options)
        if int(os.environ["RANK"]):
            return
    else:
        kept = _of_machine(where, base_dtype, options)
    profile = kept.profile
    written = options.output or kept.path
    if options.output is not None:
        profile.save(options.output)
    if json:
        print_json({**_summary(profile), "path": str(written), "cached": kept.is_old})
    else:
        _print(profile)
        source = " (measured before; --fresh measures again)" if kept.is_old else ""
        out().print(f"\n{written}{source}", soft_wrap=True)


def _of_machine(where: torch.device, base_dtype: str, options: ProfileOptions) -> KeptProfile:
    from pcg.parallel.costs.catalog import KeptProfile, kept_path, kept_profile

    path = kept_path(where, base_dtype, options.tp, quick=options.quick)
    profile = None if options.fresh else kept_profile(path)
    if profile is not None:
        return KeptProfile(profile, path, True)
    profile = _measure(where, base_dtype, options.tp, options.quick)
    profile.save(path)
    return KeptProfile(profile, path, False)


def _of_ranks(where: torch.device, base_dtype: str, options: ProfileOptions) -> KeptProfile:
    """Return the profile of torchrun's ranks, on one or several machines."""
    from pcg.parallel.costs.catalog import profile_of_ranks
    from pcg.ranks.join import join_group, own_device, started_ranks
    from pcg.ranks.launch import mute_others

    degree = started_ranks()
    if options.tp not in (1, degree):
        raise typer.BadParameter(
            f"torchrun has started {degree} ranks; leave it out, or start {options.tp}",
            param_hint="--tp",
        )
    mute_others()
    where = own_device(where)
    with err().status(f"measuring {degree} ranks …") as status:
        return profile_of_ranks(
            join_group(degree, where),
            where,
            base_dtype,
            quick=options.quick,
            fresh=options.fresh,
            on_case=lambda op: status.update(f"measuring {op} …"),
        )


def _device(name: str | None) -> torch.device:
    import torch

    from pcg.errors import UnsupportedError

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UnsupportedError(f"torch knows no device {name!r}; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"a profile is of a CPU or a GPU of CUDA, not of {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("torch sees no GPU; use --device cpu")
    return device


def _dtype(name: str | None, device: torch.device) -> str:
    from pcg.errors import UnsupportedError
    from pcg.ir.types import TORCH_NAMES

    if name is None:
        return "bf16" if device.type == "cuda" else "f32"
    floats = {short: long for short, long in TORCH_NAMES.items() if "float" in long}
    for short, long in floats.items():
        if name in (short, long):
            return short
    raise UnsupportedError(f"--dtype {name} is none of {', '.join(floats.values())}")


def _measure(device: torch.device, dtype: str, tp: int, quick: bool) -> DeviceProfile:
    import torch

    from pcg.parallel.costs.collective_profiler import measure_collectives
    from pcg.parallel.costs.device_profile import DeviceProfile
    from pcg.parallel.costs.operator_profiler import device_name, measure_operators

    versions = {"pcg": __version__, "torch": torch.__version__}
    exchanges: tuple[CollectiveTime, ...] = ()
    backend = ""
    console = err()
    with console.status("measuring …") as status:
        if tp > 1:
            status.update(f"measuring collectives of {tp} ranks …")
            exchanges, backend = measure_collectives(tp, device, quick=quick)
        points = measure_operators(
            device, dtype, quick=quick, on_case=lambda op: status.update(f"measuring {op} …")
        )
    return DeviceProfile(device_name(device), versions, points, exchanges, backend)


def _summary(profile: DeviceProfile) -> dict[str, Any]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for point in profile.points:
        work = point.work
        row = rows.setdefault(
            (work.kernel, work.dtype),
            {
                "operator": work.kernel,
                "dtype": work.dtype,
                "points": 0,
                "seconds": point.seconds,
                "flops_per_s": 0.0,
                "bytes_per_s": 0.0,
            },
        )
        row["points"] += 1
        row["seconds"] = min(row["seconds"], point.seconds)
        row["flops_per_s"] = max(row["flops_per_s"], work.flops / point.seconds)
        row["bytes_per_s"] = max(row["bytes_per_s"], work.moved_bytes / point.seconds)
    return {
        "device": profile.device,
        "versions": dict(profile.versions),
        "operators": [rows[key] for key in sorted(rows)],
        "tp": profile.degree,
        "backend": profile.backend,
        "links": _links(profile.links),
        "tiers": {ranks: _links(links) for ranks, links in profile.tiers.items()},
    }


def _links(links: Mapping[str, Link]) -> dict[str, dict[str, float]]:
    return {
        kind: {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
        for kind, link in links.items()
    }


def _print(profile: DeviceProfile) -> None:
    summary = _summary(profile)
    console = out()
    heads = ("operator", "dtype", "points", "µs", "GFLOP/s", "GB/s")
    rows = table(*heads, right=heads[2:])
    for row in summary["operators"]:
        rows.add_row(
            row["operator"],
            row["dtype"],
            str(row["points"]),
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['flops_per_s'] / 1e9:,.1f}",
            f"{row['bytes_per_s'] / 1e9:,.1f}",
        )
    print_table(rows, console)
    if summary["links"]:
        columns = ("ranks", "α µs", "β GB/s")
        rows = table("collective", *columns, right=columns)
        for ranks, links in summary["tiers"].items():
            for kind, link in links.items():
                latency, speed = link["latency_s"] * 1e6, link["bytes_per_s"] / 1e9
                rows.add_row(kind, str(ranks), f"{latency:,.1f}", f"{speed:,.2f}")
        console.print()
        print_table(rows, console)
    ranks = f", {summary['backend']} over {summary['tp']} ranks" if summary["links"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    points = counted(len(profile.points), "point")
    console.print("\nµs of the shortest call, and the best rates", style="dim")
    console.print(f"{points} of {summary['device']}{ranks}; {versions}", soft_wrap=True)
