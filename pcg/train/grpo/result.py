"""The result of a run of GRPO, and a sample of its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcg.runtime.training.trainer.datum import Snapshot


@dataclass(frozen=True)
class Sample:
    """A completion and how it was scored.

    Attributes:
        step: the update, from 1, that first read it.
        prompt: the prompt as the data has it.
        completion: its text.
        rewards: the reward of each function by name; None where it did not score.
        advantage: its advantage.
    """

    step: int
    prompt: Any
    completion: str
    rewards: Mapping[str, float | None]
    advantage: float

    @property
    def row(self) -> dict[str, object]:
        """A row of a record's table; the reward of one function is the reward."""
        values = list(self.rewards.values())
        rewards = dict(self.rewards) if len(values) > 1 else {"reward": values[0]}
        return {
            "prompt": self.prompt,
            "completion": self.completion,
            **rewards,
            "advantage": self.advantage,
        }


@dataclass(frozen=True)
class GrpoResult:
    """A run that has ended.

    Attributes:
        adapter: the adapter's name.
        steps: updates.
        history: the numbers of each update, by TRL's names (docs/grpo.md).
        samples: completions of the last generation, a few.
        snapshot: the version that is served.
        seconds: its time.
    """

    adapter: str
    steps: int
    history: Sequence[Mapping[str, float]] = field(repr=False)
    samples: Sequence[Sample] = field(repr=False)
    snapshot: Snapshot
    seconds: float
