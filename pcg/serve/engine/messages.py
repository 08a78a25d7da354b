"""Messages between the server and its engine's process, in MessagePack.

    server → engine   Submit · Cancel · Release · Watch · Call
    engine → server   Ready or Failed at first · Step · Report · Refused · Here · Gone · Event ·
                      Answer · Ended

A message holds numbers, texts, bytes and lists alone, so that nothing that a client sends becomes
an object of another type. Tensors of adapters never cross: requests name a version. A `Call` holds
the bytes of a command; no verb is named here.

A job writes its checkpoints before the news of a step goes out, and the adapter that it ends with
before the news of its end. So whatever the server hears is on the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import tokenizers
import torch
from torch import Tensor

from pcg.errors import EngineError, FinetuneInterrupted, GenerationError, PcgError
from pcg.runtime.adapters.versions import AdapterVersion, VersionName
from pcg.runtime.metrics.events import EventLog
from pcg.runtime.metrics.status import EngineNumbers, JobState, JobStatus
from pcg.runtime.metrics.totals import AdapterSums, AdapterTotals, Histogram, Totals
from pcg.runtime.requests.plain import PlainRequest
from pcg.runtime.requests.request import Chunk
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.runtime.text.chat import ChatTemplate
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.facts import ModelFacts
from pcg.units import shown

# --------------------------------------------------------------------------------------------- jobs


SUPERVISED, DPO, REINFORCEMENT = "supervised", "dpo", "reinforcement"
"""The methods of jobs: on examples, on preferences, and on rewards."""
TRAIN_REWARD, VALID_REWARD = "train_reward_mean", "valid_reward_mean"
"""Metrics of reinforcement."""


class JobOrder(msgspec.Struct, frozen=True):
    """A job that the engine is to run, or to go on with from its last checkpoint.

    Attributes:
        adapter: the engine's name of the adapter, and of the job.
        data: the training data; `eval_data` is None for a job that is not evaluated.
        peft: the recipe as of adapter_config.json.
        checkpoints: the folder of its checkpoints.
        output: the folder that will have the adapter.
        options: further options of `FinetuneOptions` or `DpoOptions`, or those of reinforcement.
        method: how it learns.
        start: the folder of the adapter that it goes on from; None for a new one of the recipe.
        tenant: the owner of the job.
    """

    adapter: str
    data: str
    eval_data: str | None
    peft: dict[str, Any]
    checkpoints: str
    output: str
    options: dict[str, Any]
    method: str = SUPERVISED
    start: str | None = None
    tenant: str = ""


class JobStep(msgspec.Struct, frozen=True, tag="step"):
    """A step that is done; the fields are those of `StepRecord`.

    Attributes:
        checkpoint: the name of the last checkpoint's folder; None without one.
        more: what the job's method tells beside these, by name.
    """

    step: int
    total_steps: int
    loss: float
    eval_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    checkpoint: str | None
    more: dict[str, float] = {}


class JobSamples(msgspec.Struct, frozen=True, tag="samples"):
    """Completions that the job waits to have graded, each with the row that it answers."""

    texts: list[str]
    items: list[dict[str, Any]]


class JobEnd(msgspec.Struct, frozen=True, tag="end"):
    """The end of a job, for now or for good.

    Attributes:
        state: how it ended.
        is_final: False for one that goes on from its checkpoint when it is ordered again: it was
            interrupted, or the engine ends.
        tokens: tokens that went through the model, of a job that succeeded.
        kind: the class of its error, and `text` what it says.
    """

    state: str
    is_final: bool
    tokens: int | None = None
    kind: str | None = None
    text: str | None = None


JobNews: TypeAlias = JobStep | JobSamples | JobEnd
Tell: TypeAlias = Callable[[JobNews], None]


def start_of(order: JobOrder) -> Any:
    """Return what the job's adapter begins as: a recipe, or a saved one."""
    return order.peft if order.start is None else Path(order.start)


# ----------------------------------------------------------------------------------------- messages


PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]


class Fault(msgspec.Struct, array_like=True):
    """An error: the name of its class, and its text."""

    kind: str
    text: str


# ----------------------------------------------------------------------------------- to the engine


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """A request; `number` is the server's, unique among open requests and calls."""

    number: int
    request: PlainRequest


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """The request of this number is to end."""

    number: int


class Release(msgspec.Struct, array_like=True, tag="release"):
    """No later request names this version."""

    version: VersionName


