"""Requests as a hostile client makes them: most have bad fields, some are valid, all are seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams

SURROGATE = "a\ud800b"
HUGE = 10**5000
"""An int of more digits than Python writes, and too large for a float."""


class Endless:
    """Has a length and no items, as an object of the wrong kind."""

    def __len__(self) -> int:
        return 2**40


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _within_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


WRONG: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, HUGE, -HUGE, 0.5, -0.0, 1e-300, 1e-45, 1e300,
    3.4e38, math.nan, math.inf, -math.inf, "", "a", "1", "\x00", SURROGATE, "x" * 70_000, b"a",
    1 + 2j, object(), Endless(), int, [], (), {}, set(), [[]], [None], [1.5], [True], ["a", 1],
    [math.nan], [-1], [HUGE], [2**63], [10**6], {"a": 1}, {1: "a"}, {1: math.nan}, {HUGE: 1.0},
    {-1: 0.0}, {None: None}, {10**6: 1.0}, [""], ["a"] * 5000, list(range(5000)),
    [0] * 300_000, range(3), frozenset({1}), lambda: 1, _nested(3), _nested(900), _within_itself(),
    {(1, 2): 3}, [SURROGATE], [["a"]], [[1, 2], "b"], [[HUGE]], [{}], iter([]), Ellipsis,
]  # fmt: skip
"""Values of all kinds, given to any field."""

SAMPLING: Mapping[str, list[Any]] = {
    "temperature": [0.0, 1e-300, 1e-45, 1e-10, 0.7, 1e30, 1e300, 2**64],
    "top_k": [1, 2**62, 2**70, 0],
    "top_p": [1e-300, 0.5, 1.0, 1.0000001],
    "min_p": [0.0, 1e-300, 1.0],
    "repetition_penalty": [0.01, 1e-40, 100.0, 0.5],
    "presence_penalty": [-2, 2.0, 2.1],
    "frequency_penalty": [-2.0, 2, -3],
    "logit_bias": [dict.fromkeys(range(512), -100.0), {5: 100}, {"5": 1.0}, {511: 1, 512: 1}],
    "bad_words": [[[token] for token in range(512)], ["a", " b"], [[1, 2, 3]], [[0]], ["the"]],
    "allowed_token_ids": [[0], [511], [5, 5, 5], [512], list(range(512)) * 3],
    "seed": [0, 2**63 - 1, 2**63, -1],
    "max_new_tokens": [0, 1, 3, 12, 10**9, 2**70],
    "min_tokens": [0, 1, 5, 10**6],
    "stop": ["", "a", [chr(i) for i in range(32, 127)], ["never" * 100], ["\ud800"], "e" * 1025],
    "stop_token_ids": [[511], list(range(512)), [512]],
    "include_stop_str_in_output": [True, False, 1],
    "ignore_eos": [True, False, "yes"],
    "skip_special_tokens": [False, True, 0],
    "truncate_prompt_tokens": [1, 5, 10**9, 0],
    "logprobs": [0, 5, 20, 21, 10**6],
    "prompt_logprobs": [0, 3, 20, 10**6],
    "echo": [True, False],
    "n": [1, 2, 4, 128, 129],
    "guided_json": [{}, {"type": "nothing"}, {"$ref": "#"}, "{", {"type": "integer"}, "[" * 9000],
    "guided_json_object": [True, False, 1],
    "guided_regex": ["(", "a*", "(a+)+b" * 90, "a{1,100000}", "\ud800", "[a-z]{3}"],
    "guided_choice": [["a", "b"], [""], ["a"] * 1025, "a"],
    "guided_grammar": ["start: start", "start: 'a'", "root ::= root", "", 'start: "a"'],
    "best_of": [1, 2, 5, 129],
}
"""Values of each field that are in its range, or near its ends."""

OWN: Mapping[str, list[Any]] = {
    "tenant": ["hostile", "", SURROGATE, "\n", "x" * 10_000],
    "cache_salt": ["", "salt", SURROGATE, "x" * 10_000],
    "request_id": ["same", "same", "same[1]", "request 0", "", "a\nb", SURROGATE, "x" * 300],
    "priority": [0, -(10**18), 10**18, 10**400],
    "ttft_slo_s": [1e-300, 1e-9, 5.0, 1e300, 10**400],
    "tpot_slo_s": [1e-300, 1e-9, 0.05, 1e300, 10**400],
    "timeout_s": [1e-9, 1e-3, 0.05, 1e300, 10**400],
}

CONTRADICTORY: list[dict[str, Any]] = [
    {"n": 3, "best_of": 2},
    {"min_tokens": 9, "max_new_tokens": 3},
    {"min_tokens": 3, "max_new_tokens": 3, "allowed_token_ids": [1], "stop_token_ids": [1]},
    {"allowed_token_ids": [1], "bad_words": [[1]]},
    {"allowed_token_ids": [2], "logit_bias": {2: -100.0}, "temperature": 1e-30},
    {"max_new_tokens": 0, "n": 4, "logprobs": 3},
    {"max_new_tokens": 0, "best_of": 4},
    {"max_new_tokens": 0, "echo": True, "prompt_logprobs": 20},
    {"echo": True, "truncate_prompt_tokens": 1, "logprobs": 2},
    {"temperature": 0.0, "top_p": 1e-300, "min_p": 1.0, "n": 4},
    {"n": 4, "best_of": 5, "temperature": 1.0, "request_id": "same", "max_new_tokens": 4},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 0.01},
    {"guided_regex": "a", "guided_choice": ["b"]},
    {"guided_regex": "a", "allowed_token_ids": [0]},
    {"guided_regex": "abc", "bad_words": ["a", "b"], "min_tokens": 5},
    {"guided_choice": ["a", "b"], "n": 3, "temperature": 1.0, "best_of": 4},
    {"no_such_field": 1},
    {"prompt_ids": [1]},
    {"adapter": "none of that name"},
]


class Hostile:
    """Makes requests to an executor whose model has 512 tokens and 128 positions.

    Args:
        own: further values of a request's own fields; `tenant` is "hostile" in most requests.
    """

    def __init__(self, executor: Executor, seed: int) -> None:
        self.executor = executor
        self.random = random.Random(seed)

    def fields(self) -> dict[str, Any]:
        """Return the keywords of a request."""
        drawn = self.random
        fields: dict[str, Any] = {"tenant": "hostile", "max_new_tokens": drawn.randint(1, 6)}
        kind = drawn.random()
        if kind < 0.15:  # valid
            return fields | {"temperature": drawn.choice([0.0, 1.0]), "seed": drawn.randrange(99)}
        if kind < 0.3:
            return fields | drawn.choice(CONTRADICTORY)
        near = {**SAMPLING, **OWN}
        for name in drawn.sample(list(near), drawn.choice([1, 1, 1, 2, 3, 6])):
            fields[name] = drawn.choice(near[name] if kind < 0.65 else WRONG)
        return fields

    def prompt(self) -> Any:
        drawn = self.random
        valid = [drawn.randrange(512) for _ in range(drawn.choice([1, 5, 17, 40]))]
        return drawn.choice(
            [valid] * 12
            + ["the quick brown fox", "a", "", SURROGATE, "x " * 3000, "\x00", "e" * 200_000]
            + [[0] * 127, [0] * 128, [0] * 50_000, [512], [-1], [HUGE], [1, 2.0], [True, 1]]
            + [drawn.choice(WRONG)] * 3
        )

    def adapter(self) -> Any:
        drawn = self.random
        return drawn.choice([None] * 6 + [*self.executor.adapters] * 4 + drawn.sample(WRONG, 2))

    def request(self) -> Request:
        """Return a request, or raise what making it raises."""
        if self.random.random() < 0.15:
            return self._made_directly()
        given = {"prompt": self.prompt(), "adapter": self.adapter()}
        return self.executor.request(**given | self.fields())

    def _made_directly(self) -> Request:
        """Return a request as a caller of `Request` makes it: every field is any value."""
        drawn = self.random
        params = SamplingParams(max_new_tokens=drawn.randint(1, 6))
        if drawn.random() < 0.5:
            name = drawn.choice(list(SAMPLING))
            value = drawn.choice([*SAMPLING[name], *WRONG])
            params = SamplingParams(**{"max_new_tokens": 3, name: value})
        fields: dict[str, Any] = {"prompt_ids": (1, 2, 3), "params": params, "tenant": "hostile"}
        if drawn.random() < 0.7:
            name = drawn.choice(["prompt_ids", "params", "adapter", "text", *OWN])
            fields[name] = drawn.choice([*OWN.get(name, ()), *WRONG])
        return Request(**fields)
