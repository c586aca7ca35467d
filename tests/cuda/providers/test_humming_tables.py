"""Launch tables: both products of experts over common intervals with equal blocks."""

from __future__ import annotations

import itertools
import random

import pytest
from hal_backend_cuda.providers.humming.tables import BlockTable, distinct, joined

END = 1 << 30


def rows(*parts):
    """(end, block) pairs as a table."""
    low, out = 0, []
    for end, block in parts:
        out.append((low, end, {"block_shape": (block, 128, 64)}))
        low = end
    return out


def served(table, count):
    return next(tile for low, high, tile in table if low < count <= high)


def test_equal_tables_stay():
    table = rows((8, 8), (64, 16), (END, 64))
    assert joined(table, table) == (table, table)


def test_a_block_that_differs_is_taken_from_the_nearest_row_that_has_it():
    left, right = joined(rows((100, 8), (END, 16)), rows((50, 8), (END, 16)))
    assert served(left, 75) == served(right, 75) == {"block_shape": (8, 128, 64)}
    assert served(right, 101)["block_shape"][0] == 16


def test_the_second_decides_where_it_has_no_such_block():
    left, right = joined(rows((10, 24), (END, 16)), rows((END, 16)))
    assert served(left, 5)["block_shape"][0] == served(right, 5)["block_shape"][0] == 16


def test_no_common_block_is_an_error():
    with pytest.raises(ValueError, match="no block"):
        joined(rows((END, 8)), rows((END, 16)))


@pytest.mark.parametrize("seed", range(20))
def test_random_tables_are_joined_without_a_gap(seed):
    rng = random.Random(seed)

    def some():
        ends = sorted(rng.sample(range(1, 5000), rng.randint(1, 12)))
        return rows(*((end, rng.choice((8, 16, 24, 64))) for end in [*ends, END]))

    first, second = some(), some()
    try:
        left, right = joined(first, second)
    except ValueError:
        return
    assert left[0][0] == 0
    assert left[-1][1] == END
    assert [r[:2] for r in left] == [r[:2] for r in right]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(left))
    for count in (1, 7, 100, 4999, 5000, END):
        assert served(left, count)["block_shape"][0] == served(right, count)["block_shape"][0]


def test_places_hold_every_way_of_spreading_rows():
    table = BlockTable.of(rows((64, 8), (END, 16)))
    assert (table.block(1), table.block(64), table.block(65)) == (8, 8, 16)
    for count, experts in ((1, 4), (8, 128), (64, 4), (1000, 128)):
        block, places = table.block(count), table.capacity(count, experts)
        assert places % block == 0
        worst = [1] * (min(experts, count) - 1)
        worst.append(count - len(worst))
        assert sum(-(-n // block) * block for n in worst) <= places


def test_distinct_counts_tiles():
    assert distinct(rows((8, 8), (16, 8), (END, 16))) == 2
