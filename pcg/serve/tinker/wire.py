"""Bodies and replies of Tinker's protocol."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from pcg.runtime.sampling.sampling_params import MOST_CELLS
from pcg.runtime.training.loss_graph import MOST_NODES, LossGraph, LossInput, LossNode
from pcg.serve.http.wire import WireModel
from pcg.serve.tinker.records import CheckpointRecord
from pcg.units import shown

_MOST_METADATA = 2**14
_MOST_CHUNKS = 4096


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(value, allow_nan=False))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has an unpaired surrogate, which UTF-8 cannot encode") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("it has numbers that are not finite, or is nested too deeply") from error
    if size > _MOST_METADATA:
        raise ValueError(f"it has {size} characters as JSON; use at most {_MOST_METADATA}")
    return value


Id = Annotated[str, Field(min_length=1, max_length=256)]
Short = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(max_length=1024)]
NoText = Annotated[str, Field(max_length=0)]
Metadata = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""A JSON object from the client, at most 16 KiB."""
Seq = Annotated[int, Field(ge=0, lt=2**31)]
SampleSeq = Annotated[int, Field(ge=0, lt=2**63)]
Ttl = Annotated[int, Field(ge=3600, le=315_360_000)]
"""A lifetime of an hour to ten years, seconds."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class TinkerBody(WireModel):
    """A body of Tinker's protocol; pydantic allows field names starting with `model_`."""

    model_config = ConfigDict(protected_namespaces=())


class TinkerReply(BaseModel):
    """A reply of Tinker's protocol; pydantic allows field names starting with `model_`."""

    model_config = ConfigDict(protected_namespaces=())


# -------------------------------------------------------------------------- sessions and futures


class ConfigBody(TinkerBody):
    """A request for the client's configuration."""

    sdk_version: Short | None = None


class ClientConfig(TinkerReply):
    """The client settings that differ from the client's defaults."""

    parallel_fwdbwd_chunks: bool = True
    custom_loss_server_side: bool = True
    proto_compress_fwdbwd: bool = True
    fwdbwd_max_chunk_len: int
    fwdbwd_max_chunk_bytes_count: int
    sample_max_concurrent_requests: int


class DynamicConfig(TinkerReply):
    """The client settings that may change while the client runs."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class SupportedModel(TinkerReply):
    """A base model."""

    model_name: str
    max_context_length: int | None
    trainable: bool = True
    sampleable: bool = True


class Capabilities(TinkerReply):
    """The models of the server."""

    supported_models: list[SupportedModel]


class SessionBody(TinkerBody):
    """A session to open. Projects do not exist: `project_id` is ignored."""

    tags: Annotated[list[Short], Field(max_length=64)] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Short = ""
    project_id: Short | None = None
    display_name: Short | None = None
    type: Literal["create_session"] = "create_session"


class HeartbeatBody(TinkerBody):
    """A heartbeat of a session."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(TinkerBody):
    """The reason of a session's end."""

    type: Literal["success", "errored", "interrupted"]
    detail: Any = None


class FinishBody(TinkerBody):
    """The end of a session."""

    reason: FinishReason
    detail: Any = None


class RetrieveBody(TinkerBody):
    """A future to wait for; results are always returned whole."""

    request_id: Id
    allow_metadata_only: bool = False
    model_id: Id | None = None


