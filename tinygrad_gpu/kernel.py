"""The kernels of kernels_cu/: found, compiled and launched here, and nowhere else.

`launch(what, *arguments)` is the one seam. CuPy arrays go to CuPy, which compiles with NVRTC or hipRTC and keeps what
it compiled on disk; NumPy arrays go to the host build of the same source (testing/host.py) while one is in use.
"""

import functools
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import device, dtypes
from .tma import Tiled

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_TYPES = "// A launch's own types, the T of a kernel's signature and the like, follow here"
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)


@functools.cache
def folder() -> Path:
    """The folder of the kernel sources: inside the package in an installed wheel, beside it in a checkout or an
    editable install. FileNotFoundError where neither is there."""
    here = Path(__file__).resolve().parent
    for place in (here / "kernels_cu", here.parent / "kernels_cu"):
        if (place / "common.cuh").is_file():
            return place
    raise FileNotFoundError(f"kernel: kernels_cu is neither in {here} nor beside it; the installation is incomplete")


def source(name: str) -> str:
    """The text of a file of kernels_cu/ with what it includes by #include "…" put in its place, each file once.

    CuPy's cache of compiled kernels does not look into included files; with one text, a changed header is a changed
    kernel. #line directives keep the files' names and lines for compilers' messages. FileNotFoundError for a file that
    is not there.

    >>> from tinygrad_gpu import kernel
    >>> "warp_sum" in kernel.source("common.cuh")
    True
    """
    seen = set()

    def expand(path):
        if path in seen:
            return ""
        seen.add(path)
        if not path.is_file():
            raise FileNotFoundError(f"kernel: kernels_cu has no file {path.relative_to(folder())}")
        text = _ONCE.sub("", path.read_text())

        def included(match):
            line = text.count("\n", 0, match.start()) + 2
            inner = expand(path.parent / match[1])
            return f'{inner}\n#line {line} "{path.name}"' if inner else ""

        return f'#line 1 "{path.name}"\n' + _INCLUDE.sub(included, text).rstrip("\n")

    return expand(folder() / name) + "\n"


# What a kernel's parameters may be, and the dtype of each; T and the like become one of these through defines.
C_TYPES = {
    "float": dtypes.float32,
    "float16": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "double": dtypes.float64,
    "int": dtypes.int32,
    "long long": dtypes.int64,
    "unsigned": np.dtype(np.uint32),
    "unsigned long long": np.dtype(np.uint64),
    "bool": dtypes.bool_,
}
_C_NAMES = {dtype: name for name, dtype in C_TYPES.items()}
KERNEL_DTYPES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)  # float64 is the mathematics' alone


def _as_define(value):
    """What is put in for a name: C's type for a dtype, a number as it is, 1 or 0 for a bool."""
    if isinstance(value, np.dtype):
        return _C_NAMES[value]
    return int(value) if isinstance(value, bool) else value


class Launch:
    """One launch but for its arguments: a kernel's source and name, grid and block (up to three numbers each), bytes of
    dynamic shared memory, and what is #defined for it (numbers, or dtypes, which become C's types).

    A pure `config` function makes it, and should be cached: equal Launches compile once.
    """

    __slots__ = ("block", "defines", "grid", "key", "name", "shared", "source")

    def __init__(self, source, name, grid, block, shared=0, **defines):
        self.source, self.name, self.shared = source, name, shared
        self.grid, self.block = ((*sizes, *(1,) * (3 - len(sizes))) for sizes in (grid, block))
        x, y, z = self.grid
        if not (0 <= x < 2**31 and 0 <= y < 2**16 and 0 <= z < 2**16 and 1 <= math.prod(self.block) <= 1024):
            limits = "a grid of at most (2^31 - 1, 65535, 65535) blocks of 1 to 1024 threads"
            raise ValueError(f"{name}: a GPU takes {limits}, got grid {self.grid}, block {self.block}")
        self.defines = tuple((k, _as_define(v)) for k, v in defines.items())
        self.key = source, name, self.defines

    def __repr__(self):
        options = "".join(f", {k}={v}" for k, v in self.defines)
        shared = f", shared={self.shared}" if self.shared else ""
        return f"Launch({self.source}, {self.name}, grid={self.grid}, block={self.block}{shared}{options})"


class Limits(NamedTuple):
    """What a `config` may ask of the device of an array: its target ("sm_90", "gfx90a", "cpu"), the width of a warp,
    the number of multiprocessors, and the bytes of shared memory that a block may have."""

    target: str
    warp_size: int
    processors: int
    shared_memory: int

    @property
    def sm(self):
        """The number of an NVIDIA GPU's target, 90 of "sm_90" and "sm_90a"; 0 for others."""
        return int(self.target[3:].rstrip("af")) if self.target.startswith("sm_") else 0


