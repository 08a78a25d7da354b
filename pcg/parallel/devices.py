"""Accelerators by name, and the memory that a program finds on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pcg.errors import UnsupportedError

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    Attributes:
        name: as people write it.
        memory_bytes: that the driver reports as the total.
    """

    name: str
    memory_bytes: int


RESERVED_BYTES = 2**30
"""Left free on a device: the CUDA context, libraries' workspaces, and what fragments."""

# Totals as nvidia-smi (rocm-smi) reports them, in MiB; with ECC where it is on by default.
_TOTALS_MIB = {
    "A10G": 23_028,
    "A100-40": 40_960,
    "A100-80": 81_920,
    "A6000": 49_140,
    "B200": 183_359,
    "H100": 81_559,
    "H100-NVL": 95_830,
    "H200": 143_771,
    "L4": 23_034,
    "L40S": 46_068,
    "MI300X": 196_592,
    "RTX-3090": 24_576,
    "RTX-4090": 24_564,
    "T4": 15_360,
    "V100-32": 32_768,
}
DEVICES: Mapping[str, Device] = {
    name: Device(name, total * MIB) for name, total in _TOTALS_MIB.items()
}


def device_of(name: str) -> Device:
    """The accelerator of a name, in any case.

    Raises:
        UnsupportedError: pcg knows none of that name; lists them.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    close = get_close_matches(name.upper(), DEVICES, 1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise UnsupportedError(f"no GPU is known as {name!r}{hint} Known are {', '.join(DEVICES)}")
