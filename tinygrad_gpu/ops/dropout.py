"""Dropout (Srivastava et al., JMLR 15, 2014), scaled while training so that inference needs no change.

y = x m / (1 - p),  m = 1 where the element's random word is at least p 2^32, else 0;   dx = dy m / (1 - p)
The words are Philox's for (seed, draw): the mask depends on these and the element's index alone, so it can be made
again. A dropped element gives 0 even where it is infinite or NaN.
"""

import functools
import numbers

from .. import kernel, random
from ..autograd import Function
from ..device import array_module
from .common import blocks, check, check_float, vector
from .copy import contiguous
from .elementwise import blockwise, masked


def check_probability(name, p):
    number = isinstance(p, numbers.Real) and not isinstance(p, bool)
    check(number, f"{name}: the probability must be a number, got {type(p).__name__}", TypeError)
    check(0 <= p <= 1, f"{name}: the probability must be in [0, 1], got {p}")


def threshold(p):
    """What an element's random word must reach for it to stay."""
    return round(p * 2**32)


def scale(p):
    """What the elements that stay are multiplied with."""
    return 1 / (1 - float(p)) if p < 1 else 0.0


def kept(xp, block, p, drawn, axis=-1):
    """Which elements stay, each with probability 1 - p: four for each Philox counter in `block`, along a new axis."""
    seed, draw = drawn
    words = random.philox_block(xp, block, draw, seed)
    return xp.stack([w >= xp.uint64(threshold(p)) for w in words], axis)


def mask_like(x, p, drawn):
    """Which elements of x stay."""
    xp = array_module(x)
    mask = xp.empty(x.size, bool)
    for b in blocks(xp, x.size):  # each starts at a multiple of four
        counters = xp.arange(b.start // 4, -(-b.stop // 4), dtype=xp.uint64)
        mask[b] = kept(xp, counters, p, drawn).ravel()[: b.stop - b.start]
    return mask.reshape(x.shape)


def fwd(x, mask, p):
    """y; with dy for x, dx."""
    return blockwise(lambda x, mask: masked(x * scale(p), mask), x, mask)


@functools.cache
def config(rows, cols, vec, dtype):
    """The kernel's Launch: a thread for `vec` elements of a row, four at least, since these share a Philox counter."""
    threads = rows * -(-cols // max(vec, 4))
    return kernel.Launch("dropout.cu", "dropout", (-(-threads // 256),), (256,), T=dtype, VEC=vec)


def rows_kernel(x, p, drawn, first=0, out=None):
    """Dropout of x (R, C), the rows from number `first` on of a larger array, to `out`, which may be x.

    A row's first element has a Philox counter of its own, the next after those of the row before: so attention numbers
    its weights, and so any rows of an array can be drawn without the others.
    """
    (x,), (rows, cols), (seed, draw) = contiguous(x), x.shape, drawn
    y = array_module(x).empty(x.shape, x.dtype) if out is None else out
    counter = first * -(-cols // 4)
    if cols % 4 == 0:  # no row leaves a counter half used: together they are one
        rows, cols = 1, rows * cols
    vec = vector(0, x, y) if rows == 1 else 1
    kernel.launch(config(rows, cols, vec, x.dtype), y, x, rows, cols, counter, draw, seed, threshold(p), scale(p))
    return y


def fwd_kernel(x, p, drawn):
    """y; with dy for x, dx: the mask is drawn in the kernel, each time anew."""
    return rows_kernel(x.reshape(1, x.size), p, drawn).reshape(x.shape)


class Dropout(Function):
    def forward(ctx, x, p):
        check_float("dropout", x=x)
        ctx.p, ctx.drawn = p, random.default_generator.next_draw()
        if kernel.runs(x):
            return fwd_kernel(x, p, ctx.drawn)
        mask = mask_like(x, p, ctx.drawn)
        ctx.save_for_backward(mask)
        return fwd(x, mask, p)

    def backward(ctx, dy):
        if not ctx.saved_arrays:
            return fwd_kernel(dy, ctx.p, ctx.drawn)
        return fwd(dy, *ctx.saved_arrays, ctx.p)
