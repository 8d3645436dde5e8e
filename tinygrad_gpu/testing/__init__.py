"""Tools for testing: `gradcheck`, hypothesis strategies for shapes and arrays (`testing.strategies`), and
`host_kernels`, which runs the GPU kernels' own source on the CPU."""

import importlib

from .gradcheck import GradcheckError, gradcheck
from .host import KernelError, host_kernels

__all__ = ["GradcheckError", "KernelError", "gradcheck", "host_kernels", "strategies"]


def __getattr__(name):
    if name == "strategies":  # needs hypothesis, which only the test extra brings
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
