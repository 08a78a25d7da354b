"""Kill `pcg serve` at random instants under load of three APIs, and compare with its promises.

Clients on threads of their own load a server with a folder for its data: Tinker's protocol (two
that train and sample), OpenAI's files, and fine-tuning jobs of the three methods. SIGKILL ends the
server, or its engine's process alone, at an instant that is drawn: while it starts, right after its
first word, some milliseconds after an acknowledgement, or after a time. The next server begins in
the same folder.

Clients keep all that they were told. Whenever one asks again for a result or for events, and in the
end for all, the answers must be the same. A request whose answer did not come is asked for again
under its number, where the protocol has one. `tests/serve` compares the results with those of a
server that nobody kills.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness as bench
import httpx2
import numpy as np
import openai

from pcg.serve.tinker.proto import CLASSES

sys.path.insert(0, str(bench.ROOT))
from tests.support import tiny_llama

MODEL = "tiny"
GONE = (httpx2.TransportError, openai.APIConnectionError)
"""Errors of a client whose server is gone: nobody knows whether its request was done."""
LONGEST_S, SETTLE_S, START_S = 15.0, 1200.0, 300.0
"""The longest waits for an acknowledgement, for all promises once nobody kills, and for a start."""


class Away(Exception):
    """The server is gone, or goes."""


class World:
    """The server as its clients know it, over its lives.

    Attributes:
        counts: how often each kind of answer was acknowledged or compared.
        wrong: promises that were broken, in words.
        is_over: True once nothing new is to be begun.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.is_over = False
        self._url: str | None = None
        self._changed = threading.Condition()

    def is_at(self, url: str | None) -> None:
        with self._changed:
            self._url = url
            self._changed.notify_all()

    def url(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._url is not None)
            return str(self._url)

    def acknowledge(self, kind: str, count: int = 1) -> None:
        with self._changed:
            self.counts[kind] += count
            self._changed.notify_all()

    def wait_for_more(self, count: int, of: Collection[str]) -> None:
        """Return after so many more acknowledgements of some kinds, or of all, or after a time."""

        def found() -> int:
            return sum(n for kind, n in self.counts.items() if not of or kind in of)

        with self._changed:
            least = found() + count
            self._changed.wait_for(lambda: found() >= least, LONGEST_S)

    def raw(self) -> httpx2.Client:
        """Return a client of Tinker's bare protocol."""
        base, headers = f"{self.url()}/tinker/api/v1/", {"x-api-key": bench.KEY}
        return httpx2.Client(base_url=base, headers=headers, timeout=60)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url()}/v1", api_key=bench.KEY, max_retries=0, timeout=60
        )


