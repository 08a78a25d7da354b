"""Bounds of texts that become tokens, some 200 bytes each meanwhile, and of the way back."""

from __future__ import annotations

from pcg.serve.errors import ApiError

TOKEN_CHARACTERS = 16
"""More than ordinary texts have for each of their tokens, which is four."""
SHORT = 2**20
"""Characters of a text that is always taken."""
FEW = 2**16
"""Tokens that are always made text of."""


def check_length(text: str, max_model_len: int | None) -> None:
    """Refuse a text that is far longer than a prompt can be, before it is tokenized.

    Args:
        max_model_len: the most tokens of a prompt and its output; None if there is no bound.
    Raises:
        ApiError: it is too long.
    """
    if max_model_len is None:
        return
    most = max(SHORT, TOKEN_CHARACTERS * max_model_len)
    if len(text) > most:
        raise ApiError(
            400,
            f"A text has {len(text)} characters, and this server takes at most {most}: the model's "
            f"context has {max_model_len} tokens. Send less.",
            param="prompt",
            code="context_length_exceeded",
        )


def check_count(count: int, max_model_len: int | None) -> None:
    """Refuse tokens that are far more than a model's context, before text is made of them.

    Args:
        count: the number of tokens.
        max_model_len: the most tokens of a prompt and its output; None if there is no bound.
    Raises:
        ApiError: they are too many.
    """
    if max_model_len is None:
        return
    most = max(FEW, max_model_len)
    if count > most:
        raise ApiError(
            400,
            f"{count} tokens, and this server takes at most {most}: the model's context has "
            f"{max_model_len} tokens. Send fewer.",
            param="tokens",
            code="context_length_exceeded",
        )
