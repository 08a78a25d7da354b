"""Losses of the trainer: functions of tokens' log-probabilities, summed and never averaged.

With a token's log-probability l, its log-probability q at the time of sampling, its advantage A,
its weight w, and r = exp(l - q):

    cross_entropy         -Σ w l
    importance_sampling   -Σ w r A
    ppo                   -Σ w min(r A, clip(r) A)
    cispo                 -Σ w stop_gradient(clip(r)) l A
    dro                   -Σ w (l A - β (l - q)² / 2)

clip(r) is r clipped to [clip_low_threshold, clip_high_threshold], which are ratios. Over sequences,
with n the number of a sequence's tokens with a weight other than 0:

    gspo   s = exp(Σ (l - q) / n) of each sequence;  -Σ w min(s A, clip(s) A) over all tokens
    dpo    m = Σ w (l - q) of each sequence, q of the reference;
           -Σ log σ(β (m_chosen - m_rejected)) over pairs: a chosen datum, then its rejected datum
    kto    Σ v (1 - σ(β (m - kl))) of sequences with advantages of 1, v = desirable_weight, and
           Σ v (1 - σ(β (kl - m))) of sequences with advantages of -1, v = undesirable_weight

`preference` is a weighted sum of the terms of TRL's DPOTrainer over pairs. With

    Δ = m_chosen - m_rejected
    δ = m_chosen / n_chosen - m_rejected / n_rejected

and ε the label smoothing, the terms of a pair are

    sigmoid        -(1 - ε) log σ(β Δ) - ε log σ(-β Δ)
    hinge          max(0, 1 - β Δ)
    ipo            (δ - 1 / 2β)²
    exo_pair       σ(β Δ) (log σ(β Δ) - log(1 - ε)) + σ(-β Δ) (log σ(-β Δ) - log ε)
    nca_pair       -log σ(β m_chosen) - (log σ(-β m_chosen) + log σ(-β m_rejected)) / 2
    robust         (-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)) / (1 - 2ε)
    bco_pair       -log σ(β m_chosen) - log σ(-β m_rejected)
    sppo_hard      (m_chosen - 1 / 2β)² + (m_rejected + 1 / 2β)²
    aot            sigmoid of sorted l_chosen - l_rejected minus sorted q_chosen - q_rejected
    aot_unpaired   sigmoid of sorted m_chosen minus sorted m_rejected
    apo_zero       1 - σ(β m_chosen) + σ(β m_rejected)
    apo_down       σ(β m_chosen) + 1 - σ(β Δ)
    discopop       -(1 - s) log σ(β Δ) + s exp(-β Δ), s = σ(β Δ / τ)
    sigmoid_norm   -log σ(β δ)
    sft            -Σ l of the chosen datum's targets

where aot and aot_unpaired sort the pairs of a batch.

To add a loss: write its function in this file, and list it in `LOSSES`.

Source: Tinker's documentation of losses; ppo as in Schulman et al. (2017), cispo as in MiniMax-M1,
dro as in Richemond et al. (2024); GSPO (Zheng et al., 2025), its sequence-level ratio; DPO
(Rafailov et al., 2023), eq. 7, with the smoothing of cDPO (Mitchell, 2023); KTO (Ethayarajh et al.,
2024); SLiC-HF (Zhao et al., 2023); IPO (Azar et al., 2023), eq. 17, by means of tokens as its
authors compute it; robust DPO (Chowdhury et al., 2024); EXO (Ji et al., 2024), eq. 16; NCA (Chen et
al., 2024); BCO without its shift (Jung et al., 2024); SPPO (Wu et al., 2024); AOT (Melnyk et al.,
2024); APO (D'Oosterlinck et al., 2024), eq. 7 and 8; DiscoPOP (Lu et al., 2024), eq. 5; SimPO's
normalization with a reference, all as TRL 1.16 has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pcg.errors import FinetuneError
from pcg.keywords import check_names
from pcg.units import is_finite, shown


@dataclass(frozen=True)
class Columns:
    """The numbers of the tokens of some data, concatenated: [T], fp64.

    Attributes:
        weights: the weight of each token's loss; 0 for tokens without a target. [T, K] for tokens
            with K targets each, which only linear losses support.
        advantages: the advantage of each token.
        sampled: each token's log-probability at the time of sampling, or by a reference.
        places: the number of each token's datum, int64.
        count: the number of data.
    """

    weights: Tensor
    advantages: Tensor
    sampled: Tensor
    places: Tensor
    count: int

    @property
    def width(self) -> int:
        """The number of targets of a token, K."""
        return 1 if self.weights.dim() == 1 else self.weights.shape[1]

    def log_ratios(self, logprobs: Tensor) -> Tensor:
        """Return logprobs minus sampled logprobs; 0 for tokens without weight, [T]."""
        return (logprobs - self.sampled).where(self.weights != 0, 0.0)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum over the tokens of each datum, [count]."""
        return x.new_zeros(self.count).index_add(0, self.places, x)


