"""Every kernel compiles for every GPU, by the compilers and options that CuPy uses, and fits it; no GPU is needed."""

import re
import types

import pytest

from tests.compilers import CUPY_OPTIONS, Missing, Needs, compile_for, version
from tests.variants import SOURCES, TARGETS, compiled, fault, launches, names, text
from tinygrad_gpu import kernel


def needs_compiler(target):
    try:
        version(target)
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles(source, target):
    needs_compiler(target)
    needs = compiled(source, target)
    found = [f"{launch}: {what}" for launch, n in needs if (what := fault(launch, n, target))]
    assert not found, "\n".join(dict.fromkeys([*found, *(f"{launch.name:32} {n}" for launch, n in needs)]))


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_is_left_out(source):
    """Each kernel is launched by some call, and each #if of the source goes both ways. What fails here wants a call in
    tests/variants.py."""
    found = [launch for target in TARGETS for launch in launches(target) if launch.source == source]
    assert {launch.name for launch in found} == set(names(source))
    conditions = " ".join(re.findall(r"^ *# *(?:el)?ifn?(?:def)?\b(.*)", text(source), re.MULTILINE))
    for name in set(re.findall(r"\b[A-Z]\w+", conditions)):
        assert len({dict(launch.defines).get(name, 0) for launch in found}) > 1, name


GREEDY = """
extern "C" __global__ void __launch_bounds__(1024) greedy(float *y, int n) {
    __shared__ float rows[1024];
    float x[256];
    for (int i = 0; i < 256; i++) x[i] = y[i * n + threadIdx.x];
    rows[threadIdx.x] = x[n];
    __syncthreads();
    for (int i = 0; i < 256; i++) y[i * n + threadIdx.x] = x[(i * n) % 256] + rows[i];
}
extern "C" __global__ void plain(float *y) { y[threadIdx.x] = 0.0f; }
"""


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_kernel_needs_is_read(target):
    needs_compiler(target)
    width = f"-DWARP_SIZE={TARGETS[target].warp_size}"
    found = compile_for(target, GREEDY, (width,))
    assert found["greedy"].shared == 4096
    assert found["greedy"].stack >= 1024
    assert found["plain"][1:] == (0, 0, 0, 1024)
    assert 0 < found["plain"].registers < 16 < found["greedy"].registers
    with pytest.raises(RuntimeError, match=r"planted\.cu\S*7\b.*missing"):
        compile_for(target, '#line 7 "planted.cu"\n__global__ void f() { missing(); }', (width,))


FITS = Needs(registers=32, shared=0, stack=0, spills=0, threads=1024)
MISFITS = {
    "8 bytes of stack": FITS._replace(stack=8),
    "4 of spills": FITS._replace(spills=4),
    "66560 bytes of shared memory": FITS._replace(shared=65 << 10),
    "512 threads a block": FITS._replace(registers=255, threads=256),
}


@pytest.mark.parametrize("words", MISFITS)
def test_what_does_not_fit_is_told(words):
    launch = kernel.Launch("gelu.cu", "gelu_fwd", (1,), (512,))
    assert fault(launch, FITS, "sm_75") is None
    assert words in fault(launch, MISFITS[words], "sm_75")


@pytest.mark.parametrize("compiler", CUPY_OPTIONS)
def test_the_options_are_cupys(compiler, monkeypatch):
    """CuPy compiles a module, what it has for GPUs replaced: its compiler gets the options that the tests' gets."""
    cupy_compiler = pytest.importorskip("cupy.cuda.compiler")
    given = []

    class Program:
        def __init__(self, *arguments, **options):
            pass

        def compile(self, options, log_stream=None):
            given.append(options)
            return b"", {}

    module = types.SimpleNamespace(load=lambda code: None, _set_mapping=lambda names: None)
    for name, stand_in in {
        "_NVRTCProgram": Program,
        "runtime": types.SimpleNamespace(is_hip=compiler == "hiprtc"),
        "function": types.SimpleNamespace(Module=lambda: module),
        "_environment": types.SimpleNamespace(_get_hipcc_include_dirs=lambda: []),
        "_get_arch_for_options_for_nvrtc": lambda arch: (f"-arch=sm_{arch}", "cubin"),
    }.items():
        monkeypatch.setattr(cupy_compiler, name, stand_in)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    cupy_compiler._compile_module_with_cache("", ("-std=c++17",), arch="90")
    arch = {"-arch=sm_90"} if compiler == "nvrtc" else set()
    assert set(given[-1]) == {"-std=c++17", *CUPY_OPTIONS[compiler], *arch}
