"""Settings shared by all tests: hypothesis profiles, the devices, a seed."""

import os

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


@pytest.fixture(autouse=True)
def fresh():
    """A seed; and an index error that a GPU has yet to tell fails the test that it comes from."""
    tg.manual_seed(0)
    yield
    tg.zeros(1).item()