class Promise(TinkerReply):
    """A stored request; `retrieve_future` returns its result."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


# ---------------------------------------------------------------------------------------- training


class LoraBody(TinkerBody):
    """The LoRA settings of a model."""

    rank: Annotated[int, Field(ge=1, le=512)]
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody):
    """The optimizer of a model; `dimuon` is refused."""

    type: Literal["adamw"] = "adamw"


class CreateModelBody(TinkerBody):
    """A model to create."""

    session_id: Id
    model_seq_id: Seq
    base_model: Short
    user_metadata: Metadata | None = None
    lora_config: LoraBody
    optimizer_config: OptimizerBody = OptimizerBody()
    type: Literal["create_model"] = "create_model"


class LossInputBody(TinkerBody):
    """An input of a custom loss."""

    name: Short
    rank: Literal[0, 1, 2]


class LossNodeBody(TinkerBody):
    """A node of a custom loss; `pcg.runtime.training.loss_graph` defines the valid nodes."""

    op: Short
    name: Short
    target: Short
    args: Annotated[list[Any], Field(max_length=MOST_NODES)] = Field(default_factory=list)
    kwargs: Annotated[dict[str, Any], Field(max_length=64)] = Field(default_factory=dict)


class LossGraphBody(TinkerBody):
    """The nodes of a custom loss."""

    format: Literal[1] = 1
    nodes: Annotated[list[LossNodeBody], Field(max_length=MOST_NODES)]


class CustomLossBody(TinkerBody):
    """A custom loss to store."""

    session_id: Id
    custom_loss_seq_id: Seq
    name: Short
    inputs: Annotated[list[LossInputBody], Field(max_length=64)]
    graph: LossGraphBody
    type: Literal["create_custom_loss"] = "create_custom_loss"

    def loss(self) -> LossGraph:
        inputs = [LossInput(tensor.name, tensor.rank) for tensor in self.inputs]
        nodes = [LossNode(n.op, n.name, n.target, n.args, n.kwargs) for n in self.graph.nodes]
        return LossGraph(self.name, inputs, nodes)


class ModelBody(TinkerBody):
    """A reference to a model."""

    model_id: Id
    type: str | None = None


class PathBody(TinkerBody):
    """A reference to a checkpoint."""

    tinker_path: Path


class PlacedBody(TinkerBody):
    """A request of a model, with its position in the model's stream."""

    model_id: Id
    seq_id: Seq | None = None

    def request(self) -> bytes:
        """Return the JSON that the server stores to execute the request, also after a crash."""
        return self.model_dump_json(exclude={"model_id", "seq_id", "type"}).encode()


class AdamBody(TinkerBody):
    """The hyperparameters of an AdamW update."""

    learning_rate: Finite = 1e-4
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0


class StepBody(PlacedBody):
    """An optimizer step."""

    adam_params: AdamBody
    type: Literal["optim_step"] = "optim_step"

    def request(self) -> bytes:
        return self.adam_params.model_dump_json().encode()


class SaveBody(PlacedBody):
    """A state to save; its name defaults to its position in the stream."""

    path: Short | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveSamplerBody(PlacedBody):
    """Weights to save for sampling: under a name, or for a sampling session."""

    path: Short | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveExternalBody(PlacedBody):
    """Weights to export in peft's format."""

    path: Short
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[Short], Field(max_length=0)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadBody(TinkerBody):
    """A state to load, into a model or into a new one."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Short | None = None
    user_metadata: Metadata | None = None
    path: Path
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: NoText | None = None
    type: Literal["load_weights"] = "load_weights"


class ModelData(TinkerReply):
    """The base of a model."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str | None = None


class ModelInfo(TinkerReply):
    """A model's base and LoRA."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    optimizer_config: OptimizerBody = OptimizerBody()


class WeightsInfo(TinkerReply):
    """The LoRA of a checkpoint."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerBody = OptimizerBody()


# ---------------------------------------------------------------------------------------- sampling


class SamplingSessionBody(TinkerBody):
    """A sampling session to open, of the base or of a checkpoint."""

    session_id: Id
    sampling_session_seq_id: SampleSeq
    base_model: Id | None = None
    model_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class Sampler(TinkerReply):
    """A sampling session, and its model."""

    sampler_id: str
    base_model: str
    model_path: str | None


def _prompt(value: Any) -> list[int]:
    """Return the tokens of a prompt; all its chunks must be encoded texts."""
    chunks = value.get("chunks") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(chunks, list):
        raise ValueError('use {"chunks": […]}')
    if len(chunks) > _MOST_CHUNKS:
        raise ValueError(f"{len(chunks)} chunks; use at most {_MOST_CHUNKS}")
    prompt: list[int] = []
    for place, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise ValueError(
                f"chunks[{place}] is of the type {shown(kind)}; this server accepts only "
                "encoded_text"
            )
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or set(map(type, tokens)) - {int} or len(chunk) > 2:
            raise ValueError(f"chunks[{place}] has to have a type and tokens, a list of ints")
        prompt += tokens
    if not prompt:
        raise ValueError("it has no tokens; give at least one")
    return prompt


def _stop(value: Any) -> str | list[str] | list[int] | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not any(set(map(type, value)) <= {t} for t in (str, int)):
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
Stop = Annotated[str | list[str] | list[int] | None, PlainValidator(_stop), WithJsonSchema(_STOPS)]


