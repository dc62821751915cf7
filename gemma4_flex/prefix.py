"""Who shares which pages: sequences that begin alike compute their common tokens once. Host only.

A page's K/V is decided by the weights and by every token up to the page's end. So its *key* is a digest of the key of the
page before it (a root for the first) and of its own tokens, and the root stands for the weight epoch and for who may look:
everybody (prefix cache), or the samples of one prompt (group).

    page 4, tokens  a b c d | e f g h | i j       keys   k0 = H(root, abcd), k1 = H(k0, efgh)
    cut 8: the first 8 tokens are there                  a full group needs the pages of k0 and k1, a sliding one of window 4
                                                         that of k1 alone
    cut 9, for samples of the prompt a ... j             besides, the page of H(k1, i), which is copied: both go on writing it
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from gemma4_flex.page_table import PageTable

if TYPE_CHECKING:
    from gemma4_flex.sequence import Sequence

NEVER = sys.maxsize      # a sequence that has nothing to publish


def page_key(parent: bytes, tokens: Iterable[int]) -> bytes:
    """The key of a page of `tokens` after the page of `parent`; a page that is not full has a key of its own for what it holds."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


def root_key(name: str, *numbers: int) -> bytes:
    """What the key of a first page starts from."""
    return page_key(name.encode(), numbers)


class Chain:
    """The keys of one sequence's pages, each computed once: tokens are added to a sequence, never changed."""

    def __init__(self, root: bytes, page_size: int) -> None:
        self.root = root
        self.page_size = page_size
        self._whole: list[bytes] = []

    def keys(self, tokens: Seq[int], cut: int) -> list[bytes]:
        """Keys of the pages that hold the first `cut` of `tokens`, the last of them perhaps not full."""
        size, whole = self.page_size, cut // self.page_size
        while (n := len(self._whole)) < whole:
            self._whole.append(page_key(self._whole[-1] if n else self.root, tokens[n * size : (n + 1) * size]))
        keys = self._whole[:whole]
        if cut % size:
            keys.append(page_key(keys[-1] if keys else self.root, tokens[whole * size : cut]))
        return keys