class Watch(msgspec.Struct, array_like=True, tag="watch"):
    """The server wants reports until `until_s`, of the monotonic clock of both processes.

    Attributes:
        begins: True to get all numbers first; False to get those that change.
    """

    until_s: float
    begins: bool


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A command; `number` is that of its answer and of its events."""

    number: int
    command: msgspec.Raw


# ----------------------------------------------------------------------------------- to the server


class AdapterData(msgspec.Struct, array_like=True):
    """An adapter that requests may name."""

    version: AdapterVersion
    size_bytes: int
    prompt_tokens: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine runs."""

    facts: ModelFacts
    tokenizer: Tokenizer | None


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine cannot be made."""

    fault: Fault


class ChunkData(msgspec.Struct, array_like=True):
    """A chunk of the request of this number.

    The logprobs of the prompt cross once, with the first chunk that has them.

    Attributes:
        has_prompt: True if the chunk has logprobs of the prompt.
        completion_has_prompt: True if its completion has them.
    """

    number: int
    chunk: Chunk
    has_prompt: bool = False
    completion_has_prompt: bool = False


class Step(msgspec.Struct, array_like=True, tag="step"):
    """All chunks of one step."""

    chunks: list[ChunkData]


class Report(msgspec.Struct, array_like=True, tag="report"):
    """Numbers of the engine; parts that did not change since the last report are None.

    Attributes:
        time_s: time of the numbers, of the monotonic clock.
        state: the fields of `EngineNumbers`, but for the totals.
        resident, waiting: versions with pages and requests that wait, by adapter, as of
            `AdapterTotals`.
        totals: as `plain` makes them.
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


class Event(msgspec.Struct, array_like=True, tag="event"):
    """An event of the call of this number."""

    number: int
    news: JobNews


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The end of a call: its reply, or the error that it ended by."""

    number: int
    reply: msgspec.Raw
    fault: Fault | None


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """Nothing is served any more, and why."""

    text: str


ToEngine = Submit | Cancel | Release | Watch | Call
ToServer = Ready | Failed | Step | Report | Refused | Here | Gone | Event | Answer | Ended


# -------------------------------------------------------------------------------- MessagePack


_KINDS = {"f4": torch.float32, "i8": torch.int64}


def _data(value: Any) -> Any:
    """Return plain data for an object of another type."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, AdapterVersion):
        return (value.name, value.number, value.known_digest)
    if isinstance(value, Totals):
        return plain(value)
    if isinstance(value, Tensor):
        kind = "f4" if value.is_floating_point() else "i8"
        return (kind, tuple(value.shape), value.to(_KINDS[kind]).contiguous().numpy().tobytes())
    if isinstance(value, PcgError):
        return fault_of(value)
    if isinstance(value, tokenizers.Tokenizer):
        return value.to_str()
    if isinstance(value, ChatTemplate):
        return value.sources
    raise NotImplementedError(f"{type(value).__name__} has no place in a message")


def _object(kind: type, data: Any) -> Any:
    """Return the object that `_data` made plain."""
    if kind is Path:
        return Path(data)
    if kind is AdapterVersion:
        name, number, digest = data
        return AdapterVersion(name, number, digest=digest)
    if kind is Totals:
        return totals_of(data)
    if kind is Tensor:
        if not data or not isinstance(data[0], str):  # a list of numbers
            return torch.tensor(data)
        dtype, shape, content = data
        if not content:
            return torch.zeros(shape, dtype=_KINDS[dtype])
        return torch.frombuffer(bytearray(content), dtype=_KINDS[dtype]).reshape(shape)
    if kind is tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(data)
    if kind is ChatTemplate:
        return ChatTemplate(data)
    assert kind is PcgError
    error = error_of(Fault(*data))
    return error if isinstance(error, PcgError) else EngineError(str(error))


encode = msgspec.msgpack.Encoder(enc_hook=_data).encode


