"""Datasets: chats, texts and columns of every format become examples, in a seeded order."""

import copy
import itertools
import json

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pcg.errors import DataError, FinetuneError, PcgError
from pcg.runtime.data import formats
from pcg.runtime.data.dataset import ExampleReader, ReadOptions, load_examples
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.formats import COLUMNS
from pcg.runtime.data.order import Batches, Mixture
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import FinetuneOptions
from tests.support import toy_tokenizers as toys

CHAT = [
    {"role": "system", "content": "think"},
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "assistant", "content": " I am fine. 中文 😀  "},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "naïve café"},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def chatml(root):
    return Tokenizer.load(toys.save_chatml(root / "chatml"))


@pytest.fixture(scope="module")
def llama2(root):
    return Tokenizer.load(toys.save_llama2(root / "llama2"))


def one(source, tokenizer, **options):
    (example,) = load_examples(source, tokenizer, **options)
    assert len(example.ids) == len(example.labels)
    assert all(b in (a, IGNORED) for a, b in zip(example.ids, example.labels, strict=True))
    return example


def learned(example, tokenizer):
    """Text of what is learned."""
    ids = [index for index in example.labels if index != IGNORED]
    return tokenizer.decode(ids, skip_special_tokens=False)


# ------------------------------------------------------------------------------- chats


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("template", [toys.CHATML, toys.CHATML_MARKED])
def test_the_assistant_mask_is_that_of_transformers(tmp_path, template, trim_offsets):
    # transformers gives up on a span that begins with a space if offsets are trimmed.
    chat = [{**m, "content": m["content"].strip()} for m in CHAT] if trim_offsets else CHAT
    marked = toys.save_chatml(tmp_path / "marked", toys.CHATML_MARKED, trim_offsets)
    theirs = PreTrainedTokenizerFast.from_pretrained(marked).apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True
    )
    directory = toys.save_chatml(tmp_path / "ours", template, trim_offsets)
    example = one([{"messages": chat}], Tokenizer.load(directory))
    assert example.ids == theirs["input_ids"]
    assert [int(label != IGNORED) for label in example.labels] == theirs["assistant_masks"]


def test_the_end_of_turn_is_learned_and_the_line_break_not(chatml):
    example = one([{"messages": CHAT}], chatml)
    assert learned(example, chatml) == (" I am fine. 中文 😀  <|im_end|>naïve café<|im_end|>")
    assert example.targets == sum(label != IGNORED for label in example.labels)


CONTENT = st.text(alphabet=st.sampled_from("ab é中😀\n.<"), min_size=1, max_size=12).filter(
    # A leading space may share a token with the line break before it, which is then learned, too.
    lambda text: not text[0].isspace()
)


@settings(deadline=None)
@given(turns=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3))
def test_any_content_is_learned_to_the_letter(turns):
    tokenizer = Tokenizer(toys.byte_level(), {}).with_template(toys.CHATML)
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    example = one([{"messages": messages}], tokenizer)
    expected = "".join(answer + "<|im_end|>" for _, answer in turns)
    assert learned(example, tokenizer) == expected


def test_text_parts_and_tool_arguments(chatml):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    plain = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]
    assert one([{"messages": messages}], chatml) == one([{"messages": plain}], chatml)
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}(a={{ call.function.arguments.a }})!"
        "{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = chatml.with_template(template)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    example = one([{"messages": messages, "tools": [{"name": "f"}]}], tokenizer)
    assert tokenizer.decode(example.ids).startswith('[{"name": "f"}]user')
    assert "f(a=7)!" in learned(example, tokenizer)


# ------------------------------------------------------------------------------- text


@pytest.mark.parametrize("family", ["chatml", "llama2"])
def test_prompt_and_completion(request, family):
    tokenizer = request.getfixturevalue(family)
    row = {"prompt": "print(1)\n", "completion": "you today?"}
    example = one([row], tokenizer)
    assert example.ids == [*tokenizer.encode("print(1)\nyou today?"), tokenizer.eos_id]
    end = tokenizer.backend.id_to_token(tokenizer.eos_id)
    assert learned(example, tokenizer) == f"you today?{end}"
    bare = one([row], tokenizer, append_eos=False)
    assert bare.ids == example.ids[:-1]


