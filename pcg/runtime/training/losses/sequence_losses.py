"""Losses of whole sequences: terms that read the log-probabilities of all of a datum's tokens.

With the names of `token_losses.py`, and n the tokens of a sequence whose weight is not 0:

    gspo   s = exp(Σ (l - q) / n) of each sequence;  -Σ w min(s A, clip(s) A) over all tokens
    dpo    m = Σ w (l - q) of each sequence, q being the reference's;
           -Σ log σ(β (m_chosen - m_rejected)) over pairs: a chosen datum, then its rejected one

Source: GSPO (Zheng et al., 2025), its sequence-level ratio; DPO (Rafailov et al., 2023), eq. 7.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from pcg.runtime.training.losses.columns import Columns
from pcg.runtime.training.losses.token_losses import Options, clipped


def gspo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ w min(s A, clip(s) A), s being the ratio of the token's sequence."""
    counts = columns.sums((columns.weights != 0).to(logprobs.dtype)).clamp(min=1)
    ratios = (columns.sums(columns.log_ratios(logprobs)) / counts).exp()
    return -(columns.weights * clipped(ratios[columns.places], columns, options)).sum()


def dpo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return -Σ log σ(β (m_chosen - m_rejected)) over pairs of data."""
    margins = columns.sums(columns.weights * columns.log_ratios(logprobs)).view(-1, 2)
    return -logsigmoid(options["beta"] * (margins[:, 0] - margins[:, 1])).sum()
