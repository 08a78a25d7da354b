"""The bytes and FLOPs of each template kernel, by the arguments of a launch.

Lists say which token has which adapter, of which rank, and which keys a sequence sees; a formula
reads them, as a launch with the same sizes may do more or less. See `roofline_counts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from gpu_work import Work
from torch import Tensor

Arguments: TypeAlias = Mapping[str, Any]


def _numbers(x: Tensor) -> np.ndarray:
    """A list's contents, wherever it lies."""
    found: np.ndarray = getattr(x, "host", x).numpy()
    return found


@dataclass(frozen=True)
class _Segmented:
    """What a kernel of segmented adapters goes over, by its tables.

    Attributes:
        parts: slice, slot and places of every tile or segment that has a matrix there.
    """

    arguments: Arguments
    parts: Sequence[tuple[int, int, int]]
    ranks: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, arguments: Arguments, items: str) -> _Segmented:
        ranks, columns = (_numbers(arguments[name]) for name in ("ranks", "columns"))
        list_ = _numbers(arguments[items]).tolist()
        if items == "by_token":
            own = [(slot, 1) for slot, *_ in list_ if slot >= 0]
        else:  # of each block of ranks, the first one has them all
            own = [(item[0], item[2]) for item in list_ if item[2] and not item[6]]
        parts = [
            (j, slot, count) for j in range(len(ranks)) for slot, count in own if ranks[j, slot]
        ]
        return cls(arguments, parts, ranks, columns)

    @property
    def matrices(self) -> set[tuple[int, int]]:
        return {(j, slot) for j, slot, _ in self.parts}

    @property
    def flops(self) -> int:
        return sum(
            2 * count * int(self.ranks[j, slot] * self.columns[j, 1])
            for j, slot, count in self.parts
        )

    @property
    def row_elements(self) -> int:
        """Elements of the matrices, each once."""
        return sum(int(self.ranks[j, slot] * self.columns[j, 1]) for j, slot in self.matrices)

    @property
    def s_bytes(self) -> int:
        """A part of s: fp32, of each place the ranks up to the next multiple of 16."""
        padded = -(-self.ranks // 16) * 16
        return 4 * sum(count * int(padded[j, slot]) for j, slot, count in self.parts)

    def token_elements(self, tensors: int = 1) -> int:
        """Elements of the tokens in the slices' columns, those of several slices once.

        Of more `tensors` than one each slice has its own.
        """
        spans: dict[tuple[int, ...], dict[int, int]] = {}
        for j, slot in self.matrices:
            span = (*self.columns[j].tolist(), *([j] if tensors > 1 else []))
            own = sum(count for k, other, count in self.parts if (k, other) == (j, slot))
            spans.setdefault(span, {})[slot] = own
        return sum(size * sum(of_slot.values()) for (_, size, *_), of_slot in spans.items())

    def list_bytes(self, items: str) -> int:
        """The tables that are read: items, order, first elements of rows, ranks and columns."""
        places = sum(count for j, _, count in self.parts if j == 0)
        rows = sum(int(self.ranks[matrix]) for matrix in self.matrices)
        scales = 4 * len(self.matrices) if self.arguments["HAS_SCALES"] else 0
        lists = _numbers(self.arguments[items]).nbytes + self.columns.nbytes
        order = 4 * places if "order" in self.arguments else 0
        return lists + order + 8 * rows + 4 * len(self.matrices) + scales


def size_of(x: Tensor) -> int:
    """The bytes of an element."""
    return int(x.element_size())


def deferred_work(lora: Any) -> Work:
    """The work of a group's kernel to add LoRA that was left to it."""
    if lora.pointers is None:
        return Work(0)
    ranks = _numbers(lora.up.ranks)[lora.number]
    slots = [slot for slot, *_ in _numbers(lora.by_token).tolist() if slot >= 0 and ranks[slot]]
    columns = lora.up.sizes[lora.number]
    places, rows = (int(sum(ranks[slot] for slot in of)) for of in (slots, set(slots)))
    read = rows * (columns * size_of(lora.up.memory) + 8) + 4 * places * len(lora.s)
    return Work(read + lora.by_token.nbytes + 4 * len(set(slots)), 2 * places * columns)


def _shrink(a: Arguments) -> Work:
    found = _Segmented.of(a, "tiles")
    tokens = found.token_elements(a.get("INPUTS", 1))
    read = tokens * size_of(a["x"]) + found.row_elements * size_of(a["memory"])
    written = a["s"].shape[0] * found.s_bytes
    return Work(read + written + found.list_bytes("tiles"), found.flops)


def _expand(a: Arguments) -> Work:
    items = "tiles" if "tiles" in a else "by_token"
    found = _Segmented.of(a, items)
    tokens = found.token_elements(a.get("OUTPUTS", 1))
    moved = tokens * (size_of(a["y"]) + size_of(a["z"]))
    read = found.row_elements * size_of(a["memory"]) + a["PARTS"] * found.s_bytes
    return Work(moved + read + found.list_bytes(items), found.flops)


def _outer(a: Arguments) -> Work:
    found = _Segmented.of(a, "segments")
    tokens = found.token_elements(a.get("INPUTS", 1))
    read = tokens * size_of(a["x"]) + found.s_bytes
    return Work(read + 4 * found.row_elements + found.list_bytes("segments"), found.flops)


@dataclass(frozen=True)
class _Attended:
    """The parts of a batch that a kernel of attention goes over.

    Attributes:
        tokens: their tokens; `keys` the keys that they see, each part's once; `pairs` the pairs of
            a token and a key that it sees.
    """

    tokens: int
    keys: int
    pairs: int
    list_bytes: int

    @classmethod
    def of(cls, a: Arguments, items: str) -> _Attended:
        every, parts = _numbers(a[items]), _numbers(a["parts"])
        # An empty item has no rows, keys or splits.
        numbers = sorted(set(every[every[:, 2] > 0][:, 0].tolist()))
        tokens = keys = pairs = pages = 0
        window = a.get("WINDOW", 0)
        for _, length, context, _ in parts[numbers].tolist():
            tokens += length
            seen = np.arange(context + 1, context + length + 1)
            pairs += int((np.minimum(seen, window) if window else seen).sum())
            whole = min(context + length, window + length - 1) if window else context + length
            keys += whole
            pages += -(-whole // a["PAGE"]) if "PAGE" in a else 0
        return cls(tokens, keys, pairs, every.nbytes + 16 * len(numbers) + 4 * pages)


def _kv_size(a: Arguments) -> int:
    """Bytes of a key and a value of all heads."""
    return (a["H"] // a["G"]) * (a["D"] + a["DV"]) * size_of(a["keys"])


def _attend_tiles(a: Arguments) -> Work:
    seen, h, size = _Attended.of(a, "tiles"), a["H"], size_of(a["q"])
    moved = seen.tokens * h * ((a["D"] + a["DV"]) * size + (4 if a["LSE"] else 0))
    return Work(
        moved + seen.keys * _kv_size(a) + seen.list_bytes,
        2 * seen.pairs * h * (a["D"] + a["DV"]),
    )


def _attend_splits(a: Arguments) -> Work:
    seen, h = _Attended.of(a, "splits"), a["H"]
    counts = _numbers(a["splits"])[:, 2]
    whole, splits = int((counts == 1).sum()), int((counts > 1).sum())
    moved = seen.tokens * h * a["D"] * size_of(a["q"]) + 4 * splits * h * (a["DV"] + 2)
    moved += whole * h * (a["DV"] * size_of(a["out"]) + (4 if a["LSE"] else 0))
    return Work(
        moved + seen.keys * _kv_size(a) + seen.list_bytes,
        2 * seen.pairs * h * (a["D"] + a["DV"]),
    )


def _reduce_splits(a: Arguments) -> Work:
    decodes = _numbers(a["decodes"])
    several = decodes[decodes[:, 2] > 1]
    tokens, splits = len(several), int(several[:, 2].sum())
    read = 4 * splits * a["H"] * (a["DV"] + 2)
    written = tokens * a["H"] * (a["DV"] * size_of(a["out"]) + (4 if a["LSE"] else 0))
    return Work(read + written + decodes.nbytes + 16 * tokens)


def _query_gradients(a: Arguments) -> Work:
    seen, h, size = _Attended.of(a, "tiles"), a["H"], size_of(a["q"])
    moved = seen.tokens * h * ((2 * a["D"] + a["DV"]) * size + 8)
    # Scores and dq, and the product with values.
    flops = 2 * seen.pairs * h * (2 * a["D"] + a["DV"])
    return Work(moved + seen.keys * _kv_size(a) + seen.list_bytes, flops)


def _key_gradients(a: Arguments) -> Work:
    seen, h, size = _Attended.of(a, "key_blocks"), a["H"], size_of(a["q"])
    heads = h // a["G"]
    read = seen.tokens * h * ((a["D"] + a["DV"]) * size + 8) + seen.keys * _kv_size(a)
    written = seen.tokens * heads * (a["D"] + a["DV"]) * size
    if a["PAGED"]:  # the pass's sums, read and written in fp32
        written += 2 * 4 * seen.keys * heads * (a["D"] + a["DV"])
    flops = 4 * seen.pairs * h * (a["D"] + a["DV"])
    return Work(read + written + seen.list_bytes, flops)


def _delta_rows(a: Arguments) -> Work:
    return Work(a["count"] * (2 * a["DV"] * size_of(a["dout"]) + 4))


def _loss_rows(a: Arguments) -> Work:
    tokens = len(a["loss"])
    moved = 2 if a["TRAINS"] else 1
    return Work(tokens * (moved * a["V"] * size_of(a["z"]) + 8 + 4 * moved))


def _greedy_rows(a: Arguments) -> Work:
    return Work(len(a["tokens"]) * (a["V"] * size_of(a["logits"]) + 8))


FORMULAS: Mapping[str, Callable[[Arguments], Work]] = {
    "shrink_kernel": _shrink,
    "expand_kernel": _expand,
    "expand_tokens_kernel": _expand,
    "outer_kernel": _outer,
    "attend_tiles": _attend_tiles,
    "attend_splits": _attend_splits,
    "reduce_splits": _reduce_splits,
    "query_gradients": _query_gradients,
    "key_gradients": _key_gradients,
    "delta_rows": _delta_rows,
    "loss_rows": _loss_rows,
    "greedy_rows": _greedy_rows,
}
"""The work of each template kernel, by its arguments."""
