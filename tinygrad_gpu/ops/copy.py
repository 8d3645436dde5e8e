"""Copies between memory layouts: y = x. On a GPU by a kernel, since CuPy's own copies of half types take several times
as long.

Shapes: x and y of one shape and dtype, with any strides.
"""

import functools
import math

import numpy as np

from .. import kernel
from ..device import address, array_module

_AXES = 5  # that the kernel takes


@functools.cache
def merged(shape, *strides):
    """The same elements in the same order over fewer axes: axes of one element left out, and neighbours made one where
    every array can step over both with one stride. Gives the shape and each array's strides."""
    axes = []  # (length, strides), from the first axis on
    for n, *steps in zip(shape, *strides, strict=True):
        if n == 1:
            continue
        if axes and all(last == step * n for last, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = axes[-1][0] * n, steps
        else:
            axes.append((n, steps))
    return tuple(n for n, _ in axes), *(tuple(steps[i] for _, steps in axes) for i in range(len(strides)))


@functools.cache
def config(shape, to, source, size, misplaced, dtype):
    """(Launch, sizes of the axes but the first, strides of y, of x) for merged axes, padded with axes of one element.

    A vector of 16 bytes moves along the last axis where that and all other strides allow it."""
    n, vec = math.prod(shape), 16 // size
    padding = (0,) * (_AXES - len(shape))
    fits = shape and shape[-1] % vec == 0 and to[-1] == source[-1] == size and not misplaced
    if not fits or any(s % 16 for s in (*to[:-1], *source[:-1])):
        vec = 1
    what = kernel.Launch("copy.cu", "copy", (-(-n // (vec * 256)),), (256,), T=dtype, VEC=vec)
    return what, (1, *(1 for _ in padding), *shape)[-_AXES + 1 :], padding + to, padding + source


def copied(x, out=None):
    """x copied to `out`, of its shape and dtype, or to a new C-contiguous array."""
    if out is None:
        out = array_module(x).empty(x.shape, x.dtype)
    shape, to, source = merged(x.shape, out.strides, x.strides)
    if not kernel.runs(x) or len(shape) > _AXES:
        out[...] = x
        return out
    misplaced = (address(x) | address(out)) % 16
    what, sizes, to, source = config(shape, to, source, x.itemsize, misplaced, x.dtype)
    kernel.launch(what, kernel.Strided(out, to), kernel.Strided(x, source), x.size, *sizes)
    return out


def contiguous(*arrays):
    """The arrays, each copied unless it is contiguous; None stays None."""
    return tuple(a if a is None or a.flags.c_contiguous else copied(a) for a in arrays)


def reshaped(x, shape):
    """x under another shape: a view where its strides allow it."""
    if not isinstance(x, np.ndarray) and not x.flags.c_contiguous and kernel.runs(x):
        view = x.view()
        try:
            view.shape = shape
            return view
        except (AttributeError, ValueError):
            x = copied(x)
    return x.reshape(shape)


def empty_like_strides(xp, shape, strides, dtype):
    """A new array whose axes lie in memory in the order of the given strides, the largest first."""
    order = sorted(range(len(shape)), key=lambda i: -abs(strides[i]))
    array = xp.empty([shape[i] for i in order], dtype)
    return array.transpose([order.index(i) for i in range(len(shape))])
