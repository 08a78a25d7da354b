"""`pcg profile`: measure what operators and collectives take on this device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pcg.units import counted
from pcg.version import __version__

from .console import err, out, print_json, table
from .options.arguments import Json

if TYPE_CHECKING:
    import torch

    from pcg.parallel.costs.device_profile import CollectiveTime, DeviceProfile


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of a profile.

    Attributes:
        output: the file to write the profile to; it is kept in the user's cache, too.
        tp: measure collectives over so many ranks, too.
        dtype: float32, bfloat16, float16 or float64 of the base model; by default bfloat16 on a GPU
            and float32 on a CPU.
        device: the device, as torch names it; a GPU where there is one, else the CPU.
        quick: measure a few small shapes, in seconds.
        fresh: measure again what the cache has.
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
    import torch

    from pcg.files import cache_folder
    from pcg.parallel.costs.operator_profiler import device_name

    where, tp, quick = _device(options.device), options.tp, options.quick
    base_dtype = _dtype(options.dtype, where)
    parts = (device_name(where), base_dtype, f"tp{tp}", "quick" if quick else "full", __version__)
    kept = cache_folder("profiles") / f"{_slug(*parts, torch.__version__)}.json"
    found = None if options.fresh else _cached(kept)
    profile = _measure(where, base_dtype, tp, quick) if found is None else found
    if found is None:
        profile.save(kept)
    written = options.output or kept
    if options.output is not None:
        profile.save(options.output)
    if json:
        print_json({**_summary(profile), "path": str(written), "cached": found is not None})
    else:
        _print(profile)
        source = " (measured before; --fresh measures again)" if found else ""
        out().print(f"\n{written}{source}", soft_wrap=True)


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


def _cached(path: Path) -> DeviceProfile | None:
    """The profile in the cache, if it can be read."""
    from pcg.errors import CostModelError
    from pcg.parallel.costs.device_profile import DeviceProfile

    try:
        return DeviceProfile.load(path) if path.is_file() else None
    except CostModelError:
        return None


def _slug(*parts: str) -> str:
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)


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
    """The measurements by operator and dtype, and the links."""
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
        "links": {
            kind: {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
            for kind, link in profile.links.items()
        },
    }


def _print(profile: DeviceProfile) -> None:
    found = _summary(profile)
    console = out()
    heads = ("operator", "dtype", "points", "µs", "GFLOP/s", "GB/s")
    rows = table(*heads, right=heads[2:])
    for row in found["operators"]:
        rows.add_row(
            row["operator"],
            row["dtype"],
            str(row["points"]),
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['flops_per_s'] / 1e9:,.1f}",
            f"{row['bytes_per_s'] / 1e9:,.1f}",
        )
    console.print(rows)
    if found["links"]:
        rows = table("collective", "α µs", "β GB/s", right=("α µs", "β GB/s"))
        for kind, link in found["links"].items():
            rows.add_row(
                kind, f"{link['latency_s'] * 1e6:,.1f}", f"{link['bytes_per_s'] / 1e9:,.2f}"
            )
        console.print()
        console.print(rows)
    ranks = f", {found['backend']} over {found['tp']} ranks" if found["links"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    points = counted(len(profile.points), "point")
    console.print("\nµs of the shortest call, and the best rates", style="dim")
    console.print(f"{points} of {found['device']}{ranks}; {versions}", soft_wrap=True)