# A GPU to plan for where none is at hand, in tests and in the table of compiled kernels.
H200 = Limits("sm_90", 32, 132, 227 << 10)


class Strided:
    """An array whose strides the kernel takes with it: the argument of a Strided<T> parameter.

    Up to five axes; of a matrix the last two are rows and columns, those before them count batches. A stride of 0
    repeats. `strides` in bytes may differ from the array's own, for other axes over the same elements.
    """

    __slots__ = ("array", "dtype", "packed")

    layout = np.dtype([("data", np.uint64), ("strides", np.int64, 5)])

    def __init__(self, array, strides=None):
        self.array, self.dtype = array, array.dtype
        size = array.dtype.itemsize
        strides = [s // size for s in (array.strides if strides is None else strides)]
        self.packed = np.array((device.address(array), [0] * (5 - len(strides)) + strides), self.layout)[()]


# What the parameters that are not pointers or values take.
_STRUCTURES = {"strided": Strided, "tiled": Tiled}
_WITH_ARRAY = tuple(_STRUCTURES.values())


class Parameter(NamedTuple):
    """A parameter of a kernel: its name, the dtype of what it is or points to (None for "tiled"), "pointer", "strided",
    "tiled" or "value", and whether the kernel writes what it points to, and if so, adds to or changes what is there
    (`updated`), or leaves some of it unwritten (`scratch`)."""

    name: str
    dtype: np.dtype | None
    kind: str
    written: bool
    updated: bool
    scratch: bool = False


_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:(?:__launch_bounds__|__cluster_dims__)\([^{;]*?\)\s+)*(\w+)\s*\(([^)]*)\)'
)
_PARAMETER = re.compile(r"(?:(UPDATED|SCRATCH)\s+)?(Strided<)?(const\s+)?([\w ]+?)(>)?\s*(\*)?\s*(\w+)")


def signature(text, name, defines):
    """The Parameters of the kernel `name` in the text of a source, its type names replaced by `defines`."""
    defines = dict(defines)
    for found, parameters in _KERNEL.findall(text):
        if found != name:
            continue
        result = []
        for parameter in parameters.split(","):
            match = _PARAMETER.fullmatch(parameter.strip())
            if match is None:
                raise ValueError(f"{name}: cannot read the parameter {parameter.strip()!r}")
            mark, strided, const, c_type, _, pointer, what = match.groups()
            if c_type == "__grid_constant__ Tiled":
                result.append(Parameter(what, None, "tiled", False, False))
                continue
            c_type = str(defines.get(c_type, c_type))
            if c_type not in C_TYPES:
                raise ValueError(f"{name}: {what} has the type {c_type}, which is none of {', '.join(C_TYPES)}")
            kind = "strided" if strided else "pointer" if pointer else "value"
            written = kind != "value" and not const
            result.append(Parameter(what, C_TYPES[c_type], kind, written, mark == "UPDATED", mark == "SCRATCH"))
        return tuple(result)
    raise ValueError(f'kernel: the source has no kernel extern "C" __global__ void {name}(...)')


# What stands for None.
_NULLS = {"pointer": np.uint64(0), "strided": np.zeros((), Strided.layout)[()]}


def _number(name, p):
    """What makes a Python number the parameter's type; TypeError or ValueError where it does not fit."""
    make, low, high = p.dtype.type, -math.inf, math.inf
    if p.dtype.kind == "b":
        kinds, words = (bool, np.bool_), "a bool"
    elif dtypes.is_float(p.dtype):
        kinds, words = (float, int, np.floating, np.integer), "a number"
    else:
        kinds, words, limits = (int, np.integer), "an int", np.iinfo(p.dtype)
        low, high = limits.min, limits.max

    def convert(value):
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name}: {p.name} must be {words}, got {type(value).__name__}")
        if value < low or value > high:
            raise ValueError(f"{name}: {p.name} must be in [{low}, {high}], got {value}")
        return make(value)

    return convert


def _array(name, p):
    """What makes an array, or None, what the parameter takes; TypeError or ValueError where it does not fit."""
    wanted = _STRUCTURES.get(p.kind)

    def convert(a):
        if a is None and p.kind in _NULLS:
            return _NULLS[p.kind]
        if not (isinstance(a, wanted) if wanted else device.is_array(a)):
            words = f"a kernel.{wanted.__name__}" if wanted else "an array or None"
            raise TypeError(f"{name}: {p.name} must be {words}, got {type(a).__name__}")
        if p.dtype is not None and a.dtype != p.dtype:
            raise TypeError(f"{name}: {p.name} must have dtype {p.dtype}, got {a.dtype}")
        if wanted:
            return a.packed
        if not a.flags.c_contiguous:
            raise ValueError(f"{name}: {p.name} must be contiguous, got strides {a.strides} for shape {a.shape}")
        return a

    return convert


