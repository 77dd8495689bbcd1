"""Which pages of a sequence go into the prefix map, and which are found there. Pure Python, no jax.

A page is registered when it is full, its tokens are known and its sequence was never compressed: pages of a prompt with the
chunk that fills them (a step writes all K and V before anything attends to them, so even the rest of its batch may hit them),
generated pages in the step after the one that filled them. Source: arXiv 2603.08743, sec. 4.4.
"""

from zipage_jax.pages import PagePool, page_key
from zipage_jax.request import Sequence


class Prefixes:
    """The prefix map of `pool` in terms of sequences; does nothing unless `enabled`."""

    def __init__(self, pool: PagePool, enabled: bool):
        self._pool, self.enabled = pool, enabled

    def register(self, seq: Sequence) -> None:
        """Put the full pages of uncompressed `seq` whose tokens are known into the map."""
        if not self.enabled or seq.compressed:
            return
        full = min(seq.cache_len, len(seq.all_ids)) // self._pool.page_size
        if full > seq.num_registered:
            self._make_keys(seq, full)
            for i in range(seq.num_registered, full):
                seq.chain = self._pool.register(seq.page_ids[i], seq.chain, seq.keys[i])
            seq.num_registered = full

    def match(self, seq: Sequence, num_pages: int) -> list[int]:
        """At most `num_pages` pages that hold what `seq` begins with, from its first; `seq` does not hold them yet.

        None for a sequence that wants its prompt's log probabilities: they come from computing it.
        """
        found = []
        if self.enabled and seq.params.prompt_logprobs is None:
            self._make_keys(seq, num_pages)
            found = self._pool.match(seq.keys[:num_pages])
        seq.num_registered = len(found)
        seq.chain = found[-1][1] if found else 0
        return [page for page, _ in found]

    def _make_keys(self, seq: Sequence, num_pages: int) -> None:
        size = self._pool.page_size
        for i in range(len(seq.keys), num_pages):
            seq.keys.append(page_key(seq.all_ids[i * size : (i + 1) * size]))
