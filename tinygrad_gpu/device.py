"""Where arrays live: device names, the array module of an array, moves between devices, range checks.

CuPy is imported here alone, and only when a GPU array is asked for or met.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import numpy as np


class CudaUnavailable(RuntimeError):
    """A GPU was asked for where CuPy finds none."""


@functools.cache
def is_available() -> bool:
    """Whether CuPy is installed and finds a working GPU (an NVIDIA one, or an AMD one through ROCm).

    >>> import tinygrad_gpu as tg
    >>> tg.cuda.is_available() == (tg.default_device() == "cuda")
    True
    """
    if importlib.util.find_spec("cupy") is None:
        return False
    _find_cache()
    import cupy

    return bool(cupy.cuda.is_available())


def _find_cache():
    """Where CuPy could not keep the kernels that it compiles, say in a home that cannot be written, give it another
    place; its import asks for it."""
    if "CUPY_CACHE_DIR" in os.environ:
        return
    try:
        place = Path.home() / ".cupy" / "kernel_cache"
        place.mkdir(parents=True, exist_ok=True)
        usable = os.access(place, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        usable = False
    if not usable:
        os.environ["CUPY_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"cupy_cache_{os.getuid()}")


@functools.cache
def cupy():
    """The module cupy; CudaUnavailable, with the reason, where it cannot be used."""
    if importlib.util.find_spec("cupy") is None:
        raise CudaUnavailable("cuda: CuPy is not installed; pip install 'tinygrad_gpu[cuda13]' (or cuda12, rocm)")
    if not is_available():
        raise CudaUnavailable("cuda: CuPy is installed but finds no working GPU")
    import cupy

    return cupy


def array_module(array):
    """numpy or cupy: the module whose functions take `array`."""
    return np if isinstance(array, (np.ndarray, np.generic)) else cupy()


def is_array(x) -> bool:
    """Whether x is a NumPy or CuPy array (asked without importing CuPy)."""
    return _is_array_type(type(x))


@functools.cache
def _is_array_type(kind):
    return issubclass(kind, np.ndarray) or kind.__module__.partition(".")[0] == "cupy"


def as_array(x):
    """NumPy's scalars, which its functions give in place of arrays with no axes, as such arrays; others as they are."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def of(array) -> str:
    """The device name of an array: "cpu" or "cuda:N"."""
    return "cpu" if isinstance(array, np.ndarray) else f"cuda:{array.device.id}"


_default = None


def default_device() -> str:
    """The device of new tensors: as set, else "cuda" where a GPU works, else "cpu".

    >>> import tinygrad_gpu as tg
    >>> tg.default_device() in ("cpu", "cuda")
    True
    """
    if _default is None:
        return "cuda" if is_available() else "cpu"
    return _default


def set_default_device(name: str | None) -> None:
    """Set the device of new tensors: "cpu", "cuda", "cuda:1"; None goes back to choosing by what works.

    ValueError for any other name, RuntimeError where that GPU is not there.

    >>> import tinygrad_gpu as tg
    >>> before = tg.default_device()
    >>> tg.set_default_device("cpu")
    >>> tg.zeros(2).device
    'cpu'
    >>> tg.set_default_device(before)
    """
    global _default
    if name is not None:
        index(name, "set_default_device")
    _default = name


def index(name: str, caller: str) -> int | None:
    """The GPU's number in a device name, None for the CPU; ValueError or RuntimeError where there is no such device."""
    kind, colon, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name == "cpu":
        return None
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f'{caller}: device must be "cpu", "cuda" or "cuda:N", got {name!r}')
    xp = cupy()
    if not colon:
        return xp.cuda.runtime.getDevice()
    count = xp.cuda.runtime.getDeviceCount()
    if int(number) >= count:
        raise ValueError(f"{caller}: device must be one of cuda:0 to cuda:{count - 1}, got {name!r}")
    return int(number)


