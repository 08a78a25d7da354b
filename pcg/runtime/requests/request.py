"""Requests, and their results: chunks and completions."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, get_args

from torch import Tensor

from pcg.errors import GenerationError, PcgError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.sampling.sampling import resolved
from pcg.runtime.sampling.sampling_params import MOST_CELLS, SamplingFields, SamplingParams
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.units import shown

Pooling: TypeAlias = Literal["last", "mean"]
_NO_TOKENS = SamplingParams(max_new_tokens=0)


class RequestFields(SamplingFields, total=False):
    """Fields of `Request` and of `SamplingParams` as keywords.

    `add_special_tokens=False` encodes a text without the tokenizer's additional tokens, usually a
    bos, for example for the output of a chat template, which already has these tokens.
    """

    add_special_tokens: bool
    tenant: str
    cache_salt: str
    request_id: str
    priority: int
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    timeout_s: float | None
    pooling: Pooling | None
    normalize: bool


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt_ids: the tokens; `params.truncate_prompt_tokens` keeps only the last ones.
        adapter: the version of an adapter that serves the request to its end; None for the base.
        tenant: the tenant for fair scheduling; KV blocks of prompts are shared only within a
            tenant, unless the engine's options allow more.
        cache_salt: requests share KV blocks only if their salts are equal, as in vLLM.
        request_id: the unique name in events and chunks; empty for a generated name.
        priority: lower numbers of a tenant are admitted first, as in vLLM.
        ttft_slo_s: SLO of the time to the first token, seconds; None for the engine's SLO.
        tpot_slo_s: SLO of the mean time per further token, seconds; None for the engine's SLO.
        timeout_s: time after which the request ends, seconds; None for no limit.
        pooling: return the last hidden state instead of tokens: of the last token, or the mean over
            the prompt's tokens; None to generate.
        normalize: divide the hidden state by its norm.
        text: the prompt's text, which `echo` returns; None if the prompt is tokens or truncated.
    Raises:
        GenerationError: a field has a wrong type or is out of range.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter: ServedAdapter | None = None
    tenant: str = ""
    cache_salt: str = ""
    request_id: str = ""
    priority: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    timeout_s: float | None = None
    pooling: Pooling | None = None
    normalize: bool = False
    text: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise GenerationError(f"params={shown(self.params)}; use SamplingParams(…)")
        if self.adapter is not None and not hasattr(self.adapter, "version"):
            raise GenerationError(
                f"adapter={shown(self.adapter)}; use one of the executor's `adapters`, or None, or "
                "give its name to `Executor.request`"
            )
        try:
            ids = tuple(map(operator.index, self.prompt_ids))
        except TypeError as error:
            raise GenerationError(
                f"a prompt of token ids has other than ints: {error}; use a text, or a list of ints"
            ) from error
        last = self.params.truncate_prompt_tokens
        if last is not None and last < len(ids):
            ids = ids[-last:]
            object.__setattr__(self, "text", None)
        object.__setattr__(self, "prompt_ids", ids)
        rows, places = len(self.params.prompt_targets), len(ids) - 1
        if rows not in (0, places):
            raise GenerationError(
                f"prompt_targets has {rows} rows, and the prompt has {places} tokens behind its "
                "first; give each a row"
            )
        if self.params.prompt_draws * places > MOST_CELLS:
            raise GenerationError(
                f"prompt_draws={self.params.prompt_draws} of {places} places are more than "
                f"{MOST_CELLS}; use fewer"
            )
        for name in ("tenant", "cache_salt", "request_id"):
            if not isinstance(getattr(self, name), str):
                raise GenerationError(f"{name}={shown(getattr(self, name))}; use a text")
        if not isinstance(self.text, str | None):
            raise GenerationError(f"text={shown(self.text)}; use the prompt's text, or None")
        if type(self.priority) is not int:
            raise GenerationError(
                f"priority={shown(self.priority)}; use an int, lower ones go first"
            )
        _check_id(self.request_id)
        self._check_pooling()
        for name in ("ttft_slo_s", "tpot_slo_s", "timeout_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value <= sys.float_info.max):
                raise GenerationError(f"{name}={shown(value)}; use seconds above 0, or None")

    def _check_pooling(self) -> None:
        if self.pooling not in (None, *get_args(Pooling)):
            raise GenerationError(f"pooling={self.pooling!r}; use 'last', 'mean' or None")
        if type(self.normalize) is not bool:
            raise GenerationError(f"normalize={self.normalize!r}; use True or False")
        if self.pooling is None:
            if self.normalize:
                raise GenerationError("normalize=True is for embeddings; add pooling='last'")
            return
        for parameter in dataclasses.fields(SamplingParams):
            name, value = parameter.name, getattr(self.params, parameter.name)
            if name != "truncate_prompt_tokens" and value != getattr(_NO_TOKENS, name):
                raise GenerationError(
                    f"{name}={value!r} with pooling={self.pooling!r}: an embedding generates no "
                    f"tokens; leave {name} out, or the pooling"
                )

    def named(self, number: int, choice: int = 0) -> str:
        """Return the id, or an id generated from the request's number in the engine.

        In events, the id of a further continuation has its index as a suffix.
        """
        name = self.request_id or f"{_MADE}{number}"
        return f"{name}[{choice}]" if choice else name

    @cached_property
    def virtual_tokens(self) -> int:
        """Number of the adapter's virtual tokens, which precede the prompt's tokens."""
        return 0 if self.adapter is None else self.adapter.prompt_tokens

    @cached_property
    def length(self) -> int:
        """Number of tokens before generation, including virtual tokens."""
        return self.virtual_tokens + len(self.prompt_ids)


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        text: the generated text, after the prompt's text with `echo`, and without the stop string
            unless requested; empty without a tokenizer.
        token_ids: the generated tokens, including the end token.
        index: the index among the continuations of the prompt.
        embedding: the last hidden state for a request with `pooling`, [hidden], fp32, in host
            memory.
        adapter_version: the version of the adapter; None for the base.
        finish_reason: `stop`, `length`, `cancelled`, `timed_out` or `failed`.
        cached_tokens: number of the prompt's tokens found in the KV cache.
        queued_s: seconds from submission to admission; None without admission.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended the output; None
            for other reasons, such as the model's end-of-sequence token.
        logprobs: log-probabilities of the generated tokens; None unless requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, with None for the first; None
            unless requested.
        routed_experts: the experts of each token but the last one, [tokens, layers, k], int16, in
            host memory; the layers are those with experts. None unless requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    adapter: str | None
    prompt_tokens: int
    _: KW_ONLY
    cached_tokens: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    index: int = 0
    routed_experts: Tensor | None = field(default=None, compare=False)
    embedding: Tensor | None = field(default=None, compare=False)
    adapter_version: AdapterVersion | None = field(default=None, compare=False)
    queued_s: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all generated tokens; None without `logprobs`."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)


@dataclass(slots=True)
class Chunk:
    """A part of a prompt's continuation.

    Attributes:
        index: index of the prompt.
        token_id: the new token; None without a new token, and for `best_of`, which returns whole
            continuations.
        completion: the completion, in the last chunk of a continuation.
        error: the cause of failure, in the last chunk of a failed request.
        request_id: the request's id.
        logprobs: the log-probability of the new token; None unless requested.
        prompt_logprobs: see `Completion`; in the first chunk of a continuation.
        choice: the index of the continuation among the prompt's continuations.
        left: in a chunk with a completion, the number of other unfinished continuations.
        adapter_version: the version of the adapter; None for the base.
    """

    index: int
    text: str
    token_id: int | None
    _: KW_ONLY
    completion: Completion | None = None
    error: PcgError | None = None
    request_id: str = ""
    logprobs: TokenLogprobs | None = None
    choice: int = 0
    left: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    adapter_version: AdapterVersion | None = None

    @property
    def is_last(self) -> bool:
        """True if no chunk of the request follows."""
        return self.completion is not None and (not self.left or self.error is not None)


def completions_of(chunks: Iterable[Chunk]) -> list[Completion]:
    """Return the completions, in the order of the prompts and of the continuations of each."""
    completions: dict[tuple[int, int], Completion] = {}
    for chunk in chunks:
        if chunk.completion is not None:
            completions[chunk.index, chunk.choice] = chunk.completion
    return [completions[key] for key in sorted(completions)]


def classifying(labels: int) -> dict[str, Any]:
    """Return the fields of a request for the probabilities of a sequence classifier's labels."""
    return {"max_new_tokens": 1, "ignore_eos": True, "logprobs": labels}


