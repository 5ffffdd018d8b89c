"""The block pool: every block is accounted for, and equal prefixes share."""

import pytest

from eval.engine.block_pool import BlockPool, extend_hashes, root_hash
from eval.errors import EvalError

ROOT = root_hash("weights", "bfloat16")


def hashes_of(tokens, block_size=4, root=ROOT):
    hashes = []
    extend_hashes(hashes, tokens, block_size, root)
    return hashes


def fill(pool, tokens, block_size=4):
    blocks = pool.allocate(len(tokens) // block_size)
    for block, block_hash in zip(blocks, hashes_of(tokens, block_size), strict=True):
        pool.name(block, block_hash)
    return blocks


def test_only_full_blocks_have_names():
    assert len(hashes_of(range(11))) == 2


def test_a_block_s_name_depends_on_all_before_it_and_on_the_weights():
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes_of([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert hashes_of([1, 2, 3, 4]) != hashes_of([1, 2, 3, 4], root=root_hash("other weights", "bfloat16"))
    assert root_hash("ab", "c") != root_hash("a", "bc")


def test_released_prefix_is_found_again():
    pool = BlockPool(8)
    blocks = fill(pool, range(12))
    pool.release(blocks)
    assert pool.match(hashes_of([*range(8), 99, 99, 99, 99])) == blocks[:2]
    pool.share(blocks[:2])
    pool.check_integrity([blocks[:2]])


def test_shared_block_is_free_only_after_its_last_owner():
    pool = BlockPool(4)
    blocks = fill(pool, range(4))
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0
    pool.check_integrity()


def test_oldest_prefix_goes_first_and_tail_before_head():
    pool = BlockPool(4)
    old, new = fill(pool, range(8)), fill(pool, range(100, 108))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.evictions == 3
    assert pool.match(hashes_of(range(100, 108))) == [new[0]]


def test_equal_content_keeps_one_name():
    pool = BlockPool(4)
    first, second = fill(pool, range(4)), fill(pool, range(4))
    pool.release(second)
    pool.release(first)
    assert pool.match(hashes_of(range(4))) == first
    pool.check_integrity()


def test_forgetting_leaves_used_blocks_in_use():
    pool = BlockPool(4)
    kept, freed = fill(pool, range(4)), fill(pool, range(50, 54))
    pool.release(freed)
    pool.forget_all()
    assert pool.match(hashes_of(range(4))) == []
    pool.check_integrity([kept])


def test_asking_for_too_much_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(EvalError, match="4 free blocks and 5"):
        pool.allocate(5)
    pool.check_integrity()


def test_integrity_check_sees_a_leak():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(EvalError, match="not whole"):
        pool.check_integrity()
