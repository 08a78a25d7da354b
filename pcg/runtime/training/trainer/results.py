"""Results of a trainer's commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.versions import AdapterVersion


@dataclass(frozen=True)
class Scored:
    """The result of `forward` and `forward_backward`.

    Attributes:
        loss: the loss, a sum over all data and tokens.
        logprobs: of each datum, the log-probability of each target, [N] or [N, K] as its targets,
            in host memory; 0 where nothing is predicted.
        tokens: tokens that went through the model, virtual ones not counted.
        targets: targets among them.
    """

    loss: float
    logprobs: tuple[Tensor, ...]
    tokens: int
    targets: int


@dataclass(frozen=True)
class Stepped:
    """The result of `optim_step`.

    Attributes:
        step: the number of updates of the adapter, this one included.
        gradient_norm: the norm of the gradients before they were clipped.
        tokens: tokens that went through the model, forward and back, since the update before.
        loss: the sum of the losses since then.
    """

    step: int
    gradient_norm: float
    tokens: int
    loss: float


@dataclass(frozen=True)
class Saved:
    """The result of `save_state` and `load_state`.

    Attributes:
        path: the state's directory.
        step: the number of updates of the adapter.
        notes: what was given to keep with the state.
    """

    path: Path
    step: int
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The result of `snapshot`: a version of the adapter that is served.

    Attributes:
        version: its name and number, `name@number`.
        adapter: the version itself, which requests may name though later ones replace it.
    """

    version: AdapterVersion
    adapter: Adapter = field(repr=False)
