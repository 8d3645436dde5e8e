"""What every op file uses: checks, wide arithmetic for narrow types, the gradient of a broadcast, the choice between
an op's mathematics and its kernels, and the launch that element-wise kernels share."""

import functools

from .. import kernel
from ..device import address, array_module, is_array
from ..dtypes import accumulator, is_float


def check(condition, message, error=ValueError):
    """Raise `error(message)` unless the condition holds. Messages read `op: what was expected, got what came`."""
    if not condition:
        raise error(message)


def check_float(name, **arrays):
    """TypeError unless the arrays (None passes) have a floating dtype, the same one."""
    dtype = None
    for what, a in arrays.items():  # messages are made where they are needed: a dtype's name takes 10 us
        if a is None:
            continue
        if not is_array(a):
            raise TypeError(f"{name}: {what} must be a Tensor, got {type(a).__name__}")
        if not is_float(a.dtype):
            raise TypeError(f"{name}: {what} must have a floating dtype, got {a.dtype}")
        dtype = dtype or a.dtype
        if a.dtype != dtype:
            raise TypeError(f"{name}: {what} must have dtype {dtype} like the others, got {a.dtype}")


def check_integer(name, what, a):
    """TypeError unless `a` is an array of int64 or int32."""
    check(is_array(a), f"{name}: {what} must be a Tensor, got {type(a).__name__}", TypeError)
    if a.dtype.kind != "i":
        raise TypeError(f"{name}: {what} must have an integer dtype, got {a.dtype}")


def check_axis(name, axis, ndim):
    """`axis` counted from 0; IndexError outside [-ndim, ndim), TypeError for what is no integer."""
    check(isinstance(axis, int) and not isinstance(axis, bool), f"{name}: axis must be an int, got {axis!r}", TypeError)
    check(-ndim <= axis < ndim, f"{name}: axis must be in [{-ndim}, {ndim}), got {axis}", IndexError)
    return axis % ndim


def check_axes(name, axis, ndim):
    """An axis, several or None (all of them) as a sorted tuple counted from 0; each may be named once."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(sorted(check_axis(name, a, ndim) for a in axes))
    check(len(set(axes)) == len(axes), f"{name}: each axis may be named once, got {axis}")
    return axes


def widen(a):
    """`a` in the dtype of its arithmetic: a float32 copy of a half array, others as they are."""
    return a.astype(accumulator(a.dtype), copy=False)


def narrow(a, dtype):
    """`a` as `dtype`: no copy where it has that dtype."""
    return a.astype(dtype, copy=False)


def unbroadcast(g, shape):
    """The gradient g of a broadcast result, summed back to the `shape` that was broadcast. A sum of half numbers is
    float32: whoever takes the gradient rounds it, and a half Parameter's is float32 too."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(shape) if n == 1 and g.shape[extra + i] != 1)
    if not axes:
        return g.reshape(shape)
    return array_module(g).sum(g, axis=axes, dtype=accumulator(g.dtype)).reshape(shape)


# Elementwise chains run block by block on the CPU, so that a block's temporaries stay in the cache: 2^15 float32
# numbers are 128 KiB. Measured on one AVX-512 core with 2 MiB of second-level cache, the backward of GELU's tanh form
# for 2^20 numbers: 7.2 ms in blocks of 2^12, 3.5 ms of 2^15, 3.6 ms of 2^17, 5.8 ms at once.
_BLOCK = 2**15


def blocks(xp, n, most=_BLOCK):
    """Slices that cover range(n): of at most `most` for NumPy, one for CuPy."""
    step = most if xp.__name__ == "numpy" else max(n, 1)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def pick(x, mathematics, kernels):
    """What computes an op on arrays like x: its kernels, or its mathematics where there are none to run."""
    return kernels if kernel.runs(x) else mathematics


def vector(width, *arrays):
    """How many elements a kernel may move at once: as many as fill 16 bytes of the widest array, if rows of `width` and
    all addresses are multiples of that, else 1. None passes."""
    arrays = [a for a in arrays if a is not None]
    n = 16 // max(a.itemsize for a in arrays)
    fits = width % n == 0 and not any(address(a) % (n * a.itemsize) for a in arrays)
    return n if fits else 1


@functools.cache
def flat(source, name, n, vec, **defines):
    """The Launch of an element-wise kernel over n elements: a thread for `vec` of them, the last for what is left."""
    threads = 256
    return kernel.Launch(source, name, (-(-n // (vec * threads)),), (threads,), VEC=vec, **defines)


def by_rows(width, itemsize, vec, warp_size, most):
    """How blocks go over rows of `width` columns, as the defines THREADS (of a row, `most` at most), ROWS (of a block)
    and ITEMS: the vectors of a row that a thread keeps in registers, 0 where a row is longer than all threads can keep.

    A thread keeps up to three vectors of 16 bytes, or eight single elements, on their way at once; blocks have 128
    threads for narrow rows."""
    fit = min(48 // (itemsize * vec), 8)
    vectors, threads = max(-(-width // vec), 1), warp_size
    while threads < most and threads * fit < vectors:
        threads *= 2
    items = -(-vectors // threads)
    return {"THREADS": threads, "ROWS": max(128 // threads, 1), "ITEMS": items if items <= fit else 0}
