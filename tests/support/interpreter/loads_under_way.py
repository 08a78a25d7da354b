"""Bytes that a thread's loads from global memory have under way, by machine code.

A load goes on until an instruction names one of the registers that it fills; loads come back in
order, so those before it are there, too, then. At a label nothing is under way that one can count
on, as other code may lead there.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bR(\d+)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def bytes_under_way(listing: str) -> int:
    """The most bytes that loads of a thread have under way in what nvdisasm wrote."""
    most = 0
    under_way: list[tuple[range, int]] = []
    for line in listing.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            under_way = [] if line.startswith(".L_") else under_way
            continue
        name, operands = found.groups()
        named = {int(number) for number in _REGISTER.findall(operands)}
        waits = [place for place, (own, _) in enumerate(under_way) if named & {*own}]
        if waits:
            under_way = under_way[waits[-1] + 1 :]
        if name.startswith("LDG."):
            first = _REGISTER.match(operands)
            size = next((_BYTES[part] for part in name.split(".") if part in _BYTES), 4)
            if first is not None:
                own = int(first[1])
                under_way.append((range(own, own + max(1, size // 4)), size))
                most = max(most, sum(size for _, size in under_way))
    return most