class Load(ABC):
    """A client on a thread of its own, which goes on over the server's lives."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.name = world, f"{type(self).__name__}-{seed}"
        self.drawn = random.Random(seed)
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @abstractmethod
    def work(self) -> None:
        """Do something; the next call goes on after a server that was killed."""

    @abstractmethod
    def settle(self) -> bool:
        """Check the promises once no server is killed; True once all of them are kept."""

    def check(self, is_kept: bool, text: str) -> None:
        if not is_kept:
            self.world.wrong.append(f"{self.name}: {text}")

    def _run(self) -> None:
        while not self.world.is_over:
            self.asked(self.work)

    def finish(self) -> None:
        until = time.monotonic() + SETTLE_S
        while not self.asked(self.settle):
            if time.monotonic() > until:
                self.check(False, "not all promises were kept in time")
                return
            time.sleep(0.2)

    def asked(self, act: Callable[[], Any]) -> Any:
        """Call a server that may go meanwhile; None if it did."""
        try:
            return act()
        except (*GONE, Away):
            time.sleep(0.02)
        except Exception as error:
            ends = getattr(error, "status_code", None) == 503
            if ends or getattr(error, "code", None) == "engine_ended":
                time.sleep(0.02)
            else:
                self.check(False, f"{error!r:.600}")
        return None


# ------------------------------------------------------------------------------------------ files


@dataclass
class Kept:
    """A file by the name that it was sent under."""

    content: bytes
    id: str = ""
    is_there: bool = False
    is_gone: bool = False


class FilesLoad(Load):
    """Keeps files, reads and deletes them."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.kept: dict[str, Kept] = {}

    def work(self) -> None:
        acts = (self._create, self._create, self._read, self._delete)
        with self.world.openai() as client:
            for _ in range(6):
                self.drawn.choice(acts)(client)

    def _create(self, client: openai.OpenAI) -> None:
        name = f"{self.name}-{len(self.kept)}"
        one = Kept(self.drawn.randbytes(self.drawn.choice((1, 100, 5_000, 300_000))))
        self.kept[name] = one
        made = client.files.create(file=(name, one.content), purpose="user_data")
        one.id, one.is_there = made.id, True
        self.world.acknowledge("files")

    def _one(self) -> Kept | None:
        there = [one for one in self.kept.values() if one.is_there]
        return self.drawn.choice(there) if there else None

    def _read(self, client: openai.OpenAI) -> None:
        if (one := self._one()) is not None:
            self._compare(client, one)

    def _compare(self, client: openai.OpenAI, one: Kept) -> None:
        try:
            found = client.files.content(one.id).content
        except openai.NotFoundError:
            self.check(False, f"{one.id} is lost")
            return
        self.check(found == one.content, f"{one.id} has other bytes")
        self.world.counts["files read"] += 1

    def _delete(self, client: openai.OpenAI) -> None:
        one = self._one()
        if one is None or self.drawn.random() < 0.5:
            return
        one.is_there = False  # nobody knows, until there is an answer
        client.files.delete(one.id)
        one.is_gone = True
        self.world.acknowledge("files deleted")

    def settle(self) -> bool:
        with self.world.openai() as client:
            found: dict[str, list[str]] = {}
            for file in client.files.list(purpose="user_data"):
                found.setdefault(file.filename, []).append(file.id)
            for name, one in self.kept.items():
                ids = found.pop(name, [])
                self.check(len(ids) <= 1, f"{name} is there {len(ids)} times")
                if one.is_there:
                    self.check(ids == [one.id], f"{name} is {ids}, and was {one.id}")
                if one.is_gone:
                    self.check(not ids, f"{name} was deleted, and is there")
                for one.id in ids:
                    self._compare(client, one)
            self.check(not found, f"files that nobody sent: {list(found)}")
        return True


# ------------------------------------------------------------------------------------------- jobs

PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
WORDS = ("file", "table", "page", "row", "key", "name")
OVER = ("succeeded", "failed", "cancelled")
CALLS = {word: f"def load_{word}(path):" for word in WORDS}
ROWS: dict[str, list[Any]] = {
    "supervised": [{"prompt": CALLS[w], "completion": f" return {w}"} for w in WORDS],
    "dpo": [{"prompt": CALLS[w], "chosen": f" return {w}", "rejected": " pass"} for w in WORDS],
    "reinforcement": [
        {"messages": [{"role": "user", "content": w}], "answer": w} for w in WORDS[:4]
    ],
}
GRADER = {
    "type": "text_similarity", "name": "alike", "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}", "evaluation_metric": "fuzzy_match",
}  # fmt: skip
ONCE = ("Created fine-tuning job", "Files validated", "New fine-tuned model", "The job has succ")
"""Starts of messages that the events of a job have once."""


@dataclass
class Job:
    """A job that was acknowledged, and its events, the oldest first."""

    id: str
    last: Any
    events: list[Any] = field(default_factory=list)


