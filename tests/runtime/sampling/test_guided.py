"""Guided decoding: outputs of random models under schemas, regexes, choices and grammars."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import GenerationError
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Chunk, Completion
from pcg.runtime.sampling import grammars as grammars_module
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import tiny_llama
from tests.support.small_engine import LORA, make_engine

PROMPTS = [
    f"what is {word}?" for word in ("a", "the fox", "today", "it", "an emoji", "add", "x", "I")
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "mail": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    },
    "required": ["name", "age", "tags", "mail"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 4}
SUM = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= ("yes" | "no") " " [0-9]+ "."'
SPACES: dict[str, Any] = {"bad_words": [" ", "\n", "\t", "\r"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads that kernels know
    return tiny_llama.save(tmp_path_factory.mktemp("model"), seed=3, **sizes)


@pytest.fixture(scope="module")
def executor(directory: Path) -> Executor:
    made = compiler.compile(directory)
    adapter = made.add_adapter("a", LORA)
    for weights in adapter.weights.values():
        torch.nn.init.normal_(weights.b, std=0.2)
    made.refresh_adapter("a")
    return made


def ends(engine: Engine) -> dict[int, Chunk]:
    """The last chunk of each request."""
    found: dict[int, Chunk] = {}
    engine.wait_prepared()
    for _ in range(3000):
        found |= {chunk.index: chunk for chunk in engine.step() if chunk.completion is not None}
        engine.check_integrity()
        if engine.is_idle:
            return found
    raise AssertionError("the engine goes on for ever")


ASKED: list[dict[str, Any]] = [
    {"guided_json": PERSON},
    {"guided_json": json.dumps(NUMBERS)},
    {"guided_json_object": True},
    {"guided_regex": r"[a-c]{2,4}-\d{3}(x|yz)"},
    {"guided_choice": ["left", "right", 'a "quoted" \\ one', "ünï😀"]},
    {"guided_grammar": SUM},
    {"guided_grammar": GBNF},
    {},
]


def check(index: int, completion: Completion) -> None:
    text = completion.text
    if index == 0:
        jsonschema.validate(json.loads(text), PERSON)
    elif index == 1:
        jsonschema.validate(json.loads(text), NUMBERS)
    elif index == 2:
        assert isinstance(json.loads(text), dict)
    elif index == 3:
        assert re.fullmatch(ASKED[3]["guided_regex"], text)
    elif index == 4:
        assert text in ASKED[4]["guided_choice"]
    elif index == 5:
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text)
    elif index == 6:
        assert re.fullmatch(r"(yes|no) \d+\.", text)


@pytest.mark.parametrize(
    ("backend", "chosen", "new"), [("torch", range(8), 150), ("triton", (3, 4, 7), 12)]
)
def test_outputs_follow_their_guides(
    directory: Path, executor: Executor, backend: str, chosen: Sequence[int], new: int
) -> None:
    """Drawn, with an adapter and without, beside a request without a guide."""
    served = executor if backend == "torch" else compiler.compile(directory, backend=backend)
    adapter = "a" if backend == "torch" else None
    engine, alone = make_engine(served, 200), make_engine(served, 200)
    options: dict[str, Any] = {"max_new_tokens": new, "seed": 5, "temperature": 2.0}
    asked = [
        served.request(PROMPTS[i], adapter if i % 2 else None, **options | ASKED[i]) for i in chosen
    ]
    for request in asked:
        engine.submit(request)
    alone.submit(asked[-1])
    found = ends(engine)
    finished = 0
    for index, place in enumerate(chosen):
        completion = found[index].completion
        assert completion is not None
        assert found[index].error is None
        if completion.finish_reason == "stop":
            check(place, completion)
            finished += place < 7
    assert finished >= len(chosen) - 3
    unguided, by_itself = found[len(chosen) - 1].completion, ends(alone)[0].completion
    assert unguided is not None
    assert by_itself is not None
    assert unguided.token_ids == by_itself.token_ids


def test_every_output_is_allowed_by_the_library_itself(executor: Executor) -> None:
    """And as far as it is cut off, its beginning is."""
    import llguidance

    tokenizer = executor.tokenizer
    assert tokenizer is not None
    theirs = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=512, eos_token=2)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(PERSON))
    found = executor.generate(
        PROMPTS, guided_json=PERSON, max_new_tokens=20, temperature=3.0, seed=0
    )
    for completion in found:
        matcher = llguidance.LLMatcher(theirs, grammar)
        assert matcher.validate_tokens(list(completion.token_ids)) == len(completion.token_ids)


def test_an_output_ends_where_its_guide_does(executor: Executor) -> None:
    """With no token that ends it, or with the model's own where more could come."""
    (chosen,) = executor.generate([PROMPTS[0]], guided_choice=["yes", "no"], ignore_eos=True)
    assert chosen.text in ("yes", "no")
    assert (chosen.finish_reason, chosen.stop_reason) == ("stop", None)
    (ended,) = executor.generate([PROMPTS[0]], guided_regex="a*", logit_bias={2: 100.0})
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("", (2,), "stop")
    (longer,) = executor.generate(
        [PROMPTS[0]], guided_regex="a*", logit_bias={2: 100.0}, min_tokens=3
    )
    assert set(longer.text) == {"a"}
    assert len(longer.token_ids) == 4


