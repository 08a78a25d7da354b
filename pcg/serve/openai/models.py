"""/v1/models: the base and the adapters that a caller may use; and the base's tokenizer.

/tokenize, /detokenize and /tokenizer_info are vLLM's; lm-eval uses them to count context tokens
(`tokenizer_backend=remote`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.responses import Response

from pcg.errors import GenerationError
from pcg.keys import Scope
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.http.caller import Caller, Infer, Trainer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import (
    LongBodyRoute,
    Service,
    ServiceDependency,
    check_count,
    check_length,
    part,
)
from pcg.serve.http.wire import WireModel, json_bytes
from pcg.serve.openai.chat import Chat, support_of
from pcg.serve.openai.messages import Messages, Template, check_continued
from pcg.serve.openai.tools import AskedTools, ChatSupport, Tools
from pcg.serve.openai.wire import FieldNames

router = APIRouter(route_class=LongBodyRoute)

CatalogPart: TypeAlias = Annotated[Catalog, part(Catalog)]
_TEXT, _CHAT = "of-text", "of-chat"


class Permission(BaseModel):
    """The permissions of a model, in vLLM's form."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class Model(BaseModel):
    """A model.

    `parent` is the base of an adapter, `version` counts the loads and publications of its name, and
    `digest` covers its weights and configuration.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pcg"
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[Permission]
    version: int | None
    digest: str | None


class ModelList(BaseModel):
    """Models, the base first."""

    object: Literal["list"] = "list"
    data: list[Model]


class DeletedModel(BaseModel):
    """A model that is no longer served."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class TokenizeText(WireModel):
    """A text to tokenize like a prompt of /v1/completions."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    def tokens(self, service: Service, tokenizer: Tokenizer, _: ChatSupport) -> list[int]:
        check_length(self.prompt, service.max_model_len)
        return tokenizer.encode(self.prompt, self.add_special_tokens)


class TokenizeChat(WireModel):
    """Messages to tokenize like those of /v1/chat/completions."""

    messages: Messages
    model: str | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None

    def tokens(self, service: Service, _: Tokenizer, support: ChatSupport) -> list[int]:
        check_continued(self.continue_final_message, self.add_generation_prompt)
        continues = self.continue_final_message
        template = Template(
            add_generation_prompt=not continues and self.add_generation_prompt is not False,
            continue_final_message=continues,
            add_special_tokens=self.add_special_tokens,
            documents=self.documents,
            variables=self.chat_template_kwargs or {},
        )
        chat = Chat(self.messages, AskedTools(self.tools or []), template=template)
        return chat.prompt(support, service.max_model_len)[0]


def _kind(value: Any) -> str:
    names = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return _CHAT if "messages" in names else _TEXT


TokenizeBody = Annotated[
    Annotated[TokenizeText, Tag(_TEXT)] | Annotated[TokenizeChat, Tag(_CHAT)], Discriminator(_kind)
]


class TokenizeReply(BaseModel):
    """Token ids, and their names in the vocabulary on request."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(WireModel):
    """Token ids to decode, including special tokens."""

    tokens: list[Annotated[int, Field(ge=0)]]
    model: str | None = None


class DetokenizeReply(BaseModel):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The tokenizer's configuration, with the names of tokenizer_config.json."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: Literal["PreTrainedTokenizerFast"]
    model_max_length: int | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


@router.get("/v1/models", tags=["models"])
async def list_models(service: ServiceDependency, catalog: CatalogPart, caller: Infer) -> ModelList:
    """List the models that the key may use."""
    models = await catalog.listed(caller)
    return ModelList(data=[_card(service, caller, model) for model in models])


@router.get("/v1/models/{model:path}", tags=["models"])
async def get_model(
    model: str, service: ServiceDependency, catalog: CatalogPart, caller: Infer
) -> Model:
    """Return a model that the key may use."""
    return _card(service, caller, await catalog.find(caller, model))


@router.delete("/v1/models/{model:path}", tags=["models"])
async def delete_model(
    model: str,
    catalog: CatalogPart,
    caller: Trainer,
) -> DeletedModel:
    """Unload an adapter of the key's tenant; running requests keep it."""
    await catalog.delete(caller, model)
    return DeletedModel(id=model)


def _card(service: Service, caller: Caller, model: ServedModel) -> Model:
    is_base, version = model.parent is None, model.version
    created = model.created_s
    may_train = Scope.TRAIN in caller.scopes
    permission = Permission(
        id=f"modelperm-{model.name}", created=created, allow_fine_tuning=may_train
    )
    return Model(
        id=model.name,
        created=created,
        root=model.root,
        parent=model.parent,
        max_model_len=service.max_model_len if is_base else None,
        permission=[permission],
        version=None if version is None else version.number,
        digest=None if version is None else version.known_digest,
    )


@router.post("/tokenize", response_model=TokenizeReply, tags=["tokens"])
async def tokenize(
    body: TokenizeBody, service: ServiceDependency, catalog: CatalogPart, caller: Infer
) -> Response:
    """Return the tokens of a text or of a chat."""
    tokenizer = await _tokenizer(service, catalog, caller, body.model)
    model = catalog.base if body.model is None else await catalog.find(caller, body.model)
    support = support_of(service, model)

    def write() -> bytes:
        ids = body.tokens(service, tokenizer, support)
        names = [tokenizer.backend.id_to_token(token) for token in ids]
        content = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        return json_bytes({**content, "token_strs": names if body.return_token_strs else None})

    with FieldNames("prompt" if isinstance(body, TokenizeText) else "messages").naming():
        return _reply(await service.beside(caller, write))


@router.post("/detokenize", response_model=DetokenizeReply, tags=["tokens"])
async def detokenize(
    body: DetokenizeBody, service: ServiceDependency, catalog: CatalogPart, caller: Infer
) -> Response:
    """Return the text of tokens."""
    tokenizer = await _tokenizer(service, catalog, caller, body.model)
    known = max(tokenizer.vocab_size, service.client.facts.vocabulary)
    check_count(len(body.tokens), service.max_model_len)

    def write() -> bytes:
        last = max(body.tokens, default=0)
        if last >= known:
            message = f"token {last} is not in the vocabulary of {known} tokens."
            raise ApiError(400, message, param="tokens")
        return json_bytes({"prompt": tokenizer.decode(body.tokens, False)})

    return _reply(await service.beside(caller, write))


@router.get("/tokenizer_info", response_model=TokenizerInfo, tags=["tokens"])
async def tokenizer_info(
    service: ServiceDependency, catalog: CatalogPart, caller: Infer
) -> Response:
    """Return the tokenizer's special tokens and chat template."""
    tokenizer = await _tokenizer(service, catalog, caller, None)
    template = tokenizer.chat_template
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": service.max_model_len,
        "chat_template": None if template is None else template.sources["default"],
        **dict.fromkeys(names),
        **tokenizer.special_tokens,
    }
    return _reply(json_bytes(content))


async def _tokenizer(
    service: Service, catalog: Catalog, caller: Caller, model: str | None
) -> Tokenizer:
    """Return the tokenizer of a model that the caller may use; adapters use the base's."""
    if model is not None:
        await catalog.find(caller, model)
    tokenizer = service.client.tokenizer
    if tokenizer is None:
        raise GenerationError("the model has no tokenizer.json; give prompts as lists of token ids")
    return tokenizer


def _reply(content: bytes) -> Response:
    return Response(content, media_type="application/json")
