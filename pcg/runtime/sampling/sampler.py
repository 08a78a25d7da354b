"""The sampler of a request: its parameters, and the state that its tokens have changed.

A bad word is a sequence of tokens that no output contains: its last token is ruled out where the
output ends with the tokens before it.

Source: vLLM `apply_bad_words`; transformers `NoBadWordsLogitsProcessor`, which also looks at the
prompt.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pcg.errors import GenerationError
from pcg.runtime.sampling.grammars import Grammar, check_guided
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.units import shown

Word = tuple[int, ...]


class BadWords:
    """The bad words of one request, and the last tokens of its output."""

    def __init__(self, words: Sequence[Word]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._after: dict[int, list[Word]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append(word)
        self._latest: deque[int] = deque(maxlen=max(map(len, words)) - 1)

    def anew(self) -> BadWords:
        """Return the same words for another output, which has no token yet."""
        words = copy.copy(self)
        words._latest = deque(maxlen=self._latest.maxlen)
        return words

    def add(self, token: int) -> None:
        """Note a generated token."""
        self._latest.append(token)

    def tokens(self) -> list[int]:
        """Return the tokens that would end a bad word now."""
        if not self._latest:
            return self._always
        latest = tuple(self._latest)
        words = self._after.get(latest[-1], ())
        return self._always + [w[-1] for w in words if latest[1 - len(w) :] == w[:-1]]


def words_of(bad_words: Sequence[str | Word], tokenizer: Tokenizer | None) -> tuple[Word, ...]:
    """Return bad words as tokens; a text stands for itself, and for itself after a space.

    Raises:
        GenerationError: a text without a tokenizer, or without tokens.
    """
    words: list[Word] = []
    for word in bad_words:
        if isinstance(word, tuple):
            words.append(word)
            continue
        if tokenizer is None:
            raise GenerationError(
                f"bad_words has the text {shown(word)}, and the model came without a "
                "tokenizer.json; give sequences of token ids"
            )
        bare = word.lstrip(" ") or word
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
        if not plain:
            raise GenerationError(f"bad_words has the text {shown(word)}, which has no tokens")
        words.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            words.append(spaced)
    return tuple(words)


class TokenCounts:
    """The tokens of a request, each once, and how often each was generated.

    They are arrays that grow, so that a step reads them without going through the tokens again.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        """Start with the prompt's tokens, each generated 0 times."""
        self._tokens = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(self._tokens.tolist())}

    def copy(self) -> TokenCounts:
        """Return counts of their own with the same tokens."""
        counts = TokenCounts()
        counts._tokens, counts._counts = self._tokens.copy(), self._counts.copy()
        counts._places = self._places.copy()
        return counts

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            room = max(16, place)
            self._tokens = np.append(self._tokens, np.zeros(room, dtype=np.int64))
            self._counts = np.append(self._counts, np.zeros(room, dtype=np.float32))
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The number of times that each of `tokens` was generated."""
        return self._counts[: len(self._places)]


Tokens = NDArray[np.int64]
_MANY = 1024
"""Allowed tokens beyond which a mask of the whole vocabulary takes a step less time."""


class RuledOut:
    """The complement of many allowed tokens, as a cached mask."""

    def __init__(self, allowed: Tokens) -> None:
        self._allowed = allowed
        self._mask: NDArray[np.bool_] | None = None

    def mask(self, vocabulary: int) -> NDArray[np.bool_]:
        """Return the mask [vocabulary], True for forbidden tokens."""
        if self._mask is None:
            self._mask = np.ones(vocabulary, dtype=np.bool_)
            self._mask[self._allowed] = False
        return self._mask


class Sampler:
    """Chooses the tokens of one request, in a batch with others; see `sample`.

    Only `commit` changes it. A step that failed, or was abandoned, is computed again with the same
    result, and a preempted request continues in the same state.

    Attributes:
        is_plain: True if the next token's logits are used unchanged, so that no row is copied.
        counts: how often each token was generated; None without a penalty.
        restricts: True if the request rules out tokens, now or before.
        grammar: the state of its guided output; None without a guide.
        allowed: the allowed tokens; None for all, or for many.
        ruled_out: the complement of many allowed tokens; None otherwise.
        bias: tokens, and the numbers added to their logits; None for no bias.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        end_ids: Iterable[int] = (),
        grammar: Grammar | None = None,
        first: Sampler | None = None,
        choice: int = 0,
    ) -> None:
        """Create the sampler of a request with an output that ends with one of `end_ids`.

        Args:
            params: as `resolved` returns them.
            first: the sampler of another continuation of the prompt, before its first token, to
                share data with; the seed of continuation `choice` is `choice` higher.
        """
        self.params = params
        self.is_greedy = params.greedy
        self.grammar = grammar
        self.counts: TokenCounts | None
        self._bad_words: BadWords | None
        self.ruled_out: RuledOut | None
        if first is None:
            self.counts = _counts(params, prompt_ids)
            allowed, self.bias = _allowed(params), _bias(params)
            self.allowed, self.ruled_out = allowed, None
            if allowed is not None and len(allowed) > _MANY:
                self.allowed, self.ruled_out = None, RuledOut(allowed)
            self._bad_words = BadWords(params.bad_words) if params.bad_words else None
        else:
            self.counts = None if first.counts is None else first.counts.copy()
            self.allowed, self.bias = first.allowed, first.bias
            self.ruled_out = first.ruled_out
            self._bad_words = None if first._bad_words is None else first._bad_words.anew()
        self._end_ids = list(end_ids)
        self._left = params.min_tokens if self._end_ids else 0
        self.restricts = bool(params.allowed_token_ids or params.bad_words or self._left)
        changes = (self.counts, self.allowed, self.ruled_out, self.bias, self._bad_words, grammar)
        self._changes_always = any(each is not None for each in changes)
        self.is_plain = not (self._changes_always or self._left)
        self._generator = None if self.is_greedy else _generator(params.seed, choice)
        self._uniform: float | None = None

    def uniform(self) -> float:
        """Return the next token's number u, in [0, 1); the same until a token is committed."""
        if self._uniform is None:
            drawn = torch.rand((), dtype=torch.float64, generator=self._generator)
            self._uniform = drawn.item()
        return self._uniform

    def forbidden(self) -> list[int]:
        """Return the tokens that are forbidden next, by `bad_words` and `min_tokens`."""
        words = [] if self._bad_words is None else self._bad_words.tokens()
        return words + self._end_ids if self._left else words

    def commit(self, token: int) -> None:
        """Note that a token was chosen, and is the request's."""
        self._uniform = None
        if self.is_plain:
            return
        if self.grammar is not None:
            self.grammar.commit(token)
        if self.counts is not None:
            self.counts.add(token)
        if self._bad_words is not None:
            self._bad_words.add(token)
        if self._left:
            self._left -= 1
            self.is_plain = not (self._changes_always or self._left)