class SamplingParamsBody(TinkerBody):
    """Sampling parameters and stop conditions.

    Without `stop`, an output ends at the model's end-of-text token; with an empty list, only at its
    maximum length.
    """

    max_tokens: Seq | None = None
    seed: SampleSeq | None = None
    stop: Stop = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TargetsBody(TinkerBody):
    """Target token ids for log-probabilities at each position of a prompt; -1 for none.

    A matrix with a row for each token but the first, either dense or in CSR format.
    """

    data: Annotated[list[int], Field(max_length=MOST_CELLS)]
    dtype: Literal["int64"]
    shape: Annotated[list[SampleSeq], Field(min_length=2, max_length=2)]
    sparse_crow_indices: Annotated[list[SampleSeq], Field(max_length=MOST_CELLS)] | None = None
    sparse_col_indices: Annotated[list[SampleSeq], Field(max_length=MOST_CELLS)] | None = None

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
            if len(columns) != count or any(column >= width for column in columns):
                raise ValueError(f"sparse_col_indices has to have {count} columns below {width}")
        if any(not -1 <= token < 2**31 for token in self.data):
            raise ValueError("it has a number that is neither a token id nor -1")
        return self

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        count, width = self.shape
        starts = self.sparse_crow_indices or [row * width for row in range(count + 1)]
        return tuple(tuple(self.data[a:b]) for a, b in itertools.pairwise(starts))


class SampleBody(TinkerBody):
    """A sample request."""

    sampling_session_id: Id | None = None
    seq_id: SampleSeq | None = None
    base_model: Id | None = None
    model_path: Path | None = None
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt: Prompt
    sampling_params: SamplingParamsBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    target_prompt_logprobs: TargetsBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MOST_CELLS)] = 0
    record_stability_info: Annotated[bool | None, AfterValidator(_no_stability)] = None
    routed_experts: bool = False  # pcg's own
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
        places, targets = len(self.prompt) - 1, self.target_prompt_logprobs
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

    @property
    def is_of_prompt(self) -> bool:
        """True if log-probabilities of prompt tokens are requested."""
        further = self.target_prompt_logprobs is not None or self.prompt_alt_tokens_k > 0
        return bool(self.prompt_logprobs) or self.topk_prompt_logprobs > 0 or further


# -------------------------------------------------------------------------------------- management

KINDS = Literal["weights", "sampler_weights", "external_weights"]
_TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


class Checkpoint(TinkerReply):
    """A checkpoint; times are in UTC."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: datetime | None

    @classmethod
    def of(cls, record: CheckpointRecord) -> Checkpoint:
        expires_s = record.expires_s
        return cls(
            checkpoint_id=f"{record.kind}/{record.name}",
            checkpoint_type=_TYPES[record.kind],
            time=moment(record.created_s),
            tinker_path=record.path,
            size_bytes=record.size_bytes,
            public=bool(record.is_public),
            user_metadata=texts_of(record.user_metadata),
            expires_at=None if expires_s is None else moment(expires_s),
        )


class Cursor(TinkerReply):
    """The position of a page in a list."""

    offset: int
    limit: int
    total_count: int


class Checkpoints(TinkerReply):
    """A page of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(TinkerReply):
    """A model that a session trains or trained."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None
    user_metadata: dict[str, str] | None


class TrainingRuns(TinkerReply):
    """A page of models."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SessionDetails(TinkerReply):
    """A session, with its models and samplers."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None
    display_name: str | None


class CopyBody(TinkerBody):
    """A checkpoint to copy: to a position of a session, or to a project, which is ignored."""

    source_path: Path
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    destination_project_id: Short | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: NoText | None = None

    @model_validator(mode="after")
    def _has_a_place(self) -> CopyBody:
        has_session = self.session_id is not None
        if has_session != (self.model_seq_id is not None):
            raise ValueError("session_id and model_seq_id go together; give both or neither")
        if has_session == (self.destination_project_id is not None):
            raise ValueError("give destination_project_id, or session_id and model_seq_id")
        return self


class TtlBody(TinkerBody):
    """The remaining lifetime of a checkpoint, seconds; null for no expiry."""

    ttl_seconds: Annotated[int, Field(ge=1, le=100 * 365 * 86_400)] | None = None


class ExternalUrls(TinkerReply):
    """Addresses of a checkpoint's files, which need no key until they expire."""

    urls: dict[str, str]
    expires: datetime


def moment(seconds: int) -> datetime:
    """Convert Unix seconds to a UTC time."""
    return datetime.fromtimestamp(seconds, UTC)


def texts_of(metadata: str | None) -> dict[str, str] | None:
    """Parse JSON metadata and convert its values to texts."""
    if metadata is None:
        return None
    words: dict[str, object] = json.loads(metadata)
    return {n: value if isinstance(value, str) else json.dumps(value) for n, value in words.items()}
