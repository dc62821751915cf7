"""Which physical pages a sequence holds, for one group (attention type). Host only.

A page holds `page_size` consecutive positions of one sequence. Logical page L of a sequence covers positions
[L * page_size, (L + 1) * page_size); the table says which physical page that is. A full-attention sequence holds
logical pages 0 to its last; a sliding one gives back the pages that have left its window:

    window 4, page 4, next position 9       positions  0 1 2 3 | 4 5 6 7 | 8
    a query at 9 sees 6 7 8 9               logical    0 freed | 1 held  | 2 held

Sequences that begin alike may hold the same pages (`prefix.py` says when). A page is *held* by one owner or more, *evictable*
(nobody's, but published under a key, and so worth keeping until pages run short) or *free*. What an owner still has to write
is its own: a page that is not full is copied for a second owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence as Seq


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def sliding_pool_pages(
    *, window: int, page_size: int, max_batch_size: int, max_prefill_tokens: int, max_seq_length: int, decode_steps: int = 1,
    prefix_cache: bool = False,
) -> int:
    """Pages, the reserved one included, with which a sliding group is never what a step waits for.

    A sequence that computes c tokens holds at most window - 1 + c consecutive positions, and those touch at most
    ceil(window / page_size) + 2 + floor(c / page_size) pages; the c of one step's chunks sum to max_prefill_tokens. A
    decoding sequence holds the places of `decode_steps` tokens at once. With `prefix_cache` there is room besides for the
    windows that max_batch_size sequences have left behind.
    """
    in_window = max_batch_size * (_ceil_div(window + decode_steps - 1, page_size) + 2)
    in_chunks = max_prefill_tokens // page_size
    whole_sequences = max_batch_size * _ceil_div(max_seq_length, page_size)
    left_behind = max_batch_size * (_ceil_div(window, page_size) + 1) if prefix_cache else 0
    return 1 + min(in_window + in_chunks, whole_sequences) + min(left_behind, whole_sequences)


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
        self._owners = [0] * n_pages                    # slots that hold a page, and copies that wait to read it
        self._published: dict[bytes, int] = {}          # key -> page
        self._keys: dict[int, set[bytes]] = {}          # page -> its keys, where it has any
        self._evictable: dict[int, None] = {}           # the one let go first comes first
        self._copies: dict[int, int] = {}               # destination -> source
        self._adopted: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be given out: nobody's, published or not."""
        return len(self.free_pages) + len(self._evictable)

    def pages_needed(self, slot: int, upto: int) -> int:
        """New pages it takes for `slot` to hold all its positions below `upto`."""
        return max(0, _ceil_div(upto, self.page_size) - self._first[slot] - len(self._pages[slot]))

    def reach(self, slot: int) -> int:
        """The largest `upto` that `extend` could serve for `slot` with the pages that are free now."""
        num_logical = self._first[slot] + len(self._pages[slot]) + self.num_free
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
        assert needed <= self.num_free, f"{self.attention_type}: {needed} pages needed, {self.num_free} free"
        pages = self._pages[slot]
        for _ in range(needed):
            page = self._take()
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
        self._adopted.discard(slot)

    def _free(self, slot: int, first: int, pages: list[int]) -> None:
        for logical in range(first, first + len(pages)):
            self._changes[slot, logical] = 0
        # The first to go is the first to be evicted: a prefix from its end, but of a window's past the most distant.
        for page in pages if self.window is not None and self._keys else reversed(pages):
            self._let_go(page)

    def _take(self) -> int:
        """A page for a new owner: a free one, else the one that has been evictable longest."""
        if self.free_pages:
            page = self.free_pages.pop()
        else:
            page = next(iter(self._evictable))
            del self._evictable[page]
            self._drop_keys(page)
        self._owners[page] = 1
        return page

    def _let_go(self, page: int) -> None:
        """One owner of `page` less."""
        self._owners[page] -= 1
        if self._owners[page]:
            return
        if page in self._copies:      # nobody wants it any more
            self._let_go(self._copies.pop(page))
        if page in self._keys:
            self._evictable[page] = None
        else:
            self.free_pages.append(page)

    # ---- pages that others may take over ------------------------------------------------------------------------

    def publish(self, slot: int, keys: Seq[bytes], *, start: int = 0) -> None:
        """Make the pages of `slot` findable that it still holds of logical pages `start` and later: keys[i] is the key of
        logical page i. What they hold up to there must have been computed. A key that has a page keeps it, as if used now."""
        first, pages = self._first[slot], self._pages[slot]
        for logical in range(max(start, first), min(len(keys), first + len(pages))):
            page = self._published.setdefault(keys[logical], pages[logical - first])
            if page == pages[logical - first]:
                self._keys.setdefault(page, set()).add(keys[logical])
            elif page in self._evictable:
                self._evictable[page] = self._evictable.pop(page)

    def page_of(self, key: bytes) -> int | None:
        """The page of `key`, where it has one."""
        return self._published.get(key)

    def leading(self, keys: Seq[bytes]) -> int:
        """How many of `keys`, from the first on, have a page."""
        return next((n for n, key in enumerate(keys) if key not in self._published), len(keys))

    def find(self, keys: Seq[bytes], cut: int) -> list[int] | None:
        """Pages of all positions below `cut` that a query at `cut` or later sees; None where one is missing."""
        assert len(keys) * self.page_size >= cut, f"{len(keys)} keys do not reach position {cut}"
        pages = []
        for key in keys[self._first_seen(cut) : _ceil_div(cut, self.page_size)]:
            if (page := self._published.get(key)) is None:
                return None
            pages.append(page)
        return pages

    def cost(self, keys: Seq[bytes], cut: int, upto: int) -> int:
        """Pages that `adopt` and then `extend` to `upto` take from those that are free; all of keys' must be there."""
        whole = (self.find(keys, cut) or [])[: cut // self.page_size - self._first_seen(cut)]
        shared = sum(self._owners[page] > 0 for page in whole)
        return _ceil_div(upto, self.page_size) - self._first_seen(cut) - shared

    def adopt(self, slot: int, keys: Seq[bytes], cut: int) -> int:
        """Let `slot`, which holds nothing, hold the pages that `find` gives; how many of them need not be written anew.

        `slot` will write on in a last page that is not full. Where somebody holds that, it gets one of its own, and a copy is
        due (`drain_copies`); else it takes the page itself, which keeps only the key of what is below `cut`.
        """
        assert not self._pages[slot], f"slot {slot} holds pages already"
        found, partial = self.find(keys, cut), cut % self.page_size > 0
        assert found is not None, f"{self.attention_type}: a page below position {cut} is missing"
        copied = partial and bool(found) and self._owners[found[-1]] > 0
        for page in found:
            if not self._owners[page]:
                del self._evictable[page]
            self._owners[page] += 1
        pages = list(found)
        if copied:
            source, pages[-1] = pages[-1], self._take()      # the copy has become an owner of its source
            self._copies[pages[-1]] = source
        elif partial and found:
            self._drop_keys(found[-1], but=keys[cut // self.page_size])
        self._first[slot], self._pages[slot] = self._first_seen(cut), pages
        for logical, page in self.held(slot):
            self._changes[slot, logical] = page
        self._adopted.add(slot)
        return len(found) - copied

    def install(self, keys: Seq[bytes]) -> list[int]:
        """Publish pages that no sequence computed: a page of its own for each key, for the caller to write before anything
        runs. The caller has seen that enough is free, and that no key has a page."""
        assert len(keys) <= self.num_free and not any(key in self._published for key in keys)
        pages = [self._take() for _ in keys]
        for key, page in zip(keys, pages):
            self._published[key], self._keys[page] = page, {key}
            self._let_go(page)
        return pages

    def exclusive(self, slot: int) -> list[int]:
        """Pages that only `slot` holds, for one whose numbers broke: they can be scrubbed, and no page of it is findable now."""
        for page in self._pages[slot]:
            self._drop_keys(page)
        return [page for page in self._pages[slot] if self._owners[page] == 1]

    def unpublish(self, keys: Iterable[bytes]) -> None:
        """Take keys back, where they have a page."""
        for key in keys:
            if (page := self._published.pop(key, None)) is not None:
                self._keys[page].discard(key)
                self._settle(page)

    def forget(self) -> None:
        """Take all keys back: nothing can be found any more."""
        self.unpublish(list(self._published))

    def _drop_keys(self, page: int, *, but: bytes | None = None) -> None:
        for key in self._keys.get(page, set()) - {but}:
            del self._published[key]
            self._keys[page].discard(key)
        self._settle(page)

    def _settle(self, page: int) -> None:
        """A page without a key is not kept for it."""
        if not self._keys.get(page, True):
            del self._keys[page]
            if page in self._evictable:
                del self._evictable[page]
                self.free_pages.append(page)

    def _first_seen(self, position: int) -> int:
        """The first logical page that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

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

    @property
    def num_copies(self) -> int:
        """Copies that are due."""
        return len(self._copies)

    def drain_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pages to copy whole, after the changes were applied and before any step. No page is both, and
        a source is not given out before it was drained."""
        copies = [(source, destination) for destination, source in self._copies.items()]
        self._copies.clear()
        for source, _ in copies:
            self._let_go(source)
        return copies

    def drain_adopted(self) -> list[int]:
        """Slots that took over pages since the last drain and still hold them."""
        slots = sorted(self._adopted)
        self._adopted.clear()
        return slots

    def check(self) -> None:
        """Assert that every page but page 0 is either free, evictable or held, by as many owners as were counted; that keys and
        pages point at each other; and that owners of one page hold it at one logical place."""
        assert not self._pages[0], "slot 0 holds pages"
        owners = Counter(page for pages in self._pages for page in pages) + Counter(self._copies.values())
        assert sorted([*owners, *self.free_pages, *self._evictable]) == list(range(1, self.n_pages)), (
            f"{self.attention_type}: a page is lost, reserved or has two states: held {sorted(owners)}, "
            f"free {self.free_pages}, evictable {list(self._evictable)}"
        )
        assert self._owners == [owners[page] for page in range(self.n_pages)], f"{self.attention_type}: owners are miscounted"
        assert all(key in self._keys[page] for key, page in self._published.items()), "a key's page does not know it"
        assert sum(map(len, self._keys.values())) == len(self._published), "a page has a key that does not lead to it"
        assert all(self._keys.values()) and self._evictable.keys() <= self._keys.keys(), "a page is kept without a key"
        assert self._keys.keys().isdisjoint(self.free_pages), "a free page has a key"
        assert self._copies.keys().isdisjoint(self._copies.values()), "a copy waits for another"
        assert all(owners[page] == 1 for page in self._copies), "a page that waits for its copy is not one slot's"
        logical_of: dict[int, int] = {}
        for slot, pages in enumerate(self._pages):
            assert self._first[slot] + len(pages) <= self.columns, f"slot {slot} holds pages beyond the table"
            assert all(logical_of.setdefault(page, n) == n for n, page in self.held(slot)), "a page lies at two logical places"
