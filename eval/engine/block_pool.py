"""Fixed-size KV blocks: who uses them, what they hold, and which one goes next.

The one idea: a full block is named by the chained hash of every token up to its end, so equal prefixes share blocks. A
block is blank (holds nothing of value), in use (reference count above zero) or cached (named, used by nobody, evicted
oldest first). Every operation is O(1) per block. Torch-free: blocks are numbers.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from eval.errors import EvalError


def root_hash(*extra_keys: str) -> bytes:
    """What a chain starts from: whatever changes the KV of equal tokens (weights' digest, KV dtype)."""
    return hashlib.blake2b("\0".join(extra_keys).encode(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes) -> None:
    """Append to `hashes` the names of the full blocks of `token_ids` that it lacks."""
    for index in range(len(hashes), len(token_ids) // block_size):
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size])
        parent = hashes[-1] if hashes else root
        hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())


class BlockPool:
    """Invariant: every block is exactly one of blank, cached, in use; a hash names at most one block."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.evictions = 0
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of blocks, from the first hash on, that the pool still holds. Changes nothing."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_after(self, hits: Iterable[int]) -> int:
        """What `num_free` would be once `hits` are in use."""
        return self.num_free - sum(self._references[block] == 0 for block in hits)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on blocks that `match` returned or that somebody uses."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` unnamed blocks with one reference each: blank ones, then the least recently used cached ones."""
        if count > self.num_free:
            raise EvalError(f"the KV block pool has {self.num_free} free blocks and {count} were asked for")
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each. Tails go first, so that the part of a prefix most likely to be shared lives
        longest."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def name(self, block: int, block_hash: bytes) -> None:
        """Say what a full block holds. The first block of equal content keeps the name."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget_all(self) -> None:
        """Drop every name: what the blocks hold can no longer be trusted."""
        for block in list(self._block_of.values()):
            self._forget(block)
        self._blank.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None

    def check_integrity(self, owners: Iterable[Sequence[int]] = ()) -> None:
        """Raise EvalError unless blank + cached + used = total, with the references that `owners` (each running
        request's blocks) account for."""
        expected = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                expected[block] += 1
        free = self._blank + list(self._cached)
        problems = []
        if expected != self._references:
            problems.append("reference counts differ from the owners' blocks")
        if len(set(free)) != len(free):
            problems.append("a block is free twice")
        if any(self._references[block] for block in free):
            problems.append("a free block has references")
        if len(free) + sum(count > 0 for count in self._references) != self.num_blocks:
            problems.append("blank + cached + used is not the total")
        if any(self._hash_of[block] is None for block in self._cached):
            problems.append("a cached block has no name")
        if any(self._hash_of[block] is not None for block in self._blank):
            problems.append("a blank block has a name")
        if {block: h for h, block in self._block_of.items()} != {
            block: h for block, h in enumerate(self._hash_of) if h is not None
        }:
            problems.append("names and blocks disagree")
        if problems:
            raise EvalError("the KV block pool is not whole: " + "; ".join(problems))
