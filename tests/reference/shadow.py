"""A shadow of the device: what every entry of every page holds, and a toy model whose tokens depend on all that a row sees.

An entry is (ident, position). Its ident is a digest of its token, its position and everything visible to it in every layer, so
two entries are equal only if their whole histories are, evictions included, and a single wrong entry changes every later token.
`Shadow` executes plans on pages and returns tokens; `Mirror` is the same request computed alone, without pages, and `check`
compares them and holds the scheduler's books to the invariants. Imports nothing of the project: it reads attributes.
"""

from collections import Counter

VOCAB = 50


def digest(position: int, token: int, visible: tuple[tuple[int, ...], ...]) -> int:
    return hash((position, token, visible))


def next_token(ident: int, seed: int) -> int:
    """The token that the toy model draws after an entry."""
    return hash((ident, seed)) % VOCAB


def select(entries: list[tuple[int, int]], budget: int, window: int, layer: int) -> list[int]:
    """Indices kept by the toy policy: the window, and the best of the rest by a digest that differs by layer."""
    rest = range(len(entries) - window)
    ranked = sorted(rest, key=lambda i: hash((entries[i][0], layer)))
    return sorted([*ranked[: budget - window], *range(len(entries) - window, len(entries))])


class Mirror:
    """One request computed alone: its visible entries per layer, and when it compresses."""

    def __init__(self, num_prompt, *, page_size, window, num_layers, budget_pages, segment_pages, seed):
        self.page_size, self.window, self.num_layers, self.seed = page_size, window, num_layers, seed
        self.num_prompt, self.budget_pages, self.segment_pages = num_prompt, budget_pages, segment_pages
        self.clear()

    def clear(self):
        self.layers = [[] for _ in range(self.num_layers)]
        self.written = 0

    @property
    def compress_len(self) -> int:
        """Entries at which it compresses, from the specification: N_max pages, or the pages of a longer prompt."""
        size = self.page_size
        if self.written == len(self.layers[0]):
            held, rest = 0, self.num_prompt
        else:
            # After a compression: only what was not written when it happened counts.
            held, rest = (
                self.budget_pages,
                self.num_prompt - (self.written - len(self.layers[0]) + self.budget_pages * size),
            )
        pages = max(self.budget_pages + 1, held - (-max(0, rest) // size))
        if self.segment_pages:
            pages = min(pages, self.segment_pages)
        return pages * size

    def write(self, token: int) -> int:
        """Compress if that is due, then append a token; returns its ident."""
        if self.budget_pages is not None and len(self.layers[0]) == self.compress_len:
            for layer, entries in enumerate(self.layers):
                kept = select(entries, self.budget_pages * self.page_size, self.window, layer)
                self.layers[layer] = [entries[i] for i in kept]
        ident = digest(self.written, token, tuple(tuple(i for i, _ in entries) for entries in self.layers))
        for entries in self.layers:
            entries.append((ident, self.written))
        self.written += 1
        return ident

    def outputs(self, prompt: list[int], num: int, stop_ids: frozenset[int], min_tokens: int) -> list[int]:
        """What the request generates."""
        self.clear()
        ids = list(prompt)
        for token in prompt:
            ident = self.write(token)
        for i in range(num):
            token = next_token(ident, self.seed)
            ids.append(token)
            if i + 1 == num or (token in stop_ids and i + 1 >= min_tokens):
                break
            ident = self.write(token)
        return ids[len(prompt) :]


class Shadow:
    """Pages and query slots of all layers. `known` maps a sequence to the tokens drawn for it, committed or not."""

    def __init__(self, *, num_pages, num_slots, num_layers, page_size, window):
        self.num_layers, self.page_size, self.window = num_layers, page_size, window
        self.pages = [[[None] * page_size for _ in range(num_pages)] for _ in range(num_layers)]
        self.queries = [[None] * window for _ in range(num_slots + 1)]
        self.mirrors = {}
        self.drawn = {}
        self.touched = set()
        self.counts = Counter()

    def follow(self, seq, mirror: Mirror) -> None:
        """Check `seq` from now on."""
        self.mirrors[seq] = mirror
        self.drawn[seq] = list(seq.all_ids)

    def lose(self) -> None:
        """Everything on the device is gone."""
        for pages in self.pages:
            for page in pages:
                page[:] = [None] * self.page_size
        for seq, ids in self.drawn.items():
            del ids[len(seq.all_ids) :]

    def run(self, plan) -> list[int]:
        """Execute a plan; returns its tokens."""
        self._compress(plan.compress)
        tokens, writers, starts = [], {}, {}
        for chunk in plan.prefill:
            starts[chunk.seq] = chunk.start
            ident = self._prefill(chunk, writers)
            if chunk.samples:
                tokens.append(self._draw(chunk.seq, ident))
        self.check_writers(writers, starts)
        writers = {}
        for seq in plan.decode:
            tokens.append(self._draw(seq, self._decode(seq, writers)))
        for page, (seq, _) in writers.items():
            holders = [other for other in self.mirrors if page in other.page_ids or page in other.pending_ids]
            assert holders == [seq], f"I3: page {page} is written by a decode and has {len(holders)} holders"
        return tokens

    def check_writers(self, writers, starts):
        """I3: who else holds a page that is written got it as a hit within this batch, and does not write it."""
        for page, (seq, _) in writers.items():
            for other in self.mirrors:
                if other is seq or page not in other.page_ids:
                    continue
                self.counts["hits within a batch"] += 1
                end = (other.page_ids.index(page) + 1) * self.page_size
                assert other.cache_len == other.position + 1, "I3: a compressed sequence shares a page that is written"
                assert end <= starts.get(other, end), f"I3: page {page} has two writers"

    def _draw(self, seq, ident) -> int:
        token = next_token(ident, self.mirrors[seq].seed)
        self.drawn[seq].append(token)
        return token

    def table(self, seq, layer, length=None):
        size = self.page_size
        length = seq.cache_len if length is None else length
        pages, entries = self.pages[layer], []
        for page in seq.page_ids[: -(-length // size)]:
            entries += pages[page]
        return entries[:length]

    def _write(self, seq, entry, token, position, writers) -> int:
        mirror, size = self.mirrors[seq], self.page_size
        page, offset = seq.page_ids[entry // size], entry % size
        assert page != 0, "the null page is in a table"
        assert writers.setdefault(page, (seq, entry // size)) == (seq, entry // size), f"I3: two writers of page {page}"
        expected = mirror.write(token)
        assert position == mirror.written - 1, f"position {position}, expected {mirror.written - 1}"
        visible = []
        for layer in range(self.num_layers):
            seen = self.table(seq, layer, entry)
            assert seen == mirror.layers[layer][:-1], (
                f"I8/I9: {seq} layer {layer} sees {seen}, not {mirror.layers[layer]}"
            )
            visible.append(tuple(ident for ident, _ in seen))
        ident = digest(position, token, tuple(visible))
        assert ident == expected
        for layer in range(self.num_layers):
            self.pages[layer][page][offset] = (ident, position)
        row = offset - (size - self.window)
        if row >= 0 and seq.query_slot:
            self.queries[seq.query_slot][row] = ident
        return ident

    def _prefill(self, chunk, writers) -> int:
        seq, mirror = chunk.seq, self.mirrors[chunk.seq]
        assert chunk.length > 0 and seq.seat >= 0
        first = seq.cache_len - chunk.length
        if mirror.written != chunk.start:
            # Begins (again), after a prefix hit: the part before must be what the request would have computed itself.
            assert mirror.written == 0 or chunk.start == first, "a compressed request is prefilled again"
            mirror.clear()
            for token in seq.all_ids[: chunk.start]:
                mirror.write(token)
        ident = None
        for i in range(chunk.length):
            token = self.drawn[seq][chunk.start + i]
            assert token == seq.all_ids[chunk.start + i]
            ident = self._write(seq, first + i, token, chunk.start + i, writers)
        assert seq.position == chunk.start + chunk.length - 1
        assert chunk.samples == (chunk.start + chunk.length == len(seq.all_ids))
        return ident

    def _decode(self, seq, writers) -> int:
        assert seq.seat >= 0
        token = self.drawn[seq][seq.position]
        assert seq.position == len(self.drawn[seq]) - 1, "decode must write the newest token"
        return self._write(seq, seq.cache_len - 1, token, seq.position, writers)

    def _compress(self, jobs) -> None:
        assert len({job.layers for job in jobs}) <= 1, "all jobs of a plan have the same layers"
        read = Counter(page for job in jobs for page in set(job.source_page_ids))
        targets = Counter(page for job in jobs for page in job.target_page_ids)
        writes = []
        for job in jobs:
            seq, size = job.seq, self.page_size
            own = set(job.source_page_ids)
            assert len(job.target_page_ids) == job.budget_pages and 0 not in targets
            for page in job.target_page_ids:
                assert targets[page] == 1, f"page {page} is a target twice"
                assert read[page] == (page in own), f"page {page} is one job's target and another's source"
                holders = [s for s in self.mirrors if page in s.page_ids or page in s.pending_ids]
                assert holders == [seq], f"I3: target {page} has {len(holders)} holders"
            assert seq.query_slot > 0, "I5: no query slot"
            mirror = self.mirrors[seq]
            last = [ident for ident, _ in mirror.layers[0][-self.window :]]
            if job.layers[0] == 0:
                assert len(mirror.layers[0]) == len(job.source_page_ids) * size, "I5: not all pages are full"
                assert self.queries[seq.query_slot] == last, "I5: the window's queries are not those of the last tokens"
                history = 0 if mirror.written == len(mirror.layers[0]) else job.budget_pages * size
                assert job.history_len == history
                self.counts["compressions"] += 1
            for layer in range(*job.layers):
                entries = [entry for page in job.source_page_ids for entry in self.pages[layer][page]]
                assert entries == mirror.layers[layer], (
                    f"I8: {seq} compresses other entries than its own in layer {layer}"
                )
                for j, i in enumerate(select(entries, job.budget_pages * size, self.window, layer)):
                    writes.append((layer, job.target_page_ids[j // size], j % size, entries[i]))
        for layer, page, offset, entry in writes:
            self.pages[layer][page][offset] = entry


def check_books(scheduler, *, num_slots: int, max_num_seqs: int) -> None:
    """I1, I2, I4, I6 and the counters that admission trusts."""
    pool, running = scheduler.pool, scheduler.running()
    free = {*pool._blank, *pool._revivable}
    used = {page: count for page, count in enumerate(pool.counts) if count}
    assert len(free) == len(pool._blank) + len(pool._revivable), "I1: a page is free twice"
    assert len(free) + len(used) == pool.num_pages - 1 and free.isdisjoint(used), "I1: free and used pages"
    assert 0 not in free and 0 not in used, "I1: the null page"
    held: dict[int, int] = {}
    for seq in running:
        for page in {*seq.page_ids, *seq.pending_ids} if seq.pending_ids else seq.page_ids:
            held[page] = held.get(page, 0) + 1
    assert held == used, "I2: counts are not the holders"
    assert len(pool._key_of) == len(pool._node_of) <= pool.num_usable, "I12: the prefix map outgrew the pool"
    assert pool._revivable.keys() <= pool._key_of.keys()
    slots = [seq.query_slot for seq in running if seq.query_slot]
    assert len(set(slots)) == len(slots) <= num_slots and all(1 <= slot <= num_slots for slot in slots), "I4"
    assert sorted([*slots, *scheduler.slots.free]) == list(range(1, num_slots + 1)), "I4: a slot is lost"
    seats = [seq.seat for seq in running]
    assert sorted([*seats, *scheduler._seats]) == list(range(max_num_seqs)), "a seat is lost"
    for seq in [*scheduler.waiting, *scheduler.draining]:
        assert not seq.page_ids and not seq.query_slot and seq.seat == -1, f"I4: {seq} holds something"
    size = pool.page_size
    for seq in running:
        assert len(set(seq.page_ids)) == len(seq.page_ids)
        assert seq.cache_len <= len(seq.page_ids) * size
        if seq.budget_pages is not None:
            assert len(seq.page_ids) <= max(seq.budget_pages + 1, seq.compress_len // size), f"I6: {seq}"
    assert scheduler._reserved == sum(seq.reserve for seq in running) >= 0
    assert scheduler.slots.num_set_aside == sum(seq.slot_pages for seq in running if seq.query_slot) <= pool.num_usable
    assert scheduler.num_running == len(running)