def label_probabilities(completion: Completion) -> list[float]:
    """Return the probabilities of all labels, in order, of a request with those fields."""
    (only,) = completion.logprobs or ()
    return [math.exp(logprob) for _, logprob in sorted(only.top)]


class ServedModel(Protocol):
    """The part of `pcg.runtime.model.state.ModelState` that requests need."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None without a tokenizer.json."""

    @property
    def vocabulary(self) -> int:
        """The number of logits per token."""

    def adapters_of(self, count: int, adapter: Any) -> Sequence[ServedAdapter | None]:
        """Return the adapter of each of `count` prompts; see `Executor.generate`."""


def make_requests(
    state: ServedModel,
    prompts: Sequence[str | Sequence[int]],
    adapter: Any,
    sampling: Mapping[str, Any],
    add_special_tokens: bool = True,
) -> list[Request]:
    """Create a request for each prompt; see `Executor.generate`."""
    adapters = state.adapters_of(len(prompts), adapter)
    return [
        Request(
            _encode(state, prompt, index, add_special_tokens),
            resolved(
                SamplingParams.of(sampling, index, len(prompts)),
                state.tokenizer,
                state.vocabulary,
            ),
            adapters[index],
            text=prompt if isinstance(prompt, str) else None,
        )
        for index, prompt in enumerate(prompts)
    ]


