"""Results of forward_backward and of sampling, encoded as Tinker's client reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pcg.serve.tinker.proto.schema import CLASSES
from pcg.serve.tinker.proto.tensors import Array, plain, tensor_of

_STOP_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True, eq=False)
class ForwardBackwardResult:
    """The result of one call of forward_backward.

    Attributes:
        outputs: of each datum, arrays by their names; float or int, [N] or [N, K]. All data have
            the same names.
        metrics: numbers by names such as `loss:sum`; what stands behind the colon says how the
            client joins those of several calls.
        kind: the type of the outputs; only its part behind the last colon is shown.
    """

    outputs: Sequence[Mapping[str, Array]]
    metrics: Mapping[str, float]
    kind: str = "pcg:ArrayRecord"


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The likeliest tokens of each of some places: [length, k] both.

    Attributes:
        tokens: their ids; 0 where there is none.
        logprobs: their log-probabilities; -99999 where there is none.
    """

    tokens: Array
    logprobs: Array


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """One sampled sequence.

    Attributes:
        tokens: its tokens, [N].
        logprobs: their log-probabilities, [N].
        stop_reason: `stop` for a stop sequence or the end of the text, `length` else.
        top: the likeliest tokens at each of its places, if asked.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    top: TopLogprobs | None = None


@dataclass(frozen=True, eq=False)
class SampleResult:
    """The result of one request of samples.

    Attributes:
        sequences: the samples.
        prompt_logprobs: of each token of the prompt, NaN for none, if asked.
        top_prompt: the likeliest tokens at each place of the prompt, if asked.
        target_prompt_logprobs: log-probabilities of given tokens, float32 [len - 1, K], if asked;
            of those that a sparse request lists, float32 [listed].
        target_cells: of a sparse request its shape, row offsets and columns.
        alternatives: tokens that were drawn at each place, int64 [len - 1, k], and their
            log-probabilities, float32, if asked.
        cached_tokens: how many tokens of the prompt were in the KV cache already.
    """

    sequences: Sequence[SampledTokens]
    prompt_logprobs: Sequence[float] | None = None
    top_prompt: TopLogprobs | None = None
    target_prompt_logprobs: Array | None = None
    target_cells: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
    alternatives: tuple[Array, Array] | None = None
    cached_tokens: int = 0


def encode_forward_backward(result: ForwardBackwardResult) -> bytes:
    """Return a `ForwardBackwardOutput`.

    Data in a row whose arrays have the same number of columns are one record.
    """
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type=result.kind)
    for name, value in result.metrics.items():
        message.metrics.add(key=name, value=value)
    for _, data in itertools.groupby(result.outputs, _columns):
        _add_record(message.loss_fn_outputs.add(), list(data))
    encoded: bytes = message.SerializeToString()
    return encoded


def _columns(datum: Mapping[str, Array]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, array.dtype.kind, array.shape[1:]) for name, array in datum.items()]


def _add_record(record: Any, data: Sequence[Mapping[str, Array]]) -> None:
    record.num_datums = len(data)
    for name, first in data[0].items():
        parts = [plain(one[name]) for one in data]
        batched = record.fields.add(key=name).value
        batched.data = b"".join(part for _, part in parts)
        batched.offsets = _offsets(len(part) for _, part in parts)
        batched.dtype = parts[0][0]
        batched.trailing_shape.extend(first.shape[1:])


def _offsets(sizes: Iterable[int]) -> bytes:
    return np.array([0, *itertools.accumulate(sizes)], "<i8").tobytes()


def encode_sample(result: SampleResult) -> bytes:
    """Return a `SampleResponse`."""
    message = CLASSES["SampleResponse"](prompt_cache_hit_tokens=result.cached_tokens)
    for one in result.sequences:
        sequence = message.sequences.add(
            stop_reason=_STOP_REASONS[one.stop_reason],
            tokens=np.asarray(one.tokens, "<i4").tobytes(),
            logprobs=np.asarray(one.logprobs, "<f4").tobytes(),
        )
        if one.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_top(one.top))
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(result.prompt_logprobs, "<f4").tobytes()
    if result.top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_top(result.top_prompt))
    if result.target_prompt_logprobs is not None:
        targets = tensor_of(result.target_prompt_logprobs, result.target_cells)
        message.target_prompt_logprobs.CopyFrom(targets)
    if result.alternatives is not None:
        tokens, logprobs = map(tensor_of, result.alternatives)
        message.prompt_alt_tokens.tokens.CopyFrom(tokens)
        message.prompt_alt_tokens.logprobs.CopyFrom(logprobs)
    encoded: bytes = message.SerializeToString()
    return encoded


def _top(given: TopLogprobs) -> Any:
    length, k = given.tokens.shape
    return CLASSES["TopkLogprobs"](
        token_ids=np.ascontiguousarray(given.tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(given.logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )
