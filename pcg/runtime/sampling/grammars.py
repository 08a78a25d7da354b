"""Grammars compiled from guides for a tokenizer, the states of outputs, and token masks.

Compiling takes milliseconds, or seconds for hostile guides. It runs on separate threads, in turn a
single guide of each tenant at a time, while the request waits in the queue. The library limits its
work, and guides have a maximum length. Nested rules take stack, so these threads have large stacks.

A mask takes about 10 to 100 µs. The masks of a step are computed in a single call without the
interpreter's lock, while the device computes the step's logits.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pcg.errors import GenerationError, PcgError, QueueFullError, as_pcg_error
from pcg.kernels.devices import device_pool
from pcg.runtime.sampling.guides import Guide, json_options
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.units import shown

_COMPILING = 2
"""Number of guides compiled concurrently."""
_MOST_QUEUED = 64
"""Maximum number of a tenant's guides that wait or are being compiled."""
_STACK_BYTES = 128 * 2**20
"""Stack of a compile thread: 32,768 characters can nest about 5,000 rules; 8 MiB hold 1,000."""
_starting = threading.Lock()


class CompileQueue:
    """Runs functions on threads with large stacks.

    Tenants take turns, and a named tenant has at most a single thread, so that a slow guide delays
    only guides of the same tenant.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._busy: set[str] = set()
        self._threads = device_pool(None, _COMPILING, "pcg guides")

    def submit(self, tenant: str, act: Callable[[], Any]) -> Future[Any]:
        """Queue a function; return the future of its result.

        QueueFullError: too many functions of a named tenant wait.
        """
        future: Future[Any] = Future()
        with self._lock:
            line = self._lines.setdefault(tenant, deque())
            if tenant and len(line) >= _MOST_QUEUED:
                raise QueueFullError(
                    f"{_MOST_QUEUED} guides of tenant {shown(tenant)} wait to be compiled, and as "
                    "many may; ask again later"
                )
            line.append((future, act))
        with _starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._threads.submit(self._run_all)
            finally:
                threading.stack_size(before)
        return future

    def _run_all(self) -> None:
        """Run functions of idle tenants; a busy tenant's functions run on its current thread."""
        tenant = None
        while True:
            with self._lock:
                if tenant is not None:
                    self._busy.discard(tenant)
                tenant = next((name for name in self._lines if name not in self._busy), None)
                if tenant is None:
                    return
                line = self._lines.pop(tenant)
                future, act = line.popleft()
                if line:
                    self._lines[tenant] = line
                if tenant:
                    self._busy.add(tenant)
            try:
                future.set_result(act())
            except BaseException as error:  # whoever waits for it gets it
                future.set_exception(error)


LONGEST_COMMIT_S = 2e-3
"""Limit of a commit's processor time, for which all requests of a step wait; usually 10 µs.

An ambiguous grammar takes longer with each token, up to 80 ms.
"""
_MOST_SLOW = 3
"""Number of tokens that may exceed the limit, as a token may build a part of the grammar."""
_SHOWN = 300
"""Maximum length of the library's message in errors, in characters."""


class Grammar:
    """The state of a guided output; only `commit` changes it.

    Attributes:
        masks: the step's masks for the next token, with this grammar's index; None if not started.
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
        """True once compiling has succeeded or failed."""
        return self._compiled.done()

    @property
    def error(self) -> PcgError | None:
        """The error that prevents the output; None without an error."""
        if not self._compiled.done():
            return None
        error = self._compiled.exception()
        if isinstance(error, Exception):
            return as_pcg_error(error, self.guide.kind, GenerationError)
        if self.masks is not None:
            self.masks[0].exception()  # wait: another thread uses the matcher
        if self._matcher is not None and self._matcher.is_error():
            return guide_error(self.guide, self._matcher.get_error())
        return None

    def wait(self) -> None:
        """Wait until the grammar is ready."""
        self._compiled.exception()

    @property
    def matcher(self) -> Any:
        """The request's matcher of the library."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        return self._matcher

    def commit(self, token: int) -> None:
        """Advance by a drawn token. GenerationError: the guide does not allow the token."""
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


Masks = NDArray[np.bool_]
"""True for forbidden tokens, [rows, vocabulary]."""

_KEPT = 64
"""Number of cached compiled guides, in addition to guides of waiting requests."""
_LIMITS = {"step_max_items": 10_000, "step_lexer_fuel": 100_000, "verbose_errors": False}
"""Stricter limits than the library's defaults, so that a mask takes at most few milliseconds."""


