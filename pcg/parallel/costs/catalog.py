"""Cost models by name or path: data sheets of accelerators, and profiles.

Profiles are in the user's cache, by device, dtype, ranks and versions. Ranks without a profile of
their device measure it together: all ranks the links, the first rank the operators; afterwards all
ranks have the same costs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from pcg.errors import CostModelError
from pcg.files import cache_folder, expanded, is_file, shown_path
from pcg.ir.types import TORCH_NAMES
from pcg.options import dtype_name
from pcg.parallel.costs import operator_profiler
from pcg.parallel.costs.accelerators import SHEETS, known_name, of_driver
from pcg.parallel.costs.collective_profiler import exchanges_between
from pcg.parallel.costs.cost_model import CostModel, SheetModel
from pcg.parallel.costs.device_profile import DeviceProfile, ProfileModel
from pcg.parallel.costs.operator_profiler import device_name
from pcg.ranks.group import Ranks
from pcg.version import __version__


def find_cost_model(name_or_path: str | os.PathLike[str], link: str | None = None) -> CostModel:
    """Return the cost model of a data sheet, or of a profile.

    Args:
        name_or_path: a case-insensitive name of `SHEETS`, with `:4` for nodes of 4 ranks, or a file
            of `pcg profile`.
        link: the name of one of the sheet's links, its first by default; a profile has its own.
    Raises:
        CostModelError: unknown; the message has the closest names.
    """
    wanted = str(name_or_path)
    called, _, node_ranks = wanted.partition(":")
    name = known_name(called, SHEETS)
    if name is not None:
        if node_ranks and (not node_ranks.isdecimal() or int(node_ranks) < 1):
            raise CostModelError(
                f"{wanted}: {node_ranks!r} is no number of ranks a node; use {name}:8, or {name}"
            )
        ranks = int(node_ranks) if node_ranks else None
        return SheetModel(name, SHEETS[name], link, node_ranks=ranks)
    path = expanded(name_or_path)
    if is_file(path):
        if link is not None:
            raise CostModelError(f"{path} is a profile, which has its own link, not {link!r}")
        return ProfileModel(DeviceProfile.load(path))
    known = ", ".join(SHEETS)
    if path.suffix or len(path.parts) > 1:
        place = shown_path(path)
        raise CostModelError(f"there is no profile {place}; pcg profile -o {place} makes one")
    close = get_close_matches(wanted.upper(), SHEETS, 1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise CostModelError(
        f"no device sheet or profile is called {wanted!r}{hint} Sheets are {known}; a profile is a "
        "file of pcg profile -o FILE"
    )


def costs_name(costs: str | os.PathLike[str] | None, gpus: Sequence[str] = ()) -> str:
    """Return the data sheet's name, or the profile's path, for an option `costs`.

    None means the first of `gpus`, else an H100.
    """
    if costs is None:
        return gpus[0] if gpus else "H100"
    path = expanded(costs)
    return str(path.resolve()) if is_file(path) else os.fspath(costs)


def own_sheet(device: torch.device, degree: int = 1) -> str:
    """Return the data sheet's name of a present device, with its node's ranks under torchrun.

    Raises:
        CostModelError: the device has no data sheet.
    """
    if device.type == "cpu":
        return "CPU"
    called = torch.cuda.get_device_name(device)
    accelerator = of_driver(called)
    if accelerator is None:
        raise CostModelError(
            f"{called} has no data sheet here, so no cost; measure it with pcg profile -o FILE "
            "--tp N, and say costs=FILE"
        )
    node_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", degree))
    return f"{accelerator.name}:{node_ranks}" if node_ranks < degree else accelerator.name


# ------------------------------------------------------------------------------------ kept profiles


_LOG = logging.getLogger("pcg.costs")


@dataclass(frozen=True)
class KeptProfile:
    """A profile, and its file in the cache; `is_old` is True if the file existed."""

    profile: DeviceProfile
    path: Path
    is_old: bool


def kept_path(device: torch.device, dtype: str, tp: int, *, quick: bool) -> Path:
    """Return the file of a device's profile in the cache."""
    parts = (device_name(device), dtype, f"tp{tp}", "quick" if quick else "full", __version__)
    return cache_folder("profiles") / f"{_slug(*parts, torch.__version__)}.json"


def kept_profile(path: Path) -> DeviceProfile | None:
    """Return the profile in a file of the cache, if readable."""
    try:
        return DeviceProfile.load(path) if path.is_file() else None
    except CostModelError:
        return None


def profile_of_ranks(
    ranks: Ranks,
    device: torch.device,
    dtype: str,
    *,
    quick: bool = True,
    fresh: bool = False,
    on_case: Callable[[str], None] = lambda op: None,
) -> KeptProfile:
    """Return the profile of the ranks' device; all ranks call this and get the first rank's.

    Args:
        dtype: the base model's dtype, by its short name.
        quick: measure a few small shapes, in seconds.
        fresh: ignore the first rank's cache.
        on_case: called with the name of each operator before it is measured.
    """
    path = kept_path(device, dtype, ranks.size, quick=quick)
    is_first = ranks.rank == 0
    cached = kept_profile(path) if is_first and not fresh else None
    text = _from_first(ranks, "" if cached is None else cached.text)
    is_old = bool(text)
    if not is_old:
        exchanges, backend = exchanges_between(ranks, device, quick=quick)
        if is_first:
            points = operator_profiler.measure_operators(
                device, dtype, quick=quick, on_case=on_case
            )
            versions = {"pcg": __version__, "torch": torch.__version__}
            name = device_name(device)
            text = DeviceProfile(name, versions, points, exchanges, backend).text
        text = _from_first(ranks, text)
    profile = DeviceProfile.read(text, path)
    if not is_old or not path.is_file():
        profile.save(path)
    return KeptProfile(profile, path, is_old)


def own_profile(ranks: Ranks, dtype: object, config: Mapping[str, Any]) -> str:
    """Return the file of the profile of the ranks' devices, which they measure if missing.

    Args:
        dtype: the base model's dtype, as torch's dtype or its name; None for the configuration's.
    """
    known = dtype_name(dtype or config.get("dtype") or config.get("torch_dtype"))
    dtypes = {name: short for short, name in TORCH_NAMES.items()}
    profile = profile_of_ranks(ranks, ranks.device, dtypes.get(known or "", "f32"))
    if not profile.is_old and ranks.rank == 0:
        _LOG.warning(
            "%s has no data sheet; it was measured: %s", profile.profile.device, profile.path
        )
    return str(profile.path)


def _from_first(ranks: Ranks, text: str) -> str:
    sent = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    size = ranks.broadcast(torch.tensor([len(text.encode())], device=ranks.device))
    if not int(size):
        return ""
    if ranks.rank:
        sent = torch.zeros(int(size), dtype=torch.uint8)
    return bytes(ranks.broadcast(sent.to(ranks.device)).cpu().tolist()).decode()


def _slug(*parts: str) -> str:
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
