"""A small model with a tokenizer and a chat template, in a directory, and rows to train it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import oracle, toy_tokenizers
from tests.support.families import BY_NAME

VOCABULARY = 512
"""Above that of the tokenizer."""

ROWS: list[dict[str, Any]] = [
    {"prompt": "Hello, how are", "completion": " you today?"},
    {"prompt": "the quick brown", "completion": " fox jumps over"},
    {"prompt": "Ein schöner", "completion": " Tag für Äpfel 😀"},
]
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "what is it?"},
            {"role": "assistant", "content": f"a dog, {i} of them"},
        ]
    }
    for i in range(3)
]

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
"""A chat template that runs for years."""


def save_text_model(directory: Path, template: str = toy_tokenizers.CHATML) -> Path:
    """Write a model directory."""
    config = BY_NAME["llama3"].config(2, max_position_embeddings=128, vocab_size=VOCABULARY)
    oracle.save_model(oracle.random_model(config), directory)
    toy_tokenizers.save_chatml(directory, template)
    return directory
