"""Usage: the tokens of a reply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from pcg.runtime.requests.request import Completion


class PromptTokensDetails(BaseModel):
    """Tokens of prompts that the KV cache had."""

    cached_tokens: int


class Usage(BaseModel):
    """The tokens of a reply; a prompt counts once, whatever its continuations are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(groups: Iterable[list[Completion]]) -> dict[str, Any]:
    """Return the usage of several prompts, each with its continuations, as JSON."""
    prompt = output = cached = 0
    for group in groups:
        prompt += group[0].prompt_tokens
        cached += group[0].cached_tokens
        output += sum(len(one.token_ids) for one in group)
    return counted(prompt, output, cached)


def counted(prompt: int, output: int, cached: int) -> dict[str, Any]:
    """Return the usage of so many tokens, as JSON."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
