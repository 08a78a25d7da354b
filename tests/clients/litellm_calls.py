"""Calls of litellm, run in its own environment; prints what came, as JSON."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

PLACE = {"api_base": os.environ["PCG_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
PROMPT, TEXTS = "def copy_file(path, recursive=True):", ["def main():", "class Error:"]
COMMON: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, **PLACE}


def texts(model: str) -> dict[str, Any]:
    """Return the answers of one model: at once and streamed, of a prompt and of a chat."""
    name, chat = f"text-completion-openai/{model}", [{"role": "user", "content": PROMPT}]
    whole = litellm.text_completion(model=name, prompt=PROMPT, **COMMON)
    parts = litellm.text_completion(model=name, prompt=PROMPT, stream=True, **COMMON)
    said = litellm.completion(model=f"openai/{model}", messages=chat, **COMMON)
    streamed = litellm.completion(model=f"openai/{model}", messages=chat, stream=True, **COMMON)
    return {
        "text": whole.choices[0].text,
        "streamed": "".join(part.choices[0].text or "" for part in parts),
        "said": said.choices[0].message.content,
        "said_streamed": "".join(part.choices[0].delta.content or "" for part in streamed),
        "usage": whole.usage.prompt_tokens,
    }


def refusal(model: str, **changes: Any) -> str:
    """Return the name of the error of a call."""
    try:
        litellm.text_completion(
            model=f"text-completion-openai/{model}", prompt=PROMPT, **{**COMMON, **changes}
        )
    except Exception as error:
        return type(error).__name__
    return "none"


models = os.environ["PCG_MODELS"].split(",")
vectors = litellm.embedding(model=f"openai/{models[0]}", input=TEXTS, **PLACE).data
found = {
    "models": {model: texts(model) for model in models},
    "vectors": [one["embedding"] for one in vectors],
    "unknown": refusal("nobody"),
    "wrong key": refusal(models[0], api_key="wrong"),
    "bad": refusal(models[0], temperature=-1.0),
}
print(json.dumps(found))
