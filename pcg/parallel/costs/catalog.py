"""The cost models that a name or a path stands for: data sheets of accelerators, and profiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches

import torch

from pcg.errors import CostModelError
from pcg.files import expanded, is_file, shown_path
from pcg.parallel.costs.accelerators import known_name, of_driver
from pcg.parallel.costs.cost_model import CostModel, SheetModel
from pcg.parallel.costs.device_profile import DeviceProfile, ProfileModel
from pcg.parallel.costs.sheets import SHEETS


def find_cost_model(name_or_path: str | os.PathLike[str], link: str | None = None) -> CostModel:
    """The cost model of a data sheet, or of a profile.

    Args:
        name_or_path: a name of `SHEETS` in any case, behind it `:4` for nodes of 4 ranks, or a file
            of `pcg profile`.
        link: the name of one of the sheet's links, its first by default; a profile has its own.
    Raises:
        CostModelError: there is neither; the closest names are named.
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
    """The name of the data sheet, or the path of the profile, that is asked for.

    None asks for the first of the named `gpus`, else for an H100's.
    """
    if costs is None:
        return gpus[0] if gpus else "H100"
    path = expanded(costs)
    return str(path.resolve()) if is_file(path) else os.fspath(costs)


def own_sheet(device: torch.device, degree: int = 1) -> str:
    """The name of the data sheet of a device that is there, with its node's ranks under torchrun.

    Args:
        degree: the number of ranks.
    Raises:
        CostModelError: it has none.
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
