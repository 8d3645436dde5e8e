"""Tensors in files: the safetensors format, written atomically.

The format is 8 bytes that give the length of a JSON header, the header (name, dtype, shape, offsets) and the raw data
(https://huggingface.co/docs/safetensors); any library reads it, and reading it runs no code.
"""

import contextlib
import os
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from . import device as devices
from . import dtypes
from .tensor import Tensor

_DTYPES = {
    "F64": dtypes.float64,
    "F32": dtypes.float32,
    "F16": dtypes.float16,
    "BF16": dtypes.bfloat16,
    "I64": dtypes.int64,
    "I32": dtypes.int32,
    "BOOL": dtypes.bool_,
}


def save(path, state):
    """Write `state`, a dict of names to Tensors or arrays (any of tg's dtypes, any device), as a safetensors file.

    The file appears whole or not at all: it is written beside `path`, reaches the disk, and then takes that name, so
    that an interrupted save leaves the file that was there. TypeError for a name that is no string or a value that is
    no Tensor or array of tg's dtypes; FileNotFoundError where the directory is missing; OSError where writing fails.

    >>> import tempfile, tinygrad_gpu as tg
    >>> from tinygrad_gpu import io
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     io.save(f"{directory}/w.safetensors", {"w": tg.ones(2)})
    ...     io.load(f"{directory}/w.safetensors")
    {'w': tensor([1., 1.])}
    """
    path = Path(path)
    arrays = {name: _to_array(name, value) for name, value in state.items()}
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save: there is no directory {path.parent}")
    with _replacing(path) as temporary:
        try:
            safetensors.numpy.save_file(arrays, temporary)
        except safetensors.SafetensorError as error:
            raise OSError(f"save: {path} could not be written: {error}") from error


def load(path, *, device=None):
    """The dict of names to Tensors that a safetensors file holds, on `device` (by default `tg.default_device()`).

    FileNotFoundError for a missing file, ValueError for one that is not safetensors or has a dtype that tg lacks.

    >>> import tempfile, tinygrad_gpu as tg
    >>> from tinygrad_gpu import io
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     io.save(f"{directory}/w.safetensors", {"a.b": tg.zeros(1, dtype=tg.bfloat16)})
    ...     io.load(f"{directory}/w.safetensors", device="cpu")["a.b"].dtype.name
    'bfloat16'
    """
    path = Path(path)
    device = device or devices.default_device()
    devices.index(device, "load")
    if not path.is_file():
        raise FileNotFoundError(f"load: there is no file {path}")
    try:
        entries = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise ValueError(f"load: {path} is not a safetensors file: {error}") from error
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"load: {name!r} in {path} must be one of {', '.join(_DTYPES)}, got {entry['dtype']}")
    return {name: Tensor._wrap(devices.put(_from_entry(entry), device)) for name, entry in sorted(entries)}


def _to_array(name, value):
    """`value` as a NumPy array in C order."""
    if not isinstance(name, str):
        raise TypeError(f"save: names must be strings, got {name!r}")
    if name == "__metadata__":
        raise ValueError("save: the format keeps the name '__metadata__' to itself")
    value = devices.as_array(value)
    if not isinstance(value, Tensor) and not devices.is_array(value):
        raise TypeError(f"save: {name!r} must be a Tensor or an array, got {type(value).__name__}")
    dtypes.as_dtype(value.dtype, f"save: {name!r}")
    array = value.numpy() if isinstance(value, Tensor) else devices.put(value, "cpu")
    return np.asarray(array, order="C")


def _from_entry(entry):
    return np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])


@contextlib.contextmanager
def _replacing(path):
    """Gives the path of a temporary file that takes the place of `path` if the block succeeds, and goes if it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; safetensors lets nobody else read its files
        yield temporary
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