@contextlib.contextmanager
def on(name: str, caller: str):
    """Make the device `name` current: gives the array module that creates arrays there."""
    number = index(name, caller)
    if number is None:
        yield np
    else:
        xp = cupy()
        with xp.cuda.Device(number):
            yield xp


_nowhere = contextlib.nullcontext()


def current(array):
    """A context in which the device of `array` is current (free for NumPy arrays)."""
    return _nowhere if isinstance(array, np.ndarray) else array.device


def put(array, name: str):
    """`array` on the device `name`: itself where it is there already, else a copy."""
    number = index(name, "to")
    if number is None:
        return array if isinstance(array, np.ndarray) else cupy().asnumpy(array)
    if not isinstance(array, np.ndarray) and array.device.id == number:
        return array
    xp = cupy()
    with xp.cuda.Device(number):
        return xp.asarray(array)


def may_share_memory(a, b) -> bool:
    """Whether the memory ranges of two arrays of one device overlap (never wrong where they share an element)."""
    if a is b:
        return True
    if isinstance(a, np.ndarray):
        return np.may_share_memory(a, b)
    return a.data.mem is b.data.mem and cupy().may_share_memory(a, b)


def is_writable(array) -> bool:
    """Whether an array can be changed in place: NumPy allows it, and no element lies in it several times."""
    repeats = any(n > 1 and s == 0 for n, s in zip(array.shape, array.strides, strict=True))
    return getattr(array.flags, "writeable", True) and not (array.size and repeats)


def address(array) -> int:
    """Where the first element of an array lies."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def same_elements(a, b) -> bool:
    """Whether two arrays of one device are the same view of the same memory."""
    return address(a) == address(b) and a.shape == b.shape and a.strides == b.strides


def _keep_freed_memory():
    """Have the C library keep the memory of freed arrays for the next ones, as CuPy's pool does on a GPU.

    glibc returns large blocks to the system at once, and every array then pays for its pages again: with this a
    training step of a small GPT on two cores took 93 ms, without it 131. A user's own MALLOC_ settings win.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        mallopt(m_mmap_threshold, 1 << 30) or mallopt(m_mmap_threshold, 1 << 25)  # the most that older ones take
        mallopt(m_trim_threshold, 1 << 30)


_keep_freed_memory()


# Range errors of indices that a GPU holds are found at the next synchronisation: (message, first bad position, value).
_pending = []
_MOST_PENDING = 256


def check_range(name: str, what: str, values, stop: int, ignore: int | None = None) -> None:
    """IndexError unless every element of the integer array `values` is in [0, stop) or equals `ignore`.

    At once on the CPU; on a GPU at the next `synchronized()`, so that no step has to wait for its check, but at once
    where no value can be right: what would be taken is not there.
    """
    if values.size == 0:
        return
    bad = (values < 0) | (values >= stop)
    if ignore is not None:
        bad &= values != ignore
    message = f"{name}: {what} must be in [0, {stop})" + (f" or {ignore}" if ignore is not None else "")
    shape = values.shape
    if isinstance(values, np.ndarray):
        if bad.any():
            first = int(bad.argmax())
            raise IndexError(_range_message(message, shape, first, values.flat[first]))
        return
    first = bad.argmax()
    _pending.append((message, shape, bad.any(), first, values.ravel()[first]))
    if len(_pending) >= _MOST_PENDING or (stop <= 0 and ignore is None):
        synchronized()


def _range_message(message, shape, first, value):
    position = tuple(int(i) for i in np.unravel_index(int(first), shape))
    return f"{message}, got {int(value)} at position {position}"


def synchronized() -> None:
    """Raise what the range checks since the last call found on a GPU; called wherever values reach the host."""
    if not _pending:
        return
    found, _pending[:] = list(_pending), []
    for message, shape, bad, first, value in found:
        if bool(bad):
            raise IndexError(_range_message(message, shape, first, value))
