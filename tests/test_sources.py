"""The rules of the house that kernel sources show: headers, names and partners, and what common.cuh alone knows."""

import re
from pathlib import Path

import pytest

from tests.variants import SOURCES, header, names, text
from tinygrad_gpu import kernel

ROOT = Path(__file__).parents[1]
FIELDS = ["Shapes", "Launch", "Memory", "Numerics", "Requires", "Source", "Measured"]
FILES = sorted(path.name for path in kernel.folder().iterdir() if path.suffix in (".cu", ".cuh"))
PORTABLE = [name for name in FILES if name not in ("common.cuh", "mma.cuh", "hopper.cuh")]

# What differs between GPUs, or between CUDA and HIP.
FOREIGN = {
    "a warp's width": r"\bWARP_SIZE\b|\bwarpSize\b",
    "a lane mask": r"0x[fF]{8}(?:[fF]{8})?[uUlL]*\b|lane_?mask|activemask|lanemask",
    "a shuffle or vote": r"__shfl|SHUFFLE|__ballot|__any|__all|__match|__reduce_|__syncwarp|__builtin_amdgcn",
    "a compiler or a target": r"\b__HIP|__CUDACC|__CUDA_ARCH|HOST_BUILD|\basm\b",
}


def stem(source):
    """What a source shares with its op, its tests and its benchmark."""
    return re.split(r"_fwd|_bwd|_sm\d+|\.", source)[0]


def code(file):
    """The text of a file without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text(file), flags=re.DOTALL)


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("file", PORTABLE)
def test_common_alone_knows_the_gpu(file, what):
    lines = enumerate(code(file).split("\n"), 1)
    assert not [f"{file}:{n}: {line.strip()}" for n, line in lines if re.search(FOREIGN[what], line)]


@pytest.mark.parametrize("what", FOREIGN)
def test_the_patterns_find_what_common_has(what):
    assert re.search(FOREIGN[what], code("common.cuh"))


@pytest.mark.parametrize("source", SOURCES)
def test_partners(source):
    name = stem(source)
    partners = f"tinygrad_gpu/ops/{name}.py", f"tests/ops/test_{name}.py", f"benchmarks/bench_{name}.py"
    assert not [path for path in partners if not (ROOT / path).is_file()]


@pytest.mark.parametrize("source", SOURCES)
def test_header(source):
    """What it computes, by kernel; then the fields in their order, Measured once it was."""
    lines = header(source).splitlines()
    fields = [match[1] for line in lines if (match := re.match(r"// ([A-Z][a-z]+)  +\S", line))]
    assert fields in (FIELDS, FIELDS[:-1])
    computes = " ".join(lines[: next(i for i, line in enumerate(lines) if line.startswith("// Shapes"))])
    assert [name for name in names(source) if not re.search(rf"\b{name}\b", computes)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_kernels_are_named_by_their_stem(source):
    assert names(source)
    whole = re.sub(r"//.*", "", kernel.source(source))
    assert len(names(source)) == len(re.findall(r"\b__global__\b", whole)), "a kernel that kernel.py cannot read"
    assert [name for name in names(source) if not re.fullmatch(rf"{stem(source)}(_[a-z0-9]+)*", name)] == []


@pytest.mark.parametrize("file", FILES)
def test_no_atomics(file):
    """A sum of floats by atomics depends on which thread comes first; nothing here has needed one of integers."""
    assert "atomic" not in code(file)


@pytest.mark.parametrize("source", SOURCES)
def test_the_page_has_every_kernel(source):
    """docs/portability.md is written by python -m tests.portability."""
    page = (ROOT / "docs" / "portability.md").read_text()
    assert [name for name in names(source) if f"| `{name}` |" not in page] == []