def fields_of(kind: str, epochs: int, seed: int) -> dict[str, Any]:
    """Return the fields of a job of a method."""
    hyper: dict[str, Any] = {"n_epochs": epochs, "batch_size": 2}
    more: dict[str, Any] = {"peft": PEFT, "learning_rate": 0.005, "save_every": 3}
    method: dict[str, Any] = {"hyperparameters": hyper}
    if kind == "dpo":
        hyper["beta"] = 0.2
    if kind == "reinforcement":
        hyper["compute_multiplier"], method["grader"] = 0.25, GRADER
        more["max_completion_length"] = 6
    methods = {"type": kind, kind: method}
    return {"model": MODEL, "seed": seed, "method": methods, "extra_body": {"pcg": more}}


class JobsLoad(Load):
    """Makes jobs of all methods, and reads their events."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.jobs: list[Job] = []
        self._files: dict[str, str] = {}
        self._made = 0

    def work(self) -> None:
        with self.world.openai() as client:
            for _ in range(4):
                for kind in ROWS.keys() - self._files.keys():
                    rows = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[kind])
                    file = (f"{kind}.jsonl", rows)
                    self._files[kind] = client.files.create(file=file, purpose="fine-tune").id
                active = [one for one in self.jobs if one.last.status not in OVER]
                if len(active) < 3:
                    self._begin(client)
                for one in active:
                    self._look(client, one)

    def _begin(self, client: openai.OpenAI) -> None:
        kind = list(ROWS)[self._made % len(ROWS)]
        self._made += 1
        given = fields_of(kind, self.drawn.randrange(4, 10), self._made)
        made = client.fine_tuning.jobs.create(training_file=self._files[kind], **given)
        self.jobs.append(Job(made.id, made))
        self.world.acknowledge("jobs")

    def _look(self, client: openai.OpenAI, one: Job) -> None:
        before, one.last = one.last, client.fine_tuning.jobs.retrieve(one.id)
        if before.status in OVER:
            self.check(one.last.status == before.status, f"{one.id} was {before.status}")
        events = list(client.fine_tuning.jobs.list_events(one.id, limit=100))[::-1]
        is_same = events[: len(one.events)] == one.events
        self.check(is_same, f"{one.id}: events have changed")
        self.world.acknowledge("events", len(events) - len(one.events))
        one.events = events

    def settle(self) -> bool:
        with self.world.openai() as client:
            for one in self.jobs:
                self._look(client, one)
            if any(one.last.status not in OVER for one in self.jobs):
                return False
            for one in self.jobs:
                self._look(client, one)
                self._compare(client, one)
        return True

    def _compare(self, client: openai.OpenAI, one: Job) -> None:
        """Check the steps, events, table, checkpoints and models of a job that is over."""
        metrics = [event.data for event in one.events if event.type == "metrics"]
        steps = [data["step"] for data in metrics]
        self.check(steps == list(range(1, len(steps) + 1)), f"{one.id} has steps {steps}")
        for start in ONCE:
            count = sum(event.message.startswith(start) for event in one.events)
            self.check(count <= 1, f"{one.id}: {start}… comes {count} times")
        self.check(one.last.status == "succeeded", f"{one.id}: {one.last.error}")
        total = metrics[0]["total_steps"]
        self.check(len(steps) == total, f"{one.id} has {len(steps)} of {total} steps")
        (result,) = one.last.result_files
        rows = client.files.content(result).text.splitlines()
        self.check(len(rows) == total + 1, f"{one.id}: its table has {len(rows)} rows")
        saved = list(client.fine_tuning.jobs.checkpoints.list(one.id))
        due = sorted({*range(3, total, 3), total})[-3:]
        found = sorted(each.step_number for each in saved)
        self.check(found == due, f"{one.id} has checkpoints {found}, and {due} were due")
        for name in [one.last.fine_tuned_model, *(c.fine_tuned_model_checkpoint for c in saved)]:
            made = client.completions.create(model=name, prompt="def ", max_tokens=4)
            self.check(bool(made.choices), f"{name} does not answer")
            self.world.counts["models that answer"] += 1


# ----------------------------------------------------------------------------------------- Tinker


def answered(reply: httpx2.Response) -> Any:
    """Return the JSON of a reply. Away: the server ends. ValueError: it is an error."""
    if reply.status_code == 503 or '"code":"ending"' in reply.text:
        raise Away
    if reply.status_code != 200:
        raise ValueError(f"{reply.request.url.path} {reply.status_code} {reply.text[:400]}")
    return reply.json()


def result_of(raw: httpx2.Client, promise: dict[str, Any]) -> Any:
    """Return the result of a promise; None while there is none."""
    reply = raw.post("retrieve_future", json={"request_id": promise["request_id"]})
    if reply.headers.get("content-type", "").startswith("application/x-protobuf"):
        sequences = CLASSES["SampleResponse"].FromString(reply.content).sequences
        return {
            "tokens": [np.frombuffer(one.tokens, "<i4").tolist() for one in sequences],
            "logprobs": [np.frombuffer(one.logprobs, "<f4").tolist() for one in sequences],
        }
    found = answered(reply)
    return None if found.get("type") == "try_again" else found


@dataclass
class Asked:
    """A request: its path and body, the promise that it got, and its result."""

    path: str
    body: dict[str, Any]
    promise: dict[str, Any] | None = None
    result: Any = None


@dataclass
class Stream:
    """A model or a sampling session, and its requests."""

    id: str
    asked: list[Asked] = field(default_factory=list)
    is_closed: bool = False


def datum(seed: int) -> dict[str, Any]:
    """Return a datum of the cross entropy."""
    tokens = [(seed * 7 + i * (seed % 5 + 1)) % 250 + 3 for i in range(12)]
    shape = [len(tokens) - 1]
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": shape},
        "weights": {"data": [1.0] * shape[0], "dtype": "float32", "shape": shape},
    }
    chunks = [{"type": "encoded_text", "tokens": tokens[:-1]}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


class TinkerLoad(Load):
    """Trains models, one after another or one all the time, and samples from them.

    Args:
        updates: after so many a model is closed and another one made; 0 for never.
    """

    def __init__(self, world: World, seed: int, updates: int) -> None:
        super().__init__(world, seed)
        self.models: list[Stream] = []
        self.samplers: list[Stream] = []
        self._session, self._updates, self._names = "", updates, 0

    def work(self) -> None:
        with self.world.raw() as raw:
            for _ in range(8):
                self._go_on(raw)

    def _all(self) -> list[Asked]:
        return [one for stream in [*self.models, *self.samplers] for one in stream.asked]

    def _go_on(self, raw: httpx2.Client) -> None:
        if not self._session:
            body = {"tags": [], "sdk_version": "0.24.0"}
            self._session = answered(raw.post("create_session", json=body))["session_id"]
            self.world.acknowledge("sessions")
        if not self.models or self.models[-1].is_closed:
            self._make(raw)
        for one in [one for one in self._all() if one.promise is None]:
            self._ask(raw, one)  # a server went while it was asked; the same again
        known = [one for one in self.models[-1].asked[-30:] if one.promise is not None]
        if known and self.drawn.random() < 0.15:
            self._ask(raw, self.drawn.choice(known))
        self._take(raw, 0.5)
        if sum(one.result is None for one in self._all()) >= 10:
            self._take(raw, 1.0)
            return
        self._train(raw, self.models[-1])
        if self.samplers and self.drawn.random() < 0.5:
            self._sample(raw, self.drawn.choice(self.samplers[-3:]))

    def _make(self, raw: httpx2.Client) -> None:
        count = len(self.models)
        body = {"session_id": self._session, "model_seq_id": count, "base_model": MODEL}
        body["lora_config"] = {"rank": 4, "seed": 1 + count}
        made = Asked("create_model", body)
        self.models.append(Stream(f"{self._session}:train:{count}", [made]))
        self._ask(raw, made)

    def _train(self, raw: httpx2.Client, model: Stream) -> None:
        """Ask for an update, in order or out of it, and perhaps to save its result."""
        drawn, new = self.drawn, list[Asked]()

        def add(to: str, **more: Any) -> None:
            seq = len(model.asked) + len(new)
            new.append(Asked(to, {"model_id": model.id, "seq_id": seq, **more}))

        def batch(count: int) -> dict[str, Any]:
            data = [datum(drawn.randrange(50)) for _ in range(count)]
            return {"data": data, "loss_fn": "cross_entropy"}

        for _ in range(drawn.choice((1, 1, 2))):
            add("forward_backward", forward_backward_input=batch(drawn.choice((1, 2))))
        add("optim_step", adam_params={"learning_rate": 1e-3, "eps": 1e-8})
        if drawn.random() < 0.1:
            add("forward", forward_input=batch(1))
        for path in ("save_weights", "save_weights_for_sampler"):
            if drawn.random() < 0.12:
                self._names += 1
                add(path, path=f"saved-{self._names}")
        model.asked += new
        for one in drawn.sample(new, len(new)) if drawn.random() < 0.2 else list(new):
            self._ask(raw, one)
        steps = sum(one.path == "optim_step" for one in model.asked)
        if self._updates and steps >= self._updates:
            new.clear()
            add("save_weights", path="last")
            model.asked += new
            model.is_closed = True
            self._ask(raw, new[0])

    def _ask(self, raw: httpx2.Client, one: Asked) -> None:
        """Ask, and keep the promise, which must be the same as before."""
        found = answered(raw.post(one.path, json=one.body))
        if one.promise is None:
            one.promise = found
            self.world.acknowledge("promises")
            return
        self.world.counts["promises asked for twice"] += 1
        same = found["request_id"] == one.promise["request_id"]
        self.check(same, f"{one.path} {one.body.get('seq_id')} is promised twice")

    def _sample(self, raw: httpx2.Client, sampler: Stream) -> None:
        drawn, seq = self.drawn, len(sampler.asked)
        tokens = [drawn.randrange(3, 250) for _ in range(drawn.randrange(3, 12))]
        params = {"max_tokens": 6, "temperature": drawn.choice((0.0, 1.0)), "seed": seq, "stop": []}
        body = {"sampling_session_id": sampler.id, "seq_id": seq, "sampling_params": params}
        body["num_samples"] = drawn.choice((1, 2))
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        sampler.asked.append(Asked("asample", body))
        self._ask(raw, sampler.asked[-1])

    def _take(self, raw: httpx2.Client, share: float) -> None:
        """Take results of some promises, and look at some that were there before."""
        for one in self._all():
            is_known = one.result is not None
            if one.promise is None or self.drawn.random() > (0.01 if is_known else share):
                continue
            found = result_of(raw, one.promise)
            if is_known:
                self.world.counts["results told twice"] += 1
                self.check(found == one.result, f"{one.promise} has another result")
            elif found is not None:
                one.result = found
                self.world.acknowledge("results")
                self.check("error" not in found, f"{one.path} failed: {found}")
                if one.path == "save_weights_for_sampler" and "path" in found:
                    self._open(raw, found["path"])

    def _open(self, raw: httpx2.Client, path: str) -> None:
        body = {"session_id": self._session, "sampling_session_seq_id": len(self.samplers)}
        reply = raw.post("create_sampling_session", json={**body, "model_path": path})
        self.samplers.append(Stream(answered(reply)["sampling_session_id"]))
        self.world.acknowledge("sampling sessions")

    def settle(self) -> bool:
        """Ask again for requests without an answer, save each model, and take all results twice."""
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
            for one in self._all():
                found = result_of(raw, one.promise or {})
                if found is None:
                    raise Away
                self.check(found == one.result, f"{one.promise} has another result")
                self.check("error" not in found, f"{one.path} failed: {found}")
                self.world.counts["results compared at the end"] += 1
        return True


# ------------------------------------------------------------------------------------------ kills


class Server:
    """`pcg serve` from its start to its end, in a folder that it shares with those before it."""

    def __init__(self, folder: Path, number: int) -> None:
        self._log = folder / f"server-{number:03d}.log"
        command = [sys.executable, "-m", "pcg_cli", "serve", str(folder / "model"), "--port", "0"]
        command += [
            "--dtype",
            "float32",
            "--data-dir",
            str(folder / "kept"),
            "--api-key",
            bench.KEY,
        ]
        command += ["--served-model-name", MODEL, "--kv-cache-gib", "0.05", "--access-log", "none"]
        with self._log.open("wb") as file:
            own: Any = {"stdout": file, "stderr": file, "start_new_session": True}
            self._process = subprocess.Popen(command, **own)

    def wait(self) -> str:
        """Return its address once it listens. SystemExit: it ended before."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            found = re.search(r"^listening at (\S+)$", self._log.read_text(), re.MULTILINE)
            if found is not None:
                return found[1]
            time.sleep(0.005)
        raise SystemExit(f"error: the server did not begin\n{self._log.read_text()}")

    def end(self, how: signal.Signals, *, engine: bool = False) -> None:
        """Signal its process, or that of its engine alone, and wait until both are gone."""
        engines = bench.children(self._process.pid) if self._process.poll() is None else []
        for pid in engines if engine and engines else [self._process.pid]:
            os.kill(pid, how)
        until = time.monotonic() + 120
        while self._process.poll() is None or any(Path(f"/proc/{one}").exists() for one in engines):
            if time.monotonic() > until:
                raise SystemExit(f"error: process {self._process.pid} does not end")
            time.sleep(0.002)


