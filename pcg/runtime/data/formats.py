"""The formats of finetuning rows, and the learned parts of each format.

    tokens             {"input_ids", "labels"?}                             labels but -100, or all
    chat               {"messages": [{"role", "content"}, …], "tools"?}     assistant messages
    sharegpt           {"conversations": [{"from", "value"}, …]}            messages from gpt
    prompt-completion  {"prompt", "completion"}: texts or message lists     the completion
    alpaca             {"instruction", "input"?, "output"}                  the output
    text               {"text"}, or a string                                all of it

The format is the first of these with values for all its keys in the first row, and all rows must
have that format; tokens are first, as rows may also contain their source text. With the format set
to chat, the texts of a prompt-completion or alpaca row are a user's message and the answer.
Messages may have keys that exclude them from learning (`LEARNS`): "weight": 0, "train": false,
"mask": true, ….

`COLUMNS` has the other columns that change the meaning of a row in the libraries that define them.
A format reads such a column or refuses it; all others, such as an id, are ignored.

A sequence classifier learns rows of a text and its label, by name or number:

    label    {"text", "label"}

Rows of preferences have a prompt, a preferred output and another output:

    TRL      {"prompt", "chosen", "rejected", "tools"?}: texts or message lists
             {"chosen", "rejected"}: the prompt is their common prefix
    OpenAI   {"input": {"messages", "tools"?}, "preferred_output", "non_preferred_output"}

In chats, the assistant's messages after the prompt are compared; in texts, the whole outputs. If
the outputs start with the prompt's messages, these count once. Other columns are read, refused or
ignored as in other formats, and a prompt under another name is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pcg.errors import DataError
from pcg.files import json_value
from pcg.runtime.data.example import check_weight
from pcg.runtime.text.chat import (
    Message,
    check_messages,
    check_variables,
    kind_of,
    require_list,
    require_string,
)
from pcg.units import shown

_CALL = "function_call"
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    _CALL: "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}

# The two prompts of Stanford Alpaca's training; a row's own system takes their first sentences'
# place, as in LLaMA-Factory and axolotl.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)


@dataclass(frozen=True)
class TextSample:
    """Text; the part after `prompt` is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatSample:
    """Messages, with the indexes `learn` of learned messages.

    Attributes:
        tools: JSON schemas of functions, for the chat template.
        variables: other variables of the template, such as enable_thinking.
    """

    messages: Sequence[Message]
    learn: tuple[int, ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenSample:
    """Tokens with unshifted labels: the token itself, or -100 if it is not learned."""

    ids: Sequence[int]
    labels: Sequence[int]


Sample = TextSample | ChatSample | TokenSample
FormattingFunc = Callable[[Mapping[str, Any]], Mapping[str, Any] | str]
"""A function from a row of the data to a row of a known format, or to its text."""


@dataclass(frozen=True)
class Format:
    """A format of rows: a row with all `keys` is `parse`d, given its place for messages.

    Attributes:
        reads: names of `COLUMNS` that it reads.
    """

    name: str
    keys: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], str], Sample] = field(repr=False)
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column that changes the meaning of a row.

    Attributes:
        fix: the hint for formats that do not read the column.
        is_neutral: returns True for a value without effect, such as an empty text.
    """

    fix: str
    is_neutral: Callable[[Any], bool] = lambda value: False


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _each(value: Any) -> list[Any]:
    listed = _listed(value)
    return listed if isinstance(listed, list) else [listed]


_OF_CHATS = Column("give the row as 'messages', or write it into the text")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA = Column("only text is learned; leave such rows out")
_PACKED = "the row has several examples; give each a row of its own"
WEIGHT = "weight"
"""The column with the factor of the loss of a row's tokens."""
_WEIGHT = Column(
    "preferences have no weights; for finetuning, give it as 'weight'",
    lambda value: isinstance(value, int | float) and value == 1,
)
_SEGMENTS = Column(_PACKED, lambda ids: len({*map(str, _each(ids))}) == 1)
_BOUNDS = Column(_PACKED, lambda bounds: len(_each(bounds)) == 2)
_DESIRED = "train by pcg train kto, compile with labels=[…] to learn classes, or leave it out"
_PREFERENCE = Column("train on preferences (pcg train dpo), or leave it out")
_MASK = Column("give 'labels', -100 where it is 0")
_SOFT = Column("distributions are not learned; leave it out to learn the tokens")
COLUMNS: Mapping[str, Column] = {
    "system": _OF_CHATS,
    "system_prompt": _OF_CHATS,
    "history": _OF_CHATS,
    "tools": Column(_OF_CHATS.fix, lambda tools: tools == "[]"),
    "functions": Column('give them as \'tools\': [{"type": "function", "function": …}]'),
    "chat_template_kwargs": _OF_CHATS,
    **dict.fromkeys(MEDIA, _MEDIA),
    "position_ids": Column(_PACKED, lambda ids: [*_each(ids)] == [*range(len(_each(ids)))]),
    "seq_lengths": Column(_PACKED, lambda lengths: len(_each(lengths)) == 1),
    **dict.fromkeys(("seq_idx", "segment_ids", "sequence_id"), _SEGMENTS),
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"), _BOUNDS),
    "token_type_ids": Column("only text is learned", lambda ids: not any(_each(ids))),
    **dict.fromkeys((WEIGHT, "weights", "sample_weight", "loss_weight"), _WEIGHT),
    # One of KTO is true or false; others are classes.
    "label": Column(_DESIRED, lambda label: _listed(label) not in (0, 1)),
    "kto_tag": Column(_DESIRED),
    **dict.fromkeys(
        ("chosen", "rejected", "preferred_output", "non_preferred_output"), _PREFERENCE
    ),
    **dict.fromkeys(("completion_mask", "assistant_masks", "loss_mask"), _MASK),
    **dict.fromkeys(("target_logprobs", "target_token_ids", "target_mask"), _SOFT),
    **dict.fromkeys(
        ("ref_chosen_logps", "ref_rejected_logps"), Column("the reference is computed here")
    ),
}
"""Columns that change what a row means to TRL, axolotl, LLaMA-Factory, transformers or OpenAI."""