def make_request(
    state: ServedModel, prompt: str | Sequence[int], adapter: Any, fields: RequestFields
) -> Request:
    """Create the request of a prompt; see `Executor.request`."""
    of_request = {name: value for name, value in fields.items() if name in _OWN}
    sampling: dict[str, Any] = {k: value for k, value in fields.items() if k not in of_request}
    special = of_request.pop("add_special_tokens", True)
    if type(special) is not bool:
        raise GenerationError(f"add_special_tokens={shown(special)}; use True or False")
    if of_request.get("pooling") is not None:
        sampling.setdefault("max_new_tokens", 0)
    (request,) = make_requests(state, [prompt], adapter, sampling, special)
    return dataclasses.replace(request, **of_request)  # type: ignore[arg-type]


_MADE = "request "
"""The prefix of generated ids."""
_LONGEST_ID = 256


def _check_id(request_id: str) -> None:
    if len(request_id) > _LONGEST_ID or not (request_id.isprintable() or not request_id):
        raise GenerationError(
            f"request_id={request_id[:_LONGEST_ID]!r}; use at most {_LONGEST_ID} characters that "
            "can be printed"
        )
    if request_id.startswith(_MADE):
        raise GenerationError(
            f"request_id={request_id!r} begins with {_MADE!r}, as those do that the engine makes; "
            "use another"
        )


_OWN = RequestFields.__annotations__.keys() - SamplingFields.__annotations__.keys()


def _encode(
    state: ServedModel, prompt: str | Sequence[int], index: int, add_special_tokens: bool
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        try:
            return tuple(prompt)
        except TypeError as error:
            raise GenerationError(
                f"prompt {index} is {shown(prompt)}; use a text, or a list of token ids"
            ) from error
    if state.tokenizer is None:
        raise GenerationError(
            "the model came without a tokenizer.json; put one into its directory (in Python, "
            "prompts may be lists of token ids)"
        )
    if not prompt:
        raise GenerationError(f"prompt {index} is empty; give at least one character")
    return tuple(state.tokenizer.encode(prompt, add_special_tokens))
