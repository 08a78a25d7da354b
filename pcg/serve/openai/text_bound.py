"""The bound of texts that become tokens, which take some 200 bytes each while they are made."""

from __future__ import annotations

from pcg.serve.errors import ApiError

TOKEN_CHARACTERS = 16
"""More than ordinary texts have for each of their tokens, which is four."""
SHORT = 2**20
"""Characters of a text that is always taken."""


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
