"""What a base that records all it is sent learns of a client's prompts and adapter.

A small Llama with random weights, and a LoRA of one up_proj. The attacker knows the base's weights,
as everybody does, and the protocol; a client of its own tells the exact rows that each token has in
the first layer. It looks for

- the tokens, in what the first layer's attention is sent: by the nearest of these rows, in one
  epoch and in the mean of several, and by the digits of what is left when a row is subtracted: on
  the grid of numbers that `ndtri` of a 52-bit uniform takes, sums that `precision` can make, and
  the zeros at the end of the mantissa;
- which of two tokens a row is, where it has chosen the two;
- the adapter: z = silu(Wg x) · (Wu + BA) x is what down_proj is sent, so BA solves a weighted
  linear least squares problem, and is cut to its rank by its singular values. x is what gate and up
  were sent, or known, where the attacker has chosen the prompts. The error is relative to BA, so
  that who guesses 0 has 1;
- whether there is an adapter, from one row of z, where it has chosen the prompt and the adapter.

Beside what it finds stand the bounds of docs/split.md for the rows that it looks at. In further
cases it first removes noise by what it knows.

    python benchmarks/bench_privacy.py
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from measure import write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pcg
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.messages import LINEAR
from pcg.split.zeromq import ZeroMqEndpoint

HIDDEN, WIDTH, VOCABULARY, RANK, EPS = 128, 192, 1024, 4, 1e-6
EPOCHS = 16
DIGIT_ROWS = 128
"""Rows whose digits are looked at, for each token of the vocabulary."""
KEY = "key-of-the-base"
LAYER = "model.layers.0."
NORMAL = NormalDist()
PRECISIONS = (("float32", 16.0), ("float64", 2.0**10), ("float64", 2.0**20))


# ---------------------------------------------------------------------------------------- attacks


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


def solved(x: Tensor, z: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the BA [out, in] that explains z best, by least squares.

    Args:
        x: [rows, in], what gate and up were sent.
        z: [rows, out], what down was sent.
    """
    gates = F.silu(x @ gate.t())
    left = z - gates * (x @ up.t())
    columns = []
    for at in range(len(up)):
        weighted = gates[:, at, None] * x
        columns.append(torch.linalg.lstsq(weighted, left[:, at, None]).solution)
    u, s, v = torch.linalg.svd(torch.cat(columns, 1).t(), full_matrices=False)
    return (u[:, :RANK] * s[:RANK]) @ v[:RANK]


def main_space(rows: Tensor, dims: int) -> Tensor:
    """Return an orthonormal basis [dims, hidden] of the space that most of the rows is in."""
    return torch.linalg.svd(rows, full_matrices=False)[2][:dims]


def projected(rows: Tensor, space: Tensor) -> Tensor:
    """Return rows without what lies in a space."""
    return rows - (rows @ space.t()) @ space


def removed(rows: Tensor, noise: Tensor, request: int) -> Tensor:
    """Subtract noise that is known, vector by vector, with the power of two that fits best."""
    found = []
    for sent, known in zip(rows.split(request), noise.split(request), strict=False):
        size = (sent * known).sum() / known.square().sum()
        found.append(sent - 2.0 ** size.log2().round() * known)
    return torch.cat(found)


def sizes_of(rows: Tensor, request: int) -> Tensor:
    """Return the size of the noise of each row, [rows, 1], which its request shows."""
    means = [
        one.square().mean().sqrt().log2().round().expand(len(one)) for one in rows.split(request)
    ]
    return 2.0 ** torch.cat(means)[:, None]


# ----------------------------------------------------------------------------------------- bounds


def guess_bound(prior: float, mu: float) -> float:
    """Return how often a guess is right at most that is right so often without what is sent."""
    return NORMAL.cdf(NORMAL.inv_cdf(prior) + mu)


def choice_bound(distances: Tensor) -> float:
    """Return how often the right one of two is chosen at most, in the mean over `distances` μ."""
    return sum(NORMAL.cdf(float(mu) / 2) for mu in distances) / len(distances)


# ----------------------------------------------------------------------------------------- trials


@dataclass
class Watched:
    """A base that records the inputs of its pieces."""

    where: str
    sent: dict[str, list[Tensor]] = field(default_factory=dict)

    def raw(self, part: str) -> Tensor:
        """Return all rows that a linear piece was sent, in order, as they came."""
        (name,) = (name for name in self.sent if LAYER in name and part in name)
        return torch.cat(self.sent[name])

    def rows(self, part: str) -> Tensor:
        """Return these rows in fp64."""
        return self.raw(part).double()


