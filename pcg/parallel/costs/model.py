"""What operators and collectives cost, from a device's sheet or from what was measured on it.

    operator      max(operations / peak, bytes / bandwidth) + launch       the roofline
    all_reduce    2 (n - 1) (α + size / (n β))                             a ring, n ranks
    all_gather      (n - 1) (α + size / (n β))
    reduce_scatter  (n - 1) (α + size / (n β))

A sheet's peaks are those of its vendor times the shares in `devices.ASSUMED`. A profile
(`pcg.parallel.costs.profile`) has the seconds of the shapes that were measured, and the roofline
between them. What has no cost is an error, never a default.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import torch

from pcg.errors import CostModelError
from pcg.ir.graph import Attribute
from pcg.ir.operators.operator import Attributes, Types
from pcg.parallel.costs.devices import ASSUMED, CPU, DEVICES, Achieved, DeviceSheet, Link
from pcg.parallel.costs.work import Work, is_free, parts_of, work_of

SHEETS: Mapping[str, DeviceSheet] = {
    **{name: device.sheet for name, device in DEVICES.items() if device.sheet is not None},
    "CPU": CPU,
}
"""By name; devices that are known by their memory alone have none."""

_ROUNDS = {"all_gather": 1, "all_reduce": 2, "reduce_scatter": 1}
_Key = tuple[str, Types, Types, tuple[tuple[str, Attribute], ...], int, int]


class CostModel(ABC):
    """Seconds of operators and collectives on one kind of device.

    Attributes:
        name: of the device.
    """

    name: str

    @abstractmethod
    def operator_seconds(
        self,
        op: str,
        inputs: Types,
        outputs: Types,
        attributes: Attributes,
        tokens: int,
        context: int,
    ) -> float:
        """Seconds of an operator on one rank; 0 of a view.

        Args:
            op: of a rank's graph, no collective.
            inputs: types of one rank, in `T` and `S` alone.
            outputs: likewise.
            attributes: of the node.
            tokens: T, of the step.
            context: S, tokens of a sequence.
        Raises:
            CostModelError: no cost is known.
        """

    @abstractmethod
    def work_seconds(self, work: Work) -> float:
        """Seconds of one call of an operator that moves bytes."""

    @abstractmethod
    def collective_seconds(self, kind: str, size_bytes: int, degree: int) -> float:
        """Seconds of a collective; 0 of one rank.

        Args:
            kind: all_reduce, all_gather or reduce_scatter.
            size_bytes: of the tensor that is summed, or of the whole that is gathered.
            degree: number of ranks.
        Raises:
            CostModelError: no link is known, or no such collective.
        """


class WorkModel(CostModel):
    """Operators cost what their work does, looked up if asked for before; collectives are rings."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._known: dict[_Key, float] = {}

    def operator_seconds(
        self,
        op: str,
        inputs: Types,
        outputs: Types,
        attributes: Attributes,
        tokens: int,
        context: int,
    ) -> float:
        key = (op, inputs, outputs, tuple(attributes.items()), tokens, context)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = 0.0
            if not is_free(op):
                for part in parts_of(op, inputs, outputs, attributes):
                    seconds += self.work_seconds(work_of(*part, tokens, context))
            self._known[key] = seconds
        return seconds

    def collective_seconds(self, kind: str, size_bytes: int, degree: int) -> float:
        if kind not in _ROUNDS:
            raise CostModelError(f"no cost is known of {kind!r}; of {', '.join(_ROUNDS)} there is")
        if degree < 1 or size_bytes < 0:
            raise CostModelError(f"{kind} of {size_bytes} bytes over {degree} ranks has no cost")
        if degree == 1:
            return 0.0
        return ring_seconds(kind, size_bytes, degree, self._link(kind, degree))

    @abstractmethod
    def _link(self, kind: str, degree: int) -> Link:
        """The link that so many ranks use, with the bandwidth that they reach."""


def ring_seconds(kind: str, size_bytes: float, degree: int, link: Link) -> float:
    """Seconds of a collective: `(n - 1) (α + size / (n β))`, twice that of an all_reduce."""
    step = link.latency_s + size_bytes / (degree * link.bytes_per_s)
    return _ROUNDS[kind] * (degree - 1) * step


