"""Sampling: from a step's logits to its next tokens, each row by its own request's sampler.

A row goes through these steps; a step that no row needs is skipped:

    masks         guides, allowed_token_ids, bad_words, min_tokens; logit_bias
    penalties     repetition, frequency, presence
    filters       temperature, top-k, top-p, min-p; T = 0 takes the argmax instead
    drawing       the first token with a cumulative probability above u, u ~ U[0, 1)

    a guide                   l = -inf for tokens that it does not allow next
    allowed_token_ids         l = -inf for all other tokens
    bad_words                 l = -inf for the last token of a word after the tokens before it
    min_tokens                l = -inf for the tokens that would end the output
    logit_bias                l + b
    repetition                l < 0: l · r, else l / r     tokens of the prompt and of the output
    frequency                 l - f · (times generated)    tokens of the output
    presence                  l - p                        tokens of the output

This file never waits for the device: if no token can be drawn, the result is `UNDRAWN`, and the
engine fails only the row's request. The only randomness is a number u per token, drawn on the CPU
from the request's own generator: a request's tokens depend neither on the rest of the batch nor on
the device, and its random state has a few bytes.

Source: transformers `RepetitionPenaltyLogitsProcessor` and `NoBadWordsLogitsProcessor`, which also
reads the prompt; OpenAI's reference of chat completions; order and meaning of the fields as in vLLM
(`v1/sample/sampler.py`, `apply_penalties`, `apply_bad_words`).

Shapes: R rows, V vocabulary, S sampled rows.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.errors import GenerationError
from pcg.kernels.devices import uploaded, uploaded_list
from pcg.runtime.sampling.drawing import PYTORCH, Drawing
from pcg.runtime.sampling.grammars import Grammar, check_guided, masks_of
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.units import shown

Word = tuple[int, ...]


class BadWords:
    """The bad words of a request, and the last tokens of its output."""

    def __init__(self, words: Sequence[Word]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._after: dict[int, list[Word]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append(word)
        self._latest: deque[int] = deque(maxlen=max(map(len, words)) - 1)

    def anew(self) -> BadWords:
        """Return the same words for a new, empty output."""
        words = copy.copy(self)
        words._latest = deque(maxlen=self._latest.maxlen)
        return words

    def add(self, token: int) -> None:
        """Append a generated token."""
        self._latest.append(token)

    def tokens(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        if not self._latest:
            return self._always
        latest = tuple(self._latest)
        words = self._after.get(latest[-1], ())
        return self._always + [w[-1] for w in words if latest[1 - len(w) :] == w[:-1]]


def words_of(bad_words: Sequence[str | Word], tokenizer: Tokenizer | None) -> tuple[Word, ...]:
    """Return bad words as tokens; a text counts with and without a leading space.

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
    """The distinct tokens of a request, with the number of times each was generated.

    The values are growing arrays, so that a step need not count the tokens again.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        """Start with the prompt's tokens, each generated 0 times."""
        self._tokens = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(self._tokens.tolist())}

    def copy(self) -> TokenCounts:
        """Return an independent copy."""
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
"""Number of allowed tokens beyond which a mask of the whole vocabulary is faster."""


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
    """Draws the tokens of a request, in a batch with others; see `sample`.

    Only `commit` changes a sampler, so that a repeated step draws the same tokens, and a preempted
    request continues in the same state.

    Attributes:
        is_plain: True if the next token's logits are used unchanged, without copying the row.
        counts: the number of times each token was generated; None without a penalty.
        restricts: True if the request forbids tokens, now or earlier.
        grammar: the state of a guided output; None without a guide.
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
        """Create the sampler of a request; a token of `end_ids` ends the output.

        Args:
            params: parameters returned by `resolved`.
            first: the sampler of the prompt's first continuation, before its first token, to share
                data with; the seed of continuation `choice` is `choice` higher.
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
        """Return the next token's number u in [0, 1), which is equal until the next `commit`."""
        if self._uniform is None:
            drawn = torch.rand((), dtype=torch.float64, generator=self._generator)
            self._uniform = drawn.item()
        return self._uniform

    def forbidden(self) -> list[int]:
        """Return the next forbidden tokens, by `bad_words` and `min_tokens`."""
        words = [] if self._bad_words is None else self._bad_words.tokens()
        return words + self._end_ids if self._left else words

    def commit(self, token: int) -> None:
        """Append a drawn token to the request."""
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
    """Return parameters for a model: bad words become tokens, and all tokens are checked.

    Raises:
        GenerationError: the model lacks a token, a bad word or a guide needs a missing tokenizer,
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
    """Create a request's CPU generator; without a seed, from the system's entropy."""
    generator = torch.Generator(device="cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


Found = Sequence[tuple[int, NDArray[np.int64]]]
"""Rows, and the tokens of each."""


def places(pairs: Found, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows [K] and the tokens [K] that index the logits [R, V]."""
    rows = np.repeat([row for row, _ in pairs], [len(tokens) for _, tokens in pairs])
    tokens = np.concatenate([tokens for _, tokens in pairs])
    return sent(rows, logits), sent(tokens, logits)