@pytest.mark.parametrize("given", ["", None, "1 and 2"])
def test_alpaca(chatml, given):
    row = {"instruction": "add", "input": given, "output": "3"}
    example = one([row], chatml)
    assert learned(example, chatml) == "3<|im_end|>"
    text = chatml.decode(example.ids)
    assert text.startswith("Below is an instruction that describes a task")
    assert text.endswith("### Instruction:\nadd\n\n### Response:\n3") == (not given)
    assert ("### Input:\n1 and 2\n\n### Response:\n3" in text) == bool(given)


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt": "what is it?", "completion": "naïve café"}, "what is it?"),
        ({"instruction": "add", "output": "naïve café"}, "add"),
        ({"instruction": "add", "input": "1 and 2", "output": "naïve café"}, "add\n1 and 2"),
    ],
)
def test_texts_are_a_question_and_its_answer_with_the_format_set_to_chat(chatml, row, question):
    messages = [{"role": "user", "content": question}, CHAT[-1]]
    found = one([{**row, "system": "think"}], chatml, format="chat")
    assert found == one([{"messages": [CHAT[0], *messages]}], chatml)
    with pytest.raises(DataError, match="missing key 'messages'"):
        one([{"prompt": messages[:1], "completion": messages[1:]}], chatml, format="chat")


@pytest.mark.parametrize("row", [{"text": "The quick brown fox"}, "The quick brown fox"])
def test_all_of_a_text_is_learned(llama2, row):
    example = one([row], llama2)
    assert example.labels == example.ids
    assert example.ids == [*llama2.encode("The quick brown fox"), llama2.eos_id]
    # The first token is predicted by nothing.
    assert example.targets == len(example.ids) - 1


def test_a_document_is_cut_into_pieces(tmp_path, chatml):
    text = "\n".join(toys.CORPUS)
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8")
    data = load_examples(path, chatml, max_length=16)
    assert data.format == "document"
    assert [index for example in data for index in example.ids] == [
        *chatml.encode(text),
        chatml.eos_id,
    ][: data.tokens]
    assert {len(example.ids) for example in data[:-1]} == {16}
    assert data.targets == data.tokens - len(data)
    assert len(load_examples(path, chatml)) == 1
    path.write_text(" \n")
    with pytest.raises(DataError, match="is empty; there is nothing to learn"):
        load_examples(path, chatml)


# ------------------------------------------------------------------------------- columns

SHOWING = "{{ tools | tojson if tools else '' }}{{ mood | default('') }}" + toys.CHATML.replace(
    "message['content'] +", "message['content'] + message.tool_calls | default('') | string +"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURNS = [{"from": "human", "value": "add"}, {"from": "gpt", "value": "3"}]
TALK = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "3"}]
ROWS = {
    "chat": {"messages": TALK},
    "sharegpt": {"conversations": TURNS},
    "prompt-completion": {"prompt": "add", "completion": "3"},
    "message lists": {"prompt": TALK[:1], "completion": TALK[1:]},
    "alpaca": {"instruction": "add", "output": "3"},
    "text": {"text": "add 3"},
    "tokens": {"input_ids": [5, 6, 7]},
}
PAIRS = {
    "texts": {"prompt": "add", "chosen": "3", "rejected": "4"},
    "messages": {
        "prompt": TALK[:1],
        "chosen": TALK[1:],
        "rejected": [{"role": "assistant", "content": "4"}],
    },
    "OpenAI": {
        "input": {"messages": TALK[:1]},
        "preferred_output": TALK[1:],
        "non_preferred_output": [{"role": "assistant", "content": "4"}],
    },
}
VALUES = {
    "system": ("Hello", "think"),
    "system_prompt": ("Hello", "think"),
    "history": ([["one", "two"]], [["one", "three"]]),
    "tools": ([{"name": "f"}], '[{"name": "g"}]'),
    "functions": ([{"name": "f"}], [{"name": "g"}]),
    "chat_template_kwargs": ({"mood": "glad"}, {"mood": "sad"}),
    "weight": (0.5, 0),
    "label": (True, False),
    "kto_tag": (True, False),
    "seq_lengths": ([1, 2], [2, 1]),
    "position_ids": ([0, 0, 1], [0, 1, 0]),
    "cu_seqlens": ([0, 1, 3], [0, 2, 3]),
    "cu_seq_lens_q": ([0, 1, 3], [0, 2, 3]),
    "cu_seq_lens_k": ([0, 1, 3], [0, 2, 3]),
}


