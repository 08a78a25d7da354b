"""The formats of finetuning rows, and what each of them learns.

    chat               {"messages": [{"role", "content"}, …], "tools"?}     assistant messages,
                                                                            but those of "weight": 0
    sharegpt           {"conversations": [{"from", "value"}, …]}            messages from gpt
    prompt-completion  {"prompt", "completion"}: texts or message lists     the completion
    alpaca             {"instruction", "input"?, "output"}                  the output
    text               {"text"}, or a string                                all of it
    tokens             {"input_ids", "labels"?}                             labels but -100, or all

The first row has the first of these formats whose keys it has; other keys are ignored, and all rows
must have that format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcg.errors import DataError
from pcg.runtime.text.chat import Message
from pcg.runtime.text.chat_messages import check_messages, kind_of, require_list, require_string

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

# The two prompts of Stanford Alpaca's training.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True)
class TextSample:
    """Text whose part after `prompt` is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatSample:
    """Messages, of which those at the indexes `learn` are learned.

    Attributes:
        tools: JSON schemas of functions, for the chat template.
        variables: other variables that the template reads, as enable_thinking.
    """

    messages: Sequence[Message]
    learn: tuple[int, ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenSample:
    """Tokens, each with its own as its label, or with -100 if it is not learned."""

    ids: Sequence[int]
    labels: Sequence[int]


Sample = TextSample | ChatSample | TokenSample


@dataclass(frozen=True)
class Format:
    """A format of rows: a row with all `keys` is `parse`d, given its place for messages."""

    name: str
    keys: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], str], Sample] = field(repr=False)


def detect(value: Any, where: str) -> Format:
    """Return the format of the first row. DataError: the row is of no known format."""
    if isinstance(value, str):
        return FORMATS["text"]
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a row is {kind_of(value)}; expected an object or a string")
    for format in FORMATS.values():
        if all(key in value for key in format.keys):
            return format
    known = "; ".join(f"{f.name}: {' and '.join(map(repr, f.keys))}" for f in FORMATS.values())
    have = ", ".join(map(repr, value)) or "no keys"
    raise DataError(f"{where}: a row with {have} is of no known format ({known})")


def parse(format: Format, value: Any, where: str) -> Sample:
    """Parse a row in a format.

    Raises:
        DataError: the row has another format, a wrong type, or nothing to learn from.
    """
    if isinstance(value, str) and format.name == "text":
        return TextSample("", value)
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: the row is {kind_of(value)}; expected {_described(format)}")
    for key in format.keys:
        if key not in value:
            have = ", ".join(map(repr, value)) or "no keys"
            raise DataError(f"{where}: missing key {key!r} (has {have}); {_described(format)}")
    return format.parse(value, where)


def _described(format: Format) -> str:
    return f"the data is in the {format.name} format, set by its first row or by format="


def _parse_text(row: Mapping[str, Any], where: str) -> Sample:
    return TextSample("", require_string(row["text"], "'text'", where))


def _parse_alpaca(row: Mapping[str, Any], where: str) -> Sample:
    instruction = require_string(row["instruction"], "'instruction'", where)
    given = row.get("input")
    given = "" if given is None else require_string(given, "'input'", where)
    prompt = ALPACA_WITH_INPUT if given else ALPACA
    return TextSample(
        prompt.format(instruction=instruction, input=given),
        require_string(row["output"], "'output'", where),
    )


def _parse_prompt_completion(row: Mapping[str, Any], where: str) -> Sample:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextSample(prompt, require_string(completion, "'completion'", where))
    if isinstance(prompt, list) and isinstance(completion, list):
        before = check_messages(prompt, "'prompt'", where)
        messages = [*before, *check_messages(completion, "'completion'", where)]
        return chat_sample(messages, len(before), row, where)
    raise DataError(
        f"{where}: 'prompt' is {kind_of(prompt)} and 'completion' is {kind_of(completion)}; "
        "give two strings or two lists of messages"
    )


def _parse_chat(row: Mapping[str, Any], where: str) -> Sample:
    return chat_sample(check_messages(row["messages"], "'messages'", where), 0, row, where)


def _parse_sharegpt(row: Mapping[str, Any], where: str) -> Sample:
    turns = require_list(row["conversations"], "'conversations'", where)
    messages = []
    for index, turn in enumerate(turns):
        place = f"{where}: 'conversations'[{index}]"
        if not isinstance(turn, Mapping):
            raise DataError(f"{place} is {kind_of(turn)}; expected an object")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise DataError(f"{place} is from {speaker!r}; use one of {', '.join(SHAREGPT_ROLES)}")
        content = require_string(turn.get("value"), f"'conversations'[{index}] 'value'", where)
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": content})
    return chat_sample(messages, 0, {}, where)


def _parse_tokens(row: Mapping[str, Any], where: str) -> Sample:
    for name in _MASKS:
        if row.get(name) is not None:
            raise DataError(f"{where} has {name!r}; give 'labels', -100 where it is 0")
    attended = row.get("attention_mask")
    if attended is not None and not all(_numbers(attended, "'attention_mask'", where)):
        raise DataError(f"{where} is padded, by its 'attention_mask'; leave the padding out")
    ids = _numbers(row["input_ids"], "'input_ids'", where)
    given = row.get("labels")
    labels = ids if given is None else _numbers(given, "'labels'", where)
    if len(labels) != len(ids):
        raise DataError(
            f"{where} has {len(ids)} input_ids and {len(labels)} labels; give each token one, -100 "
            "where it is not learned"
        )
    return TokenSample(ids, labels)


def _numbers(value: Any, name: str, where: str) -> list[int]:
    listed = value.tolist() if hasattr(value, "tolist") else value
    for one in require_list(listed, name, where):
        if type(one) is not int:
            raise DataError(f"{where}: {name} has {kind_of(one)} among its tokens; use ints")
    return list(listed)


def chat_sample(
    messages: list[dict[str, Any]], first: int, row: Mapping[str, Any], where: str
) -> Sample:
    """Return a chat whose assistant messages from `first` on are learned."""
    learn = tuple(
        index
        for index, message in enumerate(messages)
        # The weight is for us and not for a template.
        if message.pop("weight", 1) and message["role"] == "assistant" and index >= first
    )
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {kind_of(tools)}; expected a list of JSON schemas")
    return ChatSample(messages, learn, tools or None)


FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("chat", ("messages",), _parse_chat),
        Format("sharegpt", ("conversations",), _parse_sharegpt),
        Format("prompt-completion", ("prompt", "completion"), _parse_prompt_completion),
        Format("alpaca", ("instruction", "output"), _parse_alpaca),
        Format("text", ("text",), _parse_text),
        Format("tokens", ("input_ids",), _parse_tokens),
    )
}

PAIR_KEYS = ("chosen", "rejected", "preferred_output", "non_preferred_output")
"""Keys of rows with two outputs, of which one is preferred (`pairs`)."""
_MASKS = ("completion_mask", "assistant_masks")
"""Columns of TRL's tokenized rows that labels stand for here."""
READ_KEYS = frozenset(
    {"input", "tools", "labels", "attention_mask", *_MASKS, *PAIR_KEYS}.union(
        *(format.keys for format in FORMATS.values())
    )
)
"""Keys of rows that some format reads; values of others may be anything."""
