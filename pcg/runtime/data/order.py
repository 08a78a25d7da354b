"""The order of finetuning's examples: seeded, cut into batches, resumable anywhere.

The order of an epoch is a function of (seed, epoch), and a position is (epoch, index), so that a
resumed job continues with the next batch of the interrupted job. Batches are token-flat, without
padding: `max_tokens` bounds the sum of lengths.

A mixture draws each example's source by probabilities. Without shuffling, the first epoch is that
of `datasets.interleave_datasets`.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias, get_args

from pcg.errors import FinetuneError
from pcg.runtime.data.example import Example
from pcg.units import is_finite, shown

StoppingStrategy: TypeAlias = Literal["first_exhausted", "all_exhausted"]
_LOT = 1000
"""Number of draws per call of the generator, as of datasets, whose order depends on it."""


def check_probabilities(probabilities: object, strategy: object) -> None:
    """Refuse probabilities that are no numbers above 0, and a strategy without effect."""
    if strategy not in get_args(StoppingStrategy):
        raise FinetuneError(
            f"stopping_strategy={shown(strategy)}; use one of "
            f"{', '.join(get_args(StoppingStrategy))}"
        )
    if probabilities is None:
        if strategy != "first_exhausted":
            raise FinetuneError(
                f"stopping_strategy={strategy!r} has no effect without probabilities; give them, "
                "too"
            )
        return
    if not (
        isinstance(probabilities, tuple | list)
        and len(probabilities) > 1
        and all(is_finite(each) and each > 0 for each in probabilities)
    ):
        raise FinetuneError(
            f"probabilities={shown(probabilities)}; use a number above 0 for each of several data "
            "sources, such as [0.7, 0.3]"
        )


@dataclass(frozen=True)
class Mixture:
    """A mixture of consecutive parts of the examples, by probabilities.

    Attributes:
        lengths: the number of examples of each part.
        probabilities: the weight of each part; the sum need not be 1.
    """

    lengths: tuple[int, ...]
    probabilities: tuple[float, ...]
    strategy: StoppingStrategy = "first_exhausted"

    @property
    def repeats(self) -> bool:
        return self.strategy == "all_exhausted"

    def order(self, seed: int, epoch: int, shuffle: bool) -> Any:
        """Return the indexes of an epoch's examples, an array."""
        import numpy as np

        draws = self._draws(np.random.default_rng((abs(seed), epoch) if epoch else abs(seed)))
        order = np.empty(len(draws), dtype=np.int64)
        for part, length in enumerate(self.lengths):
            places = np.flatnonzero(draws == part)
            begin = sum(self.lengths[:part])
            for cycle in range(-(-len(places) // length)):
                lot = places[cycle * length : (cycle + 1) * length]
                within = np.arange(length)
                if shuffle:
                    np.random.default_rng((abs(seed), epoch, part, cycle)).shuffle(within)
                order[lot] = begin + within[: len(lot)]
        return order

    def _draws(self, generator: Any) -> Any:
        """Return the part of each example, [N], until the first part or all are exhausted."""
        import numpy as np

        weights = np.array(self.probabilities) / sum(self.probabilities)
        lots: list[Any] = []
        counts = np.zeros(len(weights), dtype=np.int64)
        is_over = np.all if self.repeats else np.any
        while not is_over(counts >= self.lengths):
            lots.append(generator.choice(len(weights), size=_LOT, p=weights))
            counts += np.bincount(lots[-1], minlength=len(weights))
        draws = np.concatenate(lots)
        ends = [
            places[length - 1] if len(places) >= length else len(draws)
            for part, length in enumerate(self.lengths)
            for places in (np.flatnonzero(draws == part),)
        ]
        return draws[: 1 + (max(ends) if self.repeats else min(ends))]


class Batch(list[Example]):
    """Examples, with their indexes in the data."""

    def __init__(self, examples: Iterable[Example], indexes: Sequence[int]) -> None:
        super().__init__(examples)
        self.indexes = indexes


class Batches:
    """Batches of examples, epoch after epoch.

    Iterating yields the rest of the current epoch and ends with it; iterating again yields the next
    epoch. The position advances before a batch is yielded, so that a state saved during the
    processing of a batch resumes with the batch after it.

    Args:
        examples: a non-empty list.
        batch_size: examples per batch; the last batch of an epoch may have fewer.
        max_tokens: tokens per batch: as many examples as fit, in order. Both bounds may be given.
        shuffle: True for a new order in each epoch; False for the order of `examples`.
        mixture: the mixture of the examples' parts; None for each example once.

    Attributes:
        epoch: epoch of the next batch, from 0.
        index: index of the next batch in its epoch, from 0.

    Raises:
        FinetuneError: no examples, no bound, or an example longer than `max_tokens`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        mixture: Mixture | None = None,
    ) -> None:
        if not examples:
            raise FinetuneError("no examples to finetune on")
        if batch_size is None and max_tokens is None:
            raise FinetuneError("batches need a bound: give batch_size, max_tokens or both")
        if batch_size is not None and batch_size < 1:
            raise FinetuneError(f"batch_size={batch_size}; use at least 1")
        self._lengths = [len(example.ids) for example in examples]
        longest = max(range(len(examples)), key=self._lengths.__getitem__)
        if max_tokens is not None and self._lengths[longest] > max_tokens:
            raise FinetuneError(
                f"example {longest} has {self._lengths[longest]} tokens, more than "
                f"max_tokens={max_tokens} of a batch; raise it, or truncate with max_length"
            )
        self._examples, self._mixture = examples, mixture
        self._settings = {
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._fingerprint = _fingerprint(examples)
        self.epoch = 0
        self.index = 0
        self._plan = self.plan(0)

    def largest(self, virtual: int = 0, replicas: int = 1, parts: int = 1) -> tuple[int, int]:
        """Return the maximum numbers of examples and of tokens in a batch of any epoch.

        Args:
            virtual: tokens before each example, which do not count for `max_tokens`.
            replicas: the number of replicas that share a batch (`pcg.ranks.step_parts`).
            parts: the number of ranks that share each sequence, by two chunks each
                (`pcg.ranks.step_parts`).
        """
        size, most = self._settings["batch_size"], self._settings["max_tokens"]
        lengths = sorted(self._lengths)
        count = len(lengths) if size is None else min(size, len(lengths))
        tokens = sum(lengths[-count:])
        if self._mixture is not None and self._mixture.repeats:
            count = len(lengths) if size is None else size
            tokens = count * lengths[-1]
        if most is not None:
            count = sum(total <= most for total in accumulate(lengths[:count]))
            tokens = min(tokens, most)
        if replicas > 1:
            tokens = min(tokens, tokens // replicas + lengths[-1])
        tokens += count * virtual
        return count, tokens if parts == 1 else min(tokens, tokens // parts + 2 * count)

    def plan(self, epoch: int) -> Sequence[Sequence[int]]:
        """Return the indexes of the examples in each batch of an epoch."""
        seed, shuffle = self._settings["seed"] or 0, bool(self._settings["shuffle"])
        order = list(range(len(self._examples)))
        if self._mixture is not None:
            order = self._mixture.order(seed, epoch, shuffle).tolist()
        elif shuffle:
            # Seeded by text, so that the order is equal on all platforms, and differs by epoch.
            random.Random(f"{seed}:{epoch}").shuffle(order)
        size, most = self._settings["batch_size"], self._settings["max_tokens"]
        batches: list[list[int]] = []
        tokens = 0
        for example in order:
            tokens += self._lengths[example]
            full = bool(batches) and (
                (size is not None and len(batches[-1]) == size)
                or (most is not None and tokens > most)
            )
            if full or not batches:
                batches.append([])
                tokens = self._lengths[example]
            batches[-1].append(example)
        return batches

    def __len__(self) -> int:
        """Return the number of batches of the current epoch."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the remaining batches of the current epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            indexes = self._plan[self.index]
            self._advance()
            yield Batch((self._examples[index] for index in indexes), indexes)

    def close(self) -> None:
        """End the work ahead of the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the settings and a checksum of the examples, as JSON values."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "examples": len(self._examples),
            "fingerprint": self._fingerprint,
            **self._settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved position. FinetuneError: saved with other examples or settings."""
        expected = self.state_dict()
        for key in expected:
            if key not in state:
                raise FinetuneError(f"the saved position has no {key!r}; it is not one of Batches")
            if key not in ("epoch", "index") and state[key] != expected[key]:
                raise FinetuneError(
                    f"the saved position has {key}={shown(state[key])}, this run {key}="
                    f"{expected[key]!r}; resume with the same data and settings, or start anew"
                )
        epoch, index = state["epoch"], state["index"]
        if type(epoch) is not int or type(index) is not int or epoch < 0:
            raise FinetuneError(
                f"the saved position has epoch={shown(epoch)} and index={shown(index)}; both are "
                "ints of at least 0"
            )
        plan = self.plan(epoch)
        if not 0 <= index < len(plan):
            raise FinetuneError(
                f"the saved index={shown(index)} is outside the {len(plan)} batches"
            )
        self.epoch, self.index, self._plan = epoch, index, plan

    def _advance(self) -> None:
        self.index += 1
        if self.index == len(self._plan):
            self.epoch += 1
            self.index = 0
            self._plan = self.plan(self.epoch)


def _fingerprint(examples: Sequence[Example]) -> int:
    checksum = 0
    for example in examples:
        for values in (example.ids, example.labels):
            checksum = zlib.crc32(_packed(values), checksum)
        if example.weight != 1.0:
            checksum = zlib.crc32(array("d", [example.weight]), checksum)
    return checksum


def _packed(values: Sequence[int]) -> array[int]:
    return values if isinstance(values, array) and values.typecode == "q" else array("q", values)