def outcome(row, tokenizer, **options):
    """Return the examples of a row, or the error that refuses it."""
    try:
        reader = ExampleReader([row], tokenizer, ReadOptions(**options))
        return [example for example, _ in reader]
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_with_a_meaning_changes_what_is_learned_or_is_refused(chatml, column, is_pair):
    """Whatever a row has that changes its meaning: no value of it goes without a trace."""
    tokenizer = chatml.with_template(SHOWING)
    for name, row in (PAIRS if is_pair else ROWS).items():
        if column in row or (column == "label" and name in ("text", "tokens")):
            continue  # is what the row is learned from; is a class
        if name == "tokens" and column in (*formats.OF_CHATS, "history"):
            continue  # is in the tokens
        found = []
        for value in (None, *VALUES.get(column, ([1, 0, 1], [0, 1, 1]))):
            read = outcome(
                {**row, column: value}, tokenizer, rows="pairs" if is_pair else "samples"
            )
            if isinstance(read, str):
                assert f"'{column}'" in read, (name, value)
                assert value is not None
            else:
                found.append(read)
        assert all(one != other for one, other in itertools.combinations(found, 2)), name


@pytest.mark.parametrize("name", ["chat", "sharegpt", "message lists"])
@pytest.mark.parametrize("key", [*formats.LEARNS, *formats.UNREAD, "reasoning", "tool_calls"])
def test_a_key_of_a_message_changes_what_is_learned_or_is_refused(chatml, key, name):
    tokenizer = chatml.with_template(SHOWING)
    values = {"tool_calls": [CALL], "weight": 0, "loss_weight": 0.0, "mask": True}
    value = values.get(key, False if key in formats.LEARNS else "why")
    plain, changed = ROWS[name], copy.deepcopy(ROWS[name])
    (changed.get("completion") or next(iter(changed.values())))[-1][key] = value
    found = outcome(changed, tokenizer, empty="drop")
    if key in formats.LEARNS:
        assert "all 1 rows were dropped" in found
    elif isinstance(found, str):
        assert f"'{key}'" in found
    else:
        assert found != outcome(plain, tokenizer)


@pytest.mark.parametrize("name", formats.PROMPTS)
def test_a_preference_does_not_lose_its_prompt(chatml, name):
    """By whichever name a library knows it: pairs of outputs alone would be learned without it."""
    for prompt, format in (("add", "texts"), (TALK[:1], "messages")):
        row = {key: PAIRS[format][key] for key in ("chosen", "rejected")}
        refused = outcome({**row, name: prompt}, chatml, rows="pairs")
        assert f"has '{name}'" in refused
        assert "as 'prompt'" in refused
        whole = {key: prompt + value for key, value in row.items()}
        expected = outcome({**row, "prompt": prompt}, chatml, rows="pairs")
        assert outcome({**whole, name: prompt}, chatml, rows="pairs") == expected


def test_the_template_and_its_variables_are_options(chatml, tmp_path):
    """A row's variables take precedence."""
    path = tmp_path / "loud.jinja"
    path.write_text(SHOWING)
    rows = [ROWS["chat"], {**ROWS["chat"], "chat_template_kwargs": {"mood": "sad"}}]
    for source in (path, str(path), SHOWING):
        options = FinetuneOptions(chat_template=source, chat_template_kwargs={"mood": "glad"})
        read = ReadOptions(template=options.template(), variables=options.variables())
        texts = [chatml.decode(list(e.ids)) for e, _ in ExampleReader(rows, chatml, read)]
        assert [text[:3] for text in texts] == ["gla", "sad"]
    for wrong in ({"chat_template": "{% for"}, {"chat_template_kwargs": {"tools": []}}):
        with pytest.raises(PcgError, match=r"line 1|without .*tools"):
            FinetuneOptions(**wrong)
    with pytest.raises(PcgError, match=r"no chat template file .*nowhere"):
        FinetuneOptions(chat_template="nowhere.jinja")