KINDS = ("start", "first", "answer", "answer", "trained", "trained", "trained", "time", "engine")
"""When servers are killed: while they start, up to 0.3 s after their first word, up to 5 ms after
an acknowledgement of any kind, or of a promise or a result of Tinker's protocol, after up to 6 s,
and by their engine's process after as long.
"""


def kill(
    server: Server, world: World, drawn: random.Random, kind: str, starts: list[float]
) -> None:
    """Let a server live for as long as is drawn, and kill it."""
    began = time.monotonic()
    if kind == "start":
        time.sleep(drawn.random() * (sorted(starts)[len(starts) // 2] if starts else 5.0))
    else:
        world.is_at(server.wait())
        starts.append(time.monotonic() - began)
        if kind in ("answer", "trained"):
            of = ("promises", "results") if kind == "trained" else ()
            world.wait_for_more(drawn.randrange(1, 60), of)
        time.sleep(drawn.random() * {"first": 0.3, "time": 6.0, "engine": 6.0}.get(kind, 0.005))
    server.end(signal.SIGKILL, engine=kind == "engine")
    world.is_at(None)


@bench.case("kills", "results compared at the end", "files", "jobs", kills=2)
def kills(kills: int = 50, seed: int = 0) -> dict[str, Any]:
    drawn, world, began = random.Random(seed), World(), time.monotonic()
    loads: list[Load] = [
        TinkerLoad(world, 1, 0), TinkerLoad(world, 2, 30), FilesLoad(world, 3), JobsLoad(world, 4),
    ]  # fmt: skip
    kinds, starts = Counter[str](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_llama.save(folder / "model")
        for load in loads:
            load.thread.start()
        for turn in range(kills):
            kind = drawn.choice(KINDS)
            kill(Server(folder, turn), world, drawn, kind, starts)
            kinds[kind] += 1
            bench.note(f"{turn + 1} of {kills} killed, {dict(world.counts)} {world.wrong}")
        world.is_over = True
        server = Server(folder, kills)
        world.is_at(server.wait())
        for load in loads:
            load.thread.join(120)
            load.finish()
        server.end(signal.SIGTERM)
    if world.wrong:
        raise SystemExit(f"error: promises were broken\n{world.wrong}")
    return {
        "kills": kills,
        "kills_by_kind": dict(kinds),
        "seconds": round(time.monotonic() - began),
        "start_s_median": round(sorted(starts)[len(starts) // 2], 1) if starts else None,
        "counts": dict(sorted(world.counts.items())),
        "promises_broken": world.wrong,
    }


if __name__ == "__main__":
    bench.main()