def detect(value: Any, where: str) -> Format:
    """Return the format of the first row. DataError: the row is of no known format."""
    if isinstance(value, str):
        return FORMATS["text"]
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a row is {kind_of(value)}; expected an object or a string")
    filled = {key for key, item in value.items() if item is not None}
    for keys in (filled, value.keys()):
        for format in FORMATS.values():
            if keys >= {*format.keys}:
                return format
    for outputs in (TRL_OUTPUTS, OPENAI_OUTPUTS):
        if filled.issuperset(outputs):
            have = " and ".join(map(repr, outputs))
            raise DataError(f"{where}: a row with {have} is a preference; train by pcg train dpo")
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
    if format.name == "chat" and "messages" not in value:
        value = _with_messages(value)
    for key in format.keys:
        if key not in value:
            have = ", ".join(map(repr, value)) or "no keys"
            raise DataError(f"{where}: missing key {key!r} (has {have}); {_described(format)}")
    if value.get("chosen") is not None and value["chosen"] == value.get("messages"):
        # A preference as data for finetuning, as of UltraFeedback.
        value = {key: item for key, item in value.items() if key not in ("chosen", "rejected")}
    check_columns(value, (*format.keys, *format.reads, WEIGHT), where, format.name)
    return format.parse(value, where)


def parse_labelled(value: Any, labels: Sequence[str], where: str) -> tuple[str, int]:
    """Return the text of a row and the number of its label, which has a name or that number.

    Raises:
        DataError: the row lacks one of them, or the classifier lacks the label.
    """
    if not isinstance(value, Mapping) or "text" not in value or "label" not in value:
        have = ", ".join(map(repr, value)) if isinstance(value, Mapping) else kind_of(value)
        raise DataError(
            f"{where} has {have}; a sequence classifier learns rows of 'text' and 'label' "
            "(columns=text=…,label=… names others)"
        )
    check_columns(value, ("label", WEIGHT), where, "label")
    label = _listed(value["label"])
    number = labels.index(label) if label in labels else label
    if type(number) is not int or not 0 <= number < len(labels):
        raise DataError(
            f"{where} has the label {shown(label)}; the classifier's are {', '.join(labels)}, or "
            f"0 to {len(labels) - 1}"
        )
    return require_string(value["text"], "'text'", where), number