def test_whole_chats_have_the_prompt_of_a_preference_once(chatml):
    """UltraFeedback's rows: a prompt as text, or as messages, and chats that begin with it."""
    row = PAIRS["messages"]
    whole = {key: row["prompt"] + row[key] for key in ("chosen", "rejected")}
    expected = outcome(row, chatml, rows="pairs")
    for prompt in ("add", row["prompt"], None):
        given = {**whole, "prompt": prompt, "messages": whole["chosen"]}
        assert outcome(given, chatml, rows="pairs") == expected
    longer = {key: [*TALK, *value] for key, value in whole.items()}
    expected = outcome(longer, chatml, rows="pairs")
    assert outcome({**longer, "prompt": "add"}, chatml, rows="pairs") == expected
    assert "give texts, or lists" in outcome({**whole, "prompt": "other"}, chatml, rows="pairs")


@pytest.mark.parametrize("name", ROWS)
def test_columns_without_a_meaning_are_ignored(chatml, name):
    row = ROWS[name]
    other = {"id": 7, "source": "web", "score": 0.3, "meta": {"a": object()}}
    other["weight"] = torch.tensor(1.0)  # as of columns that torch reads
    empty = dict.fromkeys(COLUMNS.keys() - row.keys() - other.keys(), None) | {"images": []}
    assert one([{**row, **other, **empty}], chatml) == one([row], chatml)


def test_the_system_of_a_row_is_its_first_message(chatml):
    expected = one([{"messages": [{"role": "system", "content": "think"}, *TALK]}], chatml)
    for name in ("chat", "sharegpt", "message lists"):
        assert one([{**ROWS[name], "system": "think"}], chatml) == expected
    begun = {"messages": [{"role": "system", "content": "think"}, *TALK]}
    assert one([{**begun, "system": "think", "system_prompt": "think"}], chatml) == expected
    for row in ({**begun, "system": "else"}, {**ROWS["chat"], "system": "a", "system_prompt": "b"}):
        with pytest.raises(DataError, match="give one"):
            one([row], chatml)


def test_the_system_and_the_history_of_alpaca(chatml):
    row = {**ROWS["alpaca"], "system": "think", "history": [["one", "two"]]}
    example = one([row], chatml)
    assert chatml.decode(example.ids) == (
        "think\n\n### Instruction:\none\n\n### Response:\ntwo\n\n"
        "### Instruction:\nadd\n\n### Response:\n3"
    )
    assert learned(example, chatml) == "3<|im_end|>"
    for history in (["one"], [["one"]], [["one", 2]], "one"):
        with pytest.raises(DataError, match="'history'"):
            one([{**row, "history": history}], chatml)


def test_sharegpt_with_tools(chatml):
    tokenizer = chatml.with_template(SHOWING)
    call = '{"name": "f", "arguments": {"a": 1}}'
    turns = [
        TURNS[0],
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "3"},
        {**TURNS[1], "weight": 0.0},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {**TALK[1], "weight": 0},
    ]
    found = one([{"conversations": turns, "tools": json.dumps(tools)}], tokenizer)
    assert found == one([{"messages": messages, "tools": tools}], tokenizer)
    assert learned(found, tokenizer) == "[" + str(CALL) + "]<|im_end|>"
    with pytest.raises(DataError, match=r"the JSON of 'conversations'.* is damaged"):
        one([{"conversations": [TURNS[0], {"from": "function_call", "value": "{"}]}], tokenizer)


def test_tools_and_messages_that_a_template_does_not_show_are_refused(chatml):
    with pytest.raises(DataError, match="shows no tools"):
        one([{**ROWS["chat"], "tools": [{"name": "f"}]}], chatml)
    deaf = toys.CHATML.replace("for message in messages", "for message in messages[1:]")
    for template in (deaf, deaf.replace("+ '<|im_end|>' ", "")):  # and without an end of turn
        with pytest.raises(DataError, match="drops message 0, of role 'system'"):
            one([{**ROWS["chat"], "system": "think"}], chatml.with_template(template))


# ------------------------------------------------------------------------------- truncation


