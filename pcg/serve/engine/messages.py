"""Messages between the server and its engine's process, in MessagePack.

    server → engine   Submit · Cancel · Release · Watch · Call
    engine → server   Ready or Failed first · Step · Report · Refused · Added · Removed · Event ·
                      Answer · Ended

A message holds only numbers, texts, bytes and lists, so client data cannot become an object of
another type. Adapter tensors are not sent: requests name a version. A `Call` holds the bytes of a
command; this module names no commands.

A job writes its checkpoint before it sends the step, and its adapter before it sends its end. So
every checkpoint or adapter that the server hears of is on disk.
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


SUPERVISED, DPO, KTO, REINFORCEMENT = "supervised", "dpo", "kto", "reinforcement"
"""Training methods of jobs: on examples, preferences, labelled outputs, and rewards."""
TRAIN_REWARD, VALID_REWARD = "train_reward_mean", "valid_reward_mean"
"""Names of reinforcement metrics."""


class JobOrder(msgspec.Struct, frozen=True):
    """A job that the engine starts, or resumes from its last checkpoint.

    Attributes:
        adapter: the engine's name of the adapter, and of the job.
        data: path of the training data.
        eval_data: path of the evaluation data, or paths by name; None without evaluation.
        peft: the recipe, as in adapter_config.json.
        checkpoints: folder of the checkpoints.
        output: folder for the trained adapter.
        options: further options: those of the method in Python, or of reinforcement.
        method: training method.
        start: folder of the adapter to continue training; None to start from `peft`.
        tenant: the owner of the job.
    """

    adapter: str
    data: str
    eval_data: str | dict[str, str] | None
    peft: dict[str, Any]
    checkpoints: str
    output: str
    options: dict[str, Any]
    method: str = SUPERVISED
    start: str | None = None
    tenant: str = ""


class JobStep(msgspec.Struct, frozen=True, tag="step"):
    """A completed step; the fields are those of `StepRecord`.

    Attributes:
        checkpoint: folder name of the last checkpoint, or None.
        more: further metrics of the training method, by name.
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
    """Completions to grade, each with its row of data; the job waits for the grades."""

    texts: list[str]
    items: list[dict[str, Any]]


class JobEnd(msgspec.Struct, frozen=True, tag="end"):
    """The end of a job, final or until it is resumed.

    Attributes:
        state: final state.
        is_final: False if a new order resumes the job from its checkpoint: the job was interrupted,
            or the engine ended.
        tokens: tokens processed, of a job that succeeded.
        kind: class of the error.
        text: text of the error.
    """

    state: str
    is_final: bool
    tokens: int | None = None
    kind: str | None = None
    text: str | None = None


JobEvent: TypeAlias = JobStep | JobSamples | JobEnd
Emit: TypeAlias = Callable[[JobEvent], None]


def start_of(order: JobOrder) -> Any:
    """Return the recipe of the job's adapter, or the folder of its initial adapter."""
    return order.peft if order.start is None else Path(order.start)


# ----------------------------------------------------------------------------------------- messages


PromptLogprobs: TypeAlias = tuple[TokenLogprobs | None, ...]


class Fault(msgspec.Struct, array_like=True):
    """An error: the name of its class, and its text."""

    kind: str
    text: str


# ----------------------------------------------------------------------------------- to the engine


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """A request; `number` is unique among the server's open requests and calls."""

    number: int
    request: PlainRequest


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """End the request with this number."""

    number: int


class Release(msgspec.Struct, array_like=True, tag="release"):
    """State that no later request names this version."""

    version: VersionName


class Watch(msgspec.Struct, array_like=True, tag="watch"):
    """Ask for reports until `until_s` on the monotonic clock that both processes share.

    Attributes:
        begins: True to send all numbers first; False to send only changes.
    """

    until_s: float
    begins: bool


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A command; its answer and its events have the same `number`."""

    number: int
    command: msgspec.Raw


# ----------------------------------------------------------------------------------- to the server


class AdapterData(msgspec.Struct, array_like=True):
    """An adapter that requests may use."""

    version: AdapterVersion
    size_bytes: int
    prompt_tokens: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine runs."""

    facts: ModelFacts
    tokenizer: Tokenizer | None


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine failed to start."""

    fault: Fault


class ChunkData(msgspec.Struct, array_like=True):
    """A chunk of the request with this number.

    The prompt's logprobs are sent once, with the first chunk that has them.

    Attributes:
        has_prompt: True if the chunk has logprobs of the prompt.
        completion_has_prompt: True if its completion has logprobs of the prompt.
    """

    number: int
    chunk: Chunk
    has_prompt: bool = False
    completion_has_prompt: bool = False


class Step(msgspec.Struct, array_like=True, tag="step"):
    """All chunks of a step."""

    chunks: list[ChunkData]


class Report(msgspec.Struct, array_like=True, tag="report"):
    """Numbers of the engine; parts that did not change since the last report are None.

    Attributes:
        time_s: time of the numbers, on the monotonic clock.
        state: the fields of `EngineNumbers`, without the totals.
        resident, waiting: resident versions and waiting requests by adapter, as in `AdapterTotals`.
        totals: totals in the form of `plain`.
    """

    time_s: float
    state: dict[str, Any] | None = None
    resident: dict[str, int] | None = None
    waiting: dict[str, int] | None = None
    totals: dict[str, Any] | None = None
    jobs: list[JobStatus] | None = None


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The request with this number failed before or while it ran."""

    number: int
    fault: Fault


