"""Accelerators by name: their memory, their data sheets, and what their drivers call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pcg.errors import UnsupportedError
from pcg.parallel.costs.device_sheet import DeviceSheet
from pcg.parallel.costs.sheets import SHEETS

MIB = 2**20


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, with the total of memory that the driver reports."""

    name: str
    memory_bytes: int
    sheet: DeviceSheet


RESERVED_BYTES = 2**30
"""Memory left free on a device, for the CUDA context, libraries' workspaces and fragmentation."""

# Totals as nvidia-smi (rocm-smi) reports them, in MiB; with ECC where it is on by default.
_TOTALS_MIB = {
    "A10": 23_028,
    "A10G": 23_028,
    "A100-40": 40_960,
    "A100-40-PCIE": 40_960,
    "A100-80": 81_920,
    "A100-80-PCIE": 81_920,
    "A6000": 49_140,
    "B200": 183_359,
    "H100": 81_559,
    "H100-NVL": 95_830,
    "H100-PCIE": 81_559,
    "H200": 143_771,
    "L4": 23_034,
    "L40S": 46_068,
    "MI300X": 196_592,
    "RTX-3090": 24_576,
    "RTX-4090": 24_564,
    "T4": 15_360,
    "V100-32": 32_768,
}
ACCELERATORS: Mapping[str, Accelerator] = {
    name: Accelerator(name, total * MIB, SHEETS[name]) for name, total in _TOTALS_MIB.items()
}

_BY_DRIVER = {
    "A10": "A10",
    "A10G": "A10G",
    "A100-SXM4-40GB": "A100-40",
    "A100-PCIE-40GB": "A100-40-PCIE",
    "A100-SXM4-80GB": "A100-80",
    "A100 80GB PCIe": "A100-80-PCIE",
    "RTX A6000": "A6000",
    "B200": "B200",
    "H100 80GB HBM3": "H100",
    "H100 NVL": "H100-NVL",
    "H100 PCIe": "H100-PCIE",
    "H200": "H200",
    "L4": "L4",
    "L40S": "L40S",
    "Instinct MI300X": "MI300X",
    "Instinct MI300X OAM": "MI300X",
    "GeForce RTX 3090": "RTX-3090",
    "GeForce RTX 4090": "RTX-4090",
    "T4": "T4",
    "V100-SXM2-32GB": "V100-32",
}
"""Accelerators by the names that drivers give them, without the vendor's."""


def of_driver(called: str) -> Accelerator | None:
    """The accelerator that a driver calls so; None for one without a sheet, as a part of a GPU."""
    words = called.split(maxsplit=1)
    if words[0] in ("AMD", "NVIDIA", "Tesla") and len(words) > 1:
        called = words[1]
    name = _BY_DRIVER.get(called)
    return None if name is None else ACCELERATORS[name]


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name, which may be in any case.

    Raises:
        UnsupportedError: pcg knows none of that name; lists them.
    """
    known = known_name(name, ACCELERATORS)
    if known is not None:
        return ACCELERATORS[known]
    longer = [known for known in ACCELERATORS if name and known.startswith(name.upper())]
    close = longer or get_close_matches(name.upper(), ACCELERATORS, 1)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise UnsupportedError(f"no GPU is known as {name!r}{hint} Known are {', '.join(ACCELERATORS)}")


def known_name(name: str, among: Iterable[str]) -> str | None:
    """A known name as it is written, in whatever case it was asked for."""
    return next((known for known in among if known.lower() == name.lower()), None)
