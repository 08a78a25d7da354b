"""Loops around products of Hopper's tensor cores in machine code: their order and their registers.

A product (`HGMMA`) is asked for and goes on beside what follows, up to the next full wait
(`WARPGROUP.DEPBAR gsb0, 0x0`). Until then nobody may write the registers that it reads or sums in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.+?)\s*;")
_REGISTER = re.compile(r"^R(\d+)(?:\.64)?$")
_NO_RESULT = (
    *("BAR", "BRA", "BSSY", "BSYNC", "DEPBAR", "ERRBAR", "EXIT", "FENCE", "FSETP", "ISETP"),
    *("LDGDEPBAR", "LDGSTS", "MEMBAR", "NOP", "PLOP3", "R2UR", "ST", "STG", "STS", "STSM"),
    *("UBLKCP", "WARPGROUP", "WARPSYNC"),
)
"""Instructions that write no register of a thread; those whose names begin with U are likewise."""


@dataclass(frozen=True)
class ProductLoop:
    """An innermost loop with products, as instructions from its label to its branch."""

    instructions: tuple[str, ...]

    def places(self, *parts: str) -> list[int]:
        """Places of the instructions whose names have all these parts, as ("MUFU", "EX2")."""
        names = (set(_name(one).split(".")) for one in self.instructions)
        return [place for place, name in enumerate(names) if name >= set(parts)]

    @property
    def full_waits(self) -> list[int]:
        """Places of the waits for all products that were asked for."""
        return [
            place
            for place in self.places("WARPGROUP", "DEPBAR")
            if self.instructions[place].endswith("gsb0, 0x0")
        ]

    def check_ahead(self, exponentials: int) -> None:
        """AssertionError: weights are computed while no products are under way.

        There is one full wait. Before it products of the keys ahead are asked for, and behind it
        the sums of weighted values, which read the weights from registers; so all exponentials
        before it, of which a thread has so many at least, stand beside one product or both.
        """
        (wait,) = self.full_waits
        products = self.places("HGMMA")
        before = [place for place in products if place < wait]
        assert 0 < len(before) < len(products), f"products at {products}, the wait at {wait}"
        found = self.places("MUFU", "EX2")
        assert sum(place < wait for place in found) >= exponentials, "weights behind the wait"
        for place in products:
            assert _is_in_registers(self.instructions[place]) == (place > wait)
            assert not self.overwritten(place)

    def overwritten(self, place: int) -> list[str]:
        """What writes a product's registers between the product and the next full wait."""
        held = _held(self.instructions[place])
        after = self.instructions[place + 1 :] + self.instructions[:place]
        found = []
        for one in after:
            if _name(one).startswith("WARPGROUP.DEPBAR") and one.endswith("gsb0, 0x0"):
                return found
            if not _name(one).startswith("HGMMA") and _written(one) & held:
                found.append(one)
        raise AssertionError(f"no full wait for {self.instructions[place]}")


def product_loops(listing: str) -> list[tuple[str, ...]]:
    """The instructions of each innermost loop with products in what nvdisasm wrote."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
            target = re.search(r"BRA.*\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    inner = [
        (first, end)
        for first, end in loops
        if not any(first <= a and b <= end and (a, b) != (first, end) for a, b in loops)
    ]
    bodies = [tuple(instructions[first:end]) for first, end in inner]
    return [body for body in bodies if any("HGMMA" in one for one in body)]


def _name(instruction: str) -> str:
    """The name with its modifiers, without a predicate."""
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def _operands(instruction: str) -> list[str]:
    words = instruction.split(_name(instruction), 1)[1].split(",")
    return [word.strip() for word in words]


def _is_in_registers(product: str) -> bool:
    """Return whether a product's left side is, and is not in shared memory."""
    return "desc" not in _operands(product)[1]


def _held(product: str) -> set[int]:
    """Registers of a product: its sums, and its left side where that is there."""
    rows, columns, _ = map(int, _name(product).split(".")[1].split("x"))
    out, left, *_ = _operands(product)
    held = _range(out, rows * columns // 128)
    return held | _range(left, 4) if _is_in_registers(product) else held


def _range(register: str, count: int) -> set[int]:
    first = int(register.removeprefix("R"))
    return set(range(first, first + count))


def _written(instruction: str) -> set[int]:
    name = _name(instruction)
    if name.split(".")[0] in _NO_RESULT or name.startswith("U"):
        return set()
    registers = (found for one in _operands(instruction)[:2] if (found := _REGISTER.match(one)))
    first: Sequence[str] | re.Match[str] | None = next(registers, None)
    if first is None:
        return set()
    parts = name.split(".")
    count = 4 if "128" in parts or "M88" in parts else 2 if {"64", "WIDE"} & set(parts) else 1
    return set(range(int(first[1]), int(first[1]) + count))
