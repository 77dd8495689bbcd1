"""Query slots: who may store window queries. The first running sequences hold them; a free one goes to the foremost without.

Pure Python, no jax. Source: arXiv 2603.08743, sec. 4.3.
"""

from collections import OrderedDict

from zipage_jax.request import Sequence


class QuerySlots:
    """Slots 1 … num_slots (0 is NULL_SLOT), and the running sequences that wait for one, in admission order.

    A holder sets `seq.slot_pages` pages aside: all holders could have theirs at once, or they might wait for each other.
    """

    def __init__(self, num_slots: int, num_pages: int):
        self._num_pages = num_pages
        self.free = list(range(num_slots, 0, -1))
        self.queue: OrderedDict[Sequence, None] = OrderedDict()
        self.num_set_aside = 0

    def fits(self, seq: Sequence) -> bool:
        """Whether there is a slot for `seq`, and its pages beside those of the holders."""
        return bool(self.free) and self.num_set_aside + seq.slot_pages <= self._num_pages

    def take(self, seq: Sequence) -> None:
        seq.query_slot = self.free.pop()
        self.num_set_aside += seq.slot_pages

    def set_aside(self, seq: Sequence, num_pages: int) -> None:
        """Change what a holder sets aside."""
        self.num_set_aside += num_pages - seq.slot_pages
        seq.slot_pages = num_pages

    def foremost(self) -> Sequence | None:
        """Take the foremost waiting sequence out of the queue and give it a slot, if one fits."""
        seq = next(iter(self.queue), None)
        if seq is None or not self.fits(seq):
            return None
        del self.queue[seq]
        self.take(seq)
        return seq

    def leave(self, seq: Sequence) -> None:
        """Take back the slot of a sequence that stops running, or its place in the queue."""
        self.queue.pop(seq, None)
        if seq.query_slot:
            self.free.append(seq.query_slot)
            self.num_set_aside -= seq.slot_pages
            seq.query_slot = 0
