"""Tools for testing gradients: `gradcheck`, and hypothesis strategies for shapes and arrays (`testing.strategies`)."""

import importlib

from .gradcheck import GradcheckError, gradcheck

__all__ = ["GradcheckError", "gradcheck", "strategies"]


def __getattr__(name):
    if name == "strategies":  # needs hypothesis, which only the test extra brings
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
