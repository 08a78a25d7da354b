"""Profiles in the user's cache, and those that running ranks measure of themselves.

A profile is kept by device, dtype, ranks and versions. Ranks that have none of their device measure
one together: all of them the links, the first the operators; all have the same costs then.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcg.errors import CostModelError
from pcg.files import cache_folder
from pcg.ir.types import TORCH_NAMES
from pcg.options import dtype_name
from pcg.parallel.costs import operator_profiler
from pcg.parallel.costs.collective_profiler import exchanges_between
from pcg.parallel.costs.device_profile import DeviceProfile
from pcg.parallel.costs.operator_profiler import device_name
from pcg.ranks.group import Ranks
from pcg.version import __version__

_LOG = logging.getLogger("pcg.costs")


@dataclass(frozen=True)
class KeptProfile:
    """A profile, and the file in the cache that has it.

    Attributes:
        is_old: True if it was there.
    """

    profile: DeviceProfile
    path: Path
    is_old: bool


def kept_path(device: torch.device, dtype: str, tp: int, *, quick: bool) -> Path:
    """The file of a device's profile in the cache."""
    parts = (device_name(device), dtype, f"tp{tp}", "quick" if quick else "full", __version__)
    return cache_folder("profiles") / f"{_slug(*parts, torch.__version__)}.json"


def kept_profile(path: Path) -> DeviceProfile | None:
    """The profile in a file of the cache, if it can be read."""
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
    """The profile of the ranks' device; all of them call this, and have the first one's.

    Args:
        device: this rank's own.
        dtype: the base model's, by its short name.
        quick: measure a few small shapes, in seconds.
        fresh: measure again what the first rank's cache has.
        on_case: called with the name of each operator before it is measured.
    """
    path = kept_path(device, dtype, ranks.size, quick=quick)
    is_first = ranks.rank == 0
    found = kept_profile(path) if is_first and not fresh else None
    text = _from_first(ranks, "" if found is None else found.text)
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
    """The file of the profile of the ranks' devices, which they measure if they have none yet.

    Args:
        dtype: the base model's, as torch or its name; None for that of the model's configuration.
    """
    known = dtype_name(dtype or config.get("dtype") or config.get("torch_dtype"))
    dtypes = {name: short for short, name in TORCH_NAMES.items()}
    found = profile_of_ranks(ranks, ranks.device, dtypes.get(known or "", "f32"))
    if not found.is_old and ranks.rank == 0:
        _LOG.warning("%s has no data sheet; it was measured: %s", found.profile.device, found.path)
    return str(found.path)


def _from_first(ranks: Ranks, text: str) -> str:
    """The first rank's text on all ranks."""
    sent = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    size = ranks.broadcast(torch.tensor([len(text.encode())], device=ranks.device))
    if not int(size):
        return ""
    if ranks.rank:
        sent = torch.zeros(int(size), dtype=torch.uint8)
    return bytes(ranks.broadcast(sent.to(ranks.device)).cpu().tolist()).decode()


def _slug(*parts: str) -> str:
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
