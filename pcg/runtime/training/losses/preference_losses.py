"""Losses of pairs, chosen and rejected: a weighted sum of the terms of TRL's DPOTrainer.

With the names of `token_losses.py`, q being the reference's, and n the targets of a sequence,

    m = Σ w (l - q)
    Δ = m_chosen - m_rejected
    δ = m_chosen / n_chosen - m_rejected / n_rejected

and ε the label smoothing, the terms of a pair are

    sigmoid        -(1 - ε) log σ(β Δ) - ε log σ(-β Δ)
    hinge          max(0, 1 - β Δ)
    ipo            (δ - 1 / 2β)²
    robust         (-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)) / (1 - 2ε)
    sigmoid_norm   -log σ(β δ)
    sft            -Σ l of the chosen one's targets

Source: DPO (Rafailov et al., 2023), eq. 7, with the smoothing of cDPO (Mitchell, 2023); SLiC-HF
(Zhao et al., 2023); IPO (Azar et al., 2023), eq. 17, by means of tokens as its authors compute it;
robust DPO (Chowdhury et al., 2024); SimPO's normalization with a reference, as TRL 1.10 has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import logsigmoid

from pcg.runtime.training.losses.columns import Columns
from pcg.runtime.training.losses.token_losses import Options

Term = Callable[[Tensor, Tensor, Options], Tensor]
"""Returns a term of each pair, [pairs], of Δ, δ and the options."""


def _sigmoid(delta: Tensor, _: Tensor, options: Options) -> Tensor:
    x, smoothing = options["beta"] * delta, options["label_smoothing"]
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)


def _hinge(delta: Tensor, _: Tensor, options: Options) -> Tensor:
    return (1 - options["beta"] * delta).clamp(min=0)


def _ipo(_: Tensor, mean_delta: Tensor, options: Options) -> Tensor:
    # Of a tensor: with β = 0 the loss is not finite, which is refused as of any data.
    return (mean_delta - mean_delta.new_tensor(2 * options["beta"]).reciprocal()).square()


def _robust(delta: Tensor, _: Tensor, options: Options) -> Tensor:
    x, smoothing = options["beta"] * delta, options["label_smoothing"]
    flipped = smoothing * logsigmoid(-x)
    return (flipped - (1 - smoothing) * logsigmoid(x)) / (1 - 2 * smoothing)


def _sigmoid_norm(_: Tensor, mean_delta: Tensor, options: Options) -> Tensor:
    return -logsigmoid(options["beta"] * mean_delta)


TERMS: Mapping[str, Term] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "sigmoid_norm": _sigmoid_norm,
}
"""The terms of a pair that read margins, by TRL's names."""
SFT = "sft"
DEFAULTS: Options = MappingProxyType(
    {"beta": 0.1, "label_smoothing": 0.0, "sigmoid": 1.0}
    | dict.fromkeys([*(name for name in TERMS if name != "sigmoid"), SFT], 0.0)
)
"""The options: β, ε, and the weight of each term."""


def preference(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return the weighted sum of the terms over pairs of data."""
    is_target = columns.weights != 0
    margins = columns.sums(columns.weights * columns.log_ratios(logprobs)).view(-1, 2)
    counts = columns.sums(is_target.to(logprobs.dtype)).clamp(min=1).view(-1, 2)
    means = margins / counts
    deltas = margins[:, 0] - margins[:, 1], means[:, 0] - means[:, 1]
    total = logprobs.new_zeros(())
    for name, term in TERMS.items():
        if options[name]:
            total = total + options[name] * term(*deltas, options).sum()
    if options[SFT]:
        is_chosen = is_target & (columns.places % 2 == 0)
        total = total - options[SFT] * logprobs.where(is_chosen, 0.0).sum()
    return total
