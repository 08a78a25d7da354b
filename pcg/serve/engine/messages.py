"""Messages between the server and its engine's process, in MessagePack with types of their own.

    server → engine   Submit · Cancel · Release · Watch · calls, each with an id
    engine → server   Ready or Failed at first · Step · Report · Refused · Here · Gone · Answer ·
                      JobTold · Ended

A message is one of these and holds numbers, texts and lists alone, so that nothing that a client
sends becomes an object of another kind. Tensors of adapters never cross: requests name a version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from pcg.runtime.metrics.status import JobStatus, RunningStatus
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.engine.jobs.news import JobNews


class Fault(msgspec.Struct, array_like=True):
    """An error: the name of its class, and its text."""

    kind: str
    text: str


class VersionName(msgspec.Struct, array_like=True, frozen=True):
    """A version of an adapter, which a server may name as long as it does not release it."""

    name: str
    number: int


# --------------------------------------------------------------------------------- to the engine


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """A request.

    Attributes:
        number: the server's, of which there is no other one now.
        params: the fields of `SamplingParams` that differ from its defaults.
        own: further fields of `Request`.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: dict[str, Any]
    adapter: VersionName | None
    own: dict[str, str | int | float | bool | None]


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """The request of this number is to end."""

    number: int


class Release(msgspec.Struct, array_like=True, tag="release"):
    """No later request names this version."""

    version: VersionName


class Watch(msgspec.Struct, array_like=True, tag="watch"):
    """The server wants reports until then, of the monotonic clock that both processes have.

    Attributes:
        begins: True if it wants all numbers first; False to go on with those that change.
    """

    until_s: float
    begins: bool


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A call of one of the functions that `pcg.serve.engine.worker` answers, by its name."""

    id: int
    function: str
    arguments: dict[str, Any]


# --------------------------------------------------------------------------------- to the server


class TokenizerData(msgspec.Struct):
    """A tokenizer: that of the library as its JSON, and the fields of `Tokenizer` beside it."""

    backend: str
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    templates: dict[str, str] | None


class AdapterData(msgspec.Struct, array_like=True):
    """An adapter that requests may name."""

    version: VersionName
    size_bytes: int
    prompt_tokens: int
    digest: str | None


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine runs."""

    facts: ModelFacts
    tokenizer: TokenizerData | None


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine cannot be made."""

    fault: Fault


class CompletionData(msgspec.Struct, array_like=True):
    """The fields of `Completion`; its prompt's logprobs may be those of the chunk."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    adapter: str | None
    prompt_tokens: int
    cached_tokens: int
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    has_prompt_logprobs: bool
    index: int
    embedding: bytes | None
    queued_s: float | None


class ChunkData(msgspec.Struct, array_like=True):
    """A chunk of the request of this number; the fields are those of `Chunk`.

    Attributes:
        version, digest: the version that answers, by its number, and its digest if it is known.
        has_prompt_logprobs: True for a chunk that has them: these, or those that came before.
    """

    number: int
    text: str
    token_id: int | None
    choice: int
    left: int
    version: int | None
    digest: str | None
    completion: CompletionData | None
    fault: Fault | None
    logprobs: TokenLogprobs | None
    has_prompt_logprobs: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


class Step(msgspec.Struct, array_like=True, tag="step"):
    """All chunks of one step."""

    chunks: list[ChunkData]


class Report(msgspec.Struct, array_like=True, tag="report"):
    """Numbers of the engine; parts that are as in the last report are None.

    Attributes:
        time_s: when they were so, of the monotonic clock.
        state: the fields of `EngineNumbers`, but for the totals.
        resident, waiting: versions with pages and requests that wait, by adapter, as of
            `AdapterTotals`.
        totals: as `pcg.serve.engine.numbers` has them.
    """

    time_s: float
    state: dict[str, Any] | None = None
    resident: dict[str, int] | None = None
    waiting: dict[str, int] | None = None
    totals: dict[str, Any] | None = None
    jobs: list[JobStatus] | None = None


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The request of this number cannot begin, or go on."""

    number: int
    fault: Fault


class Here(msgspec.Struct, array_like=True, tag="here"):
    """Requests of an adapter's name are answered by this version from now on."""

    adapter: AdapterData


class Gone(msgspec.Struct, array_like=True, tag="gone"):
    """There is no adapter of that name any more."""

    name: str


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The end of a call: its result, or the error that it ended by."""

    id: int
    result: msgspec.Raw
    fault: Fault | None


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """Nothing is served any more, and why."""

    text: str


class AdapterStatusData(msgspec.Struct, array_like=True):
    """The fields of `AdapterStatus`."""

    version: VersionName
    digest: str | None
    method: str
    size_bytes: int
    running: int
    pages: int
    is_trained: bool


class StatusData(msgspec.Struct):
    """The fields of `EngineStatus`; numbers are as `pcg.serve.engine.numbers` has them."""

    numbers: dict[str, Any]
    adapters: list[AdapterStatusData]
    running: list[RunningStatus]
    jobs: list[JobStatus]


class JobTold(msgspec.Struct, array_like=True, tag="job"):
    """News of the job of this number, which the server gave it."""

    number: int
    news: JobNews


ToEngine = Submit | Cancel | Release | Watch | Call
ToServer = Ready | Failed | Step | Report | Refused | Here | Gone | Answer | Ended | JobTold


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in a message")


def _path(kind: type, value: str) -> Path:
    assert kind is Path
    return Path(value)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


@cache
def decoder(kind: Any) -> Callable[[bytes | msgspec.Raw], Any]:
    """Return what turns bytes into a message, or a part of one, of this type.

    msgspec.ValidationError: the bytes are of no such message.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_path).decode
