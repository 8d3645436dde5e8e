"""Files of tensors: what is read is what was written, other libraries read it too, and no save leaves half a file."""

import os

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tinygrad_gpu import dtypes, io
from tinygrad_gpu.testing import strategies

NAMES = st.text(max_size=10).filter(lambda name: name != "__metadata__")


ARRAYS = st.sampled_from(dtypes.ALL).flatmap(lambda dtype: strategies.arrays(strategies.shapes(), dtype))


@given(state=st.dictionaries(NAMES, ARRAYS, max_size=4))
def test_round_trip(tmp_path_factory, state):
    path = tmp_path_factory.getbasetemp() / "round_trip.safetensors"
    io.save(path, state)
    loaded = io.load(path, device="cpu")
    assert loaded.keys() == state.keys()
    for name, array in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].numpy().tobytes() == array.tobytes()


def test_any_tensor_of_any_device(tmp_path, device):
    x = tg.Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    io.save(tmp_path / "x", {"result": x * 2, "view": x.T, "leaf": x, "array": x.data, "number": tg.Tensor(5)})
    loaded = io.load(tmp_path / "x")
    assert {t.device.partition(":")[0] for t in loaded.values()} == {device}
    assert loaded["result"].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert loaded["view"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert loaded["leaf"].tolist() == loaded["array"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert loaded["number"].shape == ()
    assert loaded["number"].item() == 5
    loaded["leaf"][0] = 7.0  # what is loaded may be written to


def test_safetensors_reads_what_we_write(tmp_path):
    io.save(tmp_path / "ours", {"w": tg.arange(6, device="cpu").reshape(2, 3).T})
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "ours")["w"], np.arange(6).reshape(2, 3).T)


def test_we_read_what_safetensors_writes(tmp_path):
    safetensors.numpy.save_file({"w": np.ones((2, 0), np.float16)}, tmp_path / "theirs", metadata={"format": "np"})
    loaded = io.load(tmp_path / "theirs")
    assert list(loaded) == ["w"]
    assert (loaded["w"].shape, loaded["w"].dtype) == ((2, 0), tg.float16)


def test_save_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "w"
    for value in (1, 2):
        io.save(path, {"w": tg.Tensor(value)})
    assert io.load(path)["w"].item() == 2
    assert os.listdir(tmp_path) == ["w"]


def full_disk(monkeypatch):
    def write_half(arrays, path):
        path.write_bytes(safetensors.numpy.save(arrays)[:-4])
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", write_half)


def interrupt_before_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", _raise(KeyboardInterrupt))


def interrupt_before_replace(monkeypatch):
    monkeypatch.setattr(os, "replace", _raise(KeyboardInterrupt))


def _raise(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("accident", [full_disk, interrupt_before_sync, interrupt_before_replace])
def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, accident):
    io.save(tmp_path / "w", {"w": tg.Tensor(1)})
    accident(monkeypatch)
    with pytest.raises((OSError, KeyboardInterrupt)):
        io.save(tmp_path / "w", {"w": tg.Tensor(2)})
    assert io.load(tmp_path / "w")["w"].item() == 1
    assert os.listdir(tmp_path) == ["w"]


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({3: np.ones(1)}, TypeError, "save: names must be strings, got 3"),
        ({"__metadata__": np.ones(1)}, ValueError, "save: the format keeps the name '__metadata__'"),
        ({"step": 3}, TypeError, "save: 'step' must be a Tensor or an array, got int"),
        ({"w": np.ones(1, np.uint8)}, TypeError, "save: 'w': dtype must be one of float16, .*, got dtype"),
        ({"w": np.ones(1)}, FileNotFoundError, "save: there is no directory .*missing"),
    ],
)
def test_save_errors(tmp_path, state, error, message):
    with pytest.raises(error, match=message):
        io.save(tmp_path / "missing" / "w", state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[:-1], lambda b: b"PK" + b, lambda b: b[:8] + b"!" + b[9:]]
)
def test_load_refuses_a_damaged_file(tmp_path, damage):
    path = tmp_path / "w"
    io.save(path, {"w": tg.ones(3)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"load: .*w is not a safetensors file: "):
        io.load(path)


def test_load_errors(tmp_path):
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match="load: there is no file "):
            io.load(missing)
    safetensors.numpy.save_file({"bytes": np.ones(1, np.uint8)}, tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"load: 'bytes' in .* must be one of F64, .*, got U8"):
        io.load(tmp_path / "bytes")
    with pytest.raises(ValueError, match='load: device must be "cpu", "cuda" or "cuda:N", got \'tpu\''):
        io.load(tmp_path / "bytes", device="tpu")


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    io.save(tmp_path / "w.safetensors", {"w": tg.ones(1)})
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