class Group:
    """The samples of one prompt: one of them computes it, the others take over its pages.

    number: unique among the groups of an engine.
    waiting: members that are queued, and so may want the pages.
    computing: the running member that will publish the prompt's pages when it has computed them.
    published: whether one of them ever has.
    keys: those that exist for this group's sake alone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting = 0
        self.computing: Sequence | None = None
        self.published = False
        self.keys: list[bytes] = []


class Match(NamedTuple):
    """Tokens that need not be computed: the first `cut`, in the pages of `keys`."""

    cut: int
    keys: list[bytes]


NOTHING = Match(0, [])


class Prefixes:
    """What sequences publish of their pages, and find of others'.

    tables: page table of each group, by attention type, all of one page size.
    prefix_cache: whether every whole page is published for any later sequence; else prompts are, for their groups.
    prefix_hit_tokens, group_hit_tokens: tokens that were taken over and not computed, from the cache and within groups.
    pages_shared: pages that were taken over and not allocated, by attention type.
    """

    def __init__(self, tables: Mapping[str, PageTable], *, prefix_cache: bool) -> None:
        self._tables = tuple(tables.values())
        self._page_size = self._tables[0].page_size
        self._epoch = 0
        self.prefix_cache = prefix_cache
        self.prefix_hit_tokens = self.group_hit_tokens = 0
        self.pages_shared = dict.fromkeys(tables, 0)

    # ---- a sequence's way through -------------------------------------------------------------------------------

    def queued(self, sequence: Sequence) -> None:
        """`sequence` waits to be admitted."""
        if sequence.group is not None:
            sequence.group.waiting += 1

    def withdrawn(self, sequence: Sequence) -> None:
        """`sequence` waits no longer."""
        group = sequence.group
        if group is not None:
            group.waiting -= 1
            if not group.waiting:
                self._drop(group)

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether another sample is about to publish what `sequence` would have to compute."""
        return sequence.group is not None and sequence.group.computing is not None

    def match(self, sequence: Sequence) -> Match:
        """The longest prefix of a waiting sequence that can be taken over, its last token excepted: that yields the next one."""
        if not self.prefix_cache and sequence.group is None:
            return NOTHING
        root = root_key("epoch", self._epoch) if self.prefix_cache else root_key("group", self._epoch, sequence.group.number)
        if sequence.chain is None or sequence.chain.root != root:
            sequence.chain = Chain(root, self._page_size)
        if sequence.must_compute_prompt:
            return NOTHING
        tokens, size = sequence.token_ids, self._page_size
        whole = sequence.chain.keys(tokens, (len(tokens) - 1) // size * size)
        for table in self._tables:
            if table.window is None:
                whole = whole[: table.leading(whole)]
        cuts: Iterable[int] = range(len(whole) * size, 0, -size)
        if sequence.group is not None and (prompt := len(sequence.prompt_ids) - 1) % size:
            cuts = sorted([*cuts, prompt], reverse=True)
        for cut in cuts:
            keys = sequence.chain.keys(tokens, cut) if cut % size else whole
            if all(table.find(keys, cut) is not None for table in self._tables):
                return Match(cut, keys)
        return NOTHING

    def admitted(self, sequence: Sequence, match: Match) -> None:
        """`sequence` has got its slot: it takes over what was found for it."""
        sequence.num_cached = sequence.num_computed = match.cut
        if match.cut:
            for table in self._tables:
                self.pages_shared[table.attention_type] += table.adopt(sequence.slot, match.keys, match.cut)
            if sequence.group is not None and sequence.group.published:
                self.group_hit_tokens += match.cut
            else:
                self.prefix_hit_tokens += match.cut
        sequence.num_published = match.cut // self._page_size
        group = sequence.group
        if group is not None and match.cut < len(sequence.prompt_ids) - 1:
            group.computing = sequence
        self._set_publication(sequence)
        self.withdrawn(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Make pages of `sequence` findable, now that num_computed has reached publish_at; to be called before any of them is
        recycled."""
        tokens, size, group = sequence.token_ids, self._page_size, sequence.group
        if self.prefix_cache:
            keys = sequence.chain.keys(tokens, sequence.num_computed // size * size)
            for table in self._tables:
                table.publish(sequence.slot, keys, start=sequence.num_published)
            sequence.num_published = len(keys)
        cut = len(sequence.prompt_ids) - 1
        if group is not None and group.computing is sequence and sequence.num_computed >= cut:
            group.computing = None
            if group.waiting:
                keys = sequence.chain.keys(tokens, cut)
                for table in self._tables:
                    table.publish(sequence.slot, keys)
                group.published = True
                group.keys = keys[cut // size :] if self.prefix_cache else keys      # whole pages are the cache's
        self._set_publication(sequence)

    def left(self, sequence: Sequence) -> None:
        """`sequence` has lost its slot."""
        sequence.publish_at = NEVER
        if sequence.group is not None and sequence.group.computing is sequence:
            sequence.group.computing = None

    def forget(self, epoch: int, unfinished: Iterable[Sequence]) -> None:
        """Nothing that was computed so far can be found any more, nor will what the unfinished sequences hold be."""
        self._epoch = epoch
        for table in self._tables:
            table.forget()
        for sequence in unfinished:
            self.left(sequence)
            if sequence.group is not None:
                sequence.group.keys = []

    def _set_publication(self, sequence: Sequence) -> None:
        at = (sequence.num_published + 1) * self._page_size if self.prefix_cache else NEVER
        if sequence.group is not None and sequence.group.computing is sequence:
            at = min(at, len(sequence.prompt_ids) - 1)
        sequence.publish_at = at

    def _drop(self, group: Group) -> None:
        for table in self._tables:
            table.unpublish(group.keys)
        group.keys = []