def rename_columns(
    row: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> Mapping[str, Any]:
    """Return a row with the names that formats read, from the names of `columns`.

    Raises:
        DataError: the row lacks a column.
    """
    for ours, theirs in columns.items():
        if theirs not in row:
            have = ", ".join(map(repr, row)) or "no keys"
            raise DataError(
                f"{where} has no {theirs!r} (has {have}), which columns={ours}={theirs} names; "
                "give null where the row has none"
            )
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return others | {ours: row[theirs] for ours, theirs in columns.items()}


def check_mapping(columns: Mapping[str, str], format: str = "auto") -> None:
    """Refuse a name of no format, and a column that no format reads. DataError: names it."""
    if format not in ("auto", *FORMATS):
        raise DataError(f"unknown data format {format!r}; use auto, {', '.join(FORMATS)}")
    known = sorted(READ_KEYS)
    for ours, theirs in columns.items():
        if ours not in known or not isinstance(theirs, str):
            close = difflib.get_close_matches(str(ours), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                f"columns={shown({ours: theirs})}; {hint}give a name that pcg reads and the name "
                "in the data, such as prompt=question,completion=answer"
            )


def check_columns(row: Mapping[str, Any], reads: Sequence[str], where: str, format: str) -> None:
    """Refuse a row with a column that changes its meaning, and is not read. DataError: names it."""
    for name, column in COLUMNS.items():
        value = _listed(row.get(name))
        is_empty = value is None or (hasattr(value, "__len__") and not len(value))
        if not is_empty and name not in reads and not column.is_neutral(value):
            raise DataError(
                f"{where} has {name!r} ({shown(value)}), which the {format} format does not read; "
                f"{column.fix}"
            )


def weight_of(value: Any, where: str) -> float:
    """Return a row's weight, 1 without the column. DataError: it is no number above 0."""
    weight = _listed(value.get(WEIGHT)) if isinstance(value, Mapping) else None
    if weight is None:
        return 1.0
    check_weight(weight, where)
    return float(weight)


def _described(format: Format) -> str:
    return f"the data is in the {format.name} format, set by its first row or by format="


def _parse_text(row: Mapping[str, Any], where: str) -> Sample:
    return TextSample("", require_string(row["text"], "'text'", where))


def _parse_alpaca(row: Mapping[str, Any], where: str) -> Sample:
    instruction = require_string(row["instruction"], "'instruction'", where)
    context = row.get("input")
    context = "" if context is None else require_string(context, "'input'", where)
    system = _system(row, where) or (_ALPACA_WITH_INPUT if context else _ALPACA)
    question = f"{instruction}\n\n### Input:\n{context}" if context else instruction
    rounds = []
    for index, pair in enumerate(_listed(row.get("history")) or ()):
        place = f"'history'[{index}]"
        if len(require_list(_listed(pair), place, where)) != 2:
            raise DataError(
                f"{where}: {place} has {len(pair)} values; give a question and an answer"
            )
        rounds.append(
            [require_string(part, f"{place}[{at}]", where) for at, part in enumerate(pair)]
        )
    rounds.append([question, ""])
    turns = [f"### Instruction:\n{asked}\n\n### Response:\n{answer}" for asked, answer in rounds]
    return TextSample(
        "\n\n".join([system, *turns]), require_string(row["output"], "'output'", where)
    )


def _parse_prompt_completion(row: Mapping[str, Any], where: str) -> Sample:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        check_columns(row, (WEIGHT,), where, "prompt-completion")
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


def _with_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with the messages of its texts; the row itself if it has no such texts.

    An alpaca row's input follows the instruction on a new line, as in LLaMA-Factory.
    """
    for asked, answered in (("prompt", "completion"), ("instruction", "output")):
        context = row.get("input") or "" if asked == "instruction" else ""
        texts = (row.get(asked), row.get(answered), context)
        if all(isinstance(text, str) for text in texts):
            content = f"{row[asked]}\n{context}" if context else row[asked]
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": row[answered]},
            ]
            return {"messages": messages, **{k: row[k] for k in row if k not in (asked, answered)}}
    return row


def _parse_sharegpt(row: Mapping[str, Any], where: str) -> Sample:
    turns = require_list(row["conversations"], "'conversations'", where)
    messages = []
    for index, turn in enumerate(turns):
        name = f"'conversations'[{index}]"
        if not isinstance(turn, Mapping):
            raise DataError(f"{where}: {name} is {kind_of(turn)}; expected an object")
        if turn.get("from") is None and turn.get("role") is not None:
            messages.append(dict(turn))  # as in 'messages'
            continue
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            roles = ", ".join(SHAREGPT_ROLES)
            raise DataError(f"{where}: {name} is from {speaker!r}; use one of {roles}")
        content = require_string(turn.get("value"), f"{name} 'value'", where)
        message = {key: item for key, item in turn.items() if key not in ("from", "value")}
        message |= {"role": SHAREGPT_ROLES[speaker], "content": content}
        if speaker == _CALL:
            calls = json_value(content, f"{where}: the JSON of {name} 'value'", DataError)
            calls = calls if isinstance(calls, list) else [calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            message["content"] = ""
        messages.append(message)
    return chat_sample(check_messages(messages, "'conversations'", where), 0, row, where)


def _parse_tokens(row: Mapping[str, Any], where: str) -> Sample:
    attended = row.get("attention_mask")
    mask = () if attended is None else set(_numbers(attended, "'attention_mask'", where))
    if 0 in mask:
        raise DataError(f"{where} is padded, by its 'attention_mask'; leave the padding out")
    if len(mask) > 1:
        raise DataError(f"{where} is packed, by the numbers of its 'attention_mask': {_PACKED}")
    ids = _numbers(row["input_ids"], "'input_ids'", where)
    column = row.get("labels")
    labels = ids if column is None else _numbers(column, "'labels'", where)
    if len(labels) != len(ids):
        raise DataError(
            f"{where} has {len(ids)} input_ids and {len(labels)} labels; give each token one, -100 "
            "where it is not learned"
        )
    return TokenSample(ids, labels)


def _numbers(value: Any, name: str, where: str) -> list[int]:
    listed = _listed(value)
    for number in require_list(listed, name, where):
        if type(number) is not int:
            raise DataError(f"{where}: {name} has {kind_of(number)} among its tokens; use ints")
    return list(listed)


def chat_sample(
    messages: list[dict[str, Any]], first: int, row: Mapping[str, Any], where: str
) -> ChatSample:
    """Return a chat with the assistant messages from `first` on to learn.

    Args:
        messages: keys for pcg, and not for a template, are removed from them.
        row: has the columns `OF_CHATS`.
    """
    learn = [
        index
        for index, message in enumerate(messages)
        if _is_learned(message, f"{where}: message {index}") and index >= first
    ]
    system = _system(row, where)
    if system:
        begins = messages[0]["role"] == "system"
        if begins and messages[0]["content"] != system:
            raise DataError(
                f"{where} has the system {shown(system)}, and a message of the system, "
                f"{shown(messages[0]['content'])}; give one of them"
            )
        if not begins:
            messages = [{"role": "system", "content": system}, *messages]
            learn = [index + 1 for index in learn]
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = json_value(tools, f"{where}: the JSON of 'tools'", DataError)
    tools = _listed(tools)
    if tools not in (None, "") and not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {kind_of(tools)}; expected a list of JSON schemas")
    variables = row.get("chat_template_kwargs") or {}
    variables = check_variables(variables, f"{where}: 'chat_template_kwargs'")
    return ChatSample(messages, tuple(learn), tools or None, variables)


def _is_learned(message: dict[str, Any], place: str) -> bool:
    """Return True if a message is learned, and remove the keys that decide it."""
    for name, fix in UNREAD.items():
        if message.get(name):
            raise DataError(f"{place} has {name!r}; {fix}")
    of_assistant: bool = message["role"] == "assistant"
    is_learned = of_assistant
    for name, (no, yes) in LEARNS.items():
        value = message.pop(name, None)
        if value is None:
            continue
        if isinstance(value, bool) != isinstance(no, bool) or value not in (no, yes):
            raise DataError(f"{place} has {name} {value!r}; use {no!r} or {yes!r}")
        if value == yes and not of_assistant:
            raise DataError(
                f"{place} has {name} {value!r}, and role {message['role']!r}; only assistant may "
                "be learned"
            )
        is_learned = is_learned and value == yes
    return is_learned


def _system(row: Mapping[str, Any], where: str) -> str:
    systems = {name: row[name] for name in _SYSTEM if row.get(name)}
    for name, value in systems.items():
        require_string(value, repr(name), where)
    if len(set(systems.values())) > 1:
        raise DataError(f"{where} has {' and '.join(map(repr, systems))}, which differ; give one")
    return next(iter(systems.values()), "")


LEARNS: Mapping[str, tuple[Any, Any]] = {
    "weight": (0, 1),
    "train": (False, True),
    "training": (False, True),
    "mask": (True, False),
    "loss": (False, True),
    "loss_weight": (0, 1),
}
"""Keys of a message that exclude or include it in learning: the values for no and yes.

Source: OpenAI and ShareGPT; axolotl's message_field_training; ms-swift; LLaMA-Factory.
"""
UNREAD = {
    "function_call": "give it as 'tool_calls'",
    "refusal": "give it as its content",
    **dict.fromkeys(
        ("train_detail", "training_detail"), "parts of a message are not learned by themselves"
    ),
    **dict.fromkeys(MEDIA, _MEDIA.fix),
}
"""Unsupported keys that change the meaning of a message, with hints."""
_SYSTEM = ("system", "system_prompt")
OF_CHATS = (*_SYSTEM, "tools", "chat_template_kwargs")
"""Columns that a chat reads."""
FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        # A label beside text or tokens is their class; tokens have the text of other columns.
        Format("tokens", ("input_ids",), _parse_tokens, ("label", "history", *OF_CHATS)),
        Format("chat", ("messages",), _parse_chat, OF_CHATS),
        Format("sharegpt", ("conversations",), _parse_sharegpt, OF_CHATS),
        Format("prompt-completion", ("prompt", "completion"), _parse_prompt_completion, OF_CHATS),
        Format("alpaca", ("instruction", "output"), _parse_alpaca, (*_SYSTEM, "history")),
        Format("text", ("text",), _parse_text, ("label",)),
    )
}

PROMPTS = ("instruction", "question", "query", "input", "messages", "conversations")
"""Columns that have the prompt of a preference in other libraries' formats."""
READ_KEYS = frozenset({"labels", "attention_mask", *PROMPTS, *COLUMNS}).union(
    *(format.keys for format in FORMATS.values())
)
"""Keys of rows that some format reads or refuses; values of others may be anything."""


def take_label(row: Any, where: str) -> tuple[Mapping[str, Any], bool]:
    """Return a row of KTO without its label, and the label. DataError: the row has no label."""
    if not isinstance(row, Mapping) or "label" not in row:
        raise DataError(f"{where} is {shown(row)}; give it a 'label', true or false")
    if weight_of(row, where) != 1:
        raise DataError(
            f"{where} has 'weight' {shown(row[WEIGHT])}; KTO has no weights of rows, leave it out"
        )
    label = row["label"].item() if hasattr(row["label"], "item") else row["label"]
    if label not in (True, False):
        raise DataError(f"{where} has 'label' {shown(label)}; use true for a desirable completion")
    return {name: value for name, value in row.items() if name != "label"}, bool(label)


Pair = tuple[Sample, Sample]
"""The preferred sample, and the other sample."""
OPENAI_OUTPUTS = ("preferred_output", "non_preferred_output")
TRL_OUTPUTS = ("chosen", "rejected")

_KNOWN = (
    "'chosen' and 'rejected' with or without 'prompt', or 'input', 'preferred_output' and "
    "'non_preferred_output'"
)


def parse_pair(value: Any, where: str) -> Pair:
    """Return the two samples of a row.

    Raises:
        DataError: the row has another form, a wrong type, or outputs that do not differ.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: the row is {kind_of(value)}; expected an object with {_KNOWN}")
    by_openai = any(value.get(key) is not None for key in OPENAI_OUTPUTS)
    if by_openai and value.get("chosen") is None:
        return _openai(value, where)
    for key in TRL_OUTPUTS:
        if key not in value:
            have = ", ".join(map(repr, value)) or "no keys"
            raise DataError(f"{where}: missing key {key!r} (has {have}); use {_KNOWN}")
    return _trl(value, where)


def _openai(row: Mapping[str, Any], where: str) -> Pair:
    check_columns(row, OPENAI_OUTPUTS, where, "preference")
    for key in ("input", *OPENAI_OUTPUTS):
        if key not in row:
            raise DataError(f"{where}: missing key {key!r}; use {_KNOWN}")
    asked = row["input"]
    if not isinstance(asked, Mapping) or "messages" not in asked:
        raise DataError(f"{where}: 'input' is {kind_of(asked)}; expected an object with 'messages'")
    before = _messages(asked["messages"], "'input.messages'", where)
    outputs = []
    for key in OPENAI_OUTPUTS:
        output = _messages(row[key], repr(key), where)
        for index, message in enumerate(output):
            if message["role"] not in ("assistant", "tool"):
                raise DataError(
                    f"{where}: {key!r}[{index}] is from {message['role']!r}; an output has "
                    "messages from assistant and tool"
                )
        outputs.append(output)
    return _chats(before, outputs, asked, where)


def _trl(row: Mapping[str, Any], where: str) -> Pair:
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        # As of UltraFeedback: the outputs are whole chats, which ask the prompt.
        both = chosen[: _alike(chosen, rejected)]
        if any(isinstance(item, Mapping) and item.get("content") == prompt for item in both):
            prompt = None
    kinds = {type(item) for item in (chosen, rejected, *(() if prompt is None else (prompt,)))}
    if kinds not in ({str}, {list}):
        named = ", ".join(
            f"{key!r} is {kind_of(row[key])}" for key in ("prompt", "chosen", "rejected")
            if row.get(key) is not None
        )  # fmt: skip
        raise DataError(f"{where}: {named}; give texts, or lists of messages")
    of_chats = () if isinstance(chosen, str) else OF_CHATS
    check_columns(row, (*TRL_OUTPUTS, *of_chats), where, "preference")
    if isinstance(chosen, str):
        if prompt is None:
            start = _alike(chosen, rejected)
            start -= start > 0 and chosen[start - 1] == " "  # which tokens begin with
            prompt, chosen, rejected = chosen[:start], chosen[start:], rejected[start:]
            _check_prompt(row, prompt, where)
        _check_differ(chosen, rejected, where)
        return TextSample(prompt, chosen), TextSample(prompt, rejected)
    before = [] if prompt is None else _messages(prompt, "'prompt'", where)
    outputs = [
        _messages(item, repr(key), where)
        for key, item in zip(TRL_OUTPUTS, (chosen, rejected), strict=True)
    ]
    if prompt is None:
        before = outputs[0][: _alike(*outputs)]
        _check_prompt(row, before, where)
    if before and all(output[: len(before)] == before for output in outputs):
        outputs = [output[len(before) :] for output in outputs]
    return _chats(before, outputs, row, where)


def _check_prompt(row: Mapping[str, Any], prompt: Any, where: str) -> None:
    """Refuse a row with a prompt in another column that its outputs do not begin with."""
    for name in PROMPTS:
        other = row.get(name)
        has_it = bool(prompt) if not isinstance(prompt, str) else str(other) in prompt
        if other and other != row["chosen"] and not has_it:
            raise DataError(
                f"{where} has {name!r} ({shown(other)}), which its outputs do not begin with, and "
                "no 'prompt'; give the whole prompt as 'prompt'"
            )


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} is {kind_of(value)}; expected a list of messages")
    return check_messages(value, name, where)


def _chats(
    before: list[dict[str, Any]],
    outputs: list[list[dict[str, Any]]],
    row: Mapping[str, Any],
    where: str,
) -> Pair:
    _check_differ(outputs[0], outputs[1], where)
    # Each has messages of its own, as a sample takes weights out of them.
    samples = [
        chat_sample([dict(message) for message in (*before, *output)], len(before), row, where)
        for output in outputs
    ]
    return samples[0], samples[1]


def _check_differ(chosen: Any, rejected: Any, where: str) -> None:
    if chosen == rejected:
        raise DataError(f"{where}: both outputs are alike, so neither is preferred; remove the row")


def _alike(first: Any, other: Any) -> int:
    most = min(len(first), len(other))
    return next((i for i in range(most) if first[i] != other[i]), most)
