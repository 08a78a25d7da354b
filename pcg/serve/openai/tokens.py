"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them: a model's tokenizer over HTTP.

lm-eval counts the tokens of its contexts with them (`tokenizer_backend=remote`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.responses import Response

from pcg.errors import GenerationError
from pcg.keys import Scope
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import (
    LongBodyRoute,
    Service,
    ServiceDependency,
    check_count,
    check_length,
)
from pcg.serve.http.wire import WireModel, json_bytes
from pcg.serve.openai.chat.generation import Chat, prepared
from pcg.serve.openai.chat.messages import Messages
from pcg.serve.openai.chat.tool_use import AskedTools, Tools
from pcg.serve.openai.wire import FieldNames

router = APIRouter(tags=["tokens"], route_class=LongBodyRoute)

Infers: TypeAlias = Annotated[Caller, Depends(requires(Scope.INFER))]
_TEXT, _CHAT = "of-text", "of-chat"


class TokenizeText(WireModel):
    """A text to tokenize, as a prompt of /v1/completions is."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(WireModel):
    """Messages to tokenize, as those of /v1/chat/completions are."""

    messages: Messages
    model: str | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None

    def chat(self) -> Chat:
        """Return the chat.

        Raises:
            ApiError: fields that do not go together.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        template = {
            "add_generation_prompt": not self.continue_final_message
            and self.add_generation_prompt is not False,
            "add_special_tokens": self.add_special_tokens,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents,
            "variables": self.chat_template_kwargs or {},
        }
        return Chat(self.messages, AskedTools(self.tools or [], None, True, None), {}, template)


def _kind(value: Any) -> str:
    given = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
    return _CHAT if "messages" in given else _TEXT


TokenizeBody = Annotated[
    Annotated[TokenizeText, Tag(_TEXT)] | Annotated[TokenizeChat, Tag(_CHAT)], Discriminator(_kind)
]


class TokenizeReply(BaseModel):
    """Token ids, and their names in the vocabulary if they were asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(WireModel):
    """Token ids to make text of, special ones included."""

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


@router.post("/tokenize", response_model=TokenizeReply)
async def tokenize(body: TokenizeBody, service: ServiceDependency, caller: Infers) -> Response:
    """Return the tokens of a text or of a chat."""
    tokenizer = await _tokenizer(service, caller, body.model)
    names = FieldNames("prompt" if isinstance(body, TokenizeText) else "messages")
    with names.naming():
        return _json(await service.beside(caller, _tokens, service, tokenizer, body))


@router.post("/detokenize", response_model=DetokenizeReply)
async def detokenize(body: DetokenizeBody, service: ServiceDependency, caller: Infers) -> Response:
    """Return the text of tokens."""
    tokenizer = await _tokenizer(service, caller, body.model)
    known = max(tokenizer.vocab_size, service.client.facts.vocabulary)
    check_count(len(body.tokens), service.max_model_len)
    return _json({"prompt": await service.beside(caller, _text, tokenizer, body.tokens, known)})


@router.get("/tokenizer_info", response_model=TokenizerInfo)
async def tokenizer_info(service: ServiceDependency, caller: Infers) -> Response:
    """Return the tokenizer's special tokens and chat template."""
    tokenizer = await _tokenizer(service, caller, None)
    template = tokenizer.chat_template
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return _json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": service.max_model_len,
            "chat_template": None if template is None else template.sources["default"],
            **dict.fromkeys(names),
            **tokenizer.special_tokens,
        }
    )


async def _tokenizer(service: Service, caller: Caller, model: str | None) -> Tokenizer:
    """Return the tokenizer of a model that the caller may use; adapters have the base's."""
    if model is not None:
        await service.part(Catalog).find(caller, model)
    tokenizer = service.client.tokenizer
    if tokenizer is None:
        raise GenerationError(
            "the model came without a tokenizer.json; give prompts as lists of token ids"
        )
    return tokenizer


def _tokens(
    service: Service, tokenizer: Tokenizer, body: TokenizeText | TokenizeChat
) -> dict[str, Any]:
    """Return the reply of /tokenize."""
    if isinstance(body, TokenizeText):
        check_length(body.prompt, service.max_model_len)
        ids = tokenizer.encode(body.prompt, body.add_special_tokens)
    else:
        ids, _ = prepared(service, body.chat())
    names = [tokenizer.backend.id_to_token(token) for token in ids]
    return {
        "count": len(ids),
        "max_model_len": service.max_model_len,
        "tokens": ids,
        "token_strs": names if body.return_token_strs else None,
    }


def _text(tokenizer: Tokenizer, tokens: Sequence[int], known: int) -> str:
    unknown = max(tokens, default=0)
    if unknown >= known:
        raise ApiError(
            400, f"token {unknown} is not in the vocabulary of {known} tokens.", param="tokens"
        )
    return tokenizer.decode(tokens, False)


def _json(content: dict[str, Any]) -> Response:
    return Response(json_bytes(content), media_type="application/json")
