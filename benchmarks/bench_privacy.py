"""What a base that records all it is sent learns of a client's prompts and adapter.

A small Llama with random weights, and a LoRA of one up_proj. The attacker knows the base's weights,
as everybody does, and the protocol. It looks for

- the tokens: the normed embedding that is nearest to each row that the first layer's attention is
  sent (1 / vocabulary of them are found by chance);
- the adapter: z = silu(Wg x) · (Wu + BA) x is what down_proj is sent, and x what gate and up were,
  so BA solves a weighted linear least squares problem, and is cut to its rank by its singular
  values. The error is that of BA relative to BA's own size; who guesses 0 has 1.

and first tries to remove noise by what it knows, as each case below says.

    python benchmarks/bench_privacy.py
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from pcg.split.pieces import LINEAR
from pcg.split.transports.zeromq import ZeroMqEndpoint

HIDDEN, WIDTH, VOCABULARY, RANK, EPS = 128, 192, 1024, 4, 1e-6
EPOCHS = 16
KEY = "key-of-the-base"
LAYER = "model.layers.0."


@dataclass
class Watched:
    """A base that records the inputs of its pieces."""

    where: str
    sent: dict[str, list[Tensor]] = field(default_factory=dict)

    def rows(self, part: str) -> Tensor:
        """Return all rows that a linear piece was sent, in order, fp64."""
        (name,) = (name for name in self.sent if LAYER in name and part in name)
        return torch.cat(self.sent[name]).double()

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of the first layer's attention, gate and down."""
        return self.rows("q_proj"), self.rows("gate_proj"), self.rows("down_proj")


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
class Attacker:
    """Knows the base's weights.

    Attributes:
        first: the rows that tokens have in the first layer, [vocabulary, hidden].
    """

    first: Tensor
    gate: Tensor
    up: Tensor

    def tokens(self, rows: Tensor, ids: Tensor, without: Tensor | None = None) -> float:
        """Return the share of tokens that are found; `without` is a space that is projected out."""
        known = self.first if without is None else _projected(self.first, without)
        given = rows if without is None else _projected(rows, without)
        found = (given @ F.normalize(known, dim=1).t()).argmax(1)
        return float((found == ids).double().mean())

    def adapter(self, x: Tensor, z: Tensor, true: Tensor) -> float:
        """Return the relative error of BA."""
        gates = F.silu(x @ self.gate.t())
        left = z - gates * (x @ self.up.t())
        columns = []
        for at in range(len(self.up)):
            weighted = gates[:, at, None] * x
            columns.append(torch.linalg.lstsq(weighted, left[:, at, None]).solution)
        u, s, v = torch.linalg.svd(torch.cat(columns, 1).t(), full_matrices=False)
        found = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
        return float((found - true).norm() / true.norm())


def _projected(rows: Tensor, space: Tensor) -> Tensor:
    return rows - (rows @ space.t()) @ space


def main_space(rows: Tensor, dims: int) -> Tensor:
    """Return an orthonormal basis [dims, hidden] of the space that most of the rows is in."""
    return torch.linalg.svd(rows, full_matrices=False)[2][:dims]


def removed(rows: Tensor, noise: Tensor, request: int) -> Tensor:
    """Subtract noise that is known, vector by vector, with the power of two that fits best."""
    found = []
    for sent, known in zip(rows.split(request), noise.split(request), strict=False):
        size = (sent * known).sum() / known.square().sum()
        found.append(sent - 2.0 ** size.log2().round() * known)
    return torch.cat(found)


def attacker_of(model: Any) -> Attacker:
    """Return the attacker who knows a Llama's weights."""
    layer = model.model.layers[0]
    embedded = model.model.embed_tokens.weight.detach().double()
    normed = embedded * (embedded.square().mean(1, keepdim=True) + EPS).rsqrt()
    return Attacker(
        normed * layer.input_layernorm.weight.detach().double(),
        layer.mlp.gate_proj.weight.detach().double(),
        layer.mlp.up_proj.weight.detach().double(),
    )