@contextmanager
def watched_base(executor: Any) -> Iterator[Watched]:
    """Run a base on a thread."""
    endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**28)
    base = BaseExecutor(executor)
    watched = Watched(endpoint.where)
    run = base.run

    def watching(piece: Any, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if piece.kind == LINEAR:
            watched.sent.setdefault(str(piece), []).append(inputs[0].clone())
        return run(piece, inputs)

    base.run = watching  # type: ignore[method-assign]
    loop = BaseLoop(base, endpoint, BaseOptions(api_key=(KEY,), downloads=True))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield watched
    finally:
        loop.stop()
        thread.join(60)
        endpoint.close()


@dataclass
class Trial:
    """Prompts that are sent to a base, and what the attacker finds of them.

    Attributes:
        gate: the base's matrix, which the attacker knows, as `up`, fp64.
        name: the dtype of the base.
        cases: results by name.
    """

    prompts: list[list[int]]
    gate: Tensor
    up: Tensor
    base: Watched
    second: Watched
    name: str
    cases: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """All tokens."""
        return torch.tensor(self.prompts).reshape(-1)

    @property
    def length(self) -> int:
        """Tokens of a prompt, which is a request."""
        return len(self.prompts[0])

    def send(
        self, privacy: pcg.Privacy | None, times: int = 1, prompts: Any = None, adapts: bool = True
    ) -> Tensor:
        """Send the prompts; returns the adapter's BA."""
        self.base.sent.clear()
        self.second.sent.clear()
        lora = pcg.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["up_proj"])
        options = {"transport": "tcp", "cut": "linear", "privacy": privacy}
        with pcg.connect(self.base.where, api_key=KEY, **options) as client:
            adapter = client.add_adapter("x", lora, seed=1)
            generator = torch.Generator().manual_seed(2)
            for tensor in adapter.tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05 * adapts)
            client.refresh_adapter("x")
            for prompt in (self.prompts if prompts is None else prompts) * times:
                client.logits(prompt, adapter="x")
            a, b = (one.double() for one in adapter.tensors[:2])
            return b @ a

    def learn(self) -> None:
        """Send what is known without noise: each token, and the prompts, with and without BA."""
        every = torch.arange(VOCABULARY).view(-1, self.length).tolist()
        self.send(None, prompts=every)
        self.known = self.base.raw("q_proj")
        self.send(None, adapts=False)
        self.without = self.base.rows("down_proj")
        self.true = self.send(None)
        self.bare = {name: self.base.rows(name) for name in ("q_proj", "gate_proj", "down_proj")}
        q, x, z = self.bare.values()
        self.cases[f"{self.name}, no noise"] = {
            "tokens_nearest": self.right(nearest(q, self.known)),
            "adapter_error": self.error(x, z),
        }

    def right(self, found: Tensor) -> float:
        """Return the share of tokens that are found."""
        return round(float((found == self.ids[: len(found)]).double().mean()), 4)

    def error(self, x: Tensor, z: Tensor) -> float:
        """Return the relative error of BA as it is solved for."""
        found = solved(x, z, self.gate, self.up)
        return float(f"{float((found - self.true).norm() / self.true.norm()):.2g}")

    def attack(self, precision: Any, scale: float) -> None:
        """Attack noise that is used once, whose effects a second base computes."""
        options = pcg.Privacy(self.second.where, scale, precision=precision)
        case: dict[str, Any] = {}
        self.cases[f"{self.name}, {precision}, scale {scale:g}"] = case
        self.send(options)
        sent = {name: self.base.rows(name) for name in self.bare}
        noise = {name: self.second.rows(name)[: len(sent[name])] for name in sent}
        q, x, z = sent.values()
        size = sizes_of(q, self.length)
        raw = self.base.raw("q_proj")[:DIGIT_ROWS]
        norm = float(self.known.double().norm(dim=1).max())
        mu = norm / float(size.min())
        for name, scores in digit_scores(raw, self.known, float(size[0])).items():
            case[f"tokens_by_{name.replace(' ', '_')}"] = self.right(scores.argmax(1))
        case["tokens_nearest"] = self.right(nearest(q, self.known))
        case["tokens_bound"] = round(guess_bound(1 / VOCABULARY, mu), 4)
        case["adapter_error"] = self.error(x, z)
        wrong = self.known[self.ids.roll(1)].double()
        right = self.known[self.ids].double()
        differ = (self.ids != self.ids.roll(1)).nonzero()[:, 0]
        self._choose(case, "two_tokens", (q, right, wrong), size, differ)
        sizes = sizes_of(z, self.length)
        every = torch.arange(len(z))
        self._choose(case, "two_adapters", (z, self.bare["down_proj"], self.without), sizes, every)
        one, other, third = (removed(sent[name], noise[name], self.length) for name in sent)
        case["tokens_if_bases_collude"] = self.right(nearest(one, self.known))
        case["adapter_error_if_bases_collude"] = self.error(other, third)
        self.send(options, times=EPOCHS)
        q, z = (
            self.base.rows(n).unflatten(0, (EPOCHS, -1)).mean(0) for n in ("q_proj", "down_proj")
        )
        case[f"tokens_nearest_{EPOCHS}"] = self.right(nearest(q, self.known))
        case[f"tokens_bound_{EPOCHS}"] = round(guess_bound(1 / VOCABULARY, mu * EPOCHS**0.5), 4)
        small = size / EPOCHS**0.5
        self._choose(case, f"two_tokens_{EPOCHS}", (q, right, wrong), small, differ)
        case[f"adapter_error_chosen_{EPOCHS}"] = self.error(self.bare["gate_proj"], z)
        rows, adapted, plain = z, self.bare["down_proj"], self.without
        small = sizes / EPOCHS**0.5
        self._choose(case, f"two_adapters_{EPOCHS}", (rows, adapted, plain), small, every)

    def _choose(
        self,
        case: dict[str, Any],
        name: str,
        rows: tuple[Tensor, Tensor, Tensor],
        sizes: Tensor,
        which: Tensor,
    ) -> None:
        """Note how often the right of two rows is chosen, and the bound."""
        sent, right, wrong = (one[which] for one in rows)
        case[name] = round(told_apart(sent, right, wrong), 4)
        bound = choice_bound((right - wrong).norm(dim=1) / sizes[which, 0])
        case[f"{name}_bound"] = round(bound, 4)

    def reuse(self, pool: int) -> None:
        """Attack noise of a pool that serves all rows, by the space that they are in."""
        known = self.known.double()
        self.send(pcg.Privacy("download", pool=pool, uses=10**6))
        q = self.base.rows("q_proj")
        space = main_space(q, pool)
        self.cases[f"{self.name}, download, pool of {pool} for all rows"] = {
            "tokens_nearest": self.right(nearest(q, known)),
            "tokens_projected": self.right(nearest(projected(q, space), projected(known, space))),
        }
        self.send(pcg.Privacy("base", pool=pool, uses=10**6))
        q = self.base.rows("q_proj")
        space, q = main_space(q[:pool], pool), q[pool:]
        self.cases[f"{self.name}, base, pool of {pool} for all rows"] = {
            "tokens_projected": self.right(nearest(projected(q, space), projected(known, space))),
        }


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description="What a base learns of its clients.")
    parser.add_argument("--sequences", type=int, default=40)
    parser.add_argument("--length", type=int, default=64)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=EPS, initializer_range=0.08,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(0, VOCABULARY, (given.sequences, given.length)).tolist()
    cases: dict[str, dict[str, float]] = {}
    for dtype in ("float32", "bfloat16", "float64"):
        whole = pcg.compile(model, dtype=dtype, verify=False)
        mlp = model.model.layers[0].mlp
        gate, up = (
            one.weight.detach().to(getattr(torch, dtype)).double()
            for one in (mlp.gate_proj, mlp.up_proj)
        )
        with watched_base(whole) as base, watched_base(whole) as second:
            trial = Trial(prompts, gate, up, base, second, dtype, cases)
            trial.learn()
            for precision, scale in PRECISIONS:
                trial.attack(precision, scale)
            if dtype == "float32":
                for pool in (16, 64):
                    trial.reuse(pool)
    sizes = {
        "hidden": HIDDEN, "width": WIDTH, "vocabulary": VOCABULARY, "rank": RANK,
        "rows": given.sequences * given.length, "digit_rows": DIGIT_ROWS,
    }  # fmt: skip
    write("privacy", {"sizes": sizes, "cases": cases})


if __name__ == "__main__":
    main()