SPACED: dict[str, Any] = {"x-guidance": {"whitespace_pattern": "[ \n]{2}"}}
FREE: dict[str, Any] = {"x-guidance": {"whitespace_flexible": True}}


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({}, ('{"a":1,"b":[]}', '{"a": 1, "b": []}'), ('{"a":  1', '{ "', "{\n", '{"a" :', "[")),
        ({"x-guidance": {"item_separator": ";"}}, ('{"a": 1;"b":[]}',), ('{"a":1,', "{ ")),
        (SPACED, ('{"a":1,"b":[]}', '{ \n"a":1,  "b":[]}'), ('{ "', '{   "')),
        (FREE, ('{\n\n\n "a"  :1\t,"b":[ ]}',), ()),
    ],
)
def test_json_is_compact_unless_its_schema_says_which_white_space_may_come(
    executor: Executor, options: dict[str, Any], allowed: Sequence[str], refused: Sequence[str]
) -> None:
    schema = {"type": "object", "required": ["a", "b"], "additionalProperties": False}
    schema["properties"] = {"a": {"type": "integer"}, "b": {"type": "array"}}
    grammars, tokenizer = executor.state.grammars, executor.tokenizer
    assert tokenizer is not None
    guide = SamplingParams(guided_json={**schema, **options}).guide
    assert guide is not None
    for text in (*allowed, *refused):
        matcher = grammars.begin(guide).matcher
        ids = tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.validate_tokens(ids)
        assert (taken == len(ids)) is (text in allowed), text


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": PERSON},
        {"guided_json": {**PERSON, "x-guidance": {}}},
        {"guided_json": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}},
    ],
)
def test_a_model_that_prefers_white_space_ends_its_json(
    executor: Executor, fields: dict[str, Any]
) -> None:
    """The bias is that of a small chat model, which goes on with spaces and line breaks."""
    tokenizer = executor.tokenizer
    assert tokenizer is not None
    texts = ((index, tokenizer.decode([index])) for index in range(tokenizer.vocab_size))
    bias = {index: 50.0 for index, text in texts if text.isspace()}
    found = executor.generate(PROMPTS, max_new_tokens=200, logit_bias=bias, **fields)
    assert {one.finish_reason for one in found} == {"stop"}
    assert all("\n" not in one.text for one in found)


def test_continuations_follow_the_guide_each_for_itself(executor: Executor) -> None:
    engine = make_engine(executor, 100)
    fields: dict[str, Any] = {"guided_regex": "[a-f]{6}", "temperature": 3.0, "seed": 4}
    engine.submit(executor.request(PROMPTS[1], n=3, **fields))
    engine.wait_prepared()
    found: list[str] = []
    while not engine.is_idle:
        found += [c.completion.text for c in engine.step() if c.completion is not None]
        engine.check_integrity()
    assert len(set(found)) == 3
    assert all(re.fullmatch("[a-f]{6}", text) for text in found)
    alone = [executor.generate([PROMPTS[1]], **fields | {"seed": 4 + i})[0].text for i in range(3)]
    assert sorted(found) == sorted(alone)


