"""PagePool: sole owner of page ids. Free list, reference counts, and the prefix map that lets equal prefixes share full pages.

A page is free or held (by page tables and pending compression targets; the count says by how many). A full page of an
uncompressed request may be registered under (its parent, its tokens): the parent is the serial number of the page before it
in the prefix, a number that is never given twice, so that a match verifies the whole chain by parent and tokens and a reused
page can never stand for what it held before. Free pages stay registered, hence revivable, until they are needed: unregistered
ones go first, then the least recently released. The pool knows nothing of requests. No jax. Source: arXiv 2603.08743, sec. 4.4.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

ROOT = 0
"""Parent of the first page of every prefix."""
NULL_PAGE = 0
"""Page that is never handed out."""


class PagePool:
    """Pages 1 … num_pages − 1 of `page_size` entries each. Every operation is O(1) per page."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} leaves no page beside the null page; give at least 2")
        self.num_pages, self.page_size = num_pages, page_size
        self.num_revived = 0
        self._serial = ROOT
        self.reset()

    def reset(self) -> None:
        """Make all pages free and forget all prefixes."""
        self.counts = [0] * self.num_pages
        self._blank = list(range(self.num_pages - 1, NULL_PAGE, -1))
        self._revivable: OrderedDict[int, None] = OrderedDict()
        # page -> (parent, tokens) and back to (page, serial); both have at most num_pages members.
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._node_of: dict[tuple[int, bytes], tuple[int, int]] = {}

    @property
    def num_usable(self) -> int:
        """Pages that can be held at once: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._revivable)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_registered(self) -> int:
        """Pages in the prefix map, free ones included."""
        return len(self._key_of)

    def allocate(self, num: int) -> list[int]:
        """`num` pages with count 1 and unknown contents; prefixes are forgotten only if no blank page is left."""
        assert 0 <= num <= self.num_free, f"{num} pages wanted, {self.num_free} free"
        pages = []
        for _ in range(num):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._revivable.popitem(last=False)
                del self._node_of[self._key_of.pop(page)]
            self.counts[page] = 1
            pages.append(page)
        return pages

    def retain(self, pages: Seq[int]) -> None:
        """Hold these held or revivable pages once more."""
        for page in pages:
            if self.counts[page] == 0:
                del self._revivable[page]
                self.num_revived += 1
            self.counts[page] += 1

    def release(self, pages: Seq[int]) -> None:
        """Hold these pages (in table order) once less. Tails become the older free pages, so prefix heads are reused last."""
        for page in reversed(pages):
            count = self.counts[page] - 1
            assert count >= 0, f"page {page} was released more often than held"
            self.counts[page] = count
            if count == 0:
                if page in self._key_of:
                    self._revivable[page] = None
                else:
                    self._blank.append(page)

    def register(self, page: int, parent: int, tokens: bytes) -> int:
        """Serial number of the full page `tokens` after `parent`; `page` is what holds it unless an equal page is known."""
        key = (parent, tokens)
        known = self._node_of.get(key)
        if known is not None:
            return known[1]
        assert page not in self._key_of and self.counts[page] > 0
        self._serial += 1
        self._key_of[page] = key
        self._node_of[key] = (page, self._serial)
        return self._serial

    def forget(self, page: int) -> None:
        """Take a held page out of the prefix map, because its contents are about to change."""
        assert self.counts[page] == 1, f"page {page} has {self.counts[page]} holders; only a sole holder may rewrite it"
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._node_of[key]

    def match(self, keys: Seq[bytes]) -> list[tuple[int, int]]:
        """(page, serial) of the longest known chain that begins with `keys`; holds nothing."""
        found = []
        parent = ROOT
        for tokens in keys:
            node = self._node_of.get((parent, tokens))
            if node is None:
                break
            found.append(node)
            parent = node[1]
        return found

    def num_shared(self, pages: Seq[int]) -> int:
        """How many of `pages` have more than one holder (SPEC: P)."""
        counts = self.counts
        return sum(counts[page] > 1 for page in pages)


def page_key(token_ids: Seq[int]) -> bytes:
    """The tokens of one page, as the map stores and compares them."""
    return array("i", token_ids).tobytes()
