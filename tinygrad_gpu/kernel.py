"""The kernel sources of kernels_cu/: where they are, and their text as a compiler gets it."""

import functools
import re
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


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
    kernel. FileNotFoundError for a file that is not there.

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
        return _INCLUDE.sub(lambda match: expand(path.parent / match[1]), text)

    return expand(folder() / name)
