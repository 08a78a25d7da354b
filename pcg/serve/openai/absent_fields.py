"""Fields of other servers that this one does not have.

Clients write whole bodies out, so null and a value that asks for what is done anyway are taken.
Every other value would change the answer, and is refused by name.

Source: openai 3.54's types of parameters, and the protocol.py files of vllm/entrypoints/openai.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pcg.serve.errors import UNSUPPORTED
from pcg.serve.openai.wire import RequestName, WireModel


@dataclass(frozen=True, eq=False)  # 1 and True are equal, and would be one annotation
class Only:
    """The annotation of a field that has null and a few other values."""

    values: tuple[Any, ...]

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self.values]}

    def _checked(self, value: Any) -> None:
        """Return nothing for a value that is taken, as all of them say the same."""
        if value is None or any(_is_same(value, one) for one in self.values):
            return
        shown = [json.dumps(one) for one in self.values]
        fix = " or ".join(["leave it out", *(f"send {one}" for one in shown)])
        raise PydanticCustomError(UNSUPPORTED, "{fix}", {"fix": fix})


def _is_same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) is isinstance(other, bool)


Nothing = Annotated[Any, Only(())]
Empty = Annotated[Any, Only(([],))]
EmptyObject = Annotated[Any, Only(({},))]
Off = Annotated[Any, Only((False,))]
On = Annotated[Any, Only((True,))]
One = Annotated[Any, Only((1,))]


class AbsentFields(WireModel):
    """Fields of vLLM's bodies; `session_id` names what belongs together, and has no effect."""

    ec_transfer_params: Nothing = None
    early_stopping: Off = None
    guided_decoding_backend: Nothing = None
    kv_transfer_params: Nothing = None
    length_penalty: One = None
    logits_processors: Empty = None
    logprob_token_ids: Nothing = None
    mm_processor_kwargs: Nothing = None
    repetition_detection: Nothing = None
    return_mm_kwargs: On = None
    return_token_offsets: Off = None
    routed_experts_prompt_start: Annotated[Any, Only((0,))] = None
    session_id: str | None = None
    spaces_between_special_tokens: On = None
    stream_interval: One = None
    thinking_token_budget: Annotated[Any, Only((-1,))] = None
    truncation_side: Annotated[Any, Only(("left",))] = None
    use_beam_search: Off = None
    vllm_xargs: EmptyObject = None
    watermarking: Off = None


class AbsentOfCompletions(WireModel):
    """Fields of completions' bodies."""

    prompt_embeds: Nothing = None
    suffix: Annotated[Any, Only(("",))] = None


class AbsentOfChats(WireModel):
    """Fields of chats' bodies."""

    audio: Nothing = None
    echo: Off = None
    function_call: Annotated[Any, Only(("none",))] = None
    functions: Empty = None
    include_reasoning: On = None
    media_io_kwargs: Nothing = None
    moderation: Nothing = None
    return_prompt_text: Off = None
    web_search_options: Nothing = None


class AbsentOfResponses(WireModel):
    """Fields of responses' bodies, and those of other bodies that a response has no place for."""

    access_programs: Nothing = None
    background: Off = None
    background_options: Nothing = None
    context_management: Empty = None
    conversation: Nothing = None
    enable_response_messages: Off = None
    image: Nothing = None
    moderation: Nothing = None
    previous_input_messages: Nothing = None
    previous_response: Nothing = None
    prompt: Nothing = None
    truncation: Annotated[Any, Only(("disabled",))] = None


class AbsentOfEmbeddings(WireModel):
    """Fields of embeddings' bodies; numbers are fp32, the lowest byte first."""

    embed_dtype: Annotated[Any, Only(("float32",))] = None
    endianness: Annotated[Any, Only(("native", "little"))] = None
    mm_processor_kwargs: Nothing = None
    request_id: RequestName | None = None
    session_id: str | None = None
    truncation_side: Annotated[Any, Only(("left",))] = None
    use_activation: On = None
