"""The cost models that a name or a path stands for: data sheets of accelerators, and profiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches

import torch

from pcg.errors import CostModelError
from pcg.files import expanded, is_file, shown_path
from pcg.parallel.costs.accelerators import ACCELERATORS, SHEETS, known_name
from pcg.parallel.costs.cost_model import CostModel, SheetModel
from pcg.parallel.costs.device_profile import DeviceProfile, ProfileModel


def find_cost_model(name_or_path: str | os.PathLike[str], link: str | None = None) -> CostModel:
    """The cost model of a data sheet, or of a profile.

    Args:
        name_or_path: a name of `SHEETS` in any case, or a file of `pcg profile`.
        link: the name of one of the sheet's links, its first by default; a profile has its own.
    Raises:
        CostModelError: there is neither; the closest names are named.
    """
    wanted = str(name_or_path)
    name = known_name(wanted, SHEETS)
    if name is not None:
        return SheetModel(name, SHEETS[name], link)
    path = expanded(name_or_path)
    if is_file(path):
        if link is not None:
            raise CostModelError(f"{path} is a profile, which has its own link, not {link!r}")
        return ProfileModel(DeviceProfile.load(path))
    known = ", ".join(SHEETS)
    accelerator = known_name(wanted, ACCELERATORS)
    if accelerator is not None:
        raise CostModelError(
            f"{accelerator} has no data sheet here, so no cost; use one of {known}, or a profile "
            "that pcg profile -o FILE wrote on the device"
        )
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
    """The name of the data sheet, or the path of the profile, that is asked for.

    None asks for the first of the named `gpus` that has a sheet, else for an H100's.
    """
    if costs is None:
        return next((name for name in gpus if name.upper() in map(str.upper, SHEETS)), "H100")
    path = expanded(costs)
    return str(path.resolve()) if is_file(path) else os.fspath(costs)


def own_sheet(device: torch.device) -> str:
    """The name of the data sheet of a device that is there; a CostModelError where it has none."""
    if device.type == "cpu":
        return "CPU"
    called = torch.cuda.get_device_name(device)
    words = set(called.upper().replace("-", " ").replace("GB", "").split())
    for name in SHEETS:
        if set(name.upper().split("-")) <= words:
            return name
    raise CostModelError(
        f"{called} has no data sheet here, so no cost; measure it with pcg profile -o FILE --tp N, "
        "and say costs=FILE"
    )