def test_targets_beyond_the_cut(chatml):
    rows = [{"prompt": "dog", "completion": "!"}, {"prompt": "Hello " * 20, "completion": "dog"}]
    with pytest.raises(DataError, match=r"data\[1\]: nothing to learn: all \d+ target tokens lie"):
        load_examples(rows, chatml, max_length=8)
    data = load_examples(rows, chatml, max_length=8, empty="drop")
    assert (len(data), data.truncated, data.dropped) == (1, 1, 1)
    with pytest.raises(DataError, match="no examples in the data; all 1 rows were dropped"):
        load_examples(rows[1:], chatml, max_length=8, empty="drop")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT[:2]},
        {"messages": [CHAT[1], {**CHAT[2], "weight": 0}]},
        {"prompt": "a", "completion": ""},
        {"instruction": "a", "output": ""},
        {"text": ""},
        {"input_ids": [5, 6], "labels": [5, -100]},
    ],
)
def test_rows_with_nothing_to_learn(chatml, row):
    with pytest.raises(DataError, match=r"data\[0\]: nothing to learn: no "):
        load_examples([row], chatml)
    with pytest.raises(DataError, match="all 1 rows were dropped"):
        load_examples([row], chatml, empty="drop")


def test_tokens_are_learned_as_they_are(root, chatml):
    theirs = PreTrainedTokenizerFast.from_pretrained(toys.save_chatml(root / "theirs"))
    rows = [theirs(text) for text in ("The quick brown fox", "naïve café")]
    data = load_examples([dict(row) for row in rows], chatml)
    assert data.format == "tokens"
    assert [one.ids for one in data] == [one.labels for one in data]
    assert [one.ids for one in data] == [row["input_ids"] for row in rows]
    columns = {"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100, 6, -100], [8, 9]]}
    assert list(load_examples(columns, chatml)) == [
        Example(*row) for row in zip(columns["input_ids"], columns["labels"], strict=True)
    ]


# ------------------------------------------------------------------------------- files and errors


def test_a_file_of_json_lines(tmp_path, chatml):
    path = tmp_path / "train.jsonl"
    rows = [{"messages": CHAT, "id": 1}, {"messages": CHAT[1:3]}]
    lines = [json.dumps(rows[0], ensure_ascii=False), "", json.dumps(rows[1])]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    data = load_examples(str(path), chatml)
    assert data.format == "chat"
    assert list(data) == list(load_examples(rows, chatml))
    path.write_text('"Hello"\n"dog"\n')
    assert list(load_examples(path, chatml)) == list(load_examples(["Hello", "dog"], chatml))


LINE_ERRORS = [
    ('{"text": "a"}\n{"text": }', r"line 2, column 10: not JSON: Expecting value"),
    ('{"text": "a"}\n\n{"prompt": "a"}', r"line 3: missing key 'text' \(has 'prompt'\)"),
    ('{"text": "a"}\n[1]', "line 2: a JSON array; write one row a line"),
    ('[\n{"text": "a"}\n]', "line 1, column 1: not JSON: .*: write one row a line"),
    ('{"text": 3}', "line 1: 'text' is a number; expected a string"),
    ("3", "line 1: a row is a number; expected an object or a string"),
    ('{"txt": "a"}', "line 1: a row with 'txt' is of no known format .*chat: 'messages'"),
    ('{"chosen": "a", "rejected": "b"}', "line 1: a row with .chosen. and .* pcg train dpo"),
    ('{"text": "a"}\n{"text": null}', "line 2: 'text' is null or missing"),
    ('{"prompt": "a", "completion": "b"}\n"c"', "line 2: the row is a string"),
    ('{"prompt": "a", "completion": []}', "'prompt' is a string and 'completion' is a list"),
    ('{"messages": []}', "line 1: 'messages' is empty"),
    ('{"messages": {}}', "line 1: 'messages' is an object; expected a list"),
    ('{"messages": ["a"]}', r"'messages'\[0\] is a string; expected an object"),
    ('{"messages": [{"role": "bot", "content": "a"}]}', r"'messages'\[0\] has role 'bot'; use one"),
    ('{"messages": [{"content": "a"}]}', r"'messages'\[0\] has role None"),
    ('{"messages": [{"role": "user"}]}', r"'messages'\[0\] 'content' is null or missing"),
    ('{"messages": [{"role": "user", "content": "a", "weight": 1}]}', "only assistant may"),
    ('{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}', "weight 2; use 0 or 1"),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        r"'content'\[0\] is of type 'image_url'; only text",
    ),
    (
        '{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
        r"'tool_calls'\[0\] has no 'function' with a 'name'",
    ),
    (
        '{"messages": [{"role": "assistant", "tool_calls": '
        '[{"function": {"name": "f", "arguments": "{"}}]}]}',
        "the JSON of the 'arguments' of .* is damaged",
    ),
    ('{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "'tools' is an object"),
    ('{"conversations": [{"from": "bot", "value": "a"}]}', r"'conversations'\[0\] is from 'bot'"),
    ('{"conversations": [{"from": "gpt"}]}', r"'conversations'\[0\] 'value' is null or missing"),
    ('{"conversations": [1]}', r"'conversations'\[0\] is a number"),
    ('{"instruction": "a", "output": "b", "input": 1}', "'input' is a number"),
    ('{"input_ids": 1}', "'input_ids' is a number; expected a list"),
    ('{"input_ids": [1, true]}', "'input_ids' has a boolean among its tokens; use ints"),
    ('{"input_ids": [1, 2], "labels": [1]}', "has 2 input_ids and 1 labels"),
    ('{"input_ids": [1, 2], "attention_mask": [0, 1]}', "is padded, by its 'attention_mask'"),
    ('{"input_ids": [1, 2, 3], "attention_mask": [1, 2, 2]}', "is packed, by the numbers of"),
    ('{"input_ids": [1, 2], "completion_mask": [0, 1]}', "has 'completion_mask' .*give 'labels'"),
]


@pytest.mark.parametrize(("content", "words"), LINE_ERRORS)
def test_errors_name_the_line_and_what_is_wrong(tmp_path, chatml, content, words):
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        load_examples(path, chatml)
    assert str(caught.value).startswith(f"{path} line ")


def test_bytes_that_are_no_text(tmp_path, chatml):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'"a"\n"\xff"\n')
    with pytest.raises(DataError, match=r"line 2: byte 2 is not UTF-8 \(0xff\)"):
        load_examples(path, chatml)