@dataclass
class Trial:
    """Prompts that are sent to a base, and what the attacker finds of them.

    Attributes:
        cases: results by name.
    """

    prompts: list[list[int]]
    attacker: Attacker
    base: Watched
    cases: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """All tokens."""
        return torch.tensor(self.prompts).reshape(-1)

    def send(self, privacy: pcg.Privacy | None, times: int = 1) -> Tensor:
        """Send the prompts; returns the adapter's BA."""
        self.base.sent.clear()
        lora = pcg.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["up_proj"])
        options = {"transport": "tcp", "cut": "linear", "privacy": privacy}
        with pcg.connect(self.base.where, api_key=KEY, **options) as client:
            adapter = client.add_adapter("x", lora, seed=1)
            generator = torch.Generator().manual_seed(2)
            for tensor in adapter.tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
            client.refresh_adapter("x")
            for prompt in self.prompts * times:
                client.logits(prompt, adapter="x")
            a, b = (one.double() for one in adapter.tensors[:2])
            return b @ a

    def note(self, case: str, rows: Sequence[Tensor], true: Tensor) -> None:
        """Note what is found in the rows of the attention, gate and down."""
        q, x, z = rows
        error = self.attacker.adapter(x, z, true)
        self.note_tokens(case, self.attacker.tokens(q, self.ids))
        self.cases[case]["adapter_error"] = float(f"{error:.2g}")

    def note_tokens(self, case: str, found: float) -> None:
        """Note the share of tokens that are found."""
        self.cases[case] = {"tokens_found": round(found, 4)}


def second_base(trial: Trial, second: Watched, precision: Any, scale: float) -> None:
    """Attack noise that is used once, alone, with the second base, and over epochs."""
    options = pcg.Privacy(second.where, scale, precision=precision)
    name = f"second base, {precision}, scale {scale:g}"
    second.sent.clear()
    true = trial.send(options)
    rows = trial.base.seen()
    trial.note(name, rows, true)
    noises = [one[: len(sent)] for one, sent in zip(second.seen(), rows, strict=True)]
    length = len(trial.prompts[0])
    bare = [removed(sent, noise, length) for sent, noise in zip(rows, noises, strict=True)]
    trial.note(f"{name}, and the two tell each other", bare, true)
    trial.send(options, times=EPOCHS)
    mean = trial.base.rows("q_proj").view(EPOCHS, -1, HIDDEN).mean(0)
    found = trial.attacker.tokens(mean, trial.ids)
    trial.note_tokens(f"{name}, mean of {EPOCHS} epochs", found)


def used_again(trial: Trial, pool: int) -> None:
    """Attack noise of a pool that serves all rows, by the space that they are in."""
    name = f"download, pool of {pool} for all rows"
    true = trial.send(pcg.Privacy("download", pool=pool, uses=10**6))
    rows = trial.base.seen()
    trial.note(name, rows, true)
    found = trial.attacker.tokens(rows[0], trial.ids, main_space(rows[0], pool))
    trial.note_tokens(f"{name}, its space projected out", found)
    trial.send(pcg.Privacy("base", pool=pool, uses=10**6))
    rows_of_q = trial.base.rows("q_proj")
    space = main_space(rows_of_q[:pool], pool)
    found = trial.attacker.tokens(rows_of_q[pool:], trial.ids, space)
    trial.note_tokens(f"base, pool of {pool}, projected out as it was sent", found)


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
    whole = pcg.compile(model)
    prompts = torch.randint(0, VOCABULARY, (given.sequences, given.length)).tolist()
    with watched_base(whole) as base, watched_base(whole) as second:
        trial = Trial(prompts, attacker_of(model), base)
        true = trial.send(None)
        trial.note("no noise", base.seen(), true)
        for precision, scale in (("float32", 1.0), ("float32", 16.0), ("float64", 1024.0)):
            second_base(trial, second, precision, scale)
        for pool in (16, 64):
            used_again(trial, pool)
    sizes = {
        "hidden": HIDDEN, "width": WIDTH, "vocabulary": VOCABULARY, "rank": RANK,
        "rows": len(trial.ids),
    }  # fmt: skip
    write("privacy", {"sizes": sizes, "cases": trial.cases})


if __name__ == "__main__":
    main()
