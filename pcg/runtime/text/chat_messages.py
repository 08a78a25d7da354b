"""Chat messages in OpenAI's format: checks, and the form that chat templates expect.

Every error names the place, so that the checks serve both a line of a data file and a request.
"""

from collections.abc import Mapping
from typing import Any

from pcg.errors import DataError
from pcg.files import json_value

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_messages(
    value: Any, name: str, where: str, *, keep_parts: bool = False
) -> list[dict[str, Any]]:
    """Check a list of messages; contents become text, and the arguments of tool calls objects.

    Args:
        name: the value's name in errors, as "'messages'".
        where: the value's place in errors, as "train.jsonl line 7".
        keep_parts: leave contents that are lists of text parts as they are; otherwise the parts
            are joined by line breaks, as vLLM does.
    Returns:
        New messages, without keys whose value is null, and without empty tool calls. The content of
        an assistant's message that has tool calls alone is "".
    Raises:
        DataError: it is not a list of messages, or a message has no text.
    """
    checked = []
    for index, message in enumerate(require_list(value, name, where)):
        label = f"{name}[{index}]"
        place = f"{where}: {label}"
        if not isinstance(message, Mapping):
            raise DataError(f"{place} is {kind_of(message)}; expected an object")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"{place} has role {role!r}; use one of {', '.join(ROLES)}")
        clean = {key: item for key, item in message.items() if item is not None}
        if clean.get("tool_calls") == []:  # as tables have it that give each message all keys
            del clean["tool_calls"]
        if "tool_calls" in clean:
            clean["tool_calls"] = _tool_calls(clean["tool_calls"], f"{label} 'tool_calls'", where)
        if "content" not in clean and "tool_calls" in clean and role == "assistant":
            clean["content"] = ""
        clean["content"] = _content(clean.get("content"), f"{label} 'content'", where, keep_parts)
        checked.append(clean)
    return checked


def _content(value: Any, name: str, where: str, keep_parts: bool) -> str | list[dict[str, str]]:
    """Return a message's content, from a string or from OpenAI's list of text parts."""
    if not isinstance(value, list):
        return require_string(value, name, where)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind != "text":
            raise DataError(f"{where}: {name}[{index}] is of type {kind!r}; only text is supported")
        texts.append(require_string(part.get("text"), f"{name}[{index}] 'text'", where))
    if keep_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _tool_calls(value: Any, name: str, where: str) -> list[Any]:
    """Return tool calls with arguments as objects; OpenAI writes them as JSON in a string."""
    calls = []
    for index, call in enumerate(require_list(value, name, where)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: {name}[{index}] has no 'function' with a 'name'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            of_call = f"{where}: the JSON of the 'arguments' of {name}[{index}]"
            arguments = json_value(arguments, of_call, DataError)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def require_list(value: Any, name: str, where: str) -> list[Any]:
    """Return a list; refuse other values, and an empty list."""
    if not isinstance(value, list):
        raise DataError(f"{where}: {name} is {kind_of(value)}; expected a list")
    if not value:
        raise DataError(f"{where}: {name} is empty")
    return value


def require_string(value: Any, name: str, where: str) -> str:
    """Return a string; refuse other values."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {kind_of(value)}; expected a string")
    return value


def kind_of(value: Any) -> str:
    """Describe the kind of a JSON value, for errors."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null or missing"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    name = type(value).__name__
    return kinds.get(type(value), f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}")
