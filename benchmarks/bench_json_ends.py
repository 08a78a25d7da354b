"""Count the JSON outputs of a chat model that end, with compact and with any white space.

    python benchmarks/bench_json_ends.py DIRECTORY [--new-tokens 400]

DIRECTORY has a chat model in the format of transformers, as HuggingFaceTB/SmolLM2-135M-Instruct.
Three requests with each of four schemas make 12 outputs of a contender, greedy and drawn:

    compact    at most one space, behind a comma or a colon; the default
    none       no white space (`disable_any_whitespace`)
    any        any white space, vLLM's default (`x-guidance: {"whitespace_flexible": true}`)

What does not end with compact JSON is a string, a number or an array without a bound.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measure import write

import pcg

PROMPTS = (
    "Describe Ada Lovelace, who was 36, as JSON.",
    "Alice and Bob go to a science fair on Friday. Extract the event as JSON.",
    "Give me a JSON object for a novel by Jane Austen.",
)
TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "person": closed(name=TEXT, age={"type": "integer"}),
    "event": closed(name=TEXT, date=TEXT, participants=TEXTS),
    "book": closed(title=TEXT, pages={"type": "integer"}),
    "nested": closed(address=closed(street=TEXT, city=TEXT), tags=TEXTS),
}
SPACING: dict[str, dict[str, Any]] = {
    "compact": {},
    "none": {"x-guidance": {"whitespace_flexible": False}},
    "any": {"x-guidance": {"whitespace_flexible": True}},
}


def main() -> None:
    """Generate all outputs, and write how many of them ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--new-tokens", type=int, default=400)
    arguments = parser.parse_args()
    executor = pcg.compile(arguments.directory)
    tokenizer = executor.tokenizer
    assert tokenizer is not None
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [tokenizer.encode_chat(chat, add_generation_prompt=True) for chat in chats]
    found: dict[str, dict[str, str]] = {}
    for temperature in (0.0, 0.7, 1.0):
        for name, options in SPACING.items():
            completions = [
                completion
                for schema in SCHEMAS.values()
                for completion in executor.generate(
                    prompts,
                    guided_json={**schema, **options},
                    max_new_tokens=arguments.new_tokens,
                    temperature=temperature,
                    seed=1,
                )
            ]
            ended = sum(one.finish_reason == "stop" for one in completions)
            row = found.setdefault(name, {})
            row[f"temperature {temperature}"] = f"{ended} of {len(completions)}"
    name = arguments.directory.name
    write("json_ends", {"model": name, "new_tokens": arguments.new_tokens, **found})


if __name__ == "__main__":
    main()
