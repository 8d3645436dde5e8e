"""The host build: the kernels of kernels_cu/ compiled as C++ and run on NumPy arrays, to test them with no GPU.

kernels_cu/host/ has what a source needs for that: CUDA's keywords and intrinsics in cuda_on_cpu.h, and a grid of blocks
of fibers in runtime.cpp, which can check every access. Builds are kept by the hash of all that goes into them.
"""

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
from numpy.lib.array_utils import byte_bounds

from .. import kernel


class KernelError(RuntimeError):
    """What the host build found wrong in a kernel: a race, an access outside an array, a barrier not reached …"""


class HostBuild:
    """Compiles, loads and runs kernels on NumPy arrays; kernel.launch finds it while it is in use."""

    def __init__(self, warp_size=32, sanitize=False, seed=0):
        if warp_size not in (32, 64):
            raise ValueError(f"host_kernels: warp_size must be 32 or 64, got {warp_size!r}")
        _compiler()
        self.warp_size, self.sanitize, self.seed = warp_size, sanitize, seed
        self.limits = kernel.Limits("cpu", warp_size, 4, 48 << 10)

    def function(self, key):
        return _load(key, self.warp_size)

    def __repr__(self):
        return f"HostBuild(warp_size={self.warp_size}, sanitize={self.sanitize})"


# ---- building


@functools.cache
def _compiler():
    """A C++ compiler, its name for the check of an index against its array, and its version."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            version = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
            return name, "array-bounds" if "clang" in version else "bounds-strict", version
    raise RuntimeError("host_kernels: needs a C++ compiler; install g++ (Debian and Ubuntu: apt install g++)")


@functools.cache
def _cache():
    """The folder of builds: ~/.cache/tinygrad_gpu, or where a home cannot be written, one in /tmp."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinygrad_gpu"
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    base = Path(tempfile.gettempdir()) / f"tinygrad_gpu_{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid == os.getuid():  # another user's folder could hold another user's code
        return base
    return Path(tempfile.mkdtemp(prefix="tinygrad_gpu_"))


def _compile(suffix, text, *options):
    """The file that the compiler makes of a C++ text, kept by all that goes into it; many processes may ask at once."""
    compiler, _, version = _compiler()
    # Fibers jump from stack to stack, which _FORTIFY_SOURCE (on by itself in some distributions) takes for an attack.
    # A loop that clang made a call of memset would not be seen.
    flags = ("-std=c++17", "-O1", "-gdwarf-4", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-builtin-memset")
    options = (*flags, *map(str, options))
    key = hashlib.sha256("\0".join((compiler, version, *options, text)).encode()).hexdigest()[:32]
    target = _cache() / (key + suffix)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            source, made = Path(folder) / "kernel.cpp", Path(folder) / target.name
            source.write_text(text)
            done = subprocess.run([compiler, source, *options, "-o", made], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"host_kernels: {compiler} failed:\n{done.stderr}")
            made.replace(target)
    return target


def build(source_name, name, defines, warp_size):
    """The path of the shared library of one kernel."""
    host = kernel.folder() / "host"
    runtime = _compile(".o", (host / "runtime.cpp").read_text(), "-O2", "-c")
    header = (host / "cuda_on_cpu.h").read_text()
    text, options = kernel.program(source_name, defines, warp_size)
    # -fsanitize=thread makes the code call a function before each access, the other check one for an index beyond an
    # array. The runtime has both; without default libraries the compiler does not bring its own.
    checks = (f"-fsanitize=thread,{_compiler()[1]}", "-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc")
    text = f'#line 1 "cuda_on_cpu.h"\n{header}{text}HOST_KERNEL({name})\n'
    return _compile(".so", text, *options, "-shared", "-Wl,-Bsymbolic", runtime, *checks)


# ---- running


class _Dim3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"

    def __eq__(self, other):
        return bytes(self) == bytes(other)


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("begin", "end", "states", "cells", "number")]


class _Report(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("finding", "region", "size", "writes", "other_writes")),
        *((name, _Dim3) for name in ("block", "thread", "other_block", "other_thread")),
        ("offset", ctypes.c_longlong),
        *((name, ctypes.c_size_t) for name in ("code", "other_code")),
        *((name, ctypes.c_ulonglong) for name in ("lanes", "arrived")),
    ]


_lock = threading.Lock()  # one kernel runs at a time, all on the same stacks
_stacks = None


