"""Calls of instructor, run in its own environment; prints what came, as JSON."""

import json
import os
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

MODELS = os.environ["PCG_MODELS"].split(",")
BIAS = {str(token): -100 for token in json.loads(os.environ["PCG_SPACES"])}
CHAT: Any = [{"role": "user", "content": "what is it?"}]
COMMON: dict[str, Any] = {"messages": CHAT, "max_tokens": 120, "logit_bias": BIAS, "max_retries": 0}
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Animal(BaseModel):
    """An animal."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["dog", "fox"]
    is_lazy: bool


class Herd(BaseModel):
    """Some animals, and where they are."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["field", "wood"]
    leader: Animal


client = openai.OpenAI(base_url=os.environ["PCG_URL"], max_retries=0)
found: dict[str, Any] = {}
for mode in MODES:
    made = instructor.from_openai(client, mode=mode)
    one, reply = made.chat.completions.create_with_completion(
        model=MODELS[0], response_model=Animal, temperature=0, **COMMON
    )
    herd = made.chat.completions.create(
        model=MODELS[1], response_model=Herd, temperature=1, seed=3, **COMMON
    )
    parts = list(
        made.chat.completions.create_partial(
            model=MODELS[0], response_model=Animal, temperature=0, **COMMON
        )
    )
    found[mode.value] = {
        "one": one.model_dump(),
        "tokens": reply.usage.completion_tokens,
        "herd": herd.model_dump(),
        "streamed": parts[-1].model_dump(),
        "parts": len(parts),
    }
print(json.dumps(found))
