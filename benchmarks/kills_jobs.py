"""A client of fine-tuning jobs for `soak_kills.py`, and what it was told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import openai
from kills_world import MODEL, Load, World

PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
WORDS = ("file", "table", "page", "row", "key", "name")
OVER = ("succeeded", "failed", "cancelled")
ROWS: dict[str, list[Any]] = {
    "supervised": [
        {"prompt": f"def load_{word}(path):", "completion": f" return {word}"} for word in WORDS
    ],
    "dpo": [
        {"prompt": f"def load_{word}(path):", "chosen": f" return {word}", "rejected": " pass"}
        for word in WORDS
    ],
    "reinforcement": [
        {"messages": [{"role": "user", "content": word}], "answer": word} for word in WORDS[:4]
    ],
}
GRADER = {
    "type": "text_similarity",
    "name": "alike",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
}
ONCE = ("Created fine-tuning job", "Files validated", "New fine-tuned model", "The job has succ")
"""Messages that an event tells once."""


@dataclass
class Told:
    """A job that was acknowledged, and the events that were told of it, the oldest first."""

    id: str
    given: dict[str, Any]
    events: list[Any] = field(default_factory=list)
    last: Any = None
    is_cancelled: bool = False
    is_paused: bool = False


def fields_of(kind: str, epochs: int, seed: int) -> dict[str, Any]:
    """Return what a job of a method is made of, but for its file."""
    hyper: dict[str, Any] = {"n_epochs": epochs, "batch_size": 2}
    more: dict[str, Any] = {"peft": PEFT, "learning_rate": 0.005, "save_every": 3}
    method: dict[str, Any] = {"hyperparameters": hyper}
    if kind == "dpo":
        hyper["beta"] = 0.2
    if kind == "reinforcement":
        hyper["compute_multiplier"] = 0.25
        method["grader"] = GRADER
        more["max_completion_length"] = 6
    return {
        "model": MODEL,
        "seed": seed,
        "method": {"type": kind, kind: method},
        "extra_body": {"pcg": more},
    }


def upload(client: openai.OpenAI, kind: str) -> str:
    """Keep the rows of a method; returns the file's id."""
    content = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[kind])
    return client.files.create(file=(f"{kind}.jsonl", content), purpose="fine-tune").id


