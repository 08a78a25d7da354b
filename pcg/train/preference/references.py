"""References: log-probabilities that an adapter is held to, computed once for each pair.

Those of the base, or of an adapter that is served, are the log-probabilities of prompts: requests
of the engine that trains, over the one copy of the base. So there is no second model.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

from pcg.errors import AdapterNotFoundError, GenerationError, QueueFullError
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from pcg.runtime.training.trainer.trainer import Trainer
from pcg.train.preference.pairs import Pair, data_of, targets_of

_LOT = 8
"""Pairs that are computed at once."""
_AGAIN_S = 0.2
"""Time after which an engine that has too much waiting is asked again, seconds."""


class References(ABC):
    """Log-probabilities of pairs by a reference."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[array[float], array[float]]] = {}

    def of(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Return the log-probability of each target, chosen and rejected outputs in turns."""
        missing = [pair for pair in pairs if pair.number not in self._kept]
        for begin in range(0, len(missing), _LOT):
            lot = missing[begin : begin + _LOT]
            found = self._compute(lot)
            for index, pair in enumerate(lot):
                two = found[2 * index : 2 * index + 2]
                self._kept[pair.number] = array("d", two[0]), array("d", two[1])
        return [values.tolist() for pair in pairs for values in self._kept[pair.number]]

    @abstractmethod
    def _compute(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """Return what `of` does, of pairs that were not asked for before."""


class ServedReferences(References):
    """Log-probabilities by the base, or by an adapter that the executor serves.

    Args:
        adapter: the adapter's name; None for the base.
        check: raises an error if the run has ended meanwhile.
    Raises:
        AdapterNotFoundError: there is none of that name.
    """

    def __init__(self, executor: Executor, adapter: str | None, check: Callable[[], None]) -> None:
        super().__init__()
        self._executor = executor
        self._check = check
        if adapter is not None and adapter not in executor.adapters:
            raise AdapterNotFoundError(
                f"reference={adapter!r}, and there is no adapter of that name; use 'base', 'start' "
                f"or one of {', '.join(executor.adapters) or 'none'}"
            )
        self._adapter = adapter

    def _compute(self, pairs: Sequence[Pair]) -> list[list[float]]:
        examples = [example for pair in pairs for example in pair.examples]
        prompts = [list(example.ids) for example in examples]
        done = self._done(prompts)
        found = []
        for example, one in zip(examples, done, strict=True):
            if one.prompt_logprobs is None:
                raise GenerationError("the engine returned no log-probabilities of a prompt")
            values = [each.logprob for each in one.prompt_logprobs[1:] if each is not None]
            targets = targets_of(example)
            found.append([x if t >= 0 else 0.0 for x, t in zip(values, targets, strict=True)])
        return found

    def _done(self, prompts: list[list[int]]) -> list[Completion]:
        """Return the prompts' completions, of no tokens, once the engine takes them."""
        while True:
            self._check()
            try:
                return self._executor.generate(
                    prompts, self._adapter, max_new_tokens=0, prompt_logprobs=0
                )
            except QueueFullError:
                time.sleep(_AGAIN_S)


class StartReferences(References):
    """Log-probabilities by the adapter as it is before its first update.

    All pairs are computed at once, while the trainer still has that adapter.
    """

    def __init__(self, trainer: Trainer, pairs: Sequence[Pair]) -> None:
        super().__init__()
        self._trainer = trainer
        self.of(pairs)

    def _compute(self, pairs: Sequence[Pair]) -> list[list[float]]:
        scored = self._trainer.forward(data_of(pairs, None))
        return [values.tolist() for values in scored.logprobs]
