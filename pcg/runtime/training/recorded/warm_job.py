"""A job that may come, of which an engine is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.errors import FinetuneError


@dataclass(frozen=True)
class WarmJob:
    """A job that may come.

    Attributes:
        peft: its recipe, as `Executor.finetune` takes it.
        batch: the most sequences of a step of its own.
        seq: the most tokens of each.
    Raises:
        FinetuneError: a number is not an int above 0.
    """

    peft: object
    batch: int = 1
    seq: int = 1024

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise FinetuneError(f"{name}={value!r} of a warm job; use an int of at least 1")