def sent(values: NDArray[np.generic], logits: Tensor) -> Tensor:
    """Copy an array to the device of the logits."""
    return uploaded(torch.from_numpy(values), logits.device)


def guided(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """Return a copy of the logits [R, V] in fp32, without tokens that rows' guides rule out."""
    grammars = {row: each.grammar for row, each in enumerate(samplers) if each.grammar is not None}
    if not grammars:
        return logits.to(torch.float32, copy=True)
    ruled_out = uploaded(torch.from_numpy(masks_of(list(grammars.values()))), logits.device)
    nothing = torch.full((), -math.inf, device=logits.device)
    if len(grammars) == len(logits):
        return torch.where(ruled_out, nothing, logits.float())
    logits = logits.to(torch.float32, copy=True)
    rows = uploaded_list(list(grammars), torch.int64, logits.device)
    logits[rows] = torch.where(ruled_out, nothing, logits[rows])
    return logits


def restrict(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Remove the tokens that each row's fields forbid from its logits [R, V], in place."""
    vocabulary = logits.shape[-1]
    masked = [
        (row, each.ruled_out.mask(vocabulary))
        for row, each in enumerate(samplers)
        if each.ruled_out is not None
    ]
    if masked:
        rows = uploaded_list([row for row, _ in masked], torch.int64, logits.device)
        mask = torch.from_numpy(np.stack([mask for _, mask in masked]))
        logits[rows] = logits[rows].masked_fill(uploaded(mask, logits.device), -math.inf)
    allowed = [(row, each.allowed) for row, each in enumerate(samplers) if each.allowed is not None]
    if allowed:
        at = places(allowed, logits)
        rows = uploaded_list([row for row, _ in allowed], torch.int64, logits.device)
        kept = logits[at]
        logits.index_fill_(0, rows, -math.inf)
        logits[at] = kept
    ruled_out = [(row, each.forbidden()) for row, each in enumerate(samplers) if not each.is_plain]
    forbidden = [(row, np.array(tokens, dtype=np.int64)) for row, tokens in ruled_out if tokens]
    if forbidden:
        logits.index_put_(places(forbidden, logits), logits.new_full((), -math.inf))


def add_biases(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Add each row's biases to its logits [R, V], in place."""
    biases = [(row, each.bias) for row, each in enumerate(samplers) if each.bias is not None]
    if biases:
        at = places([(row, tokens) for row, (tokens, _) in biases], logits)
        logits[at] += sent(np.concatenate([values for _, (_, values) in biases]), logits)


def penalize(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Apply each row's penalties to its logits [R, V], in place."""
    counts = {
        row: sampler.counts for row, sampler in enumerate(samplers) if sampler.counts is not None
    }
    rows_and_tokens = [(row, each.tokens) for row, each in counts.items()]
    if not sum(len(tokens) for _, tokens in rows_and_tokens):
        return
    at = places(rows_and_tokens, logits)
    params = [samplers[row].params for row in counts]
    sizes = [len(tokens) for _, tokens in rows_and_tokens]

    def each(values: list[float]) -> Tensor:
        return sent(np.repeat(np.array(values, dtype=np.float32), sizes), logits)

    score, repetition = logits[at], each([p.repetition_penalty for p in params])
    score = torch.where(score < 0, score * repetition, score / repetition)
    generated = sent(np.concatenate([each.counts for each in counts.values()]), logits)
    score -= each([p.frequency_penalty for p in params]) * generated
    score -= each([p.presence_penalty for p in params]) * (generated > 0)
    logits[at] = score


UNDRAWN = -1
"""The result if no token could be drawn."""


def sample(logits: Tensor, samplers: Sequence[Sampler], drawing: Drawing | None = None) -> Tensor:
    """Draw the next token of every row.

    Args:
        logits: [R, V], of each row's last position. Not changed.
        samplers: the sampler of each row. Not changed: the caller commits the tokens that it keeps.
        drawing: the device's kernels; PyTorch's operators by default.
    Returns:
        [R], int64, on the device of `logits`; `UNDRAWN` if a sampled row's logits have NaN or no
        finite number, or a greedy row's maximum is not finite.
    Raises:
        GenerationError: the arguments disagree about R.
    """
    if logits.ndim != 2:
        raise GenerationError(f"logits have shape {tuple(logits.shape)}; expected [rows, vocab]")
    if len(samplers) != logits.shape[0]:
        raise GenerationError(f"{len(samplers)} samplers for {logits.shape[0]} rows of logits")
    if [sampler for sampler in samplers if not sampler.is_plain]:
        logits = _changed(logits, samplers)
    drawing = drawing or PYTORCH
    rows = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if not rows:
        return only_finite(logits, drawing.greedy(logits))
    every_row = len(rows) == len(samplers)
    chosen = uploaded_list(rows, torch.int64, logits.device)
    drawn_S = _draw(
        logits if every_row else logits[chosen], [samplers[row] for row in rows], drawing
    )
    if every_row:
        return drawn_S
    tokens = only_finite(logits, drawing.greedy(logits))
    tokens[chosen] = drawn_S
    return tokens


def scored(logits: Tensor, samplers: Sequence[Sampler], drawing: Drawing | None = None) -> Tensor:
    """Return the logits for each row's requested log-probabilities, [R, V].

    The result has the raw logits, or the logits of `sample`'s distribution, with -inf for tokens
    that cannot be drawn; a greedy row then has masks, biases and penalties, but no filter.
    """
    rows = [row for row, s in enumerate(samplers) if s.params.logprobs_mode == "processed_logprobs"]
    if not rows:
        return logits
    every_row = len(rows) == len(samplers)
    chosen = uploaded_list(rows, torch.int64, logits.device)
    processed = [samplers[row] for row in rows]
    changed = _changed(logits if every_row else logits[chosen], processed)
    drawn = [row for row, s in enumerate(processed) if not s.is_greedy]
    if drawn:
        places = uploaded_list(drawn, torch.int64, logits.device)
        keep = (drawing or PYTORCH).keep
        changed[places] = keep(changed[places], [processed[row].params for row in drawn])
    if every_row:
        return changed
    result = logits.to(torch.float32, copy=True)
    result[chosen] = changed
    return result


def _changed(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    logits = guided(logits, samplers)
    restrict(logits, samplers)
    add_biases(logits, samplers)
    penalize(logits, samplers)
    return logits


def only_finite(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the tokens [R] with `UNDRAWN` where a token's own logit is not finite."""
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens.masked_fill(~chosen.isfinite(), UNDRAWN)


def undrawn_error(sampler: Sampler | None, adapter: str | None) -> GenerationError:
    """Return the error of a request without a token to draw."""
    grammar = None if sampler is None else sampler.grammar
    if grammar is not None and grammar.error is not None:
        return GenerationError(str(grammar.error))
    if sampler is not None and (sampler.restricts or grammar is not None):
        return GenerationError(
            "no token is left to draw: the request's guide, allowed_token_ids, bad_words and "
            "min_tokens rule out all that have a finite logit"
        )
    cause = "the base's weights" if adapter is None else f"the weights of adapter {adapter!r}"
    return GenerationError(
        "the logits hold NaN or no finite number, so no token can be drawn; check the request's "
        f"parameters, {cause} and the dtype of the run"
    )


def _draw(logits_SV: Tensor, samplers: Sequence[Sampler], drawing: Drawing) -> Tensor:
    """Draw each row's token from its distribution at a uniform number; return [S] int64."""
    numbers = [sampler.uniform() for sampler in samplers]
    uniform = uploaded_list(numbers, torch.float64, logits_SV.device)
    params = [sampler.params for sampler in samplers]
    drawn_S, are_drawn_S = drawing.draw(logits_SV, params, uniform)
    return drawn_S.masked_fill_(~are_drawn_S, UNDRAWN)
