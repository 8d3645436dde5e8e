"""The host build: the kernels of kernels_cu/ compiled as C++ and run on NumPy arrays, to test them with no GPU.

kernels_cu/host/ has what a source needs for that: CUDA's keywords and intrinsics in cuda_on_cpu.h, and a grid of blocks
of fibers in runtime.cpp, which can check every access. Builds are kept by the hash of all that goes into them.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import kernel

_FLAGS = ("-O1", "-g", "-fPIC", "-w", "-fno-tree-loop-distribute-patterns")
# -fsanitize=thread makes the code call a function before each access, -fsanitize=bounds-strict one for an index beyond
# an array; both are the runtime's.
_CHECKS = ("-fsanitize=thread", "-fsanitize=bounds-strict", "--param", "tsan-instrument-func-entry-exit=0")


class KernelError(RuntimeError):
    """What the host build found wrong in a kernel: a race, an access outside an array, a barrier not reached …"""


class _Dim3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]

    def __str__(self):
        return f"({self.x}, {self.y}, {self.z})"


class _Region(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_size_t), ("end", ctypes.c_size_t), ("state", ctypes.c_void_p)]


class _Report(ctypes.Structure):
    _fields_ = [
        ("finding", ctypes.c_int),
        ("region", ctypes.c_int),
        ("offset", ctypes.c_longlong),
        ("size", ctypes.c_int),
        ("writes", ctypes.c_int),
        *((name, _Dim3) for name in ("block", "thread", "other_block", "other_thread")),
        ("code", ctypes.c_size_t),
        ("other_code", ctypes.c_size_t),
        ("other_writes", ctypes.c_int),
        ("lanes", ctypes.c_ulonglong),
        ("arrived", ctypes.c_ulonglong),
    ]


_FINDINGS = (
    None, "outside", "misaligned", "uninitialised", "race", "barrier", "lanes", "unread lane", "array index",
)  # fmt: skip
_PART, _INITIALISED = 1, 2


@functools.cache
def _compiler():
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError("host_kernels: needs a C++ compiler; install g++ (Debian and Ubuntu: apt install g++)")


@functools.cache
def _cache():
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinygrad_gpu"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    base = Path(tempfile.gettempdir()) / f"tinygrad_gpu_{os.getuid()}"
    base.mkdir(exist_ok=True)
    return base


def _build(suffix, text, make):
    """The file made from `text` by make(source, target), from the cache if it is there: many processes may ask."""
    name = hashlib.sha256("\0".join((_compiler(), *_FLAGS, *_CHECKS, suffix, text)).encode()).hexdigest()[:32]
    target = _cache() / (name + suffix)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            source, made = Path(folder) / "kernel.cpp", Path(folder) / ("kernel" + suffix)
            source.write_text(text)
            make(source, made)
            made.replace(target)
    return target


def _compile(*arguments):
    done = subprocess.run([_compiler(), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"host_kernels: {_compiler()} failed:\n{done.stderr}")


@functools.cache
def _runtime():
    text = (kernel.folder() / "host" / "runtime.cpp").read_text()
    return _build(".o", text, lambda source, made: _compile(*_FLAGS, "-std=c++17", "-O2", "-c", source, "-o", made))


def build(source_name, name, defines, warp_size):
    """The shared library of one kernel."""
    header = kernel.folder() / "host" / "cuda_on_cpu.h"
    text, options = kernel.program(source_name, defines, warp_size)
    text += f"HOST_KERNEL({name})\n"

    def make(source, made):
        compiled = made.with_suffix(".o")
        _compile(*_FLAGS, *_CHECKS, *options, "-include", header, "-c", source, "-o", compiled)
        _compile("-shared", "-Wl,-Bsymbolic", compiled, _runtime(), "-o", made)

    # What else decides the library goes into the text too, as comments: the cache is by content.
    also = "\n".join((_runtime().name, header.read_text(), *options))
    return _build(".so", text + "".join(f"// {line}\n" for line in also.splitlines()), make)


class _Memory:
    """The arrays of one launch as the runtime's regions: each byte's state, arrays that overlap in one region."""

    def __init__(self, parameters, arguments):
        spans = []
        for p, a in zip(parameters, arguments, strict=True):
            a = a.array if isinstance(a, kernel.Strided) else a
            if p.kind == "value" or a is None or not a.size:
                continue
            low, high = np.lib.array_utils.byte_bounds(a)
            spans.append((low, high, p, a))
        spans.sort(key=lambda s: s[:2])
        self.regions = []  # (begin, end, state, [(parameter, array)])
        for low, high, p, a in spans:
            if self.regions and low < self.regions[-1][1]:
                begin, end, _, members = self.regions.pop()
                self.regions.append((begin, max(end, high), None, [*members, (p, a)]))
            else:
                self.regions.append((low, high, None, [(p, a)]))
        self.regions = [(b, e, self._state(b, e, members), members) for b, e, _, members in self.regions]

    def _state(self, begin, end, members):
        state = np.zeros(end - begin, np.uint8)
        for p, a in members:
            given = p.updated or not p.written
            self._of(state, begin, a)[...] |= _PART | (_INITIALISED if given else 0)
        return state

    @staticmethod
    def _of(state, begin, a):
        """The states of an array's bytes, (*shape, itemsize)."""
        at = a.ctypes.data - begin
        return as_strided(state[at:], (*a.shape, a.itemsize), (*a.strides, 1), writeable=True)

    def pointers(self):
        return (_Region * len(self.regions))(*(_Region(b, e, state.ctypes.data) for b, e, state, _ in self.regions))

    def unwritten(self):
        """(parameter, index) of the first element of an output that was not written, or None."""
        for begin, _, state, members in self.regions:
            for p, a in members:
                if p.written and not p.updated:
                    missing = ~(self._of(state, begin, a) & _INITIALISED).all(axis=-1)
                    if missing.any():
                        return p, np.unravel_index(missing.argmax(), a.shape)
        return None

    def describe(self, number, offset, size):
        """Words for `size` bytes at an offset from the beginning of a region."""
        begin, _, _, members = self.regions[number]
        near = None
        for p, a in members:
            low, high = np.lib.array_utils.byte_bounds(a)
            address = begin + offset
            if low <= address and address + size <= high and all(s > 0 for s in a.strides):
                rest, index = address - a.ctypes.data, []
                for i in sorted(range(a.ndim), key=lambda i: -a.strides[i]):
                    index.append((i, rest // a.strides[i]))
                    rest %= a.strides[i]
                at = [int(n) for _, n in sorted(index)]
                if rest < a.itemsize and all(i < n for i, n in zip(at, a.shape, strict=True)):
                    return f"{p.name}{at}"
            distance = max(low - address, address + size - high, 0)
            if near is None or distance < near[0]:
                where = "between the elements of" if not distance else "before" if address < low else "past the end of"
                gap = low - address if address < low else address - high
                amount = f"{gap} bytes " if gap > 0 else ""
                near = distance, f"{amount}{where} {p.name} ({a.dtype}, shape {a.shape})"
        return near[1]


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


_lock = threading.Lock()  # a library runs one kernel at a time


@functools.cache
def _load(key, warp_size):
    source_name, name, defines = key
    parameters = kernel.signature(kernel.source(source_name), name, defines)
    path = build(source_name, name, defines, warp_size)
    library = ctypes.CDLL(str(path))

    def run(what, values, arguments):
        host = kernel._host
        memory = _Memory(parameters, arguments) if host.sanitize else None
        regions = memory.pointers() if memory else (_Region * 0)()
        # Each value in memory of its own, and a list of where they are.
        kept = [np.array(v.ctypes.data if isinstance(v, np.ndarray) else v) for v in values]
        pointers = (ctypes.c_void_p * len(kept))(*(v.ctypes.data for v in kept))
        report = _Report()
        with _lock:
            library.host_launch(
                getattr(library, f"host_{name}"), pointers, ctypes.byref(_Dim3(*what.grid)),
                ctypes.byref(_Dim3(*what.block)), ctypes.c_size_t(what.shared), host.warp_size,
                ctypes.c_uint(host.seed), int(host.sanitize), regions, len(regions), ctypes.byref(report),
            )  # fmt: skip
        host.seed += 1
        if report.finding:
            raise KernelError(f"{name}: {_message(report, memory, path)}")
        missing = memory.unwritten() if memory else None
        if missing:
            p, index = missing
            raise KernelError(f"{name}: {p.name}{[int(i) for i in index]} was never written")

    return kernel.Function(name, parameters, run)


def _line(path, code):
    """ " at layernorm.cu:12" for an address in a library, as far as the compiler gave it."""
    if not code or shutil.which("addr2line") is None:
        return ""
    lines = subprocess.run(
        ["addr2line", "-i", "-e", str(path), hex(code - 1)], capture_output=True, text=True
    ).stdout.split("\n")
    for line in lines:  # from the innermost inlined function outwards
        place = Path(line.split(" ")[0]).name
        if ".cu" in place:
            return f" at {place}"
    return ""


def _message(report, memory, path):
    finding = _FINDINGS[report.finding]
    who = f"thread {report.thread} of block {report.block}"
    at, other_at = _line(path, report.code), _line(path, report.other_code)
    if finding == "barrier":
        fate = f"waits{other_at}" if report.other_code else "has returned"
        return f"{who} waits at a barrier{at} that thread {report.other_thread} does not reach: it {fate}"
    if finding == "lanes":
        missing = ", ".join(str(i) for i in range(64) if report.lanes & ~report.arrived & 1 << i)
        return f"{who} takes part in a shuffle, vote or warp barrier{at} without lanes that its mask names: {missing}"
    if finding == "unread lane":
        return f"{who} is in a shuffle{at} that reads lane {report.lanes}, which does not take part"
    if finding == "array index":
        return f"{who} uses the index {report.offset} beyond its array{at}"
    verb, size = ("writes" if report.writes else "reads"), report.size
    if report.region >= 0:
        where = memory.describe(report.region, report.offset, size)
    elif report.region == -1:
        where = f"byte {report.offset} of shared memory"
    else:
        where = "an address in no array"
    did = f"{who} {verb} {size} bytes{at}: {where}"
    return (
        did
        + {
            "outside": ", outside of every array"
            if report.region == -2
            else ", outside of it"
            if report.region == -1
            else "",
            "misaligned": f", an address that is no multiple of {size}",
            "uninitialised": ", which nobody has written",
            "race": f", which thread {report.other_thread} of block {report.other_block} "
            f"{'writes' if report.other_writes else 'reads'}{other_at} with no barrier between",
        }[finding]
    )


@contextlib.contextmanager
def host_kernels(warp_size: int = 32, sanitize: bool = False, seed: int = 0):
    """Within it, ops on NumPy arrays (float32, float16, bfloat16) run their kernels' own source, compiled for the CPU.

    For tests: it is slow. warp_size 32 is an NVIDIA GPU's (and AMD's RDNA), 64 that of AMD's CDNA. With sanitize=True
    each access is checked, and KernelError tells of an access outside an array, a race, a barrier that not every thread
    reaches, a shuffle that reads an absent lane, an output never written, a read of what nobody wrote. Blocks run in an
    order that `seed` shuffles. RuntimeError with no C++ compiler, ValueError for another width.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> with tg.testing.host_kernels(warp_size=64, sanitize=True):
    ...     F.softmax(tg.zeros(2, device="cpu"))
    tensor([0.5, 0.5])
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
