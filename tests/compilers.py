"""NVRTC and hipRTC as CuPy calls them, for any GPU and with none at hand: what a kernel then needs of its GPU."""

import ctypes
import functools
import io
import re
import threading
from typing import NamedTuple


class Missing(RuntimeError):
    """A compiler that is not installed, or too old for a target."""


class Needs(NamedTuple):
    """What one compiled kernel takes: registers a thread, bytes of static shared memory a block, bytes of stack and of
    spilled registers a thread, the threads that a block may have."""

    registers: int
    shared: int
    stack: int
    spills: int
    threads: int


# What CuPy adds to a RawModule's options, by compiler; on CUDA also -arch=sm_NN, on ROCm nothing: there hipRTC compiles
# for the GPU that it finds.
CUPY_OPTIONS = {
    "nvrtc": ("-ftz=true", "--device-as-default-execution-space"),
    "hiprtc": ("-fcuda-flush-denormals-to-zero",),
}


def version(target):
    """The name and version of what compiles for a target; Missing where there is nothing."""
    if target.startswith("gfx"):
        number = ctypes.c_int()
        _hip().hipRuntimeGetVersion(ctypes.byref(number))
        return f"hipRTC {number.value // 10**7}.{number.value // 10**5 % 100}"
    return "NVRTC {}.{}".format(*_nvrtc(target).getVersion())


def compile_for(target, text, options):
    """{kernel: Needs} of a source compiled for a target; RuntimeError with the compiler's words where it fails."""
    return (_by_hiprtc if target.startswith("gfx") else _by_nvrtc)(target, text, options)


# ---- CUDA


def _nvrtc(target):
    try:
        from cupy.cuda import nvrtc, runtime

        known = nvrtc.getSupportedArchs()
    except (ImportError, RuntimeError, OSError) as error:
        raise Missing("NVRTC is missing: pip install 'tinygrad_gpu[compile]'") from error
    if runtime.is_hip:
        raise Missing("this CuPy is for ROCm: it has no NVRTC")
    if int(re.sub(r"\D", "", target)) not in known:
        raise Missing(f"NVRTC {nvrtc.getVersion()} does not know {target}")
    return nvrtc


# What ptxas says of each kernel; "N bytes smem" only where there are some.
_PTXAS = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)
_REGISTERS = 1 << 16  # of a block, on every target; a thread gets eight at once, and four warps together get theirs


def _by_nvrtc(target, text, options):
    nvrtc = _nvrtc(target)
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, *CUPY_OPTIONS["nvrtc"], f"-arch={target}", "--ptxas-options=-v"))
        log = nvrtc.getProgramLog(program)
        assert nvrtc.getCUBIN(program).startswith(b"\x7fELF")
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{target}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    found = {}
    for name, *numbers, rest in _PTXAS.findall(log):
        stack, stores, loads, registers = map(int, numbers)
        shared = re.search(r"(\d+) bytes smem", rest)
        threads = min(1024, _REGISTERS // (-(-registers // 8) * 8) // 128 * 128)
        found[name] = Needs(registers, int(shared[1]) if shared else 0, stack, stores + loads, threads)
    return found


# ---- HIP


@functools.cache
def _hip():
    try:
        return ctypes.CDLL("libamdhip64.so.5")  # of ROCm 5, which holds hipRTC too
    except OSError as error:
        raise Missing("hipRTC is missing: apt install libamdhip64-5 libhiprtc-builtins5") from error


_one_at_a_time = threading.Lock()  # two threads in hipRTC 5.2 crash it


def _bytes_of(program, what):
    """hiprtcGetWhat of a program: a size, then that many bytes."""
    size = ctypes.c_size_t()
    getattr(_hip(), f"hiprtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(max(size.value, 1))
    getattr(_hip(), f"hiprtcGet{what}")(program, data)
    return data.raw


def _by_hiprtc(target, text, options):
    hip, program = _hip(), ctypes.c_void_p()
    options = [o.encode() for o in (*options, *CUPY_OPTIONS["hiprtc"], f"--offload-arch={target}")]
    hip.hiprtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        with _one_at_a_time:
            failed = hip.hiprtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            raise RuntimeError(f"{target}: {_bytes_of(program, 'ProgramLog').rstrip(bytes(1)).decode()}")
        code = _bytes_of(program, "Code")
    finally:
        hip.hiprtcDestroyProgram(ctypes.byref(program))
    # The note of that name holds a MessagePack map (LLVM, User Guide for AMDGPU Backend: code object V3 metadata).
    notes = _unpack(io.BytesIO(code[code.index(b"AMDGPU\0\0") + 8 :]))
    found = {}
    for k in notes["amdhsa.kernels"]:
        assert f"-DWARP_SIZE={k['.wavefront_size']}".encode() in options
        shared, stack = k[".group_segment_fixed_size"], k[".private_segment_fixed_size"]
        spills = 4 * k[".vgpr_spill_count"]
        found[k[".name"]] = Needs(k[".vgpr_count"], shared, stack, spills, k[".max_flat_workgroup_size"])
    return found


# The kinds of MessagePack value that occur there, by their first byte: from there on it holds a number itself, or it
# tells how many bytes of one follow.
_SHORT = ((0xA0, str), (0x90, list), (0x80, dict), (0, int))
_LONG = {0xCC: (int, 1), 0xCD: (int, 2), 0xCE: (int, 4), 0xD9: (str, 1), 0xDA: (str, 2), 0xDC: (list, 2),
         0xDE: (dict, 2)}  # fmt: skip


def _unpack(stream):
    """The MessagePack value that a stream goes on with."""
    first = stream.read(1)[0]
    if first in (0xC2, 0xC3):
        return first == 0xC3
    if first < 0xC0:
        kind, n = next((kind, first - least) for least, kind in _SHORT if first >= least)
    else:
        kind, width = _LONG[first]
        n = int.from_bytes(stream.read(width), "big")
    if kind is str:
        return stream.read(n).decode()
    if kind is dict:
        return {_unpack(stream): _unpack(stream) for _ in range(n)}
    return [_unpack(stream) for _ in range(n)] if kind is list else n
