"""Functions that make tensors. All but `randint` and `from_dlpack` take `dtype`, `device` and `requires_grad` as
`tg.Tensor` does. Errors: TypeError for a shape of anything but ints or a dtype that is not one of tg's, ValueError for
a negative length or another device, RuntimeError for a GPU where there is none."""

import math

import numpy as np

from . import device as devices
from . import dtypes, random
from .tensor import Tensor, _spread


def _make(name, shape, dtype, device, requires_grad, fill):
    """A tensor of the array that fill(xp, shape, dtype) makes on the device."""
    shape = _spread(name, shape)
    if min(shape, default=0) < 0:
        raise ValueError(f"{name}: lengths must not be negative, got {shape}")
    dtype = dtypes.as_dtype(dtypes.float32 if dtype is None else dtype, name)
    where = devices.default_device() if device is None else device
    with devices.on(where, name) as xp, np.errstate(all="ignore"):
        return Tensor._wrap(fill(xp, shape, dtype)).requires_grad_(requires_grad)


def zeros(*shape, dtype=None, device=None, requires_grad=False):
    """Zeros of the given shape (ints, or one sequence of them), float32 by default.

    >>> import tinygrad_gpu as tg
    >>> tg.zeros(2, 2)
    tensor([[0., 0.],
            [0., 0.]])
    """
    return _make("zeros", shape, dtype, device, requires_grad, lambda xp, s, d: xp.zeros(s, d))


def ones(*shape, dtype=None, device=None, requires_grad=False):
    """Ones of the given shape, float32 by default.

    >>> import tinygrad_gpu as tg
    >>> tg.ones(3)
    tensor([1., 1., 1.])
    """
    return _make("ones", shape, dtype, device, requires_grad, lambda xp, s, d: xp.ones(s, d))


def full(shape, fill_value, *, dtype=None, device=None, requires_grad=False):
    """A tensor of `shape` filled with a number; its dtype is the number's (float32, int64, bool) by default.

    >>> import tinygrad_gpu as tg
    >>> tg.full((2,), 7)
    tensor([7, 7])
    """
    _check_numbers("full", fill_value=fill_value)
    dtype = dtypes.promote(fill_value) if dtype is None else dtypes.as_dtype(dtype, "full")
    _check_fits("full", dtype, fill_value)
    return _make("full", (shape,), dtype, device, requires_grad, lambda xp, s, d: xp.full(s, fill_value, d))


def arange(start, stop=None, step=1, *, dtype=None, device=None, requires_grad=False):
    """start, start + step, … below stop; from 0 with one argument. int64 where all are ints, else float32.

    >>> import tinygrad_gpu as tg
    >>> tg.arange(1, 7, 2)
    tensor([1, 3, 5])
    """
    start, stop = (0, start) if stop is None else (start, stop)
    _check_numbers("arange", start=start, stop=stop, step=step)
    dtype = dtypes.promote(start, stop, step) if dtype is None else dtypes.as_dtype(dtype, "arange")
    if step == 0 or not all(map(math.isfinite, (start, stop, step))):
        raise ValueError(f"arange: needs finite numbers and a step other than 0, got {start}, {stop} and {step}")
    integers = all(isinstance(n, int) for n in (start, stop, step))
    count = len(range(start, stop, step)) if integers else max(math.ceil((stop - start) / step), 0)
    if count:
        _check_fits("arange", dtype, start, start + (count - 1) * step)

    def fill(xp, _, d):
        steps = xp.arange(count, dtype=np.float64 if isinstance(step + start, float) else np.int64)
        return (steps * step + start).astype(d)

    return _make("arange", (count,), dtype, device, requires_grad, fill)


def _check_numbers(name, **values):
    for what, n in values.items():
        if not isinstance(n, (bool, int, float)):
            raise TypeError(f"{name}: {what} must be a number, got {type(n).__name__}")


def _check_fits(name, dtype, *values):
    """ValueError for numbers outside the range of an integer dtype."""
    if dtype.kind == "i":
        bounds = np.iinfo(dtype)
        for n in values:
            if not bounds.min <= n <= bounds.max:
                raise ValueError(f"{name}: numbers must fit in {dtype}, got {n}")


