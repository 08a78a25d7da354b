import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import FinetuneError
from pcg.runtime.data.example import Example
from pcg.runtime.data.order import Batches

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
