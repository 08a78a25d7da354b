"""The grammar of one request: where its output stands in what a guide allows."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from pcg.errors import GenerationError, PcgError, as_pcg_error
from pcg.runtime.guided.guide import Guide

LONGEST_COMMIT_S = 2e-3
"""Processor time of a token in its grammar, which all requests of a step wait for; 10 µs as a rule.

A grammar in which a text can be read in many ways takes longer with each token, up to 80 ms.
"""
_MOST_SLOW = 3
"""Tokens that may take longer, as a part of a grammar may be built for one."""
_SHOWN = 300
"""Characters of the library's message that an error shows."""


class Grammar:
    """The state of a guided output, which `commit` alone changes.

    Attributes:
        masks: the masks that are made for the next token, and its place among them; None for none.
    """

    def __init__(self, guide: Guide, compiled: Future[Any]) -> None:
        self.guide = guide
        self._slow = 0
        self.masks: tuple[Any, int] | None = None
        self.is_complete = False
        self._compiled = compiled
        self._matcher: Any = None

    @property
    def is_ready(self) -> bool:
        """True once the guide is compiled, or could not be."""
        return self._compiled.done()

    @property
    def error(self) -> PcgError | None:
        """The reason why the output cannot begin, or cannot go on."""
        if not self._compiled.done():
            return None
        error = self._compiled.exception()
        if isinstance(error, Exception):
            return as_pcg_error(error, self.guide.kind, GenerationError)
        if self.masks is not None:
            self.masks[0].exception()  # until they are made, another thread holds the matcher
        if self._matcher is not None and self._matcher.is_error():
            return guide_error(self.guide, self._matcher.get_error())
        return None

    def wait(self) -> None:
        """Wait until it is ready."""
        self._compiled.exception()

    @property
    def matcher(self) -> Any:
        """The library's matcher, the request's own."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        return self._matcher

    def commit(self, token: int) -> None:
        """Note that a token was chosen. GenerationError: the guide does not allow it."""
        self.masks = None
        began_s = time.thread_time()
        try:
            is_allowed = self.matcher.consume_token(token)
            self.is_complete = self.matcher.is_stopped()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise guide_error(self.guide, str(error)) from error
        if not is_allowed:
            raise guide_error(self.guide, self.matcher.get_error())
        self._slow += time.thread_time() - began_s > LONGEST_COMMIT_S
        if self._slow >= _MOST_SLOW:
            raise guide_error(
                self.guide,
                f"its last tokens took more than {1000 * LONGEST_COMMIT_S:g} ms each of everyone's "
                "step; write it without rules that match a text in many ways",
            )


def guide_error(guide: Guide, message: str) -> GenerationError:
    """Return the error of a guide that cannot be compiled or followed."""
    text = " ".join(message.split())
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return GenerationError(f"{guide.kind} cannot be followed: {text}")
