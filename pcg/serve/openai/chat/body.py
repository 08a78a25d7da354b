"""The body of a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from pcg.runtime.requests.request import RequestFields
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel
from pcg.serve.openai.chat.generation import Chat
from pcg.serve.openai.chat.messages import Messages
from pcg.serve.openai.chat.tool_use import AskedTools, ToolChoice, Tools
from pcg.serve.openai.sampling_fields import (
    ResponseFormat,
    SamplingBody,
    SamplingDefaults,
    Whole,
    content_schema,
)
from pcg.serve.openai.wire import AbsentOfChats, FieldNames, StreamOptions


class ChatFieldsWithoutEffect(WireModel):
    """Fields of OpenAI's API, and of vLLM's, that are taken and change nothing here.

    A reply is not stored, there is one tier of service, the prefix cache needs no key, and `user`
    and `safety_identifier` name people that a server of one's own knows already.
    """

    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    user: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ChatBody(SamplingBody, ChatFieldsWithoutEffect, AbsentOfChats):
    """A request for the next message of a chat."""

    messages: Messages
    logprobs: bool | None = None
    max_completion_tokens: Whole | None = None
    max_tokens: Whole | None = None
    model: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: Tools | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: Annotated[str, Field(max_length=262_144)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None

    def names(self) -> FieldNames:
        """Return the names of fields that the engine has others for."""
        is_old = self.max_completion_tokens is None and self.max_tokens is not None
        names = {
            "max_new_tokens": "max_tokens" if is_old else "max_completion_tokens",
            "logprobs": "top_logprobs",
            "guided_json": "response_format",
        }
        return FieldNames("messages", {**names, **self.guide_names()})

    def chat(self, request: Request, defaults: SamplingDefaults) -> Chat:
        """Return the chat that is asked for.

        Raises:
            ApiError: fields that do not go together.
        """
        self._check()
        fields: dict[str, Any] = {**self.request_fields(request, defaults)}
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is not None:
            fields["max_new_tokens"] = most
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        content = content_schema(self.response_format, self.guide())
        tools = AskedTools(
            self.tools or [], self.tool_choice, self.parallel_tool_calls is not False, content
        )
        asked: RequestFields = fields  # type: ignore[assignment]
        return Chat(self.messages, tools, asked, self._template())

    def _template(self) -> dict[str, Any]:
        continues = bool(self.continue_final_message)
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return {
            "add_generation_prompt": self.add_generation_prompt is not False and not continues,
            "continue_final_message": continues,
            "add_special_tokens": bool(self.add_special_tokens),
            "documents": self.documents,
            "variables": variables,
            "chat_template": self.chat_template,
        }

    def _check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options needs stream=true; leave it out", param="stream_options"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and "
                f"max_completion_tokens={self.max_completion_tokens} differ; give one",
                param="max_tokens",
            )
