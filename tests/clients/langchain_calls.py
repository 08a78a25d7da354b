"""Calls of LangChain, run in its own environment; prints what came, as JSON."""

import asyncio
import json
import os
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

PROMPT, TEXTS = "def copy_file(path, recursive=True):", ["def main():", "class Error:"]
PLACE: dict[str, Any] = {"base_url": os.environ["PCG_URL"], "temperature": 0}
NO_SPACES = {int(token): -100 for token in json.loads(os.environ["PCG_SPACES"])}
"""Without white space, which the JSON of a small model could go on with for ever."""


class Animal(BaseModel):
    """An animal."""

    kind: Literal["dog", "fox"]
    is_lazy: bool


@tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather of a city."""
    return f"{days} days of sun in {city}"


def texts(model: str) -> dict[str, Any]:
    """Return the answers of one model: at once, streamed, and by every endpoint."""
    chat = ChatOpenAI(model=model, max_tokens=24, stream_usage=True, **PLACE)
    parts = list(chat.stream(PROMPT))
    whole = chat.invoke(PROMPT)
    responses = ChatOpenAI(model=model, max_tokens=24, use_responses_api=True, **PLACE)
    return {
        "said": whole.content,
        "said_streamed": "".join(str(part.content) for part in parts),
        "said_in_a_response": responses.invoke(PROMPT).text,
        "usage": whole.usage_metadata,
        "streamed_usage": sum(parts[1:], parts[0]).usage_metadata,
        "text": OpenAI(model=model, max_tokens=24, **PLACE).invoke(PROMPT),
    }


async def texts_at_once(models: list[str]) -> list[str]:
    """Return the answers of all models, in one event loop, whose connections are shared."""
    chats = [ChatOpenAI(model=model, max_tokens=24, **PLACE) for model in models]
    return [one.content for one in await asyncio.gather(*(c.ainvoke(PROMPT) for c in chats))]


def tools(model: str) -> dict[str, Any]:
    """Return the calls of a tool that was asked for, and whether their results are read."""
    chat = ChatOpenAI(model=model, max_tokens=100, logit_bias=NO_SPACES, **PLACE)
    asked = [HumanMessage("what is it?")]
    found: dict[str, Any] = {}
    for choice in ("weather", "any"):
        one = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
        said = one.invoke(asked)
        found[choice] = [call["args"] for call in said.tool_calls]
    results = [ToolMessage(weather.invoke(call).content, tool_call_id=call["id"])
               for call in said.tool_calls]  # fmt: skip
    answer = chat.bind_tools([weather]).invoke([*asked, said, *results])
    found["answer"] = answer.response_metadata["finish_reason"]
    return found


def structured(model: str) -> dict[str, Any]:
    """Return an object of a class, by both ways that the model can be asked for one."""
    chat = ChatOpenAI(model=model, max_tokens=100, logit_bias=NO_SPACES, **PLACE)
    found = {}
    for method in ("json_schema", "function_calling"):
        said = chat.with_structured_output(Animal, method=method).invoke("what is it?")
        found[method] = said.model_dump()
    return found


models = os.environ["PCG_MODELS"].split(",")
embeddings = OpenAIEmbeddings(
    model=models[0], base_url=PLACE["base_url"], check_embedding_ctx_length=False
)
found = {
    "models": {model: texts(model) for model in models},
    "at once": asyncio.run(texts_at_once(models)),
    "tools": tools(models[0]),
    "structured": structured(models[0]),
    "vectors": embeddings.embed_documents(TEXTS),
}
print(json.dumps(found))
