"""Attacks on the rows that a split client sends with noise, and bounds of their success.

The attacker knows the rows that may have been sent. It takes the nearest of them, or looks at the
digits of the rest when a row is subtracted: on the grid of numbers that `ndtri` of a 52-bit uniform
takes, sums that a precision can make, and the zeros at the end of the mantissa.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

NORMAL = NormalDist()


def nearest(rows: Tensor, known: Tensor) -> Tensor:
    """Return for each row the number of the known row that is nearest by its angle."""
    return (rows.double() @ F.normalize(known.double(), dim=1).t()).argmax(1)


def digit_scores(sent: Tensor, known: Tensor, size: float) -> dict[str, Tensor]:
    """Return how well each known row explains the digits of each row that was sent.

    Args:
        sent: [rows, in], in the precision of what travels.
        known: [candidates, in], as exact as the client has them.
        size: of the noise.
    Returns:
        Scores [rows, candidates] of each test.
    """
    known = known.double()
    step = size * 8 * torch.finfo(sent.dtype).eps
    on_grid = (known / step).round() * step
    tests: dict[str, list[Tensor]] = {}
    for row in sent:
        left = (row.double() - known) / size
        of_row = {
            "ndtri": _is_of_ndtri(left),
            "sums": _is_a_sum(row, known.to(sent.dtype), size),
            "zeros": _zeros(left),
            "zeros on the grid": _zeros((row.double() - on_grid) / size),
        }
        for name, values in of_row.items():
            tests.setdefault(name, []).append(values.double().mean(1))
    return {name: torch.stack(scores) for name, scores in tests.items()}


def _is_of_ndtri(numbers: Tensor) -> Tensor:
    """Return whether numbers are normal quantiles of a uniform number of 52 bits, fp64."""
    near = torch.special.ndtr(numbers).mul_(2.0**52).sub_(0.5).round_()
    grid = (torch.special.ndtri((near + (at + 0.5)) * 2.0**-52) for at in (-1, 0, 1))
    return torch.stack([one == numbers for one in grid]).any(0)


def _is_a_sum(sent: Tensor, known: Tensor, size: float) -> Tensor:
    """Return whether numbers are a rounded known + size · n, of any n of that precision."""
    noise = ((sent.double() - known.double()) / size).to(sent.dtype)
    far = torch.full_like(noise, torch.inf)
    close = (noise, torch.nextafter(noise, far), torch.nextafter(noise, -far))
    return torch.stack([torch.add(known, one, alpha=size) == sent for one in close]).any(0)


def _zeros(numbers: Tensor) -> Tensor:
    """Return the number of zeros at the end of each mantissa, 53 for 0."""
    mantissa = (torch.frexp(numbers).mantissa * 2.0**53).long()
    return torch.where(mantissa == 0, 53.0, (mantissa & -mantissa).double().log2())


def told_apart(sent: Tensor, right: Tensor, wrong: Tensor) -> float:
    """Return the share of rows that are nearer to the right one of two, by a likelihood ratio."""
    between = (sent.double() - (right.double() + wrong.double()) / 2) * (right - wrong).double()
    return float((between.sum(1) > 0).double().mean())


def sizes_of(rows: Tensor, request: int) -> Tensor:
    """Return the size of the noise of each row, [rows, 1], which its request shows."""
    means = [
        one.square().mean().sqrt().log2().round().expand(len(one)) for one in rows.split(request)
    ]
    return 2.0 ** torch.cat(means)[:, None]


def guess_bound(prior: float, mu: float) -> float:
    """Return how often a guess is right at most that is right so often without what is sent."""
    return NORMAL.cdf(NORMAL.inv_cdf(prior) + mu)


def choice_bound(distances: Tensor) -> float:
    """Return how often the right one of two is chosen at most, in the mean over `distances` μ."""
    return sum(NORMAL.cdf(float(mu) / 2) for mu in distances) / len(distances)
