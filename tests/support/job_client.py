"""Jobs over HTTP by the real openai client."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.support import serving
from tests.support.waiting import until

ROWS = [
    {"prompt": f"def load_{word}(path):", "completion": f" return {word}"}
    for word in ("file", "table", "page", "row", "key", "name")
]
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def lines_of(rows: list[Any]) -> bytes:
    """The lines of a file of rows."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def client_of(url: str, key: str = serving.KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, rows: list[Any] = ROWS) -> str:
    """Keep rows for training; returns the file's id."""
    made = client.files.create(file=("train.jsonl", lines_of(rows)), purpose="fine-tune")
    return made.id


def begin(client: openai.OpenAI, epochs: int = 2, own: Any = None, **fields: Any) -> Any:
    """Make a job of three steps an epoch."""
    given: dict[str, Any] = {
        "model": serving.MODEL,
        "method": {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": 2}},
        },
        "extra_body": {"pcg": {"peft": PEFT, "learning_rate": 0.01, **(own or {})}},
        **fields,
    }
    if "training_file" not in given:
        given["training_file"] = upload(client)
    return client.fine_tuning.jobs.create(**given)


def ended(client: openai.OpenAI, job: str) -> Any:
    """The job, once it is over."""
    over = ("succeeded", "failed", "cancelled")
    until(lambda: client.fine_tuning.jobs.retrieve(job).status in over, 120, 0.05)
    return client.fine_tuning.jobs.retrieve(job)


def events(client: openai.OpenAI, job: str) -> list[Any]:
    """All events of a job, the oldest first."""
    return list(client.fine_tuning.jobs.list_events(job))[::-1]


def steps(client: openai.OpenAI, job: str) -> list[int]:
    """The steps that a job's events tell."""
    return [one.data["step"] for one in events(client, job) if one.type == "metrics"]


def text(client: openai.OpenAI, model: str) -> str:
    """A greedy continuation."""
    reply = client.completions.create(
        model=model, prompt="def load_file(path):", max_tokens=8, temperature=0
    )
    return reply.choices[0].text