Options = Mapping[str, float]


def _cross_entropy(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    return -(columns.weights * logprobs).sum()


def _importance_sampling(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    return -(columns.weights * _ratios(logprobs, columns) * columns.advantages).sum()


def _ppo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    return -(columns.weights * _clipped(_ratios(logprobs, columns), columns, options)).sum()


def _ratios(logprobs: Tensor, columns: Columns) -> Tensor:
    """Return r of each token, [T]; 1 without an advantage, as q may be padding."""
    return columns.log_ratios(logprobs).where(columns.advantages != 0, 0.0).exp()


def _clipped(ratios: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return min(r A, clip(r) A) of each token, [T]."""
    near = ratios.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return torch.minimum(ratios * columns.advantages, near * columns.advantages)


def _cispo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    ratios = columns.log_ratios(logprobs.detach()).exp()
    near = ratios.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -(columns.weights * near * logprobs * columns.advantages).sum()


def _dro(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    penalties = 0.5 * options["beta"] * columns.log_ratios(logprobs).square()
    return -(columns.weights * (logprobs * columns.advantages - penalties)).sum()


@dataclass(frozen=True)
class Pairs:
    """The sums of pairs of data; columns are the chosen and the rejected datum.

    Attributes:
        logprobs: the log-probability of each token, [T].
    """

    logprobs: Tensor
    columns: Columns

    @property
    def policy(self) -> Tensor:
        """Return Σ w l, [pairs, 2]."""
        weights = self.columns.weights
        return self.columns.sums(weights * self.logprobs.where(weights != 0, 0.0)).view(-1, 2)

    @cached_property
    def scores(self) -> Tensor:
        """m, [pairs, 2]."""
        columns = self.columns
        return columns.sums(columns.weights * columns.log_ratios(self.logprobs)).view(-1, 2)

    @property
    def delta(self) -> Tensor:
        """Δ, [pairs]."""
        return self.scores[:, 0] - self.scores[:, 1]

    @property
    def mean_delta(self) -> Tensor:
        """δ, [pairs]."""
        is_target = (self.columns.weights != 0).to(self.logprobs.dtype)
        means = self.scores / self.columns.sums(is_target).clamp(min=1).view(-1, 2)
        return means[:, 0] - means[:, 1]


Term = Callable[[Pairs, Options], Tensor]
"""A function that returns a term for each pair, [pairs]."""


def _tensor(value: float, pairs: Pairs) -> Tensor:
    """Return an option as a tensor, so that 0 gives a non-finite loss, which is refused."""
    return pairs.scores.new_tensor(value)


def _smoothed(delta: Tensor, options: Options) -> Tensor:
    x, smoothing = options["beta"] * delta, options["label_smoothing"]
    return -(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)


def _sigmoid(pairs: Pairs, options: Options) -> Tensor:
    return _smoothed(pairs.delta, options)


def _hinge(pairs: Pairs, options: Options) -> Tensor:
    return (1 - options["beta"] * pairs.delta).clamp(min=0)


def _ipo(pairs: Pairs, options: Options) -> Tensor:
    return (pairs.mean_delta - _tensor(2 * options["beta"], pairs).reciprocal()).square()


def _exo_pair(pairs: Pairs, options: Options) -> Tensor:
    x, smoothing = options["beta"] * pairs.delta, _tensor(options["label_smoothing"], pairs)
    chosen = x.sigmoid() * (logsigmoid(x) - torch.log1p(-smoothing))
    return chosen + (-x).sigmoid() * (logsigmoid(-x) - smoothing.log())


def _nca_pair(pairs: Pairs, options: Options) -> Tensor:
    rewards = options["beta"] * pairs.scores
    return -logsigmoid(rewards[:, 0]) - 0.5 * logsigmoid(-rewards).sum(1)


def _robust(pairs: Pairs, options: Options) -> Tensor:
    x, smoothing = options["beta"] * pairs.delta, options["label_smoothing"]
    flipped = smoothing * logsigmoid(-x)
    return (flipped - (1 - smoothing) * logsigmoid(x)) / (1 - 2 * smoothing)


def _bco_pair(pairs: Pairs, options: Options) -> Tensor:
    rewards = options["beta"] * pairs.scores
    return -logsigmoid(rewards[:, 0]) - logsigmoid(-rewards[:, 1])


def _sppo_hard(pairs: Pairs, options: Options) -> Tensor:
    half = _tensor(2 * options["beta"], pairs).reciprocal()
    return (pairs.scores[:, 0] - half).square() + (pairs.scores[:, 1] + half).square()


def _aot(pairs: Pairs, options: Options) -> Tensor:
    policy = pairs.policy
    reference = policy - pairs.scores
    by_policy, by_reference = (x[:, 0] - x[:, 1] for x in (policy, reference))
    return _smoothed(by_policy.sort().values - by_reference.sort().values, options)


def _aot_unpaired(pairs: Pairs, options: Options) -> Tensor:
    scores = pairs.scores.sort(0).values
    return _smoothed(scores[:, 0] - scores[:, 1], options)


def _apo_zero(pairs: Pairs, options: Options) -> Tensor:
    chosen, rejected = (options["beta"] * pairs.scores).sigmoid().unbind(1)
    return 1 - chosen + rejected


def _apo_down(pairs: Pairs, options: Options) -> Tensor:
    chosen = (options["beta"] * pairs.scores[:, 0]).sigmoid()
    return chosen + 1 - (options["beta"] * pairs.delta).sigmoid()


def _discopop(pairs: Pairs, options: Options) -> Tensor:
    x = options["beta"] * pairs.delta
    share = (x / _tensor(options["discopop_tau"], pairs)).sigmoid()
    return -logsigmoid(x) * (1 - share) + (-x).exp() * share


def _sigmoid_norm(pairs: Pairs, options: Options) -> Tensor:
    return -logsigmoid(options["beta"] * pairs.mean_delta)


TERMS: Mapping[str, Term] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}
"""The terms that depend on margins, by TRL's names."""
SFT = "sft"
DEFAULTS: Options = {
    "beta": 0.1, "label_smoothing": 0.0, "discopop_tau": 0.05, **dict.fromkeys(TERMS, 0.0),
    "sigmoid": 1.0, SFT: 0.0,
}  # fmt: skip
"""The options: β, ε, τ, and the weight of each term."""


def _preference(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    """Return the weighted sum of the terms over pairs of data."""
    pairs, total = Pairs(logprobs, columns), logprobs.new_zeros(())
    for name, term in TERMS.items():
        if options[name]:
            total = total + options[name] * term(pairs, options).sum()
    if options[SFT]:
        is_chosen = (columns.weights != 0) & (columns.places % 2 == 0)
        total = total - options[SFT] * logprobs.where(is_chosen, 0.0).sum()
    return total


# ---------------------------------------------------------------------------------- sequence losses


def _gspo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    counts = columns.sums((columns.weights != 0).to(logprobs.dtype)).clamp(min=1)
    ratios = (columns.sums(columns.log_ratios(logprobs)) / counts).exp()
    return -(columns.weights * _clipped(ratios[columns.places], columns, options)).sum()


def _dpo(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    margins = columns.sums(columns.weights * columns.log_ratios(logprobs)).view(-1, 2)
    return -logsigmoid(options["beta"] * (margins[:, 0] - margins[:, 1])).sum()


def _kto(logprobs: Tensor, columns: Columns, options: Options) -> Tensor:
    margins = columns.sums(columns.weights * columns.log_ratios(logprobs))
    signs = columns.sums(columns.advantages.where(columns.weights != 0, 0.0)).sign()
    weights = options["undesirable_weight"] * (signs < 0) + options["desirable_weight"] * (
        signs > 0
    )
    return (weights * (1 - (options["beta"] * signs * (margins - options["kl"])).sigmoid())).sum()


@dataclass(frozen=True)
class Loss:
    """A loss of data.

    Attributes:
        function: returns the summed loss of log-probabilities [T], columns and options.
        reads: the columns that each datum needs.
        options: the loss's options, with defaults.
        together: the number of consecutive data in a term.
        is_linear: True if the loss is linear in the log-probabilities: -Σ w l.
        reads_weights: True if data may have weights.
        skips_zero_advantages: True if the default weight of a token without an advantage is 0.
    """

    name: str
    function: Callable[[Tensor, Columns, Options], Tensor]
    reads: tuple[str, ...] = ("advantages", "logprobs")
    options: Options = field(default_factory=dict)
    together: int = 1
    is_linear: bool = False
    reads_weights: bool = True
    skips_zero_advantages: bool = False

    def with_options(self, overrides: Mapping[str, float] | None) -> Options:
        """Return the options with overrides. FinetuneError: names a bad option."""
        if overrides is not None and not isinstance(overrides, Mapping):
            raise FinetuneError(f"loss_options={shown(overrides)}; use a dict of numbers by name")
        options = {
            **self.options,
            **{str(name): value for name, value in (overrides or {}).items()},
        }
        if options and self.options:
            check_names(options, self.options, FinetuneError)
        elif options:
            names = ", ".join(map(str, options))
            raise FinetuneError(f"loss {self.name!r} has no options, and {names} was given")
        for name, value in options.items():
            if not is_finite(value) or value < 0:
                raise FinetuneError(
                    f"loss {self.name!r}: {name}={shown(value)}; use a number of at least 0"
                )
        low, high = options.get("clip_low_threshold", 0), options.get("clip_high_threshold", 0)
        if low > high:
            raise FinetuneError(
                f"loss {self.name!r}: clip_low_threshold={low:g} is above "
                f"clip_high_threshold={high:g}; they are bounds of a ratio, such as 0.8 and 1.2"
            )
        return options

    def evaluate(
        self, logprobs: Tensor, columns: Columns, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and its gradient by each log-probability, [T]; both fp64."""
        with torch.enable_grad():
            x = logprobs.detach().to(torch.float64).requires_grad_()
            total = self.function(x, columns, options)
            (slopes,) = torch.autograd.grad(total, x)
        return total.detach(), slopes


_KTO = {"beta": 0.1, "kl": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CROSS_ENTROPY = Loss("cross_entropy", _cross_entropy, (), is_linear=True)
OF_A_FUNCTION = Loss("of a function", _cross_entropy, (), is_linear=True, reads_weights=False)
"""The loss for the forward of a caller's loss function, which reads only log-probabilities."""

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        CROSS_ENTROPY,
        Loss("importance_sampling", _importance_sampling),
        Loss("ppo", _ppo, options=_CLIP),
        Loss("cispo", _cispo, options={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        Loss("dro", _dro, options={"beta": 0.01}),
        Loss("gspo", _gspo, options=_CLIP, skips_zero_advantages=True),
        Loss("dpo", _dpo, ("logprobs",), {"beta": 0.1}, together=2),
        Loss("kto", _kto, options=_KTO),
        Loss("preference", _preference, ("logprobs",), DEFAULTS, together=2),
    )
}
"""All losses by name. Sources of defaults: Tinker for ppo, its cookbook for cispo, TRL for dpo."""


def loss_of(name: object) -> Loss:
    """Return a loss by name. FinetuneError: unknown name."""
    if not isinstance(name, str) or name not in LOSSES:
        raise FinetuneError(f"loss={shown(name)}; use {', '.join(LOSSES)}, or a function")
    return LOSSES[name]