class Function:
    """A compiled kernel: its parameters, and `run(launch, values)`, which starts it."""

    def __init__(self, name, parameters, run):
        self.name, self.parameters, self.run = name, parameters, run
        self._converters = [(_number if p.kind == "value" else _array)(name, p) for p in parameters]

    def convert(self, arguments):
        """The arguments as the kernel's parameters want them; TypeError or ValueError for those that do not fit."""
        if len(arguments) != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise TypeError(f"{self.name}: takes {len(self.parameters)} arguments ({names}), got {len(arguments)}")
        return [f(a) for f, a in zip(self._converters, arguments, strict=True)]


_host = None  # the host build in use (testing/host.py)
_enabled = os.environ.get("TINYGRAD_GPU_KERNELS", "") != "off"


def runs(x) -> bool:
    """Whether ops on arrays like x run on kernels: those on a GPU, and NumPy's while a host build is in use."""
    if x.dtype not in KERNEL_DTYPES:
        return False
    return _host is not None if isinstance(x, np.ndarray) else _enabled


def limits(x) -> Limits:
    """The Limits of the device of an array."""
    return _host.limits if isinstance(x, np.ndarray) else _gpu_limits(x.device.id)


@functools.cache
def _gpu_limits(number):
    cupy = device.cupy()
    found = cupy.cuda.runtime.getDeviceProperties(number)
    if cupy.cuda.runtime.is_hip:
        target = found["gcnArchName"].decode().partition(":")[0]
    else:
        target = f"sm_{found['major']}{found['minor']}"
    shared = found.get("sharedMemPerBlockOptin") or found["sharedMemPerBlock"]
    return Limits(target, found["warpSize"], found["multiProcessorCount"], shared)


def program(source_name, defines, warp_size):
    """What any compiler gets for a Launch's source and defines: the text and the options.

    Numbers are #defined by options; types, which as macros could meet the names in a compiler's own headers, are
    declared in the text, at the end of common.cuh.
    """
    types = "".join(f"using {k} = {v};" for k, v in defines if isinstance(v, str))
    text = source(source_name).replace(_TYPES, types + _TYPES, 1)
    numbers = (("WARP_SIZE", warp_size), *((k, v) for k, v in defines if not isinstance(v, str)))
    # wgmma and its like are in sm_90a alone; the first -arch counts, not the -arch=sm_90 that CuPy adds.
    arch = ("-arch=sm_90a",) if source_name.endswith("_sm90.cu") else ()
    return text, ("-std=c++17", *arch, *(f"-D{k}={v}" for k, v in numbers))


@functools.cache
def _on_gpu(key, number):
    """The Function of a Launch's key on the GPU `number`."""
    cupy = device.cupy()
    source_name, name, defines = key
    text, options = program(source_name, defines, _gpu_limits(number).warp_size)
    parameters = signature(text, name, defines)
    module = cupy.RawModule(code=text, options=options)
    function = module.get_function(name)
    granted = (48 << 10) - function.shared_size_bytes  # a block may have more, if that is asked for

    def run(what, values, _):
        nonlocal granted
        if what.shared > granted:
            function.max_dynamic_shared_size_bytes = granted = what.shared
        function(what.grid, what.block, values, shared_mem=what.shared)

    return Function(name, parameters, run)


def launch(what: Launch, *arguments) -> None:
    """Run a kernel on its arguments: outputs, inputs, dimensions, scalars, as its signature in the source has them.

    Arrays must be contiguous, or given as `Strided` or `Tiled` where the parameter is; None is a null pointer; Python
    numbers become the parameter's type. Runs on the arrays' own device, on CuPy's current stream; not at all where the
    grid is empty. TypeError and ValueError for arguments that do not fit, before anything runs.
    """
    first = here = None
    for a in arguments:
        if isinstance(a, _WITH_ARRAY):
            a = a.array
        elif not device.is_array(a):
            continue
        place = None if isinstance(a, np.ndarray) else a.device.id
        if first is None:
            first, here = a, place
        elif place != here:
            places = f"{device.of(first)} and {device.of(a)}"
            raise ValueError(f"{what.name}: all arrays must be on one device, got {places}")
    if first is None:
        raise TypeError(f"{what.name}: at least one argument must be an array")
    if here is None and _host is None:
        raise RuntimeError(f"{what.name}: NumPy arrays need `with tg.testing.host_kernels():`")
    function = _host.function(what.key) if here is None else _on_gpu(what.key, here)
    values = function.convert(arguments)
    if 0 in what.grid:
        return
    with device.current(first):
        function.run(what, values, arguments)