@functools.cache
def _load(key, warp_size):
    source_name, name, defines = key
    parameters = kernel.signature(kernel.source(source_name), name, defines)
    path = build(source_name, name, defines, warp_size)
    library = ctypes.CDLL(str(path))
    library.host_stacks.restype = ctypes.c_void_p

    def run(what, values, arguments):
        global _stacks
        host = kernel._host
        memory = _Memory(parameters, arguments) if host.sanitize else None
        # Each value in memory of its own (np.array shares that of a structure), and a list of where they are.
        kept = [np.array(v.ctypes.data if isinstance(v, np.ndarray) else v).copy() for v in values]
        if memory:
            memory.move(kept)
        pointers = (ctypes.c_void_p * len(kept))(*(v.ctypes.data for v in kept))
        regions = memory.regions if memory else (_Region * 0)()
        report = _Report()
        with _lock:
            _stacks = _stacks or library.host_stacks()
            library.host_launch(
                ctypes.c_void_p(_stacks), getattr(library, f"host_{name}"), pointers,
                ctypes.byref(_Dim3(*what.grid)), ctypes.byref(_Dim3(*what.block)), ctypes.c_size_t(what.shared),
                host.warp_size, ctypes.c_uint(host.seed), int(host.sanitize), regions, len(regions),
                ctypes.byref(report),
            )  # fmt: skip
        host.seed += 1
        if report.finding:
            raise KernelError(f"{name}: {_message(report, memory, path)}")
        if memory:
            memory.give_back(name)

    return kernel.Function(name, parameters, run)


_PART, _INITIALISED, _WRITTEN = 1, 2, 4
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on
_GAP = 1 << 20