def roofline_seconds(work: Work, sheet: DeviceSheet, achieved: Achieved, name: str) -> float:
    """Seconds of a call at best: by operations or by bytes, and its launch.

    Raises:
        CostModelError: the sheet has no peak for the dtype.
    """
    if work.is_product:
        peaks, share, dtype = sheet.product_flops_per_s, achieved.product, work.dtype
    else:
        # Half precision is computed in fp32; integers are as wide at most.
        peaks, share = sheet.vector_flops_per_s, achieved.vector
        dtype = "f64" if work.dtype == "f64" else "f32"
    if dtype not in peaks:
        raise CostModelError(
            f"{name} has no peak for {work.kernel} in {work.dtype}; it has {', '.join(peaks)}. "
            "Measure on the device with pcg profile -o FILE"
        )
    by_flops = work.flops / (peaks[dtype] * share)
    by_bytes = work.moved_bytes / (sheet.memory_bytes_per_s * achieved.memory)
    return max(by_flops, by_bytes) + sheet.launch_s


class SheetModel(WorkModel):
    """The roofline of a device's sheet.

    Args:
        name: of the device.
        sheet: its sheet.
        link: name of one of the sheet's links; its first by default.
        achieved: shares of the sheet's peaks.
    Raises:
        CostModelError: the sheet has no such link.
    """

    def __init__(
        self,
        name: str,
        sheet: DeviceSheet,
        link: str | None = None,
        achieved: Achieved = ASSUMED,
    ) -> None:
        super().__init__(name)
        self.sheet = sheet
        self.achieved = achieved
        self.link_name = next(iter(sheet.links)) if link is None else _found(link, sheet.links)
        if self.link_name is None:
            known = ", ".join(sheet.links)
            raise CostModelError(f"{name} has no link {link!r}; it has {known}")

    def work_seconds(self, work: Work) -> float:
        return roofline_seconds(work, self.sheet, self.achieved, self.name)

    def _link(self, kind: str, degree: int) -> Link:
        link = self.sheet.links[str(self.link_name)]
        if link.is_measured:
            return link
        return Link(link.latency_s, link.bytes_per_s * self.achieved.link, link.source)


def cost_model(name_or_path: str | os.PathLike[str], link: str | None = None) -> CostModel:
    """The cost model of a device's sheet, or of a profile.

    Args:
        name_or_path: a name of `SHEETS` in any case, or a file of `pcg profile`.
        link: name of one of the sheet's links; its first by default. A profile has its own.
    Raises:
        CostModelError: there is neither; the closest names are named.
    """
    from pcg.parallel.costs.profile import Profile, ProfileModel

    wanted = str(name_or_path)
    name = _found(wanted, SHEETS)
    if name is not None:
        return SheetModel(name, SHEETS[name], link)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        if link is not None:
            raise CostModelError(f"{path} is a profile, which has its own link, not {link!r}")
        return ProfileModel(Profile.load(path))
    known = ", ".join(SHEETS)
    device = _found(wanted, DEVICES)
    if device is not None:
        raise CostModelError(
            f"{device} has no data sheet here, so no cost; use one of {known}, or a profile that "
            "pcg profile -o FILE wrote on the device"
        )
    if path.suffix or len(path.parts) > 1:
        raise CostModelError(f"there is no profile {path}; pcg profile -o {path} makes one")
    close = get_close_matches(wanted.upper(), SHEETS, 1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise CostModelError(
        f"no device sheet or profile is called {wanted!r}{hint} Sheets are {known}; a profile is a "
        "file of pcg profile -o FILE"
    )


def costs_name(costs: str | os.PathLike[str] | None, gpus: Sequence[str] = ()) -> str:
    """The name of a sheet, or the path of a profile, that is asked for.

    Args:
        costs: a name or a path; None for the first of `gpus` that has a sheet, else an H100.
        gpus: names of GPUs.
    """
    if costs is None:
        return next((name for name in gpus if name.upper() in map(str.upper, SHEETS)), "H100")
    path = Path(costs).expanduser()
    return str(path.resolve()) if path.is_file() else os.fspath(costs)


def own_sheet(device: torch.device) -> str:
    """The name of the sheet of a device that there is.

    Raises:
        CostModelError: it has none.
    """
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


def _found(name: str, among: Mapping[str, object]) -> str | None:
    """The name as it is written there, in whatever case it was asked for."""
    return next((known for known in among if known.lower() == name.lower()), None)
