"""Bases that hold some layers each: a request goes to where its layer is."""

from contextlib import ExitStack

import pytest

from pcg.errors import SplitError
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.serve_base import held_layers
from pcg.split.client.connect import connect
from pcg.split.client.noise import Privacy
from tests.support import oracle
from tests.support.split_base import KEY, PROMPTS, running_base, running_layers, undivided


def test_bases_of_layers_are_named_together_and_hold_their_own():
    whole = undivided("llama3", 3)
    tokens = whole.generate(PROMPTS, max_new_tokens=4, temperature=0)
    with ExitStack() as stack:
        one, other = (stack.enter_context(running_layers("llama3", 3, h)) for h in ("0-1", "2"))
        with pytest.raises(SplitError, match=r"no base executor at .* holds model\.layers\.2"):
            one.connect(cut="linear")
        with pytest.raises(SplitError, match=r"name all that hold layers"):
            other.connect(cut="linear")

        def places():
            return [base.endpoint.transport() for base in (one, other)]

        split = stack.enter_context(connect(places(), api_key=KEY, cut="linear"))
        split.generate(PROMPTS, max_new_tokens=4, temperature=0)
        counts = [base.loop.counts.requests for base in (one, other)]
        assert split.caller.moved.calls > sum(counts) > 0
        assert min(counts) > 0
        second = stack.enter_context(running_base(whole))
        with pytest.raises(SplitError, match="is the one that noise is to hide from"):
            connect(places(), api_key=KEY, privacy=Privacy(places()))
        privacy = Privacy(second.endpoint.transport(), effects_api_key=KEY)
        with connect(places(), api_key=KEY, privacy=privacy) as hidden:
            found = hidden.generate(PROMPTS, max_new_tokens=4, temperature=0)
            assert [a.token_ids for a in found] == [b.token_ids for b in tokens]
        with pytest.raises(SplitError, match=r"name all that hold layers"):
            second.connect(privacy=Privacy(one.endpoint.transport()))
        held = [sum(x.nbytes for x in b.loop.base.multiplied.values()) for b in (one, other)]
        assert sum(held) == sum(tensor.nbytes for tensor in BaseExecutor(whole).multiplied.values())
        fetched = sum(tensor.nbytes for tensor in other.loop.base.fetched.values())
        assert other.loop.base.size_bytes < held[1] + fetched + 100  # constants of positions


def test_bases_of_other_weights_are_no_one_model(monkeypatch):
    with running_layers("llama3", 2, "0") as one:
        make = oracle.random_model

        def other_weights(config):
            model = make(config)
            model.model.layers[1].mlp.up_proj.weight.data[3, 5] *= 1 + 2**-20  # in either's files
            return model

        monkeypatch.setattr(oracle, "random_model", other_weights)
        with running_layers("llama3", 2, "1") as other:
            places = [one.endpoint.transport(), other.endpoint.transport()]
            with pytest.raises(SplitError, match="have other weights"):
                connect(places, api_key=KEY)


@pytest.mark.parametrize("text", ["", "3-1", "0-4", "-1", "a", "0-1-2"])
def test_layers_that_are_none_are_refused(text):
    assert held_layers("1-3", 4) == range(1, 4)
    with pytest.raises(SplitError, match="0-3 for all 4"):
        held_layers(text, 4)


def test_a_transport_that_there_is_not_is_refused_with_the_reason():
    with pytest.raises(SplitError, match="members of a process group are fixed"):
        connect("127.0.0.1:8300", api_key=KEY, transport="distributed")
