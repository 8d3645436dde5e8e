"""Devices: names, defaults, errors where there is no GPU, what the import costs, range checks."""

import os
import subprocess
import sys

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu import device as devices

no_gpu = pytest.mark.skipif(tg.cuda.is_available(), reason="a GPU works here")
needs_gpu = pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")


def python(code):
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_import_is_quick_and_light():
    loaded = python(
        "import sys, tinygrad_gpu; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    ).split()
    assert "numpy" in loaded
    assert not {"matplotlib", "torch", "cupy", "hypothesis"} & set(loaded)
    seconds = []  # of wall or CPU time: the one counts what else the machine does, the other idle threads that spin
    for _ in range(3):
        before = os.times()
        python("import tinygrad_gpu")
        wall, user, system = (
            getattr(os.times(), name) - getattr(before, name)
            for name in ("elapsed", "children_user", "children_system")
        )
        seconds.append(min(wall, user + system))
    assert 0 < min(seconds) < 0.5


def test_cupy_is_imported_only_where_it_is_asked_for():
    code = "import sys, tinygrad_gpu as tg; tg.set_default_device('cpu'); x = tg.ones(3, requires_grad=True); "
    code += "(x * x).sum().backward(); repr(x.grad); print('cupy' in sys.modules)"
    assert python(code).strip() == "False"


FACTORIES = [
    lambda d: tg.Tensor([1.0], device=d),
    lambda d: tg.zeros(1, device=d),
    lambda d: tg.ones(1, device=d),
    lambda d: tg.full((1,), 1, device=d),
    lambda d: tg.arange(3, device=d),
    lambda d: tg.rand(1, device=d),
    lambda d: tg.randn(1, device=d),
    lambda d: tg.randint(0, 2, (1,), device=d),
    lambda d: tg.zeros_like(tg.ones(1), device=d),
    lambda d: tg.ones_like(tg.ones(1), device=d),
]


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_without_a_gpu_cuda_is_a_clear_error(name):
    calls = [*FACTORIES, lambda d: tg.ones(1).to(d), lambda d: tg.set_default_device(d), lambda d: tg.ones(1).cuda()]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"cuda: CuPy is (not installed; pip install|installed but finds no)"):
            call(name)
    assert tg.default_device() == tg.ones(1).device == "cpu"


@pytest.mark.parametrize(
    "name", ["gpu", "cuda0", "cuda:", "cuda:-1", "cuda:one", "cuda:²", "cpu:0", "CPU", "", 0, True]
)
def test_other_names_are_refused(name):
    for call in (*FACTORIES, tg.set_default_device):
        with pytest.raises(ValueError, match=r'[\w]+: device must be "cpu", "cuda" or "cuda:N", got'):
            call(name)


def test_the_default_device():
    before = tg.default_device()
    assert before in ("cpu", "cuda")
    tg.set_default_device("cpu")
    assert tg.default_device() == "cpu"
    assert tg.ones(1).device == "cpu"
    tg.set_default_device(None)
    assert tg.default_device() == ("cuda" if tg.cuda.is_available() else "cpu")
    tg.set_default_device(before)


def test_memory_that_is_shared():
    a = np.zeros((4, 6))
    for b, shared, same in (
        (a, True, True),
        (a[...], True, True),
        (a[1:], True, False),
        (a.reshape(-1), True, False),
        (a.T, True, False),
        (a[::2][:2], True, False),
        (a.copy(), False, False),
        (np.zeros((4, 6)), False, False),
    ):
        assert devices.may_share_memory(a, b) is shared
        assert devices.same_elements(a, b) is same
    assert not devices.may_share_memory(a[:2], a[2:])


def check(values, ignore=None):
    devices.check_range("op", "ids", tg.Tensor(values, dtype=tg.int64).data, 5, ignore)
    devices.synchronized()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 5, 2], r"op: ids must be in \[0, 5\), got 5 at position \(1,\)"),
        ([[0, 1], [-1, 9]], r"op: ids must be in \[0, 5\), got -1 at position \(1, 0\)"),
    ],
)
def test_range_checks_name_the_first_value(device, values, message):
    with pytest.raises(IndexError, match=message):
        check(values)
    devices.synchronized()  # it is told once


def test_range_checks_that_pass(device):
    for values, ignore in (([0, 4], None), ([], None), ([-100, 3], -100)):
        check(values, ignore)
    with pytest.raises(IndexError, match=r"op: ids must be in \[0, 5\) or -100, got -1 at position \(0,\)"):
        check([-1, -100], -100)


@needs_gpu
def test_tensors_move():
    x = tg.Tensor([1.0, 2.0], device="cpu", requires_grad=True)
    y = x.cuda()
    assert y.device == "cuda:0"
    assert y.cuda() is y.to("cuda:0") is y
    assert y.numpy().tolist() == y.cpu().tolist() == [1, 2]
    (y * 3.0).sum().backward()
    assert x.grad.device == "cpu"
    assert x.grad.tolist() == [3, 3]
    for dtype in (tg.float64, tg.float16, tg.bfloat16, tg.int64, tg.int32, tg.bool):
        z = tg.Tensor([0.0, 1.0], dtype=dtype, device="cpu")
        assert z.cuda().dtype == dtype
        assert z.cuda().cpu().tolist() == z.tolist()
    with pytest.raises(ValueError, match="device must be one of cuda:0 to cuda:"):
        tg.ones(1, device="cuda:99")


@needs_gpu
def test_a_bad_index_on_a_gpu_is_told_when_values_come_out():
    weight, ids = tg.ones(5, 2, device="cuda"), tg.Tensor([1, 7], device="cuda")
    y = tg.functional.embedding(ids, weight)
    with pytest.raises(IndexError, match=r"embedding: ids must be in \[0, 5\), got 7 at position \(1,\)"):
        y.numpy()
    assert tg.ones(1, device="cuda").item() == 1
