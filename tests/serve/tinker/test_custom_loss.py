"""Losses that run in the client: a function that is the cross entropy trains as the built-in."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from pcg.files import SUMS
from pcg.serve.store.store import DATABASE
from tests.support import tinker_client

ROWS = [[5, 8, 13, 21, 34], [3, 7, 9]]


def data(width: int | None = None) -> list[types.Datum]:
    """Data with a target of each token, or several, with weights of either sign."""
    found = []
    for row in ROWS:
        shape = (len(row) - 1,) if width is None else (len(row) - 1, width)
        generator = np.random.default_rng(len(row))
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": generator.integers(0, 40, shape),
                    "weights": generator.normal(size=shape).astype(np.float32),
                },
            )
        )
    return found


def cross_entropy(
    given: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    total = torch.zeros(())
    for one, found in zip(given, logprobs, strict=True):
        total = total - (one.loss_fn_inputs["weights"].to_torch() * found).sum()
    return total, {"terms:sum": float(len(given))}


def test_a_cross_entropy_of_the_clients_is_the_built_in_one(tmp_path: Path) -> None:
    with tinker_client.server(tmp_path) as served, tinker_client.client(served.url) as client:
        found: list[Any] = []
        for is_custom in (False, True):
            made = client.create_lora_training_client(
                base_model=tinker_client.MODEL, rank=4, seed=0
            ).result(60)
            for width in (None, 3):
                if is_custom:
                    done = made.forward_backward_custom(data(width), cross_entropy).result(60)
                    assert done.metrics["terms:sum"] == 2
                else:
                    done = made.forward_backward(data(width), "cross_entropy").result(60)
                    found.append(done.metrics["loss:sum"])
                shapes = [one["logprobs"].shape for one in done.loss_fn_outputs]
                assert shapes == [one.loss_fn_inputs["weights"].shape for one in data(width)]
            made.optim_step(types.AdamParams(learning_rate=0.05)).result(60)
            sampler = made.save_weights_and_get_sampling_client().result(60)
            prompt = types.ModelInput.from_ints(ROWS[0])
            found.append(sampler.compute_logprobs(prompt).result(60)[1:])
        assert found[2] == pytest.approx(found[3], abs=1e-5)
        base = client.create_sampling_client(base_model=tinker_client.MODEL).result(60)
        before = base.compute_logprobs(types.ModelInput.from_ints(ROWS[0])).result(60)[1:]
        assert max(abs(a - b) for a, b in zip(before, found[2], strict=True)) > 0.01


def gained(
    logprobs: torch.Tensor, advantages: torch.Tensor, old: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of the server's, one datum at a time: PPO with a penalty of its own."""
    ratios = (logprobs - old).exp()
    near = ratios.clamp(0.8, 1.2)
    kl = (torch.exp(old - logprobs) - 1 - (old - logprobs)).sum()
    loss = 0.1 * kl - torch.minimum(ratios * advantages, near * advantages).sum()
    return loss, {"custom/kl:mean": kl, "custom/ratio:sum": ratios.sum()}


def rewarded(count: int) -> list[types.Datum]:
    draw = np.random.default_rng(7)
    found = []
    for index in range(count):
        size = 3 + index
        inputs = {
            "target_tokens": draw.integers(0, 40, size),
            "advantages": draw.normal(size=size).astype(np.float32),
            "old": -draw.random(size).astype(np.float32) * 4,
            "mask": np.ones(size, np.float32),  # the loss does not read it
        }
        tokens = draw.integers(0, 40, size).tolist()
        found.append(types.Datum(types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return found


def by_hand(
    given: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The same in the client, as `forward_backward_custom` takes a function."""
    total, kl = torch.zeros(()), 0.0
    for one, found in zip(given, logprobs, strict=True):
        fields = one.loss_fn_inputs
        loss, told = gained(found, fields["advantages"].to_torch(), fields["old"].to_torch())
        total, kl = total + loss, kl + told["custom/kl:mean"].item()
    return total, {"custom/kl:mean": kl / len(given)}


def test_a_loss_that_the_server_runs_trains_as_the_clients_own(tmp_path: Path) -> None:
    with tinker_client.server(tmp_path) as served, tinker_client.client(served.url) as client:
        ranks: dict[str, Any] = {"logprobs": 1, "advantages": 1, "old": 1}
        handle = client.create_custom_loss(gained, ranks).result(60)
        assert handle.loss_id is not None  # so that the client sends its name alone
        found = []
        for loss in (handle, by_hand):
            made = client.create_lora_training_client(
                base_model=tinker_client.MODEL, rank=4, seed=0
            ).result(60)
            for _ in range(2):
                done = made.forward_backward_custom(rewarded(5), loss).result(60)
                made.optim_step(types.AdamParams(learning_rate=0.02)).result(60)
            after = made.forward(data(), "cross_entropy").result(60)
            logprobs = np.concatenate([one["logprobs"].to_numpy() for one in after.loss_fn_outputs])
            found.append((done.metrics["loss:sum"], done.metrics["custom/kl:mean"], logprobs))
        (mine, kl, logprobs), (theirs, their_kl, their_logprobs) = found
        assert mine == pytest.approx(theirs, abs=1e-4)
        assert kl == pytest.approx(their_kl, abs=1e-4)
        np.testing.assert_allclose(logprobs, their_logprobs, atol=1e-4)

        with tinker_client.client(served.url) as stranger:  # another session knows no such loss
            other = stranger.create_lora_training_client(tinker_client.MODEL, rank=2).result(60)
            ask = other.forward_backward(rewarded(1), "custom", {"loss_id": handle.loss_id})
            with pytest.raises(tinker.RequestFailedError, match="no custom loss"):
                ask.result(60)

        def product(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return torch.outer(logprobs, logprobs).sum(), {}

        with pytest.raises(tinker.BadRequestError, match=r"torch\.outer"):
            client.create_custom_loss(product, {"logprobs": 1}).result(60)

        def named(logprobs: torch.Tensor, missing: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return (logprobs * missing).sum(), {}

        handle = client.create_custom_loss(named, {"logprobs": 1, "missing": 1}).result(60)
        ask = made.forward_backward(rewarded(1), "custom", {"loss_id": handle.loss_id})
        with pytest.raises(tinker.RequestFailedError, match="no 'missing', which the loss reads"):
            ask.result(60)


def test_a_loss_outlasts_the_server(tmp_path: Path) -> None:
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        session = raw.post("create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        nodes = [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "all", "target": "sum", "args": [{"ref": "logprobs"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "all"}, {"dict": {}}]}],
            },
        ]
        body = {
            "session_id": session,
            "custom_loss_seq_id": 0,
            "name": "all",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": nodes},
        }
        promise = raw.post("create_custom_loss", json=body).json()
        assert raw.post("create_custom_loss", json=body).json() == promise
        told = tinker_client.result(raw, promise)
    # A promise that was not settled when the server ended.
    with sqlite3.connect(tmp_path / DATABASE) as rows:
        rows.execute("UPDATE tinker_futures SET state = 'pending', result = NULL")
    (tmp_path / SUMS).unlink()
    with tinker_client.server(tmp_path) as served, tinker_client.raw(served.url) as raw:
        assert tinker_client.result(raw, promise) == told
        assert told["loss_id"].startswith("loss-")