def test_state_outlives_preemption_and_steps_that_fail(executor: Executor) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 2.0, "guided_json": PERSON}
    asked = [executor.request(p, seed=i, **options | SPACES) for i, p in enumerate(PROMPTS)]

    def served(pages: int, fails: int) -> tuple[list[tuple[int, ...]], bool]:
        engine = make_engine(executor, pages)
        start, steps = engine.device.start, 0

        def failing(*given: Any) -> Any:
            nonlocal steps
            steps += 1
            if fails and steps % fails == 0:
                start(*given)
                raise RuntimeError("after the masks were made")
            return start(*given)

        engine.device.start = failing  # type: ignore[method-assign]
        for request in asked:
            engine.submit(request)
        found = ends(engine)
        preempted = any(event.kind is Kind.PREEMPTED for event in engine.log)
        completions = [found[i].completion for i in range(len(asked))]
        return [c.token_ids for c in completions if c is not None], preempted

    expected, preempted = served(100, 0)
    assert not preempted
    assert served(7, 0) == (expected, True)
    again, _ = served(100, 17)
    assert again == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"type": "objekt"}}, "guided_json cannot be followed: .*objekt"),
    ({"guided_json": {"not": {"type": "string"}}}, r"Unimplemented keys: \[\"not\"\]"),
    (
        {"guided_json": {"not": {}, "x-guidance": {"lenient": True}}},
        "guided_json cannot be followed: x-guidance has lenient=True",
    ),
    ({"guided_json": {"x-guidance": 3}}, "cannot be followed: x-guidance=3; use an object"),
    ({"guided_json": {"x-guidance": {"a": 1}}}, "cannot be followed: .*unknown field `a`"),
    ({"guided_json": {"items": {"x-guidance": {}}}}, "cannot be followed: .*at its top alone"),
    ({"guided_json": {"$ref": "https://example.org/a"}}, "guided_json cannot be followed"),
    ({"guided_regex": "(a"}, "guided_regex cannot be followed: .*unclosed group"),
    ({"guided_grammar": "start: missing"}, "guided_grammar cannot be followed: .*missing"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar cannot be followed"),
    ({"guided_json": {"$ref": "#"}}, "guided_json cannot be followed"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_guide_that_does_not_compile_fails_its_request_alone(
    executor: Executor, fields: dict[str, Any], words: str
) -> None:
    engine = make_engine(executor, 100)
    engine.submit(executor.request(PROMPTS[0], max_new_tokens=3))
    for _ in range(2):  # compiled, and found among those that were
        engine.submit(executor.request(PROMPTS[1], max_new_tokens=3, **fields))
    found = ends(engine)
    assert found[0].error is None
    for index in (1, 2):
        assert isinstance(found[index].error, GenerationError)
        assert re.search(words, str(found[index].error))
    with pytest.raises(GenerationError, match=words):
        executor.generate([PROMPTS[0]], **fields)


def test_guides_that_nest_deeply_or_explode_end_nothing(executor: Executor) -> None:
    """Each once killed a process by its stack, or has no end."""
    chain = "\n".join(f"r{i:x}:r{i + 1:x}" for i in range(2800))
    refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(900)} | {"d900": {"const": 1}}
    for fields in (
        {"guided_grammar": f'start: r0\n{chain}\nraf0: "z"'},
        {"guided_json": {"$defs": refs, "$ref": "#/$defs/d0"}},
        {"guided_grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
        {"guided_grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
        {"guided_json": '{"a":' * 400 + "1" + "}" * 400},
        {"guided_grammar": 'start: ("a"{0,100000}){0,100000}'},
        {"guided_regex": "(((a{0,1000}){0,1000}){0,1000}){0,1000}"},
    ):
        engine = make_engine(executor, 100)
        engine.submit(executor.request(PROMPTS[0], max_new_tokens=2, **fields))
        (end,) = ends(engine).values()
        assert end.error is None or "cannot be followed" in str(end.error)


def test_a_request_waits_for_its_guide_and_nobody_else_does(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be cancelled and time out meanwhile, through the engine's thread, too."""
    release = threading.Event()
    compile_guide = type(executor.state.grammars)._compile

    def slow(*given: Any) -> Any:
        release.wait(60)
        return compile_guide(*given)

    monkeypatch.setattr(type(executor.state.grammars), "_compile", slow)
    try:
        with executor.engine(kv_cache_bytes=2**22).start() as engine:
            guided = engine.submit(PROMPTS[0], guided_regex="[a-d]{7}")
            cancelled = engine.submit(PROMPTS[0], guided_regex="[a-d]{7}")
            late = engine.submit(PROMPTS[0], guided_regex="[a-d]{7}", timeout_s=0.01)
            plain = engine.submit(PROMPTS[1], max_new_tokens=4)
            assert plain.wait(60).finish_reason == "length"
            cancelled.cancel()
            assert cancelled.wait(60).finish_reason == "cancelled"
            assert late.wait(60).finish_reason == "timed_out"
            assert not guided.is_over
            release.set()
            assert re.fullmatch("[a-d]{7}", guided.wait(60).text)
    finally:
        release.set()


class Panic(BaseException):
    """A panic of the library, as its bindings raise it."""


def test_a_panic_of_the_library_ends_its_request_alone(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a guide is compiled, where masks are made, and where a token is taken."""
    grammars = executor.state.grammars
    texts, masks = grammars_module._grammar_text, type(grammars)._masks
    commit = grammars_module.Grammar.commit

    def compiling(library: Any, guide: Any) -> str:
        if guide.text == "compiled":
            raise Panic("while it is compiled")
        return texts(library, guide)

    def masking(self: Any, given: Any) -> Any:
        if any(grammar.guide.text == "masked" for grammar in given):
            raise Panic("while its mask is made")
        return masks(self, given)

    class Matcher:
        def consume_token(self, token: int) -> bool:
            raise Panic("while a token is taken")

    def taking(self: Any, token: int) -> None:
        if self.guide.text == "taken":
            self._matcher = Matcher()
        commit(self, token)

    monkeypatch.setattr(grammars_module, "_grammar_text", compiling)
    monkeypatch.setattr(type(grammars), "_masks", masking)
    monkeypatch.setattr(grammars_module.Grammar, "commit", taking)
    with executor.engine(kv_cache_bytes=2**22).start() as engine:
        good = [engine.submit(PROMPTS[0], guided_regex="good"), engine.submit(PROMPTS[1])]
        bad = {word: engine.submit(PROMPTS[2], guided_regex=word) for word in WORDS}
        for word, stream in bad.items():
            with pytest.raises(GenerationError, match=WORDS[word]):
                stream.wait(60)
        assert good[0].wait(60).text == "good"
        assert good[1].wait(60).finish_reason in ("length", "stop")


WORDS = {
    "compiled": "while it is compiled",
    "masked": "while its mask is made",
    "taken": "while a token is taken",
}


def test_guides_without_a_tokenizer_or_the_library(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(executor.state, "tokenizer", None)
        with pytest.raises(GenerationError, match=r"guided_regex needs the texts of tokens"):
            executor.generate([[1, 2]], guided_regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GenerationError, match=r"llguidance, .*: pip install 'pcg\[guided\]'"):
        executor.generate([[1, 2]], guided_regex="a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex are given"),
        ({"guided_json": "{"}, "guided_json is no JSON"),
        ({"guided_json": '{"a":' * 5000 + "1" + "}" * 5000}, "guided_json is no JSON: .*recursion"),
        ({"guided_json": "[1]"}, r"guided_json='\[1\]'; use a JSON schema, which is an object"),
        ({"guided_json": {"a": {1, 2}}}, "guided_json is no JSON"),
        ({"guided_json": 5}, "guided_json=5; use a text"),
        ({"guided_json": {"enum": ["x" * 40_000]}}, "the limit is 32,768"),
        ({"guided_regex": ""}, "guided_regex=''; use a text that is not empty"),
        ({"guided_regex": "a?" * 5000}, "10,000 characters; the limit is 4,096"),
        ({"guided_regex": "\ud800"}, "half of a surrogate pair at character 0"),
        ({"guided_choice": ("a", "")}, "guided_choice=.*; use a tuple of strings"),
        ({"guided_choice": ("a",) * 2000}, "guided_choice has 2,000 strings; the limit is 1,024"),
        ({"guided_json_object": 1}, "guided_json_object=1; use True or False"),
    ],
)
def test_guides_that_are_refused_at_once(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GenerationError, match=words):
        SamplingParams(**fields)


def test_a_schema_is_the_requests_own() -> None:
    schema: dict[str, Any] = {"type": "object"}
    params = SamplingParams.of({"guided_json": [schema, None]}, 0, 2)
    schema["type"] = "array"
    assert params.guide is not None
    assert json.loads(params.guide.text) == {"type": "object"}
    assert SamplingParams.of({"guided_json": [schema, None]}, 1, 2).guide is None
