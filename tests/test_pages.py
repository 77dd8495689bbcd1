"""PagePool: ownership, prefix chains, revival and the order in which free pages go."""

import pytest

from zipage_jax.pages import NULL_PAGE, ROOT, PagePool, page_key

A, B, C = (page_key([n] * 4) for n in range(3))


def chain(pool: PagePool, *keys: bytes) -> list[int]:
    """Pages registered as a prefix made of `keys`."""
    pages, parent = pool.allocate(len(keys)), ROOT
    for page, key in zip(pages, keys, strict=True):
        parent = pool.register(page, parent, key)
    return pages


def matched(pool: PagePool, *keys: bytes) -> list[int]:
    return [page for page, _ in pool.match(keys)]


def test_all_pages_but_the_null_page_are_handed_out_once():
    pool = PagePool(6, 4)
    pages = pool.allocate(5)
    assert sorted(pages) == [1, 2, 3, 4, 5] and NULL_PAGE not in pages and pool.num_free == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.allocate(1)
    pool.release(pages)
    assert pool.num_free == pool.num_usable == 5 and pool.num_used == 0
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(pages[:1])


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1, 4)


def test_shared_pages_stay_until_their_last_holder_leaves():
    pool = PagePool(4, 4)
    pages = chain(pool, A, B)
    pool.retain(pages)
    assert pool.num_shared(pages) == 2
    pool.release(pages)
    assert pool.num_shared(pages) == 0 and pool.num_used == 2
    pool.release(pages)
    assert pool.num_used == 0


def test_a_match_needs_the_whole_chain():
    pool = PagePool(8, 4)
    pages = chain(pool, A, B, C)
    assert matched(pool, A, B, C) == pages
    assert matched(pool, A, B, A) == pages[:2]
    assert matched(pool, B, C) == [] and matched(pool, A, C) == pages[:1]


def test_equal_pages_after_different_parents_are_different():
    pool = PagePool(8, 4)
    first, second = chain(pool, A, C), chain(pool, B, C)
    assert matched(pool, A, C) == first and matched(pool, B, C) == second


def test_a_second_copy_of_a_page_is_not_registered_but_continues_the_chain():
    pool = PagePool(8, 4)
    first = chain(pool, A)
    copy, tail = pool.allocate(2)
    pool.register(tail, pool.register(copy, ROOT, A), B)
    assert matched(pool, A, B) == [*first, tail] and pool.num_registered == 2


def test_a_reused_page_never_stands_for_its_old_contents():
    pool = PagePool(3, 4)
    pages = chain(pool, A, B)
    pool.release(pages)
    (reused,) = pool.allocate(1)
    assert reused == pages[1], "the tail goes before the head"
    assert matched(pool, A, B) == pages[:1]
    # The head's page is taken as well and holds something else: its orphan must not be found below it.
    pool.release([reused])
    pool.allocate(2)
    assert matched(pool, A) == [] and pool.num_registered == 0


def test_a_child_of_a_replaced_parent_is_unreachable():
    pool = PagePool(4, 4)
    head, _ = pages = chain(pool, A, B)
    pool.forget(head)  # A compression writes into the head; the child stays registered.
    assert pool.register(head, ROOT, A) > 0, "the page may hold a prefix again"
    assert matched(pool, A, B) == pages[:1]


def test_free_pages_are_revived():
    pool = PagePool(4, 4)
    pages = chain(pool, A, B)
    pool.release(pages)
    assert pool.num_free == 3 and matched(pool, A, B) == pages
    pool.retain(pages)
    assert pool.num_free == 1 and pool.num_revived == 2 and pool.counts[pages[0]] == 1


def test_blank_pages_go_first_then_the_least_recently_used_and_heads_last():
    pool = PagePool(8, 4)
    old, recent = chain(pool, A, B), chain(pool, B, C)
    pool.release(recent)
    pool.release(old)
    pool.retain(recent)
    pool.release(recent)
    order = pool.allocate(7)
    assert set(order[:3]).isdisjoint({*old, *recent})
    assert order[3:] == [old[1], old[0], recent[1], recent[0]]


def test_only_a_sole_holder_may_rewrite_a_page():
    pool = PagePool(4, 4)
    pages = chain(pool, A)
    pool.retain(pages)
    with pytest.raises(AssertionError, match="2 holders"):
        pool.forget(pages[0])


def test_the_map_is_bounded_however_many_prefixes_pass():
    pool = PagePool(5, 4)
    for n in range(500):
        pool.release(chain(pool, page_key([n] * 4), A, B))
        assert pool.num_registered <= pool.num_usable
    pool.reset()
    assert pool.num_registered == 0 and pool.num_free == 4