class Added(msgspec.Struct, array_like=True, tag="added"):
    """Requests with the adapter's name use this version from now on."""

    adapter: AdapterData


class Removed(msgspec.Struct, array_like=True, tag="removed"):
    """The adapter with this name was removed."""

    name: str


class Event(msgspec.Struct, array_like=True, tag="event"):
    """An event of the call with this number."""

    number: int
    event: JobEvent


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The end of a call: its reply, or its error."""

    number: int
    reply: msgspec.Raw
    fault: Fault | None


class Ended(msgspec.Struct, array_like=True, tag="ended"):
    """The engine has ended; `text` is the reason."""

    text: str


ToEngine = Submit | Cancel | Release | Watch | Call
ToServer = Ready | Failed | Step | Report | Refused | Added | Removed | Event | Answer | Ended


# -------------------------------------------------------------------------------- MessagePack


_KINDS = {"f4": torch.float32, "i8": torch.int64}


def _data(value: Any) -> Any:
    """Convert an object of another type to plain data."""
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
    """Convert plain data of `_data` back to an object."""
    if kind is Path:
        return Path(data)
    if kind is AdapterVersion:
        name, number, digest = data
        return AdapterVersion(name, number, digest=digest)
    if kind is Totals:
        return totals_of(data)
    if kind is Tensor:
        if not data or not isinstance(data[0], str):  # plain numbers
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
    """Return the function that decodes a message, or a part of a message, of a type.

    msgspec.ValidationError: the bytes do not fit the type.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_object).decode


def encoded(submit: Submit) -> bytes:
    """Return the bytes of a request.

    Raises:
        GenerationError: a number has more than 64 bits, or a text has an unpaired surrogate.
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
    """Convert totals to dicts, lists, texts and numbers, while another thread updates them."""
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
    """Return the fields of the numbers, without the totals."""
    state = {**vars(numbers), "jobs": dict(numbers.jobs)}
    del state["totals"]
    return state


def _public(value: object) -> dict[str, Any]:
    return {name: plain(item) for name, item in vars(value).items() if not name.startswith("_")}


def totals_of(data: Mapping[str, Any]) -> Totals:
    """Restore totals from the data of `plain`. A later report may add values."""
    totals = Totals(EventLog(0))
    for name, value in data.items():
        setattr(totals, name, _restored(getattr(totals, name), value))
    return totals


def with_totals(state: Mapping[str, Any], totals: Totals) -> EngineNumbers:
    """Combine a state and totals to an engine's numbers."""
    jobs = {JobState(name): count for name, count in state["jobs"].items()}
    return EngineNumbers(**{**state, "jobs": jobs, "totals": totals})


def _restored(new: Any, value: Any) -> Any:
    """Convert a value to the class of a new engine's value."""
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
        knows_prompt: True if an earlier chunk sent the prompt's logprobs.
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
        known: the prompt's logprobs, once received.
    """
    chunk = data.chunk
    if data.has_prompt:
        chunk.prompt_logprobs = known
    if data.completion_has_prompt and chunk.completion is not None:
        chunk.completion = replace(chunk.completion, prompt_logprobs=known)
    return chunk


# ------------------------------------------------------------------------------------------ errors


class _UnknownError(Exception):
    """An error of a class outside pcg, with its class and text."""


def fault_of(error: BaseException) -> Fault:
    """Return the message of an error."""
    for kind in type(error).__mro__:
        if _ERRORS.get(kind.__name__) is kind:
            return Fault(kind.__name__, str(error))
    return Fault("", f"{type(error).__name__}: {error}")


def error_of(fault: Fault) -> Exception:
    """Return the error of a message; an error of a class outside pcg is an internal error."""
    kind = _ERRORS.get(fault.kind)
    return _UnknownError(fault.text) if kind is None else kind(fault.text)


def _kinds(of: type[PcgError]) -> dict[str, type[PcgError]]:
    kinds = {of.__name__: of}
    for kind in of.__subclasses__():
        kinds |= _kinds(kind)
    return kinds


_ERRORS = _kinds(PcgError)
del _ERRORS[FinetuneInterrupted.__name__]  # has further arguments; sent as FinetuneError
