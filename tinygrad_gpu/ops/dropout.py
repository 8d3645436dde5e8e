"""Dropout (Srivastava et al., JMLR 15, 2014), scaled while training so that inference needs no change.

y = x m / (1 - p),  m = 1 where the element's random word is at least p 2^32, else 0;   dx = dy m / (1 - p)
The words are Philox's for (seed, draw): the mask depends on these and the element's index alone, so it can be made
again. A dropped element gives 0 even where it is infinite or NaN.
"""

import numbers

from .. import random
from ..autograd import Function
from ..device import array_module
from .common import blocks, check, check_float
from .elementwise import blockwise, masked


def check_probability(name, p):
    number = isinstance(p, numbers.Real) and not isinstance(p, bool)
    check(number, f"{name}: the probability must be a number, got {type(p).__name__}", TypeError)
    check(0 <= p <= 1, f"{name}: the probability must be in [0, 1], got {p}")


def kept(xp, block, p, drawn, axis=-1):
    """Which elements stay, each with probability 1 - p: four for each Philox counter in `block`, along a new axis."""
    seed, draw = drawn
    words = random.philox_block(xp, block, draw, seed)
    return xp.stack([w >= xp.uint64(round(p * 2**32)) for w in words], axis)


def scale(p):
    """What the elements that stay are multiplied with."""
    return 1 / (1 - float(p)) if p < 1 else 0.0


def fwd(x, mask, p):
    """y; with dy for x, dx."""
    return blockwise(lambda x, mask: masked(x * scale(p), mask), x, mask)


class Dropout(Function):
    def forward(ctx, x, p):
        check_float("dropout", x=x)
        xp, drawn = array_module(x), random.default_generator.next_draw()
        mask = xp.empty(x.size, bool)
        for b in blocks(xp, x.size):  # each starts at a multiple of four
            counters = xp.arange(b.start // 4, -(-b.stop // 4), dtype=xp.uint64)
            mask[b] = kept(xp, counters, p, drawn).ravel()[: b.stop - b.start]
        mask, ctx.p = mask.reshape(x.shape), p
        ctx.save_for_backward(mask)
        return fwd(x, mask, p)

    def backward(ctx, dy):
        return fwd(dy, *ctx.saved_arrays, ctx.p)