def _draw(name, shape, dtype, device, requires_grad, sample):
    """A tensor of random floats: sample(xp, n, dtype, drawn) from `random`."""
    if dtype is not None and not dtypes.is_float(dtypes.as_dtype(dtype, name)):
        raise TypeError(f"{name}: dtype must be a floating one, got {dtype}")

    def fill(xp, s, d):
        return sample(xp, math.prod(s), d, random.default_generator.next_draw()).reshape(s)

    return _make(name, shape, dtype, device, requires_grad, fill)


def rand(*shape, dtype=None, device=None, requires_grad=False):
    """Uniform numbers in [0, 1), from the generator that `tg.manual_seed` seeds (Philox4x32-10).

    >>> import tinygrad_gpu as tg
    >>> 0 <= tg.rand(1).item() < 1
    True
    """
    return _draw("rand", shape, dtype, device, requires_grad, random.uniform)


def randn(*shape, dtype=None, device=None, requires_grad=False):
    """Standard normal numbers (Box and Muller), from the generator that `tg.manual_seed` seeds.

    >>> import tinygrad_gpu as tg
    >>> tg.randn(2, 3).shape
    (2, 3)
    """
    return _draw("randn", shape, dtype, device, requires_grad, random.normal)


def randint(low, high, shape, *, dtype=None, device=None):
    """Integers in [low, high) of the given shape, int64 by default; ValueError unless low < high, within the dtype.

    >>> import tinygrad_gpu as tg
    >>> tg.randint(0, 1, (3,))
    tensor([0, 0, 0])
    """
    for what, n in (("low", low), ("high", high)):
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"randint: {what} must be an int, got {n!r}")
    if not low < high:
        raise ValueError(f"randint: low must be below high, got {low} and {high}")
    dtype = dtypes.int64 if dtype is None else dtypes.as_dtype(dtype, "randint")
    _check_fits("randint", dtype, low, high - 1)

    def fill(xp, s, d):
        drawn = random.default_generator.next_draw()
        return random.integers(xp, math.prod(s), low, high, drawn).astype(d, copy=False).reshape(s)

    return _make("randint", (shape,), dtype, device, False, fill)


def _like(name, make, x, dtype, device, requires_grad):
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a Tensor, got {type(x).__name__}")
    dtype, device = x.dtype if dtype is None else dtype, x.device if device is None else device
    return make(*x.shape, dtype=dtype, device=device, requires_grad=requires_grad)


def zeros_like(x, *, dtype=None, device=None, requires_grad=False):
    """Zeros with the shape, dtype and device of x.

    >>> import tinygrad_gpu as tg
    >>> tg.zeros_like(tg.ones(2))
    tensor([0., 0.])
    """
    return _like("zeros_like", zeros, x, dtype, device, requires_grad)


def ones_like(x, *, dtype=None, device=None, requires_grad=False):
    """Ones with the shape, dtype and device of x.

    >>> import tinygrad_gpu as tg
    >>> tg.ones_like(tg.zeros(2))
    tensor([1., 1.])
    """
    return _like("ones_like", ones, x, dtype, device, requires_grad)


def from_dlpack(x):
    """A Tensor that shares the memory of an array of another library (torch, jax, CuPy …), through DLPack.

    TypeError for what has no __dlpack__, does not give its memory away, or has a dtype that is not one of tg's (on the
    CPU NumPy refuses bfloat16 too).

    >>> import numpy as np, tinygrad_gpu as tg
    >>> array = np.ones(2, np.float32)
    >>> shared = tg.from_dlpack(array)
    >>> array[0] = 7
    >>> shared.tolist()
    [7.0, 1.0]
    """
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"from_dlpack: expected an object with __dlpack__, got {type(x).__name__}")
    if isinstance(x, Tensor):
        return x.detach()  # which knows of changes in place
    kind, _ = x.__dlpack_device__()
    try:
        array = (np if int(kind) == 1 else devices.cupy()).from_dlpack(x)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"from_dlpack: {error}") from None
    dtypes.as_dtype(array.dtype, "from_dlpack")
    return Tensor._wrap(array)
