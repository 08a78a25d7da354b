"""Groups of sequences: each is in one, and attention sees its rows and no others."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.memory.pool import PagePool, PageTable
from pcg.runtime.model.batch import Singles, decode_groups

CPU = torch.device("cpu")


def random_tables(random: st.DataObject) -> tuple[PagePool, list[PageTable]]:
    """Tables with pages, some in runs and some scattered, at equal distances and not."""
    pool, tables = PagePool(random.draw(st.integers(12, 90))), list[PageTable]()
    for expected, need, closes in random.draw(
        st.lists(st.tuples(st.sampled_from([0, 4, 6]), st.integers(1, 6), st.booleans()))
    ):
        if need <= pool.free:
            tables.append(pool.open("someone", expected))
            pool.extend(tables[-1], need)
        if closes and len(tables) > 1:
            pool.close(tables.pop(len(tables) // 2))
    return pool, tables


@given(st.data(), st.sampled_from([0, 9, 40]))
def test_each_sequence_sees_its_own_rows(random: st.DataObject, window: int) -> None:
    pool, tables = random_tables(random)
    lengths = [random.draw(st.integers(1, table.capacity)) for table in tables]
    rows = pool.size * PAGE_TOKENS
    places = [table.run_row for table in tables], [table.stop_row for table in tables]
    columns = (np.array(x, dtype=np.int64) for x in (range(len(tables)), *places, lengths))
    groups = decode_groups(Singles(*columns, tables), window, torch.float64, CPU)
    of_others = {
        id(table): {page for other in tables if other is not table for page in other.pages}
        for table in tables
    }
    assert sorted(i for group in groups for i in group.tokens.tolist()) == list(range(len(tables)))
    for group in groups:
        seen = [min(lengths[i], window or lengths[i]) for i in group.tokens.tolist()]
        assert group.longest == max(seen)
        assert group.longest * len(seen) <= 2 * sum(seen)
        assert (group.mask is None) == (len(set(seen)) == 1)
        for place, (i, count) in enumerate(zip(group.tokens.tolist(), seen, strict=True)):
            if group.rows is None:
                first = group.row + place * group.stride
                found = list(range(first, first + group.longest))
                assert found[-1] < rows
            else:
                found = group.rows[place].tolist()
            # What the mask hides is read, too: it is nobody else's.
            assert not {row // PAGE_TOKENS for row in found} & of_others[id(tables[i])]
            assert found[:count] == list(tables[i].rows(lengths[i] - count, lengths[i]))
            if group.mask is not None:
                mask = group.mask[place, 0, 0]
                assert mask.dtype is torch.float64
                assert (mask[:count] == 0).all()
                assert (mask[count:] == float("-inf")).all()
