"""Dropout (Srivastava et al., JMLR 15, 2014), scaled while training so that inference needs no change.

y = x m / (1 - p),  m = 1 where the element's random word is at least p 2^32, else 0;   dx = dy m / (1 - p)
The words are Philox's for (seed, draw): the mask depends on these and the element's index alone, so it can be made again.
"""

from .. import random
from ..autograd import Function
from ..device import array_module
from .common import check, check_float, narrow


def check_probability(name, p):
    number = isinstance(p, (int, float)) and not isinstance(p, bool)
    check(number, f"{name}: the probability must be a number, got {type(p).__name__}", TypeError)
    check(0 <= p <= 1, f"{name}: the probability must be in [0, 1], got {p}")


def multiplier(xp, n, p, drawn, dtype, start=0):
    """m / (1 - p) for the n elements from number `start` on: 0 with probability p."""
    if p == 1:
        return xp.zeros(n, dtype)
    kept = random.philox(xp, *drawn, n, start) >= xp.uint32(min(round(p * 2**32), 2**32 - 1))
    return kept.astype(dtype) * dtype.type(1 / (1 - p))


class Dropout(Function):
    def forward(ctx, x, p):
        check_float("dropout", x=x)
        check_probability("dropout", p)
        xp = array_module(x)
        m = multiplier(xp, x.size, p, random.default_generator.next_draw(), x.dtype).reshape(x.shape)
        ctx.save_for_backward(m)
        return narrow(x * m, x.dtype)

    def backward(ctx, dy):
        (m,) = ctx.saved_arrays
        return dy * m