def _counts(params: SamplingParams, prompt_ids: Sequence[int]) -> TokenCounts | None:
    if params.repetition_penalty != 1.0:
        return TokenCounts(prompt_ids)
    return TokenCounts() if params.presence_penalty or params.frequency_penalty else None


def _allowed(params: SamplingParams) -> Tokens | None:
    allowed = params.allowed_token_ids
    return None if allowed is None else np.unique(np.array(allowed, dtype=np.int64))


def _bias(params: SamplingParams) -> tuple[Tokens, NDArray[np.float32]] | None:
    if not params.logit_bias:
        return None
    values = np.array(list(params.logit_bias.values()), dtype=np.float32)
    return np.array(list(params.logit_bias), dtype=np.int64), values


def _generator(seed: int | None, choice: int) -> torch.Generator:
    return make_generator(None if seed is None else (seed + choice) % 2**63)


def resolved(
    params: SamplingParams, tokenizer: Tokenizer | None, vocabulary: int
) -> SamplingParams:
    """Return parameters for a model: bad words are sequences of tokens, and the model has them.

    Raises:
        GenerationError: the model lacks a token, there is no tokenizer for a bad word or a guide,
            or llguidance is not installed.
    """
    if params.guide is not None:
        check_guided(params.guide, tokenizer)
    if any(isinstance(word, str) for word in params.bad_words):
        words = words_of(params.bad_words, tokenizer)
        params = dataclasses.replace(params, bad_words=words)
    params.check_vocabulary(vocabulary)
    return params


def make_generator(seed: int | None = None) -> torch.Generator:
    """Make a request's CPU generator; without a seed, from the system's entropy."""
    generator = torch.Generator(device="cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
