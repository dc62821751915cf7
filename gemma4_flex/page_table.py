"""Which physical pages a sequence holds, for one group (attention type). Host only.

A page holds `page_size` consecutive positions of one sequence. Logical page L of a sequence covers positions
[L * page_size, (L + 1) * page_size); the table says which physical page that is. A full-attention sequence holds
logical pages 0 to its last; a sliding one gives back the pages that have left its window:

    window 4, page 4, next position 9       positions  0 1 2 3 | 4 5 6 7 | 8
    a query at 9 sees 6 7 8 9               logical    0 freed | 1 held  | 2 held
"""

from __future__ import annotations


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def sliding_pool_pages(
    *, window: int, page_size: int, max_batch_size: int, max_prefill_tokens: int, max_seq_length: int, decode_steps: int = 1
) -> int:
    """Pages, the reserved one included, with which a sliding group is never what a step waits for.

    A sequence that computes c tokens holds at most window - 1 + c consecutive positions, and those touch at most
    ceil(window / page_size) + 2 + floor(c / page_size) pages; the c of one step's chunks sum to max_prefill_tokens. A
    decoding sequence holds the places of `decode_steps` tokens at once.
    """
    in_window = max_batch_size * (_ceil_div(window + decode_steps - 1, page_size) + 2)
    in_chunks = max_prefill_tokens // page_size
    whole_sequences = max_batch_size * _ceil_div(max_seq_length, page_size)
    return 1 + min(in_window + in_chunks, whole_sequences)


class PageTable:
    """Allocator and page table of one group.

    attention_type: "sliding_attention" or "full_attention".
    n_pages: physical pages in the pool, the reserved page 0 included.
    page_size: positions a page holds.
    window: positions a query sees, itself included (`sliding_window` of the config); None sees all.
    num_slots: slots, the reserved slot 0 included.
    max_seq_length: positions a sequence may have.

    Page 0 and slot 0 belong to padding rows and are never handed out.
    """

    def __init__(
        self,
        attention_type: str,
        *,
        n_pages: int,
        page_size: int,
        window: int | None,
        num_slots: int,
        max_seq_length: int,
    ) -> None:
        self.attention_type = attention_type
        self.n_pages = n_pages
        self.page_size = page_size
        self.window = window
        self.num_slots = num_slots
        self.max_seq_length = max_seq_length
        self.columns = _ceil_div(max_seq_length, page_size)
        # Handed out from the end; results must not depend on the order, so a test may shuffle it.
        self.free_pages = list(range(n_pages - 1, 0, -1))
        # A slot holds the physical pages of logical pages first, first + 1, ...
        self._first = [0] * num_slots
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._changes: dict[tuple[int, int], int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_pages)

    def pages_needed(self, slot: int, upto: int) -> int:
        """New pages it takes for `slot` to hold all its positions below `upto`."""
        return max(0, _ceil_div(upto, self.page_size) - self._first[slot] - len(self._pages[slot]))

    def reach(self, slot: int) -> int:
        """The largest `upto` that `extend` could serve for `slot` with the pages that are free now."""
        num_logical = self._first[slot] + len(self._pages[slot]) + len(self.free_pages)
        return min(num_logical * self.page_size, self.max_seq_length)

    def least_pages(self, num_positions: int) -> int:
        """Fewest pages in which a sequence of that many positions can be computed, a token at a time if need be."""
        pages = _ceil_div(num_positions, self.page_size)
        if self.window is None:
            return pages
        return min(pages, _ceil_div(self.window - 1, self.page_size) + 1)

    def extend(self, slot: int, upto: int) -> None:
        """Allocate what `slot` lacks to hold its positions below `upto`; the caller has seen that enough is free."""
        assert 0 < slot < self.num_slots, f"slot {slot} cannot hold pages"
        assert upto <= self.max_seq_length, f"position {upto - 1} is beyond max_seq_length {self.max_seq_length}"
        needed = self.pages_needed(slot, upto)
        assert needed <= len(self.free_pages), f"{self.attention_type}: {needed} pages needed, {self.num_free} free"
        pages = self._pages[slot]
        for _ in range(needed):
            page = self.free_pages.pop()
            self._changes[slot, self._first[slot] + len(pages)] = page
            pages.append(page)

    def recycle(self, slot: int, next_position: int) -> None:
        """Free the pages of `slot` that no query at `next_position` or later can see; a full group has none.

        Position p is dead once next_position >= p + window. next_position lies within or just after what is held.
        """
        if self.window is None:
            return
        first = self._first[slot]
        num_dead = (next_position - self.window + 1) // self.page_size - first
        if num_dead <= 0:
            return
        pages = self._pages[slot]
        assert num_dead <= len(pages), f"slot {slot} does not hold the positions before {next_position}"
        self._free(slot, first, pages[:num_dead])
        self._first[slot] = first + num_dead
        del pages[:num_dead]

    def release(self, slot: int) -> None:
        """Free every page of `slot`."""
        self._free(slot, self._first[slot], self._pages[slot])
        self._first[slot] = 0
        self._pages[slot] = []

    def _free(self, slot: int, first: int, pages: list[int]) -> None:
        for logical in range(first, first + len(pages)):
            self._changes[slot, logical] = 0
        self.free_pages.extend(reversed(pages))

    def held(self, slot: int) -> list[tuple[int, int]]:
        """(logical, physical) pages of `slot`, in logical order."""
        return list(enumerate(self._pages[slot], self._first[slot]))

    def drain_changes(self) -> list[tuple[int, int, int]]:
        """(slot, logical, page) table entries written since the last drain, page 0 for a cleared one.

        An entry occurs at most once, with its last value, so the list can be scattered to the device in one go.
        Cleared entries come first, so that a page's new owner is written after its old one is gone.
        """
        cleared = [(slot, logical, 0) for (slot, logical), page in self._changes.items() if page == 0]
        written = [(slot, logical, page) for (slot, logical), page in self._changes.items() if page != 0]
        self._changes.clear()
        return cleared + written

    def check(self) -> None:
        """Assert that every page but page 0 is either free or held, by one owner."""
        assert not self._pages[0], "slot 0 holds pages"
        owned = [page for pages in self._pages for page in pages]
        assert sorted(owned + self.free_pages) == list(range(1, self.n_pages)), (
            f"{self.attention_type}: a page is lost, reserved or has two owners: held {owned}, free {self.free_pages}"
        )
        for slot, pages in enumerate(self._pages):
            assert self._first[slot] + len(pages) <= self.columns, f"slot {slot} holds pages beyond the table"