class Grammars:
    """Compiles guides for a tokenizer, and computes masks."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocabulary: int, end_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Guide, tuple[Future[Any], WeakSet[Grammar]]] = OrderedDict()

    def begin(self, guide: Guide, tenant: str = "") -> Grammar:
        """Start compiling the guide of a tenant's request; return its grammar.

        A guide is not compiled if all requests that waited for it have ended.

        QueueFullError: too many guides of the tenant wait.
        """
        with self._lock:
            if guide not in self._compiled:
                awaiting: WeakSet[Grammar] = WeakSet()
                act = functools.partial(self._compile, guide, awaiting)
                self._compiled[guide] = self._queue.submit(tenant, act), awaiting
            self._compiled.move_to_end(guide)
            compiled, awaiting = self._compiled[guide]
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            grammar = Grammar(guide, compiled)
            awaiting.add(grammar)
            return grammar

    def begin_masks(self, grammars: Sequence[Grammar]) -> None:
        """Start computing the masks of a step's rows; `masks_of` waits for the masks."""
        masks = self._mask_thread.submit(self._safe_masks, list(grammars))
        for place, grammar in enumerate(grammars):
            grammar.masks = (masks, place)

    # ------------------------------------------------------------------------------- compiling

    def _compile(self, guide: Guide, awaiting: WeakSet[Grammar]) -> Any:
        with self._lock:
            if not awaiting:
                self._compiled.pop(guide, None)
                raise guide_error(guide, "nobody waits for it any more")
        try:
            return self._compiled_matcher(guide)
        except GenerationError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise guide_error(guide, str(error)) from error

    def _compiled_matcher(self, guide: Guide) -> Any:
        """Return the library's matcher of a guide after its first, slowest mask."""
        library = _library(guide.kind)
        with self._lock:
            tokenizer = self._library_tokenizer
        grammar = _grammar_text(library, guide)
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise guide_error(guide, matcher.get_error())
        return matcher

    @cached_property
    def _library_tokenizer(self) -> Any:
        library = _library("guided decoding")
        assert self._tokenizer is not None  # check_guided
        backend = self._tokenizer.backend
        highest = max(backend.get_vocab(with_added_tokens=True).values())
        size = max(self._vocabulary, highest + 1)
        # Without an end token, pass a token id that the model lacks.
        ends = sorted(self._end_ids) or [size]
        size = max(size, ends[-1] + 1)
        try:
            return library.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise GenerationError(
                f"guided decoding cannot use the model's tokenizer: {error}"
            ) from error

    @cached_property
    def _queue(self) -> CompileQueue:
        return CompileQueue()

    # ------------------------------------------------------------------------------- masks

    @cached_property
    def _mask_thread(self) -> ThreadPoolExecutor:
        return device_pool(None, 1, "pcg masks")

    @cached_property
    def _mask_maker(self) -> Any:
        return _library("guided decoding").LLExecutor()

    def _safe_masks(self, grammars: Sequence[Grammar]) -> Masks:
        try:
            return self._masks(grammars)
        except BaseException as error:  # a panic of the library is no Exception
            raise GenerationError(f"masks of guides cannot be made: {error}") from error

    def _masks(self, grammars: Sequence[Grammar]) -> Masks:
        words = -(-self._library_tokenizer.vocab_size // 32)
        allowed = np.zeros((len(grammars), words), dtype=np.int32)
        matchers = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        self._mask_maker.unsafe_compute_mask_ptr(
            matchers, allowed.ctypes.data, 4 * words, len(grammars)
        )
        for row, grammar in enumerate(grammars):
            if grammar.matcher.is_error():
                allowed[row] = 0
        bits = ~allowed.view(np.uint8)
        ruled_out = np.unpackbits(bits, axis=1, count=self._vocabulary, bitorder="little")
        return ruled_out.view(np.bool_)


def masks_of(grammars: Sequence[Grammar]) -> Masks:
    """Wait for and return the started masks of a step's rows."""
    begun = [grammar.masks for grammar in grammars]
    assert None not in begun
    masks: Masks = begun[0][0].result()  # type: ignore[index]
    places = [place for _, place in begun]  # type: ignore[misc]
    is_whole = places == list(range(len(masks)))
    return masks if is_whole else masks[places]


def check_guided(guide: Guide, tokenizer: Tokenizer | None) -> None:
    """Raise a GenerationError if the tokenizer or a missing library rules out guides."""
    if tokenizer is None:
        raise GenerationError(
            f"{guide.kind} needs the texts of tokens, and the model came without a tokenizer.json; "
            "put one into its directory"
        )
    _library(guide.kind)


def _library(what: str) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GenerationError(
            f"{what} needs llguidance, which is not installed: pip install 'pcg[guided]'"
        ) from error
    return llguidance


def _grammar_text(library: Any, guide: Guide) -> str:
    matcher = library.LLMatcher
    if guide.kind == "guided_json":
        options = json_options(json.loads(guide.text))
        return str(matcher.grammar_from_json_schema(guide.text, overrides=options))
    if guide.kind == "guided_regex":
        return str(matcher.grammar_from_regex(guide.text))
    if guide.kind == "guided_choice":
        texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(guide.text)]
        # A single terminal is a state machine; rules would be tried in turn.
        return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}"))
    return str(library.grammar_from("grammar", guide.text))