class _Memory:
    """Copies of the arrays of one launch, far from each other, so that an access beyond one lands in no other.

    Arrays that overlap are one region, and so are their copies. For each byte of `data` there is one of `states`: is it
    an element's, initialised, written. Both take room only where they are touched: a strided array may span more than
    there is.
    """

    def __init__(self, parameters, arguments):
        arrays = [a.array if isinstance(a, kernel.Strided) else a for a in arguments]
        used = [i for i, p in enumerate(parameters) if p.kind != "value" and arrays[i] is not None and arrays[i].size]
        self.members = []  # (parameter's number, parameter, array, region's number, address of its copy - its own)
        places, last, size = [], 0, _GAP
        for (low, high), i in sorted((byte_bounds(arrays[i]), i) for i in used):
            if low >= last:
                shift = size + low % 4096 - low
                places.append((low + shift, 0))
            last = max(last, high)
            places[-1] = places[-1][0], last + shift
            size = -(-(last + shift + _GAP) // 4096) * 4096
            self.members.append((i, parameters[i], arrays[i], len(places) - 1, shift))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self.data, self.states = (np.frombuffer(mmap.mmap(-1, size, flags), np.uint8) for _ in range(2))
        self.base, state = self.data.ctypes.data, self.states.ctypes.data
        regions = (_Region(self.base + b, self.base + e, state + b, 0, i) for i, (b, e) in enumerate(places))
        self.regions = (_Region * len(places))(*regions)
        for _, p, a, _, shift in self.members:
            given = p.updated or not p.written
            states = self._states(a, shift)
            states |= _PART | (_INITIALISED if given else 0)
            if given:
                self._copy(a, shift)[...] = a

    def _copy(self, a, shift):
        return np.ndarray(a.shape, a.dtype, self.data, a.ctypes.data + shift, a.strides)

    def _states(self, a, shift):
        """The states of an array's bytes, (*shape, itemsize)."""
        shape, strides = (*a.shape, a.itemsize), (*a.strides, 1)
        return np.ndarray(shape, np.uint8, self.states, a.ctypes.data + shift, strides)

    def move(self, values):
        """Make the pointers among a launch's values point to the copies."""
        for i, p, _, _, shift in self.members:
            pointer = values[i]["data"] if p.kind == "strided" else values[i]
            pointer[...] = int(pointer) + self.base + shift

    def give_back(self, name):
        """Copy the results to the arrays; KernelError for an element of an output that was not written."""
        for _, p, a, _, shift in self.members:
            if p.written and not (p.updated or p.scratch):
                missing = ~(self._states(a, shift) & _WRITTEN).all(axis=-1)
                if missing.any():
                    index = [int(i) for i in np.unravel_index(missing.argmax(), a.shape)]
                    raise KernelError(f"{name}: {p.name}{index} was never written")
        for _, p, a, _, shift in self.members:
            if p.scratch:
                done = (self._states(a, shift) & _WRITTEN).all(axis=-1)
                a[done] = self._copy(a, shift)[done]
            elif p.written:
                _writable(a)[...] = self._copy(a, shift)

    def describe(self, region, offset, size):
        """Words for `size` bytes at an offset from the beginning of a region."""
        address = self.regions[region].begin - self.base + offset
        found = []  # (distance, words)
        for _, p, a, where, shift in self.members:
            if where != region:
                continue
            low, high = (bound + shift for bound in byte_bounds(a))
            index = _index(a, address - low)
            array = f"{p.name} ({a.dtype}, shape {a.shape})"
            if address < low:
                found.append((low - address, f"{low - address} bytes before {array}"))
            elif address + size > high:
                found.append((address + size - high, f"{address + size - high} bytes past the end of {array}"))
            elif index is None:
                found.append((1, f"between the elements of {array}"))
            else:
                found.append((0, f"{p.name}{index}"))
        return min(found)[1]


def _writable(a):
    """The array's memory as it is, for views that NumPy lets nobody write, like those of broadcast_to."""
    low, high = byte_bounds(a)
    memory = (ctypes.c_char * (high - low)).from_address(low)
    return np.ndarray(a.shape, a.dtype, memory, a.ctypes.data - low, a.strides)


def _index(a, offset):
    """The index of the element that has the byte at an offset from the array's lowest, or None."""
    index = [0] * a.ndim
    for axis in sorted(range(a.ndim), key=lambda axis: -abs(a.strides[axis])):
        stride, n = a.strides[axis], a.shape[axis]
        if stride and n > 1:
            i = min(max(offset // abs(stride), 0), n - 1)
            offset -= i * abs(stride)
            index[axis] = i if stride > 0 else n - 1 - i
    return index if 0 <= offset < a.itemsize else None


# ---- what was found

_FINDINGS = (
    None, "outside", "misaligned", "uninitialised", "race", "barrier", "lanes", "absent lane", "array index",
)  # fmt: skip
_SHARED = {-1: "static shared memory", -2: "dynamic shared memory"}


def _line(path, code):
    """ " at layernorm.cu:12" for an address in a library, as far as the compiler gave it; for a line of an inlined
    function, also where that was called."""
    if not code or shutil.which("addr2line") is None:
        return ""
    command = ["addr2line", "-i", "-e", str(path), hex(code - 1)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
    places = [Path(line.split(" ")[0]).name for line in lines if ".cu" in line and "?" not in line]
    return " at " + ", called at ".join(places) if places else ""


def _message(report, memory, path):
    finding = _FINDINGS[report.finding]
    who = f"thread {report.thread} of block {report.block}"
    at, other_at = _line(path, report.code), _line(path, report.other_code)
    if finding == "barrier":
        fate = f"waits{other_at}" if report.other_code else "has returned"
        return f"{who} waits at a barrier{at} that thread {report.other_thread} does not reach: it {fate}"
    if finding == "lanes":
        missing = ", ".join(str(i) for i in range(64) if report.lanes & ~report.arrived & 1 << i)
        lacks = f"without lanes that its mask names: {missing}" if missing else "whose mask lacks its own lane"
        return f"{who} takes part in a shuffle, vote or warp barrier{at} {lacks}"
    if finding == "absent lane":
        return f"{who} is in a shuffle{at} that reads lane {report.offset}, which does not take part"
    if finding == "array index":
        return f"{who} uses the index {report.offset} beyond its array{at}"
    where = "an address near no array"
    if report.region >= 0:
        where = memory.describe(report.region, report.offset, report.size)
    elif report.region in _SHARED:
        where = f"byte {report.offset} of {_SHARED[report.region]}"
    did = f"{who} {'writes' if report.writes else 'reads'} {report.size} bytes{at}: {where}"
    if finding == "outside":
        return did + (", outside of it" if report.region in _SHARED else "")
    if finding == "misaligned":
        return f"{did}, an address that is no multiple of {report.size}"
    if finding == "uninitialised":
        return f"{did}, which nobody has written"
    alone = report.block == report.other_block and report.thread == report.other_thread  # with others, the last of them
    other = "another thread" if alone else f"thread {report.other_thread} of block {report.other_block}"
    return f"{did}, which {other} {'writes' if report.other_writes else 'reads'}{other_at} with no barrier between"


@contextlib.contextmanager
def host_kernels(warp_size: int = 32, sanitize: bool = False, seed: int = 0):
    """Within it, ops on NumPy arrays (float32, float16, bfloat16) run their kernels' own source, compiled for the CPU.

    For tests: it is slow. warp_size 32 is an NVIDIA GPU's (and AMD's RDNA), 64 that of AMD's CDNA. With sanitize=True
    each access is checked, and KernelError tells of an access outside an array, a race, a barrier that not every thread
    reaches, a shuffle that reads an absent lane, an output never written, a read of what nobody wrote. Blocks run in an
    order that `seed` shuffles. RuntimeError with no C++ compiler, ValueError for another width.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> with tg.testing.host_kernels(warp_size=64, sanitize=True):
    ...     F.softmax(tg.zeros(2, device="cpu")).tolist()
    [0.5, 0.5]
    """
    before = kernel._host
    kernel._host = HostBuild(warp_size, sanitize, seed)
    try:
        yield kernel._host
    finally:
        kernel._host = before


def _from_environment(setting):
    """TINYGRAD_GPU_KERNELS=host32, host64, or either with ,sanitize: a host build for the whole process."""
    name, _, option = setting.partition(",")
    if name not in ("host32", "host64") or option not in ("", "sanitize"):
        raise ValueError(f"TINYGRAD_GPU_KERNELS: must be off, host32, host64 or host32,sanitize, got {setting!r}")
    return HostBuild(int(name[4:]), option == "sanitize")


_setting = os.environ.get("TINYGRAD_GPU_KERNELS", "")
if _setting not in ("", "off"):
    kernel._host = _from_environment(_setting)
