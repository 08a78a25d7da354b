"""Bodies and replies of Tinker's protocol for sampling."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from pcg.runtime.sampling.sampling_params import MOST_CELLS
from pcg.serve.tinker.wire import Id, TinkerBody, TinkerReply
from pcg.units import shown

_MOST_CHUNKS = 4096
_Path = Annotated[str, Field(max_length=1024)]
Seq = Annotated[int, Field(ge=0, lt=2**63)]


class SamplingSessionBody(TinkerBody):
    """A sampling session to open, of the base or of a checkpoint."""

    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Id | None = None
    model_path: _Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingSession(TinkerReply):
    """A sampling session that is open."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class Sampler(TinkerReply):
    """A sampling session, and what it samples from."""

    sampler_id: str
    base_model: str
    model_path: str | None


def _prompt(value: Any) -> list[int]:
    """Return the tokens of a prompt, of which all chunks have to be encoded texts."""
    chunks = value.get("chunks") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(chunks, list):
        raise ValueError('use {"chunks": […]}')
    if len(chunks) > _MOST_CHUNKS:
        raise ValueError(f"{len(chunks)} chunks; use at most {_MOST_CHUNKS}")
    found: list[int] = []
    for place, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise ValueError(
                f"chunks[{place}] is of the type {shown(kind)}; this server takes encoded_text "
                "alone"
            )
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or set(map(type, tokens)) - {int} or len(chunk) > 2:
            raise ValueError(f"chunks[{place}] has to have a type and tokens, a list of ints")
        found += tokens
    if not found:
        raise ValueError("it has no tokens; give at least one")
    return found


def _stop(value: Any) -> str | list[str] | list[int] | None:
    """Return what ends an output: a text, texts, or token ids."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not any(set(map(type, value)) <= {one} for one in (str, int)):
        raise ValueError("use a text, texts, or token ids")
    return value


def _no_stability(value: bool | None) -> bool | None:
    if value:
        raise ValueError(
            "the loss that reads it, stable_reinforce, is not public; train by another, such as ppo"
        )
    return value


_CHUNKS = {"type": "object", "properties": {"chunks": {"type": "array"}}, "required": ["chunks"]}
_STOPS = {
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
    ]
}
Prompt = Annotated[list[int], PlainValidator(_prompt), WithJsonSchema(_CHUNKS)]
StabilityInfo = Annotated[bool | None, AfterValidator(_no_stability)]
Stop = Annotated[str | list[str] | list[int] | None, PlainValidator(_stop), WithJsonSchema(_STOPS)]


class SamplingParamsBody(TinkerBody):
    """The way in which tokens are chosen, and outputs end.

    Without `stop` an output ends with the model's own end of a text, with an empty list only by its
    length.
    """

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TargetsBody(TinkerBody):
    """Token ids whose log-probabilities are wanted at each place of a prompt; -1 for none.

    A matrix with a row for each token but the first: all of its numbers, or in CSR some of them.
    """

    data: Annotated[list[int], Field(max_length=MOST_CELLS)]
    dtype: Literal["int64"]
    shape: Annotated[list[Seq], Field(min_length=2, max_length=2)]
    sparse_crow_indices: Annotated[list[Seq], Field(max_length=MOST_CELLS)] | None = None
    sparse_col_indices: Annotated[list[Seq], Field(max_length=MOST_CELLS)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> TargetsBody:
        rows, width = self.shape
        starts, columns, count = self.sparse_crow_indices, self.sparse_col_indices, len(self.data)
        if starts is None and columns is None:
            if rows * width != count or not width:
                raise ValueError(f"it has {count} numbers, and the shape {self.shape}")
        elif starts is None or columns is None:
            raise ValueError("sparse_crow_indices and sparse_col_indices go together")
        else:
            is_rising = all(a <= b for a, b in itertools.pairwise(starts))
            if len(starts) != rows + 1 or starts[0] or starts[-1] != count or not is_rising:
                raise ValueError(
                    f"sparse_crow_indices has to rise from 0 to {count} in {rows + 1} numbers"
                )
            if len(columns) != count or any(one >= width for one in columns):
                raise ValueError(f"sparse_col_indices has to have {count} columns below {width}")
        if any(not -1 <= one < 2**31 for one in self.data):
            raise ValueError("it has a number that is neither a token id nor -1")
        return self

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ids that each row lists."""
        count, width = self.shape
        starts = self.sparse_crow_indices or [row * width for row in range(count + 1)]
        return tuple(tuple(self.data[a:b]) for a, b in itertools.pairwise(starts))


class SampleBody(TinkerBody):
    """A request of samples."""

    sampling_session_id: Id | None = None
    seq_id: Seq | None = None
    base_model: Id | None = None
    model_path: _Path | None = None
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt: Prompt
    sampling_params: SamplingParamsBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MOST_CELLS)] = 0
    record_stability_info: StabilityInfo = None
    type: Literal["sample"] = "sample"

    @model_validator(mode="after")
    def _go_together(self) -> SampleBody:
        if (self.sampling_session_id is None) != (self.seq_id is None):
            raise ValueError("sampling_session_id and seq_id go together; give both or neither")
        if self.sampling_session_id is not None and (self.base_model or self.model_path):
            raise ValueError(
                "a sampling session knows its model; leave out base_model and model_path"
            )
        last = self.prompt_logprobs_last_n
        if last is not None and (not self.prompt_logprobs or last >= len(self.prompt)):
            raise ValueError(
                f"prompt_logprobs_last_n={last} needs prompt_logprobs and a prompt that is longer"
            )
        places = len(self.prompt) - 1
        targets = self.target_prompt_logprobs
        if targets is not None and targets.shape[0] != places:
            raise ValueError(
                f"target_prompt_logprobs has the shape {targets.shape}; use [{places}, K], a row "
                "for each token of the prompt but the first"
            )
        if self.prompt_alt_tokens_k * places > MOST_CELLS:
            raise ValueError(
                f"prompt_alt_tokens_k={self.prompt_alt_tokens_k} of {places} places are more than "
                f"{MOST_CELLS} tokens; use fewer"
            )
        return self

    def is_of_prompt(self) -> bool:
        """Return True if log-probabilities of the prompt's tokens are asked for."""
        further = self.target_prompt_logprobs is not None or self.prompt_alt_tokens_k > 0
        return bool(self.prompt_logprobs) or self.topk_prompt_logprobs > 0 or further
