"""Translation of requests, results, errors and tokenizers to messages and back."""

from __future__ import annotations

from typing import TypeAlias

import tokenizers
import torch

from pcg.errors import EngineError, FinetuneInterrupted, GenerationError, PcgError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.requests.plain import plain_fields, plain_params, request_of_plain
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.messages import (
    ChunkData,
    CompletionData,
    Fault,
    Submit,
    TokenizerData,
    VersionName,
    encode,
)
from pcg.units import shown

PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]


# --------------------------------------------------------------------------------- requests


def submit_of(number: int, request: Request, version: AdapterVersion | None) -> Submit:
    """Return the message of a request, which a version answers; None is the base."""
    adapter = None if version is None else name_of(version)
    params, own = plain_params(request.params), plain_fields(request)
    return Submit(number, request.prompt_ids, params, adapter, own)


def encoded(submit: Submit) -> bytes:
    """Return the bytes of a request.

    Raises:
        GenerationError: a field has a number beyond 64 bits, or half a character.
    """
    try:
        return encode(submit)
    except (OverflowError, UnicodeEncodeError):
        wrong = next((one for one in submit.prompt_ids if not _is_sendable(one)), None)
        if wrong is not None:
            name = f"request {submit.own['request_id']!r}"
            raise GenerationError(f"{name} has token {shown(wrong)}; the model has none") from None
        given = {**submit.params, **submit.own}
        name = next(name for name, value in given.items() if not _is_sendable(value))
        raise GenerationError(
            f"{name}={shown(given[name])}; use numbers of 64 bits, and characters of Unicode"
        ) from None


def _is_sendable(value: object) -> bool:
    try:
        encode(value)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


def request_of(asked: Submit, adapter: ServedAdapter | None) -> Request:
    """Return the request of a message; errors as of `Request`."""
    return request_of_plain(asked.prompt_ids, asked.params, adapter, asked.own)


def name_of(version: AdapterVersion) -> VersionName:
    """Return what names a version in messages."""
    return VersionName(version.name, version.number)


# --------------------------------------------------------------------------------- results


def data_of(number: int, chunk: Chunk, *, knows_prompt: bool) -> ChunkData:
    """Return a chunk of the request of that number.

    Args:
        knows_prompt: True if the logprobs of the prompt came with an earlier chunk.
    """
    version, done = chunk.adapter_version, chunk.completion
    return ChunkData(
        number,
        chunk.text,
        chunk.token_id,
        chunk.choice,
        chunk.left,
        None if version is None else version.number,
        None if version is None or done is None else version.known_digest,
        None if done is None else _completion_data(done),
        None if chunk.error is None else fault_of(chunk.error),
        chunk.logprobs,
        chunk.prompt_logprobs is not None,
        None if knows_prompt else chunk.prompt_logprobs,
    )


def _completion_data(done: Completion) -> CompletionData:
    embedding = done.embedding
    return CompletionData(
        done.text,
        done.token_ids,
        done.finish_reason,
        done.adapter,
        done.prompt_tokens,
        done.cached_tokens,
        done.stop_reason,
        done.logprobs,
        done.prompt_logprobs is not None,
        done.index,
        None if embedding is None else embedding.float().numpy().tobytes(),
        done.queued_s,
    )


def chunk_of(
    data: ChunkData, version: AdapterVersion | None, known: PromptLogprobs | None
) -> Chunk:
    """Return the chunk that a message has.

    Args:
        version: the version that answers.
        known: the logprobs of the prompt, if they have come.
    """
    of_prompt = known if data.has_prompt_logprobs else None
    done = None if data.completion is None else _completion_of(data.completion, version, known)
    error = None if data.fault is None else error_of(data.fault)
    return Chunk(
        data.number,
        data.text,
        data.token_id,
        completion=done,
        error=error if error is None or isinstance(error, PcgError) else EngineError(str(error)),
        logprobs=data.logprobs,
        choice=data.choice,
        left=data.left,
        prompt_logprobs=of_prompt,
        adapter_version=version,
    )


def _completion_of(
    data: CompletionData, version: AdapterVersion | None, known: PromptLogprobs | None
) -> Completion:
    embedding = data.embedding
    return Completion(
        data.text,
        data.token_ids,
        data.finish_reason,
        data.adapter,
        data.prompt_tokens,
        cached_tokens=data.cached_tokens,
        stop_reason=data.stop_reason,
        logprobs=data.logprobs,
        prompt_logprobs=known if data.has_prompt_logprobs else None,
        index=data.index,
        embedding=None
        if embedding is None
        else torch.frombuffer(bytearray(embedding), dtype=torch.float32),
        adapter_version=version,
        queued_s=data.queued_s,
    )


# --------------------------------------------------------------------------------- errors


class _UnknownError(Exception):
    """An error that is none of pcg's, with its class and text."""


def fault_of(error: BaseException) -> Fault:
    """Return the message of an error."""
    for kind in type(error).__mro__:
        if _KINDS.get(kind.__name__) is kind:
            return Fault(kind.__name__, str(error))
    return Fault("", f"{type(error).__name__}: {error}")


def error_of(fault: Fault) -> Exception:
    """Return the error of a message; what is none of pcg's is a fault of ours."""
    kind = _KINDS.get(fault.kind)
    return _UnknownError(fault.text) if kind is None else kind(fault.text)


def _kinds(of: type[PcgError]) -> dict[str, type[PcgError]]:
    found = {of.__name__: of}
    for kind in of.__subclasses__():
        found |= _kinds(kind)
    return found


_KINDS = _kinds(PcgError)
del _KINDS[FinetuneInterrupted.__name__]  # it has more than a text; FinetuneError stands for it


# --------------------------------------------------------------------------------- tokenizers


def tokenizer_data(tokenizer: Tokenizer) -> TokenizerData:
    """Return the message of a tokenizer."""
    template = tokenizer.chat_template
    return TokenizerData(
        tokenizer.backend.to_str(),
        dict(tokenizer.special_tokens),
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.eos_ids,
        tokenizer.pad_id,
        None if template is None else dict(template.sources),
    )


def tokenizer_of(data: TokenizerData) -> Tokenizer:
    """Return the tokenizer of a message."""
    return Tokenizer(
        tokenizers.Tokenizer.from_str(data.backend),
        data.special_tokens,
        data.bos_id,
        data.eos_id,
        data.eos_ids,
        data.pad_id,
        None if data.templates is None else ChatTemplate(data.templates),
    )
