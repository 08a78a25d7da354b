"""The losses of a trainer by name: what each reads of a datum, and its options.

Losses of whole sequences: terms that read the log-probabilities of all of a datum's tokens.

With the names of `token_losses.py`, and n the tokens of a sequence whose weight is not 0:

    gspo   s = exp(Σ (l - q) / n) of each sequence;  -Σ w min(s A, clip(s) A) over all tokens
    dpo    m = Σ w (l - q) of each sequence, q being the reference's;
           -Σ log σ(β (m_chosen - m_rejected)) over pairs: a chosen datum, then its rejected one

Source: GSPO (Zheng et al., 2025), its sequence-level ratio; DPO (Rafailov et al., 2023), eq. 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pcg.errors import FinetuneError
from pcg.keywords import check_names
from pcg.runtime.training.losses.columns import Columns
from pcg.runtime.training.losses.preference_losses import DEFAULTS, preference
from pcg.runtime.training.losses.token_losses import (
    Options,
    cispo,
    clipped,
    cross_entropy,
    dro,
    importance_sampling,
    ppo,
)
from pcg.units import is_finite, shown

# ---------------------------------------------------------------------------------- sequence losses


def gspo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w min(s A, clip(s) A), s being the ratio of the token's sequence."""
    counts = columns.sums((columns.weights != 0).to(logprobs.dtype)).clamp(min=1)
    ratios = (columns.sums(columns.log_ratios(logprobs)) / counts).exp()
    return -(columns.weights * clipped(ratios[columns.places], columns, options)).sum()


def dpo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ log σ(β (m_chosen - m_rejected)) over pairs of data."""
    margins = columns.sums(columns.weights * columns.log_ratios(logprobs)).view(-1, 2)
    return -logsigmoid(options["beta"] * (margins[:, 0] - margins[:, 1])).sum()


# --------------------------------------------------------------------------------------------- loss


_NONE: Options = MappingProxyType({})


@dataclass(frozen=True)
class Loss:
    """A loss of some data.

    Attributes:
        function: returns the loss, a sum, of log-probabilities [T], columns and options.
        reads: what each datum has to have beside its tokens.
        options: its options, and their defaults.
        together: the number of consecutive data of one term.
        is_linear: True if it is linear in the log-probabilities: -Σ w l.
        reads_weights: True if data may have weights.
        skips_zero_advantages: True if a token without an advantage has no weight by default.
    """

    name: str
    function: Callable[[Tensor, Columns, Options], Tensor]
    reads: tuple[str, ...] = ("advantages", "logprobs")
    options: Options = field(default_factory=lambda: _NONE)
    together: int = 1
    is_linear: bool = False
    reads_weights: bool = True
    skips_zero_advantages: bool = False

    def with_options(self, given: Mapping[str, float] | None) -> Options:
        """Return its options, some of them as given. FinetuneError: names a bad one."""
        if given is not None and not isinstance(given, Mapping):
            raise FinetuneError(f"loss_options={shown(given)}; use a dict of numbers by name")
        found = {**self.options, **{str(name): value for name, value in (given or {}).items()}}
        if found and self.options:
            check_names(found, self.options, FinetuneError)
        elif found:
            names = ", ".join(map(str, found))
            raise FinetuneError(f"loss {self.name!r} has no options, and {names} was given")
        for name, value in found.items():
            if not is_finite(value) or value < 0:
                raise FinetuneError(
                    f"loss {self.name!r}: {name}={shown(value)}; use a number of at least 0"
                )
        low, high = found.get("clip_low_threshold", 0), found.get("clip_high_threshold", 0)
        if low > high:
            raise FinetuneError(
                f"loss {self.name!r}: clip_low_threshold={low:g} is above "
                f"clip_high_threshold={high:g}; they are bounds of a ratio, such as 0.8 and 1.2"
            )
        return found

    def evaluate(
        self, logprobs: Tensor, columns: Columns, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and its gradient by each log-probability, [T]; both fp64."""
        with torch.enable_grad():
            x = logprobs.detach().to(torch.float64).requires_grad_()
            total = self.function(x, columns, options)
            (slopes,) = torch.autograd.grad(total, x)
        return total.detach(), slopes


def _clip(low: float, high: float) -> Options:
    return MappingProxyType({"clip_low_threshold": low, "clip_high_threshold": high})


def _beta(beta: float) -> Options:
    return MappingProxyType({"beta": beta})


CROSS_ENTROPY = Loss("cross_entropy", cross_entropy, (), is_linear=True)
OF_A_FUNCTION = Loss("of a function", cross_entropy, (), is_linear=True, reads_weights=False)
"""What goes forward for a loss of the caller's own, which reads log-probabilities alone."""

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        CROSS_ENTROPY,
        Loss("importance_sampling", importance_sampling),
        Loss("ppo", ppo, options=_clip(0.8, 1.2)),
        Loss("cispo", cispo, options=_clip(0.0, 4.0)),
        Loss("dro", dro, options=_beta(0.01)),
        Loss("gspo", gspo, options=_clip(0.8, 1.2), skips_zero_advantages=True),
        Loss("dpo", dpo, ("logprobs",), _beta(0.1), together=2),
        Loss("preference", preference, ("logprobs",), DEFAULTS, together=2),
    )
}
"""Every loss by its name. Defaults: Tinker's of ppo, its cookbook's of cispo, TRL's of dpo."""


def loss_of(name: object) -> Loss:
    """Return a loss by its name. FinetuneError: there is none."""
    if not isinstance(name, str) or name not in LOSSES:
        raise FinetuneError(f"loss={shown(name)}; use {', '.join(LOSSES)}, or a function")
    return LOSSES[name]
