"""Settings shared by all tests: hypothesis profiles, the devices, a seed."""

import contextlib
import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

import tinygrad_gpu as tg

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("default", max_examples=50, **_common)
settings.register_profile("ci", max_examples=50, derandomize=True, **_common)
settings.load_profile("ci" if os.environ.get("CI") else "default")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(params=DEVICES)
def device(request):
    """Each device in turn, made the default while the test runs."""
    before = tg.default_device()
    tg.set_default_device(request.param)
    yield request.param
    tg.set_default_device(before)


def _on(name):
    """A context in which `name` of BACKENDS computes: "cpu" NumPy, "host32" and "host64" the kernels' host build with
    warps of that width and every access checked, "cuda" the kernels on a GPU."""
    return tg.testing.host_kernels(int(name[4:]), sanitize=True) if "host" in name else contextlib.nullcontext()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler (g++)")
HOSTS = [pytest.param(name, marks=needs_compiler) for name in ("host32", "host64")]


def _backend(request):
    before = tg.default_device()
    tg.set_default_device("cuda" if request.param == "cuda" else "cpu")
    with _on(request.param):
        yield request.param
    tg.set_default_device(before)


# For tests of what an op gives in any dtype: on NumPy, on the kernels' host build, on a GPU.
backend = pytest.fixture(params=[DEVICES[0], *HOSTS, DEVICES[1]])(_backend)
# For tests of kernels alone.
kernels = pytest.fixture(params=[*HOSTS, DEVICES[1]])(_backend)


@pytest.fixture(autouse=True)
def fresh():
    """A seed; and an index error that a GPU has yet to tell fails the test that it comes from."""
    tg.manual_seed(0)
    yield
    tg.zeros(1).item()
