"""Guided decoding: outputs of random models under schemas, regexes, choices and grammars."""

from __future__ import annotations

import gc
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

from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Chunk, Completion
from pcg.runtime.sampling import grammars
from pcg.runtime.sampling import grammars as grammars_module
from pcg.runtime.sampling.grammars import CompileQueue, Grammars
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, tiny_llama
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads that kernels know
    return tiny_llama.save(tmp_path_factory.mktemp("model"), seed=3, **sizes)


@pytest.fixture(scope="module")
def executor(directory: Path) -> Executor:
    made = compiled.executor(directory)
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
    ("backend", "chosen", "new"),
    [("torch", range(8), 150), pytest.param("triton", (3, 4, 7), 12, marks=pytest.mark.slow)],
)
def test_outputs_follow_their_guides(
    directory: Path, executor: Executor, backend: str, chosen: Sequence[int], new: int
) -> None:
    """Drawn, with an adapter and without, beside a request without a guide."""
    served = executor if backend == "torch" else compiled.executor(directory, backend=backend)
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


# -------------------------------------------------------------------------------------- steps ahead

CHOICES = ["left", "right", "ünï😀"]
PATTERN = r"[a-c]{2,4}-\d{3}(x|yz)"
AHEAD: list[dict[str, Any]] = [
    {"guided_regex": PATTERN, "temperature": 2.0},
    {"temperature": 0.0},
    {"guided_choice": CHOICES, "temperature": 1.0, "n": 2},
    {"guided_json": NUMBERS, "temperature": 1.5, "repetition_penalty": 1.1},
    {"guided_regex": PATTERN, "temperature": 0.0, "logprobs": 1},
    {"guided_regex": "a{40}b", "temperature": 1.0, "stop": ["aaa"]},
    {"temperature": 1.0},
]


def served(executor: Executor, is_ahead: bool) -> tuple[dict[Any, Completion], dict[str, int]]:
    """Completions of requests that come one after the other, and how steps were read."""
    engine = executor.engine(Limits(running=6, tokens=48), kv_cache_bytes=2**20)
    engine.device.is_ahead = is_ahead
    asked = [
        executor.request(
            f"what is {number}?", "a" if number % 3 == 1 else None, max_new_tokens=16,
            seed=number, **fields,
        )
        for number, fields in enumerate(AHEAD)
    ]  # fmt: skip
    found: dict[Any, Completion] = {}
    for step in range(500):
        if step % 2 == 0 and asked:
            engine.submit(asked.pop(0))
            engine.wait_prepared()
        for chunk in engine.step():
            assert chunk.error is None
            if chunk.completion is not None:
                found[chunk.index, chunk.choice] = chunk.completion
        engine.check_integrity()
        if not asked and engine.is_idle:
            return found, dict(engine.reads)
    raise AssertionError("the engine goes on for ever")


# ---------------------------------------------------------------------------- guides that take long

AMBIGUOUS = 'start: a\na: "x" | a a | a a a\n'


def test_tenants_have_turns() -> None:
    """Behind two that take long, one of each tenant runs, whoever asked first."""
    queue, release, order = CompileQueue(), threading.Event(), []
    queue.submit("a", lambda: release.wait(60))
    queue.submit("c", lambda: release.wait(60))
    ends = [queue.submit("a", lambda i=i: order.append(f"a{i}")) for i in range(8)]
    ends.append(queue.submit("b", lambda: order.append("b")))
    release.set()
    for end in ends:
        end.result(60)
    assert order.index("b") <= 2


def test_a_tenant_has_so_many_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_QUEUED", 3)
    queue, release, begun = CompileQueue(), threading.Event(), threading.Semaphore(0)
    queue.submit("a", lambda: (begun.release(), release.wait(60)))
    assert begun.acquire(timeout=60)
    ends = [queue.submit("a", lambda: None) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 guides of tenant 'a' wait to be compiled"):
        queue.submit("a", lambda: None)
    ends.append(queue.submit("b", lambda: None))
    release.set()
    for end in ends:
        end.result(60)


def test_a_guide_is_not_compiled_for_a_request_that_has_gone(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cancel, a time that is out, or a client that left."""
    compiled: list[str] = []
    release, begun = threading.Event(), threading.Semaphore(0)

    def compile_slowly(grammars: Grammars, guide: Any) -> Any:
        compiled.append(guide.text)
        begun.release()
        release.wait(60)
        raise GenerationError("slow")

    monkeypatch.setattr(Grammars, "_compiled_matcher", compile_slowly)
    fields: dict[str, Any] = {"max_new_tokens": 4}
    with executor.engine(kv_cache_bytes=2**22).start() as running:
        slow = [running.submit("a", guided_regex=text, **fields) for text in ("one", "two")]
        assert all(begun.acquire(timeout=60) for _ in slow)
        gone = running.submit("a", guided_regex="gone", **fields)
        stays = running.submit("a", guided_regex="stays", **fields)
        gone.cancel()
        assert gone.wait(60).finish_reason == "cancelled"
        del gone
        gc.collect()
        release.set()
        with pytest.raises(GenerationError):
            stays.wait(60)
    assert sorted(compiled) == ["one", "stays", "two"]


def test_an_ambiguous_grammar_fails_before_its_tokens_take_long(executor: Executor) -> None:
    """Its tokens would take 80 ms each of everyone's steps; its neighbour is left alone."""
    fields: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
    expected = executor.generate("the fox", **fields).token_ids
    with executor.engine(kv_cache_bytes=2**22).start() as running:
        hostile = running.submit("x", guided_grammar=AMBIGUOUS, max_new_tokens=200, min_tokens=200)
        neighbour = running.submit("the fox", **fields)
        assert neighbour.wait(60).token_ids == expected
        with pytest.raises(GenerationError, match="more than 2 ms each of everyone's step"):
            hostile.wait(60)
