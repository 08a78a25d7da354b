"""Bodies and replies of Tinker's protocol for models and what is done with them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pcg.runtime.training.loss_graph import (
    MOST_NODES,
    LossGraph,
    LossInput,
    LossNode,
)
from pcg.serve.tinker.wire import Id, Metadata, Short, TinkerBody, TinkerReply

MOST_RANK = 512
"""The largest rank of a LoRA."""
Seq = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ttl = Annotated[int, Field(ge=3600, le=315_360_000)]
"""An hour to ten years, seconds."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class LoraBody(TinkerBody):
    """A LoRA."""

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)]
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(TinkerBody):
    """The optimizer of a model; `dimuon` is refused."""

    type: Literal["adamw"] = "adamw"


class CreateModelBody(TinkerBody):
    """A model to make."""

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
    """A node of a custom loss; `pcg.runtime.training.loss_graph` says what it may be."""

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
    """A custom loss to keep."""

    session_id: Id
    custom_loss_seq_id: Seq
    name: Short
    inputs: Annotated[list[LossInputBody], Field(max_length=64)]
    graph: LossGraphBody
    type: Literal["create_custom_loss"] = "create_custom_loss"

    def loss(self) -> LossGraph:
        """Return the graph."""
        inputs = [LossInput(one.name, one.rank) for one in self.inputs]
        nodes = [
            LossNode(one.op, one.name, one.target, one.args, one.kwargs) for one in self.graph.nodes
        ]
        return LossGraph(self.name, inputs, nodes)


class ModelBody(TinkerBody):
    """A model."""

    model_id: Id
    type: str | None = None


class PathBody(TinkerBody):
    """A checkpoint."""

    tinker_path: Annotated[str, Field(max_length=1024)]


class AdamBody(TinkerBody):
    """The numbers of one update by AdamW."""

    learning_rate: Finite = 1e-4
    beta1: Finite = 0.9
    beta2: Finite = 0.95
    eps: Finite = 1e-12
    weight_decay: Finite = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0


class StepBody(TinkerBody):
    """An update."""

    model_id: Id
    seq_id: Seq | None = None
    adam_params: AdamBody
    type: Literal["optim_step"] = "optim_step"


class SaveBody(TinkerBody):
    """A state to save; without a name its place in the stream is one."""

    model_id: Id
    seq_id: Seq | None = None
    path: Short | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveSamplerBody(TinkerBody):
    """Weights to sample by: under a name, or for one sampling session."""

    model_id: Id
    seq_id: Seq | None = None
    path: Short | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveExternalBody(TinkerBody):
    """Weights for others to load, in peft's format."""

    model_id: Id
    seq_id: Seq | None = None
    path: Short
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[Short], Field(max_length=0)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class LoadBody(TinkerBody):
    """A state to go on from, in a model that is there or in a new one."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Short | None = None
    user_metadata: Metadata | None = None
    path: Annotated[str, Field(max_length=1024)]
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: Annotated[str, Field(max_length=0)] | None = None
    type: Literal["load_weights"] = "load_weights"


class ModelData(TinkerReply):
    """A model's base."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str | None = None


class ModelInfo(TinkerReply):
    """A model."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    optimizer_config: OptimizerBody = OptimizerBody()


class WeightsInfo(TinkerReply):
    """A checkpoint."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerBody = OptimizerBody()
