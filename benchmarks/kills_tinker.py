"""Clients of Tinker's protocol for `soak_kills.py`, and what they were told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
from kills_world import MODEL, Away, Load, World, answered

from pcg.serve.tinker.proto import CLASSES

PENDING, MOST_PENDING, LENGTH = "try_again", 10, 12


@dataclass
class Asked:
    """A request: its path and body, the promise that it got, and the result that was told."""

    path: str
    body: dict[str, Any]
    promise: dict[str, Any] | None = None
    result: Any = None


@dataclass
class Trained:
    """A model or a sampling session, by the session that has it, with all that was asked of it."""

    session: str
    body: dict[str, Any]
    id: str = ""
    asked: list[Asked] = field(default_factory=list)
    is_closed: bool = False


def datum(seed: int) -> dict[str, Any]:
    """Return a datum of the cross entropy."""
    tokens = [(seed * 7 + i * (seed % 5 + 1)) % 250 + 3 for i in range(LENGTH)]
    count = LENGTH - 1
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [count]},
            "weights": {"data": [1.0] * count, "dtype": "float32", "shape": [count]},
        },
    }


def result_of(raw: httpx2.Client, promise: dict[str, Any]) -> Any:
    """Return the result of a promise; None while there is none."""
    reply = raw.post("retrieve_future", json={"request_id": promise["request_id"]})
    if reply.headers.get("content-type", "").startswith("application/x-protobuf"):
        return sampled(reply.content)
    found = answered(reply)
    return None if found.get("type") == PENDING else found


def sampled(content: bytes) -> dict[str, Any]:
    """Return the samples in a reply."""
    message = CLASSES["SampleResponse"].FromString(content)
    return {
        "tokens": [np.frombuffer(one.tokens, "<i4").tolist() for one in message.sequences],
        "logprobs": [np.frombuffer(one.logprobs, "<f4").tolist() for one in message.sequences],
    }


class TinkerLoad(Load):
    """Trains models, one behind the other or one all the time, and samples from them.

    Args:
        updates: after so many a model is unloaded and another one made; 0 for never.
    """

    def __init__(self, world: World, seed: int, updates: int) -> None:
        self.name = f"tinker-{seed}"
        super().__init__(world, seed)
        self.models: list[Trained] = []
        self.samplers: list[Trained] = []
        self._session = ""
        self._updates = updates
        self._names = 0

    def work(self) -> None:
        with self.world.raw() as raw:
            for _ in range(8):
                if self.world.is_over:
                    return
                self._go_on(raw)

    def _go_on(self, raw: httpx2.Client) -> None:
        if not self._session:
            said = answered(raw.post("create_session", json={"tags": [], "sdk_version": "0.24.0"}))
            self._session = said["session_id"]
            self.world.acknowledge("sessions")
        if not self.models or self.models[-1].is_closed:
            self._make(raw)
        model = self.models[-1]
        waiting = [one for one in self._all() if one.promise is None]
        for one in waiting:  # a server went while it was asked; the same again
            self._ask(raw, one)
        if self.drawn.random() < 0.15:
            self._ask_again(raw)
        self._tell(raw, 0.5)
        pending = [one for one in self._all() if one.result is None]
        if len(pending) >= MOST_PENDING:
            self._tell(raw, 1.0)
            return
        self._train(raw, model)
        if self.samplers and self.drawn.random() < 0.5:
            self._sample(raw, self.drawn.choice(self.samplers[-3:]))

    def _make(self, raw: httpx2.Client) -> None:
        body = {
            "session_id": self._session,
            "model_seq_id": len(self.models),
            "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": 1 + len(self.models)},
        }
        made = Trained(self._session, body)
        made.id = f"{self._session}:train:{len(self.models)}"
        made.asked.append(Asked("create_model", body))
        self.models.append(made)
        self._ask(raw, made.asked[0])

    def _train(self, raw: httpx2.Client, model: Trained) -> None:
        """Ask for an update, in order or out of it, and for what may be saved behind it."""
        new: list[Asked] = []

        def add(to: str, **more: Any) -> None:
            seq = len(model.asked) + len(new)
            new.append(Asked(to, {"model_id": model.id, "seq_id": seq, **more}))

        for _ in range(self.drawn.choice((1, 1, 2))):
            data = [datum(self.drawn.randrange(50)) for _ in range(self.drawn.choice((1, 2)))]
            add(
                "forward_backward",
                forward_backward_input={"data": data, "loss_fn": "cross_entropy"},
            )
        add("optim_step", adam_params={"learning_rate": 1e-3, "eps": 1e-8})
        if self.drawn.random() < 0.1:
            data = [datum(self.drawn.randrange(50))]
            add("forward", forward_input={"data": data, "loss_fn": "cross_entropy"})
        if self.drawn.random() < 0.12:
            self._names += 1
            add("save_weights", path=f"state-{self._names}")
        if self.drawn.random() < 0.12:
            self._names += 1
            add("save_weights_for_sampler", path=f"sampler-{self._names}")
        model.asked += new
        order = list(new)
        if self.drawn.random() < 0.2:
            self.drawn.shuffle(order)
        for one in order:
            self._ask(raw, one)
        steps = sum(one.path == "optim_step" for one in model.asked)
        if self._updates and steps >= self._updates:
            new.clear()
            add("save_weights", path="last")
            model.asked.append(new[-1])
            self._ask(raw, new[-1])
            model.is_closed = True

    def _ask(self, raw: httpx2.Client, one: Asked) -> None:
        """Ask, and keep the promise, which is the one that was given before."""
        said = answered(raw.post(one.path, json=one.body))
        if one.promise is None:
            one.promise = said
            self.world.acknowledge("promises")
        else:
            self.world.counts["promises asked for twice"] += 1
            same = said["request_id"] == one.promise["request_id"]
            self.check(same, f"{one.path} {one.body.get('seq_id')} is promised twice")

    def _ask_again(self, raw: httpx2.Client) -> None:
        model = self.models[-1]
        known = [one for one in model.asked[-30:] if one.promise is not None]
        if known:
            self._ask(raw, self.drawn.choice(known))

    def _sample(self, raw: httpx2.Client, sampler: Trained) -> None:
        tokens = [self.drawn.randrange(3, 250) for _ in range(self.drawn.randrange(3, 12))]
        body = {
            "sampling_session_id": sampler.id,
            "seq_id": len(sampler.asked),
            "num_samples": self.drawn.choice((1, 2)),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {
                "max_tokens": 6,
                "temperature": self.drawn.choice((0.0, 1.0)),
                "seed": len(sampler.asked),
                "stop": [],
            },
        }
        sampler.asked.append(Asked("asample", body))
        self._ask(raw, sampler.asked[-1])

    def _tell(self, raw: httpx2.Client, share: float) -> None:
        """Take results of some promises, and look at some that were told before."""
        for one in self._all():
            if one.promise is None:
                continue
            is_told = one.result is not None
            if self.drawn.random() > (0.01 if is_told else share):
                continue
            found = result_of(raw, one.promise)
            if found is None:
                self.check(not is_told, f"{one.promise} had a result, and has none")
            elif is_told:
                self.world.counts["results told twice"] += 1
                self.check(found == one.result, f"{one.promise} has another result")
            else:
                one.result = found
                self.world.acknowledge("results")
                self.check("error" not in found, f"{one.path} failed: {found}")
                if one.path == "save_weights_for_sampler" and "path" in found:
                    self._open(raw, found["path"])

    def _open(self, raw: httpx2.Client, path: str) -> None:
        body = {
            "session_id": self._session,
            "sampling_session_seq_id": len(self.samplers),
            "model_path": path,
        }
        made = Trained(self._session, body)
        reply = raw.post("create_sampling_session", json=body)
        made.id = answered(reply)["sampling_session_id"]
        self.samplers.append(made)
        self.world.acknowledge("sampling sessions")

    def _all(self) -> list[Asked]:
        return [one for model in [*self.models, *self.samplers] for one in model.asked]

    def settle(self) -> bool:
        """Ask for what no server heard of, save each model, and take all results."""
        with self.world.raw() as raw:
            for model in self.models:
                if model.asked[-1].body.get("path") != "last":
                    body = {"model_id": model.id, "seq_id": len(model.asked), "path": "last"}
                    model.asked.append(Asked("save_weights", body))
            for one in self._all():
                if one.promise is None:
                    self._ask(raw, one)
            for one in self._all():
                if one.result is None and one.promise is not None:
                    one.result = result_of(raw, one.promise)
            if any(one.result is None for one in self._all()):
                return False
            for one in self._all():  # once more, and asked for once more
                assert one.promise is not None
                found = result_of(raw, one.promise)
                self.check(found == one.result, f"{one.promise} has another result")
                if found is None:
                    raise Away
                self.check("error" not in found, f"{one.path} failed: {found}")
                self.world.counts["results compared at the end"] += 1
        return True


def replay(world: World, load: TinkerLoad) -> tuple[dict[str, float], dict[str, str]]:
    """Ask a server that nobody kills for the same, and compare.

    Returns:
        The largest differences, and the paths of its checkpoints by those of the others.
    """
    worst = {"loss": 0.0, "logprobs": 0.0, "sampled_logprobs": 0.0, "other_tokens": 0.0}
    paths: dict[str, str] = {}
    with world.raw() as raw:
        said = answered(raw.post("create_session", json={"tags": [], "sdk_version": "0.24.0"}))
        session = said["session_id"]
        for model in load.models:
            id = f"{session}:train:{model.body['model_seq_id']}"
            for one in model.asked:
                own = {"session_id": session} if one.path == "create_model" else {"model_id": id}
                found = _done(raw, one.path, {**one.body, **own})
                _compare(worst, one, found)
                if "path" in one.result:
                    paths[one.result["path"]] = found["path"]
        for sampler in load.samplers:
            body = {**sampler.body, "session_id": session}
            body["model_path"] = paths[body["model_path"]]
            id = answered(raw.post("create_sampling_session", json=body))["sampling_session_id"]
            for one in sampler.asked:
                found = _done(raw, one.path, {**one.body, "sampling_session_id": id})
                if found["tokens"] != one.result["tokens"]:
                    worst["other_tokens"] += 1
                    continue
                for ours, other in zip(one.result["logprobs"], found["logprobs"], strict=True):
                    far = float(np.abs(np.array(ours) - np.array(other)).max(initial=0))
                    worst["sampled_logprobs"] = max(worst["sampled_logprobs"], far)
    return worst, paths


def _done(raw: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    promise = answered(raw.post(path, json=body))
    while (found := result_of(raw, promise)) is None:
        pass
    return found


def _compare(worst: dict[str, float], one: Asked, found: Any) -> None:
    for name, value in one.result.get("metrics", {}).items():
        if "loss" in name:
            worst["loss"] = max(worst["loss"], abs(value - found["metrics"][name]))
    outputs = zip(
        one.result.get("loss_fn_outputs", ()), found.get("loss_fn_outputs", ()), strict=True
    )
    for ours, other in outputs:
        far = np.abs(np.array(ours["logprobs"]["data"]) - np.array(other["logprobs"]["data"]))
        worst["logprobs"] = max(worst["logprobs"], float(far.max()))