def test_wrong_arguments(tmp_path, chatml):
    (tmp_path / "data.xlsx").touch()
    (tmp_path / "empty.jsonl").touch()
    for source, options, words in [
        (tmp_path / "missing.jsonl", {}, "no data file"),
        (tmp_path / "data.xlsx", {}, r"ends in \.xlsx; use one of"),
        (tmp_path / "empty.jsonl", {}, r"no examples in .*empty\.jsonl"),
        ([], {}, "no examples in the data"),
        ({"text": "a"}, {}, "data is one dict"),
        (["a"], {"max_length": 1}, "max_length=1; an example needs at least 2 tokens"),
        (["a"], {"format": "csv"}, "unknown data format 'csv'; use auto, tokens, chat"),
        (["a"], {"empty": "skip"}, "use 'error' or 'drop'"),
        (["a"], {"format": "alpaca"}, "the row is a string; .* the alpaca format"),
    ]:
        with pytest.raises(DataError, match=words):
            load_examples(source, chatml, **options)


def test_a_chat_without_a_template_names_the_row_and_the_fix(tmp_path):
    tokenizer = Tokenizer.load(toys.save_llama2(tmp_path, template=None))
    with pytest.raises(DataError, match=r"data\[0\]: the model has no chat template"):
        load_examples([{"messages": CHAT}], tokenizer)


# -------------------------------------------------------------------------------------------- order

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def examples(lengths):
    return [Example([row] * n, [row] * n) for row, n in enumerate(lengths)]