@cache
def decoder(kind: Any) -> Callable[[bytes | msgspec.Raw], Any]:
    """Return the function that decodes a message, or a part of one, of a type.

    msgspec.ValidationError: the bytes are of no such message.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_object).decode


def encoded(submit: Submit) -> bytes:
    """Return the bytes of a request.

    Raises:
        GenerationError: a field has a number beyond 64 bits, or half a character.
    """
    try:
        return encode(submit)
    except (OverflowError, UnicodeEncodeError):
        raise _refusal(submit.request) from None


def _refusal(request: PlainRequest) -> GenerationError:
    wrong = next((token for token in request.prompt_ids if not _is_sendable(token)), None)
    if wrong is not None:
        name = f"request {request.own['request_id']!r}"
        return GenerationError(f"{name} has token {shown(wrong)}; the model has none")
    options = {**request.params, **request.own}
    name = next(name for name, value in options.items() if not _is_sendable(value))
    return GenerationError(
        f"{name}={shown(options[name])}; use numbers of 64 bits, and characters of Unicode"
    )


def _is_sendable(value: object) -> bool:
    try:
        encode(value)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


# ----------------------------------------------------------------------------------------- numbers


def plain(value: Any) -> Any:
    """Return totals as dicts, lists, texts and numbers, while another thread counts on."""
    if isinstance(value, Histogram):
        return [value.counts.copy(), value.sum]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.copy().items()}
    if isinstance(value, AdapterTotals):
        return {**_public(value), "own": plain(value.own)}
    if isinstance(value, Totals):
        return _public(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def plain_state(numbers: EngineNumbers) -> dict[str, Any]:
    """Return the fields of numbers, without the totals."""
    state = {**vars(numbers), "jobs": dict(numbers.jobs)}
    del state["totals"]
    return state


def _public(value: object) -> dict[str, Any]:
    return {name: plain(item) for name, item in vars(value).items() if not name.startswith("_")}


def totals_of(data: Mapping[str, Any]) -> Totals:
    """Return the totals that `plain` made data of; totals may get further values later."""
    totals = Totals(EventLog(0))
    for name, value in data.items():
        setattr(totals, name, _restored(getattr(totals, name), value))
    return totals


def with_totals(state: Mapping[str, Any], totals: Totals) -> EngineNumbers:
    """Return the numbers of a state and totals."""
    jobs = {JobState(name): count for name, count in state["jobs"].items()}
    return EngineNumbers(**{**state, "jobs": jobs, "totals": totals})


def _restored(new: Any, value: Any) -> Any:
    """Return a value in the class of a new engine's value."""
    if isinstance(new, Histogram):
        new.counts, new.sum = value
        return new
    if isinstance(new, Counter):
        return Counter(value)
    if isinstance(new, AdapterTotals):
        sums_of = {name: _restored(AdapterSums(), sums) for name, sums in value.pop("own").items()}
        new.take(sums_of)
    if isinstance(new, AdapterTotals) or is_dataclass(new):
        for name, item in value.items():
            setattr(new, name, _restored(getattr(new, name), item))
        return new
    return value


# ----------------------------------------------------------------------------------------- results


def data_of(number: int, chunk: Chunk, *, knows_prompt: bool) -> ChunkData:
    """Return the message of a chunk.

    Args:
        knows_prompt: True if the logprobs of the prompt came with an earlier chunk.
    """
    completion = chunk.completion
    data = ChunkData(number, chunk)
    if chunk.prompt_logprobs is not None:
        data.has_prompt = True
        if knows_prompt:
            data.chunk = chunk = replace(chunk, prompt_logprobs=None)
    if completion is not None and completion.prompt_logprobs is not None:
        data.completion_has_prompt = True
        data.chunk = replace(chunk, completion=replace(completion, prompt_logprobs=None))
    return data


def chunk_of(data: ChunkData, known: PromptLogprobs | None) -> Chunk:
    """Return the chunk of a message.

    Args:
        known: the logprobs of the prompt, if they have come.
    """
    chunk = data.chunk
    if data.has_prompt:
        chunk.prompt_logprobs = known
    if data.completion_has_prompt and chunk.completion is not None:
        chunk.completion = replace(chunk.completion, prompt_logprobs=known)
    return chunk


# ------------------------------------------------------------------------------------------ errors


class _UnknownError(Exception):
    """An error that is none of pcg's, with its class and text."""


def fault_of(error: BaseException) -> Fault:
    """Return the message of an error."""
    for kind in type(error).__mro__:
        if _ERRORS.get(kind.__name__) is kind:
            return Fault(kind.__name__, str(error))
    return Fault("", f"{type(error).__name__}: {error}")


def error_of(fault: Fault) -> Exception:
    """Return the error of a message; an error that is none of pcg's is a fault of ours."""
    kind = _ERRORS.get(fault.kind)
    return _UnknownError(fault.text) if kind is None else kind(fault.text)


def _kinds(of: type[PcgError]) -> dict[str, type[PcgError]]:
    kinds = {of.__name__: of}
    for kind in of.__subclasses__():
        kinds |= _kinds(kind)
    return kinds


_ERRORS = _kinds(PcgError)
del _ERRORS[FinetuneInterrupted.__name__]  # it has more than a text; FinetuneError stands for it
