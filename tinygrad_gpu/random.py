"""Counter-based random numbers: Philox4x32-10, the same on a CPU as on a GPU.

Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The key is the 64-bit
seed; the counter is (element // 4 as 64 bits, a 64-bit draw number that advances once a call), so that an element's
number depends on nothing but the seed, the call and its own index.
"""

import math

import numpy as np

from .dtypes import accumulator

_MASK = 0xFFFFFFFF


def philox(xp, seed, draw, n, start=0):
    """n words (uint32) of the draw numbered `draw` under `seed`, from element `start` on; xp is the array module."""
    first, skipped = divmod(start, 4)
    block = xp.arange(first, first + -(-(skipped + n) // 4), dtype=xp.uint64)
    words = xp.stack(philox_block(xp, block, draw, seed), axis=1)
    return words.ravel()[skipped : skipped + n].astype(xp.uint32)


def philox_block(xp, block, draw, seed):
    """The four words (32 bits each, in uint64 arrays) of each counter (block, draw); block is a uint64 array."""
    u64 = xp.uint64
    low, high = u64(_MASK), u64(32)
    c0, c1 = block & low, block >> high
    c2 = xp.full_like(block, draw & _MASK)
    c3 = xp.full_like(block, draw >> 32 & _MASK)
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(10):
        p0, p1 = c0 * u64(0xD2511F53), c2 * u64(0xCD9E8D57)
        c0, c1 = (p1 >> high) ^ c1 ^ u64(k0), p1 & low
        c2, c3 = (p0 >> high) ^ c3 ^ u64(k1), p0 & low
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3


class Generator:
    """A seed and the number of the next draw: all the state there is."""

    def __init__(self, seed=0):
        self.seed, self.draw = seed, 0

    def next_draw(self):
        """The (seed, draw) of one call; the next call gets the next."""
        self.draw += 1
        return self.seed, self.draw - 1

    def state_dict(self):
        return {"seed": self.seed, "draw": self.draw}

    def load_state_dict(self, state):
        self.seed, self.draw = int(state["seed"]), int(state["draw"])


default_generator = Generator()


def manual_seed(seed: int) -> Generator:
    """Set the seed (64 bits) of every random number that follows, on all devices; gives the generator.

    TypeError or ValueError for what is no integer in [0, 2**64).

    >>> import tinygrad_gpu as tg
    >>> _ = tg.manual_seed(1)
    >>> a = tg.rand(3).tolist()
    >>> _ = tg.manual_seed(1)
    >>> tg.rand(3).tolist() == a
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"manual_seed: seed must be an int, got {type(seed).__name__}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"manual_seed: seed must be in [0, 2**64), got {seed}")
    default_generator.seed, default_generator.draw = int(seed), 0
    return default_generator


_BITS = {"float16": 11, "bfloat16": 8, "float32": 24}  # of significand: any more could round up to 1


def uniform(xp, n, dtype, drawn):
    """n numbers in [0, 1): the high bits of one word each, as many as `dtype` holds; 53 of two words in float64."""
    if dtype == np.float64:
        words = philox(xp, *drawn, 2 * n).astype(xp.uint64)
        return ((words[0::2] << xp.uint64(32) | words[1::2]) >> xp.uint64(11)).astype(dtype) * 2.0**-53
    bits = _BITS[dtype.name]
    return ((philox(xp, *drawn, n) >> xp.uint32(32 - bits)).astype(xp.float32) * np.float32(2.0**-bits)).astype(dtype)


def normal(xp, n, dtype, drawn):
    """n standard normal numbers by Box and Muller's transform (1958), in pairs, from uniform ones in (0, 1], [0, 1)."""
    pairs = -(-n // 2)
    wide = accumulator(dtype)
    u = uniform(xp, 2 * pairs, wide, drawn)
    radius = xp.sqrt(-2 * xp.log(1 - u[0::2]))
    angle = wide.type(2 * math.pi) * u[1::2]
    return xp.stack([radius * xp.cos(angle), radius * xp.sin(angle)], axis=1).ravel()[:n].astype(dtype)


def integers(xp, n, low, high, drawn):
    """n int64 in [low, high): the high bits of a word times the range (Lemire, arXiv:1805.10941, without rejection: the
    bias is below range / 2^32 of a count), for ranges beyond 2^32 two words modulo the range."""
    words = philox(xp, *drawn, 2 * n).astype(xp.uint64)
    span = high - low
    if span <= 2**32:
        return ((words[0::2] * xp.uint64(span)) >> xp.uint64(32)).astype(xp.int64) + low
    drawn = words[0::2] << xp.uint64(32) | words[1::2]
    return (drawn % xp.uint64(span) if span < 2**64 else drawn).astype(xp.int64) + low  # modulo 2^64