class JobsLoad(Load):
    """Makes jobs of all methods, reads their events, and pauses, resumes and cancels them."""

    def __init__(self, world: World, seed: int, most: int) -> None:
        self.name = f"jobs-{seed}"
        super().__init__(world, seed)
        self.jobs: list[Told] = []
        self._files: dict[str, str] = {}
        self._made = 0
        self._most = most

    def work(self) -> None:
        with self.world.openai() as client:
            for _ in range(4):
                if self.world.is_over:
                    return
                for kind in ROWS:
                    if kind not in self._files:
                        self._files[kind] = upload(client, kind)
                active = [one for one in self.jobs if one.last.status not in OVER]
                if len(active) < self._most:
                    self._begin(client)
                elif self.drawn.random() < 0.15:
                    self._change(client, self.drawn.choice(active))
                for one in active:
                    self._look(client, one)

    def _begin(self, client: openai.OpenAI) -> None:
        kind = list(ROWS)[self._made % len(ROWS)]
        self._made += 1
        epochs = self.drawn.randrange(4, 10)
        given = fields_of(kind, epochs, seed=self._made)
        made = client.fine_tuning.jobs.create(training_file=self._files[kind], **given)
        self.jobs.append(Told(made.id, given, last=made))
        self.world.acknowledge("jobs")

    def _change(self, client: openai.OpenAI, one: Told) -> None:
        jobs = client.fine_tuning.jobs
        try:
            if one.last.status == "paused":
                one.last = jobs.resume(one.id)
                self.world.acknowledge("jobs resumed")
            elif self.drawn.random() < 0.05:
                one.is_cancelled = True
                one.last = jobs.cancel(one.id)
                self.world.acknowledge("jobs cancelled")
            else:
                one.is_paused = True
                one.last = jobs.pause(one.id)
                self.world.acknowledge("jobs paused")
        except openai.BadRequestError as error:  # its status has changed since
            self.check("this can be done to one that is" in str(error), f"{one.id}: {error}")

    def _look(self, client: openai.OpenAI, one: Told) -> None:
        before = one.last
        one.last = client.fine_tuning.jobs.retrieve(one.id)
        if before.status in OVER:
            self.check(one.last.status == before.status, f"{one.id} was {before.status}")
        events = list(client.fine_tuning.jobs.list_events(one.id, limit=100))[::-1]
        told = one.events
        is_same = [event.id for event in events[: len(told)]] == [event.id for event in told]
        self.check(is_same and events[: len(told)] == told, f"{one.id}: events have changed")
        new = len(events) - len(told)
        one.events = events
        for _ in range(new):
            self.world.acknowledge("events")

    def settle(self) -> bool:
        with self.world.openai() as client:
            for one in self.jobs:
                self._look(client, one)
                if one.last.status == "paused":
                    one.last = client.fine_tuning.jobs.resume(one.id)
            if any(one.last.status not in OVER for one in self.jobs):
                return False
            for one in self.jobs:
                self._look(client, one)
                self._compare(client, one)
        return True

    def _compare(self, client: openai.OpenAI, one: Told) -> None:
        """Compare what there is of a job that is over with what there has to be."""
        steps = [event.data["step"] for event in one.events if event.type == "metrics"]
        self.check(steps == list(range(1, len(steps) + 1)), f"{one.id} tells steps {steps}")
        for start in ONCE:
            count = sum(event.message.startswith(start) for event in one.events)
            self.check(count <= 1, f"{one.id}: {start}… is told {count} times")
        if one.last.status != "succeeded":
            is_right = one.is_cancelled and one.last.status == "cancelled"
            self.check(is_right, f"{one.id} is {one.last.status}: {one.last.error}")
            return
        metrics = [event for event in one.events if event.type == "metrics"]
        total = metrics[0].data["total_steps"]
        self.check(len(steps) == total, f"{one.id} has {len(steps)} of {total} steps")
        (result,) = one.last.result_files
        rows = client.files.content(result).text.splitlines()
        self.check(len(rows) == total + 1, f"{one.id}: its table has {len(rows)} rows")
        saved = list(client.fine_tuning.jobs.checkpoints.list(one.id))
        due = sorted({*range(3, total, 3), total})[-3:]
        found = sorted(each.step_number for each in saved)
        is_right = found[-1] == total and len(found) == 3 if one.is_paused else found == due
        self.check(is_right, f"{one.id} has checkpoints {found}, and {due} were due")
        for name in [one.last.fine_tuned_model, *(c.fine_tuned_model_checkpoint for c in saved)]:
            made = client.completions.create(model=name, prompt="def ", max_tokens=4)
            self.check(bool(made.choices), f"{name} does not answer")
            self.world.counts["models that answer"] += 1


def replay(world: World, load: JobsLoad) -> dict[str, tuple[str, list[float]]]:
    """Run the jobs that succeeded on a server that nobody kills.

    Returns:
        For each the id of the job there, and the losses of its steps.
    """
    found = {}
    with world.openai() as client:
        files = {kind: upload(client, kind) for kind in ROWS}
        jobs = client.fine_tuning.jobs
        made = {
            one.id: jobs.create(training_file=files[one.given["method"]["type"]], **one.given).id
            for one in load.jobs
            if one.last.status == "succeeded"
        }
        for id, other in made.items():
            while jobs.retrieve(other).status not in OVER:
                pass
            events = list(jobs.list_events(other, limit=100))[::-1]
            losses = [one.data["train_loss"] for one in events if one.type == "metrics"]
            found[id] = other, losses
    return found
