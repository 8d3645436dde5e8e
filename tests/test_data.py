"""The tokenizer, and loaders: shifted targets, every token once an epoch, the same batches from the same state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tinygrad_gpu.data import ByteTokenizer, TokenLoader, evaluation_batches

# (tokens, seq_len) with at least one window
SIZES = st.integers(1, 9).flatmap(lambda seq_len: st.tuples(st.integers(seq_len + 1, 60), st.just(seq_len)))
SEEDS = st.integers(0, 2**64 - 1)


@given(st.text())
def test_text_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert bytes(ids) == text.encode()
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)


def test_decode_takes_any_ids_and_replaces_what_is_no_utf8(device):
    for ids in ([104, 105, 0xFF], np.array([104, 105, 0xFF]), tg.Tensor([104, 105, 0xFF])):
        assert ByteTokenizer().decode(ids) == "hi\ufffd"
    assert ByteTokenizer().decode([]) == ""


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.encode(3), TypeError, "encode: text must be str or bytes, got int"),
        (lambda t: t.decode([0, 256]), ValueError, r"decode: ids must be in \[0, 256\), got 0 to 256"),
        (lambda t: t.decode([-1]), ValueError, r"decode: ids must be in \[0, 256\), got -1 to -1"),
        (lambda t: t.decode([[1, 2]]), ValueError, r"decode: ids must have shape \(N,\), got \(1, 2\)"),
    ],
)
def test_tokenizer_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(ByteTokenizer())


def test_batches_are_shifted_int64_tensors_of_the_device(device):
    tokens = np.arange(50, dtype=np.uint16) * 3
    for ids, targets in (next(TokenLoader(tokens, 4, 5, seed=0)), evaluation_batches(tokens, 4, 5)[0]):
        assert ids.shape == targets.shape == (4, 5)
        assert ids.dtype == targets.dtype == tg.int64
        assert ids.device.partition(":")[0] == targets.device.partition(":")[0] == device
        assert (targets - ids).tolist() == [[3] * 5] * 4
        assert ids[:, 1:].tolist() == targets[:, :-1].tolist()


@given(SIZES, SEEDS, st.integers(0, 3))
def test_an_epoch_predicts_each_token_once(sizes, seed, epoch):
    n, seq_len = sizes
    loader = TokenLoader(np.arange(n), 1, seq_len, seed=seed, device="cpu")
    loader.load_state_dict({"seed": seed, "position": epoch * loader.windows})
    predicted = sorted(t for _ in range(loader.windows) for t in next(loader)[1].numpy().ravel().tolist())
    assert predicted == list(range(predicted[0], predicted[-1] + 1))
    assert n - len(predicted) < 2 * seq_len


def test_epochs_differ_in_order_and_in_the_first_token():
    loader = TokenLoader(np.arange(1000), 1, 10, seed=0, device="cpu")
    epochs = [tuple(next(loader)[0].numpy()[0, 0].item() for _ in range(loader.windows)) for _ in range(20)]
    assert len({tuple(first - min(epoch) for first in epoch) for epoch in epochs}) == 20
    assert {first for epoch in epochs for first in epoch if first == min(epoch)} > {0, 5, 9}


@given(SIZES, SEEDS, st.integers(1, 7), st.integers(0, 30))
def test_the_state_decides_what_follows(sizes, seed, batch_size, before):
    n, seq_len = sizes

    def loader(seed):
        return TokenLoader(np.arange(n), batch_size, seq_len, seed=seed, device="cpu")

    def take(loader, count):
        return [(ids.tolist(), targets.tolist()) for _, (ids, targets) in zip(range(count), loader, strict=False)]

    straight = loader(seed)
    take(straight, before)
    resumed = loader(0)
    resumed.load_state_dict(straight.state_dict())
    following = take(straight, 5)
    assert take(resumed, 5) == following
    assert take(loader(seed), before + 5)[before:] == following


def test_batch_size_and_generator_do_not_change_the_stream():
    def stream(batch_size, count):
        loader = TokenLoader(np.arange(100), batch_size, 3, seed=5, device="cpu")
        return np.concatenate([next(loader)[0].numpy() for _ in range(count)])

    one = stream(1, 84)
    tg.manual_seed(3)
    np.testing.assert_array_equal(stream(7, 12), one)
    assert tg.random.default_generator.draw == 0  # nothing was drawn from the generator of weights and dropout


@given(SIZES, st.integers(1, 7))
def test_evaluation_covers_the_tokens_in_order(sizes, batch_size):
    n, seq_len = sizes
    batches = evaluation_batches(np.arange(n), batch_size, seq_len, device="cpu")
    targets = np.concatenate([targets.numpy().ravel() for _, targets in batches])
    np.testing.assert_array_equal(targets, np.arange(1, len(targets) + 1))
    assert n - 1 - len(targets) < seq_len
    assert {len(ids) for ids, _ in batches[:-1]} <= {batch_size}


@given(SIZES, st.integers(1, 7), st.integers(1, 5))
def test_evaluation_on_a_part_is_spread_over_the_tokens(sizes, batch_size, count):
    n, seq_len = sizes
    batches = evaluation_batches(np.arange(n), batch_size, seq_len, batches=count, device="cpu")
    starts = np.concatenate([ids.numpy()[:, 0] for ids, _ in batches])
    windows = (n - 1) // seq_len
    assert len(starts) == min(windows, count * batch_size)
    gaps = np.diff([*starts, windows * seq_len])
    assert starts[0] == 0
    assert seq_len <= gaps.min() <= gaps.max() <= gaps.min() + seq_len


@pytest.mark.parametrize("make", [TokenLoader, evaluation_batches])
@pytest.mark.parametrize(
    ("tokens", "batch_size", "seq_len", "error", "message"),
    [
        (np.arange(4), 1, 4, ValueError, r"tokens must have shape \(N,\), N > seq_len = 4 .* got \(4,\)"),
        (np.arange(0), 1, 1, ValueError, r"tokens must have shape \(N,\), N > seq_len = 1 .* got \(0,\)"),
        (np.ones((9, 9), int), 1, 4, ValueError, r"tokens must have shape \(N,\), .* got \(9, 9\)"),
        (np.ones(9), 1, 4, TypeError, "tokens must be integers, got float64"),
        ("some text", 1, 4, TypeError, "tokens must be integers, got <U9"),
        (np.arange(9), 0, 4, ValueError, "batch_size must be an int of at least 1 .* got 0"),
        (np.arange(9), 1, -4, ValueError, "seq_len must be an int of at least 1 .* got -4"),
        (np.arange(9), 1, 4.0, ValueError, "seq_len must be an int of at least 1 .* got 4.0"),
    ],
)
def test_errors_of_tokens_and_sizes(make, tokens, batch_size, seq_len, error, message):
    with pytest.raises(error, match=f"{make.__name__}: {message}"):
        make(tokens, batch_size, seq_len)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenLoader(np.arange(9), 1, 4, seed=-1), "TokenLoader: seed must be an int of at least 0 .* got -1"),
        (lambda: TokenLoader(np.arange(9), 1, 4, device="tpu"), "TokenLoader: device must be .* got 'tpu'"),
        (
            lambda: TokenLoader(np.arange(9), 1, 4).load_state_dict({"seed": 1}),
            r"must have seed and position, got \['seed'\]",
        ),
        (lambda: evaluation_batches(np.arange(9), 1, 4, batches=0), "batches must be an int of at least 1 .* got 0"),
    ],
)
def test_other_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