@given(
    lengths=LENGTHS,
    size=st.none() | st.integers(1, 8),
    tokens=st.none() | st.integers(20, 60),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_an_epoch_has_every_example_once_within_the_bounds(lengths, size, tokens, seed, shuffle):
    if size is None and tokens is None:
        size = 1
    data = examples(lengths)
    batches = Batches(data, batch_size=size, max_tokens=tokens, seed=seed, shuffle=shuffle)
    for epoch in range(2):
        assert batches.epoch == epoch
        planned = len(batches)
        epoch_batches = list(batches)
        assert len(epoch_batches) == planned
        flat = [example.ids[0] for batch in epoch_batches for example in batch]
        assert sorted(flat) == list(range(len(data)))
        if not shuffle:
            assert flat == list(range(len(data)))
        for batch, after in zip(epoch_batches, [*epoch_batches[1:], None], strict=True):
            total = sum(len(example.ids) for example in batch)
            assert size is None or len(batch) <= size
            assert tokens is None or total <= tokens
            # A batch ends only where the next example would not fit.
            if after is not None:
                full = size is not None and len(batch) == size
                assert full or (tokens is not None and total + len(after[0].ids) > tokens)


@given(lengths=LENGTHS, stop=st.integers(0, 70), seed=st.integers(0, 5))
def test_a_resumed_run_goes_on_with_the_same_batches(lengths, stop, seed):
    data = examples(lengths)

    def walk(batches, epochs):
        while batches.epoch < epochs:
            for batch in batches:
                yield batch, batches.state_dict()

    options = {"batch_size": 3, "max_tokens": 40, "seed": seed}
    whole = list(walk(Batches(data, **options), 3))
    at = stop % len(whole)
    state = json.loads(json.dumps(whole[at][1]))
    resumed = Batches(data, **options)
    resumed.load_state_dict(state)
    assert [batch for batch, _ in walk(resumed, 3)] == [batch for batch, _ in whole[at + 1 :]]


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
def test_a_mixture_is_that_of_datasets(strategy):
    sets = [datasets.Dataset.from_dict({"a": [*range(n * 100, n * 100 + 30 * n)]}) for n in (1, 2)]
    options = {"probabilities": [0.7, 0.3], "stopping_strategy": strategy}
    expected = datasets.interleave_datasets(sets, seed=5, **options)["a"]
    values = [*sets[0]["a"], *sets[1]["a"]]
    mixture = Mixture((30, 60), (7, 3), strategy)
    assert [values[index] for index in mixture.order(5, 0, False)] == list(expected)
    shuffled = [mixture.order(5, epoch, True).tolist() for epoch in (0, 1, 1)]
    assert shuffled[0] != shuffled[1] == shuffled[2]
    for order in shuffled:
        counts = [order.count(index) for index in range(90)]
        assert (max(counts) == 1) == (strategy == "first_exhausted")
        assert min(counts[30:]) >= (strategy == "all_exhausted")
    batches = Batches(examples([3, 4] * 45), batch_size=4, mixture=mixture)
    steps = [batch for _ in range(2) for batch in batches]
    resumed = Batches(examples([3, 4] * 45), batch_size=4, mixture=mixture)
    resumed.load_state_dict({**batches.state_dict(), "epoch": 1, "index": 2})
    assert [*resumed] == steps[len(batches.plan(0)) + 2 :]
    count, tokens = batches.largest()
    assert max(map(len, steps)) <= count
    assert max(sum(len(e.ids) for e in batch) for batch in steps) <= tokens


def test_the_order_is_seeded_and_changes_each_epoch():
    data = examples([1] * 50)
    plans = {
        json.dumps(Batches(data, batch_size=4, seed=seed).plan(epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(plans) == 9
    assert Batches(data, batch_size=4, seed=1).plan(2) == Batches(data, batch_size=4, seed=1).plan(
        2
    )
    # The order is part of what a saved position means: it must not change between versions.
    assert Batches(examples([1] * 8), batch_size=8).plan(0) == [[5, 0, 3, 6, 4, 7, 2, 1]]


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([], {"batch_size": 1}, "no examples"),
        ([1], {}, "give batch_size, max_tokens or both"),
        ([1], {"batch_size": 0}, "batch_size=0"),
        ([1, 9, 2], {"max_tokens": 8}, "example 1 has 9 tokens, more than max_tokens=8"),
    ],
)
def test_wrong_options(lengths, options, words):
    with pytest.raises(FinetuneError, match=words):
        Batches(examples(lengths), **options)


def test_a_position_in_other_data_is_refused():
    data = examples([1, 2, 3])
    state = Batches(data, batch_size=2).state_dict()
    for other, words in [
        (Batches(data, batch_size=1), "the saved position has batch_size=2, this run batch_size=1"),
        (Batches(data, batch_size=2, seed=1), "seed=0, this run seed=1"),
        (Batches(examples([1, 2]), batch_size=2), "examples=3, this run examples=2"),
        (Batches(examples([1, 3, 2]), batch_size=2), "fingerprint="),
    ]:
        with pytest.raises(FinetuneError, match=words):
            other.load_state_dict(state)
    with pytest.raises(FinetuneError, match="has no 'epoch'"):
        Batches(data, batch_size=2).load_state_dict({})
    with pytest.raises(FinetuneError, match="index=2 is outside the 2 batches"):
        Batches(data, batch_size=2).load_state_dict({**state, "index": 2})
