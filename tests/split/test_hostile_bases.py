"""What a damaged base says is an error of pcg's at its client, that names what was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pcg import LoraConfig
from pcg.errors import PcgError, SplitError
from pcg.runtime.executor import Executor
from pcg.split.client.connect import connect
from pcg.split.messages import Message
from pcg.split.transport import Transport
from tests.support.split_base import EXAMPLES, KEY, Base, running_base


class Damaged(Transport):
    """Another transport, some of whose replies are damaged.

    Args:
        op: of the requests whose replies are.
        fields: put in place of a reply's; None leaves a field out.
        tensors: makes other tensors of a reply's.
    """

    def __init__(
        self,
        inner: Transport,
        op: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Any = None,
    ) -> None:
        self.where = inner.where
        self._inner, self._op, self._fields, self._tensors = inner, op, fields or {}, tensors

    def open(self) -> None:
        self._inner.open()

    def close(self) -> None:
        self._inner.close()

    def exchange(self, message: Message, timeout_s: float) -> Message:
        reply = self._inner.exchange(message, timeout_s)
        if message.op != self._op or reply.op == "error":
            return reply
        fields = {**reply.fields, **self._fields}
        fields = {name: value for name, value in fields.items() if value is not None}
        tensors = reply.tensors if self._tensors is None else self._tensors(reply.tensors)
        return replace(reply, fields=fields, tensors=tensors)


FACTS = {
    "no name": {"name": None},
    "no digest": {"digest": None},
    "no config": {"config": None},
    "a config of another kind": {"config": ["llama"]},
    "a config of no model": {"config": {}},
    "a config with words for sizes": {"config": {"model_type": "llama", "hidden_size": "many"}},
    "an unknown dtype": {"dtype": "int8"},
    "a device without a name": {"device": 3},
    "a file for a device": {"device": "./profile.json"},
    "rates of no kind": {"rates": {"memory_bytes_per_s": 1e9}},
    "rates that are words": {
        "rates": {"product_flops_per_s": {"f32": "fast"}, "memory_bytes_per_s": 1e9}
    },
    "rates of nothing": {"rates": {"product_flops_per_s": {"f32": 0.0}, "memory_bytes_per_s": 1e9}},
    "no largest message": {"most_bytes": 0},
    "no pieces": {"pieces": {}},
    "pieces without shapes": {"pieces": {"model.layers.0.self_attn.q_proj.weight": 7}},
    "pieces of three dims": {"pieces": {"model.layers.0.self_attn.q_proj.weight": [1, 2, 3]}},
    "nothing to fetch": {"fetched": {}},
    "tensors of no size": {"fetched": {"model.norm.weight": [-1]}},
    "flags that are numbers": {"graphs": 1},
    "files that are none": {"files": {"tokenizer.json": 3}},
    "absent names that are none": {"absent": "all"},
}


@pytest.mark.parametrize("fields", FACTS.values(), ids=FACTS)
def test_facts_that_are_none_are_refused(whole: Executor, fields: Mapping[str, Any]) -> None:
    with running_base(whole) as base, pytest.raises(PcgError):
        connect(Damaged(base.endpoint.transport(), "hello", fields), api_key=KEY, cut="linear")


REPLIES: dict[str, tuple[str, Any]] = {
    "no tensor": ("run", lambda given: ()),
    "one more": ("run", lambda given: (*given, given[0])),
    "another dtype": ("run", lambda given: [one.double() for one in given]),
    "fewer rows": ("run", lambda given: [one[1:] for one in given]),
    "more columns": ("run", lambda given: [torch.cat([one, one], -1) for one in given]),
    "a fetched tensor of another dtype": ("fetch", lambda given: [one.half() for one in given]),
    "no fetched tensor": ("fetch", lambda given: ()),
}


@pytest.mark.parametrize(
    ("damage", "cut"),
    [
        *((one, "linear") for one in REPLIES.values()),
        (REPLIES["one more"], "searched"),
        (REPLIES["another dtype"], "searched"),
    ],
    ids=[*REPLIES, "one more of a graph", "another dtype of a graph"],
)
def test_replies_that_do_not_fit_are_refused(
    whole: Executor, damage: tuple[str, Any], cut: str
) -> None:
    op, tensors = damage
    recipe = LoraConfig(r=2, target_modules=["q_proj"])

    def use(base: Base) -> None:
        transport = Damaged(base.endpoint.transport(), op, tensors=tensors)
        with connect(transport, None, {"x": recipe}, api_key=KEY, cut=cut, link="1,1") as split:
            split.finetune(EXAMPLES, "x", max_steps=1)

    with running_base(whole) as base, pytest.raises(SplitError, match=f"answers {op} with"):
        use(base)
