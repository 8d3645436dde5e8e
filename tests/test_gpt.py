"""The whole model: its gradients, that it learns, that it repeats, and what it generates."""

import dataclasses
import gc
import math
import tracemalloc

import numpy as np
import pytest

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tinygrad_gpu import kernel, random
from tinygrad_gpu.gpt import GPT, GPTConfig, sample

TINY = GPTConfig(vocab_size=5, block_size=3, n_layer=1, n_head=2, n_embd=4)
SMALL = GPTConfig(vocab_size=16, block_size=8, n_layer=2, n_head=4, n_embd=32)
VARIANTS = {
    "gpt2": {},
    "post_norm_relu": {"norm_first": False, "activation": "relu"},
    "grouped_swiglu": {"n_kv_head": 1, "activation": "swiglu", "bias": False},
}


def make(config=SMALL, dtype=tg.float32, seed=0, **changes):
    tg.manual_seed(seed)
    return GPT(dataclasses.replace(config, **changes)).to(dtype)


def spread(model, size=0.3):
    """Weights of a size at which every part of the model matters."""
    with tg.no_grad():
        for p in model.parameters():
            p += size * tg.randn(*p.shape, dtype=p.dtype)
    return model


def batch(config=SMALL, size=2, seed=0):
    ids, targets = np.random.default_rng(seed).integers(0, config.vocab_size, (2, size, config.block_size))
    return tg.Tensor(ids), tg.Tensor(targets)


# Gradients


@pytest.fixture
def on_cpu():
    before = tg.default_device()
    tg.set_default_device("cpu")
    yield
    tg.set_default_device(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck_of_every_parameter(variant, on_cpu):
    """Of a whole model in float64, with dropout from a seed, tokens that come twice and a target that is ignored."""
    model = spread(make(TINY, tg.float64, dropout=0.2, **VARIANTS[variant]))
    ids, targets = tg.Tensor([[1, 1, 2], [2, 0, 1]]), tg.Tensor([[1, 2, -100], [0, 1, 1]])

    def loss(*_):
        tg.manual_seed(5)
        return model(ids, targets)

    assert tg.testing.gradcheck(loss, *model.parameters())


def test_a_tied_head_adds_to_the_embeddings_gradient(device):
    """wte.grad is what reaches it as the table plus what reaches it as the head, each taken alone."""
    model = spread(make(dtype=tg.float64))
    ids, targets = batch()
    model(ids, targets).backward()
    parts = []
    for part in ("table", "head"):
        twin = spread(make(dtype=tg.float64))
        table, twin.wte.weight = twin.wte.weight, twin.wte.weight.detach()
        head = twin.wte.weight
        (table if part == "table" else head).requires_grad = True
        (head if part == "table" else table).requires_grad = False
        x = F.embedding(ids, table) + twin.wpe.weight
        for block in twin.h:
            x = block(x)
        F.linear_cross_entropy(twin.ln_f(x), head, targets).backward()
        parts.append((table if part == "table" else head).grad.numpy())
    assert all(abs(part).max() > 1e-3 for part in parts)
    np.testing.assert_allclose(model.wte.weight.grad.numpy(), sum(parts), rtol=1e-9, atol=1e-12)


def test_loss_is_the_cross_entropy_of_the_logits(device):
    model = spread(make(dtype=tg.float64))
    ids, targets = batch()
    targets[0] = -100
    expected = F.cross_entropy(model(ids).reshape(-1, 16), targets.reshape(-1))
    assert model(ids, targets).item() == pytest.approx(expected.item(), rel=1e-12)
    assert make()(ids, targets).item() == pytest.approx(math.log(16), abs=0.05)  # an untrained model knows nothing


def test_logits_do_not_depend_on_what_follows(device):
    model, (ids, _) = spread(make()), batch()
    changed = ids.clone()
    changed[:, 5:] = 15 - ids[:, 5:]
    before, after = model(ids).numpy(), model(changed).numpy()
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-4, atol=1e-5)
    assert abs(before[:, 5:] - after[:, 5:]).max() > 0.1


# Training


def train(model, optimizer, steps, scaler=None, size=2, batches=1):
    """The loss before each step."""
    losses = []
    for step in range(steps):
        ids, targets = batch(model.config, size, seed=step % batches)
        optimizer.zero_grad()
        loss = model(ids, targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_batch_is_learnt_by_heart(variant, device):
    model = make(**VARIANTS[variant])
    losses = train(model, tg.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, max_grad_norm=1.0), 40)
    assert losses[0] > 2.5
    assert losses[-1] < 0.05


@pytest.mark.parametrize("dtype", [tg.bfloat16, tg.float16])
def test_half_types_learn(dtype, device):
    """float16 with loss scaling, which starts too high and finds its scale."""
    model = make(dtype=dtype)
    optimizer = tg.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, max_grad_norm=1.0)
    scaler = tg.optim.GradScaler(2.0**24) if dtype == tg.float16 else None
    losses = train(model, optimizer, 40, scaler)
    assert losses[0] > 2.5
    assert losses[-1] < 0.1
    assert all(p.dtype == dtype and p.grad.dtype == tg.float32 for p in model.parameters())
    if scaler:
        assert 0 < optimizer.skipped_steps < 20
        assert scaler.get_scale() == 2.0 ** (24 - optimizer.skipped_steps)


def test_training_twice_gives_the_same_bits(device):
    def run(seed):
        model = make(dropout=0.2, seed=seed)
        losses = train(model, tg.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), 5, batches=5)
        return losses, [p.numpy().copy() for p in model.parameters()]

    (first, weights), (second, again), (other, _) = run(1), run(1), run(2)
    assert first == second != other
    for a, b in zip(weights, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_memory_stays_flat_without_the_garbage_collector(on_cpu):
    """Over 200 steps: no object or array piles up, and no step leaves a reference cycle behind."""
    model = make(n_layer=1)
    optimizer = tg.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    gc.collect()
    gc.disable()
    try:
        train(model, optimizer, 100)
        objects = len(gc.get_objects())
        train(model, optimizer, 80)
        tracemalloc.start()  # what is allocated in the last steps and still there (it is slow)
        train(model, optimizer, 20, size=8)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        objects = len(gc.get_objects()) - objects
        cycles = gc.collect()
    finally:
        gc.enable()
    assert kept < 20 * 8192  # the smallest activation has 8 KiB
    assert objects < 50
    assert cycles == 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_add_up_over_microbatches(checkpointed, device):
    """Two halves of a batch, each with half the loss, give the gradient of the whole; blocks checkpointed or not."""
    model, (ids, targets) = spread(make(dtype=tg.float64)), batch()
    model(ids, targets).backward()
    whole = [p.grad.numpy().copy() for p in model.parameters()]
    model.zero_grad()
    if checkpointed:
        for block in model.h:
            block.forward = lambda x, cache=None, forward=block.forward: tg.checkpoint(forward, x)
    for half in (slice(0, 1), slice(1, 2)):
        (model(ids[half], targets[half]) / 2).backward()
    for p, expected in zip(model.parameters(), whole, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_initial_weights():
    """GPT-2's: deviation 0.02, of what goes into a residual sum 0.02 / sqrt(2 n_layer); biases 0, norms 1."""
    model = make(n_embd=64, vocab_size=500, block_size=64)
    for name, p in model.named_parameters():
        w = p.numpy()
        if p.ndim == 1:
            assert (w == (0 if name.endswith("bias") else 1)).all(), name
            continue
        deviation = 0.02 / math.sqrt(2 * 2) if name.endswith("c_proj.weight") else 0.02
        assert w.std() == pytest.approx(deviation, rel=5 / math.sqrt(w.size)), name
        assert abs(w.mean()) < 5 * deviation / math.sqrt(w.size), name


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 8), (1, 1)])
def test_any_batch_shape(shape, device):
    model, ids = make(), tg.zeros(*shape, dtype=tg.int64)
    assert model(ids).shape == (*shape, 16)
    loss = model(ids, ids)
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())


# Generation


def greedy_without_cache(model, ids, n):
    """The definition: each time the most likely token after the last block_size."""
    ids = ids.numpy()
    for _ in range(n):
        logits = model(tg.Tensor(ids[:, -model.config.block_size :])).numpy()[:, -1]
        ids = np.concatenate([ids, logits.argmax(axis=1)[:, None]], axis=1)
    return ids


@pytest.mark.parametrize("prompt", [1, 3, 8, 11])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_changes_nothing(variant, prompt, device):
    """Greedy, from prompts shorter and longer than the context, to well beyond it."""
    model = spread(make(dtype=tg.float64, **VARIANTS[variant])).eval()
    ids = tg.Tensor(np.random.default_rng(1).integers(0, 16, (3, prompt)))
    found = model.generate(ids, 12, temperature=0)
    np.testing.assert_array_equal(found.numpy(), greedy_without_cache(model, ids, 12))
    assert len(np.unique(found.numpy()[:, prompt:])) > 1


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-300}, {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "top_p": 1.0}]
)
def test_the_narrowest_choices_are_greedy(options, device):
    model, ids = spread(make()), tg.Tensor([[1, 2], [3, 4]])
    expected = model.generate(ids, 10, temperature=0)
    assert model.generate(ids, 10, **options).tolist() == expected.tolist()


def expected_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """Written out: keep the k most likely, then the fewest of those that together have probability p."""
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    p[order[top_k:] if top_k is not None else []] = 0
    p /= p.sum()
    if top_p is not None:
        kept, total = [], 0.0
        for i in order:
            if total >= top_p:
                break
            kept.append(i)
            total += p[i]
        p[[i for i in range(len(p)) if i not in kept]] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 99},
        {"top_p": 0.7},
        {"top_p": 1.0},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [tg.float32, tg.bfloat16])
def test_samples_have_the_right_distribution(options, dtype, device):
    logits = np.array([1.0, -2.0, 0.5, 3.0, -np.inf, 2.0, 2.0, 0.0])
    n = 40_000
    p = expected_distribution(logits, **options)
    z = tg.Tensor(np.broadcast_to(logits, (n, 8)), dtype=dtype)
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    drawn = sample(z, drawn=random.default_generator.next_draw(), **options)
    found = np.bincount(drawn.numpy().ravel(), minlength=8) / n
    assert drawn.shape == (n, 1)
    assert (found[p == 0] == 0).all()
    assert (abs(found - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


def test_the_choice_of_a_row_is_its_own(device):
    """Rows of a batch draw numbers of their own, from their own logits."""
    z = np.full((2000, 4), -np.inf)
    z[np.arange(2000), np.arange(2000) % 4] = 0
    z[1000:] = 0
    drawn = sample(tg.Tensor(z, dtype=tg.float32), 1.0, None, None, (3, 0)).numpy().ravel()
    np.testing.assert_array_equal(drawn[:1000], np.arange(1000) % 4)
    assert (np.bincount(drawn[1000:], minlength=4) > 180).all()


def test_seeds(device):
    """A seed fixes the tokens and leaves the global generator alone; without one they come from that generator."""
    model, ids = make(), tg.Tensor([[1]])
    before = random.default_generator.state_dict()
    first = model.generate(ids, 20, seed=1).tolist()
    assert model.generate(ids, 20, seed=1).tolist() == first
    assert model.generate(ids, 20, seed=2).tolist() != first
    assert random.default_generator.state_dict() == before
    free = [model.generate(ids, 20).tolist() for _ in range(2)]
    assert free[0] != free[1]
    random.default_generator.load_state_dict(before)
    assert model.generate(ids, 20).tolist() == free[0]


def test_generation_leaves_the_model_as_it_was(device):
    """Dropout is off for it, each module's mode comes back, no gradient appears."""
    model = make(dropout=0.5)
    model.h[0].eval()
    modes = [module.training for module in model.modules()]
    ids = tg.Tensor([[1, 2]])
    assert model.generate(ids, 9, temperature=0).tolist() == model.generate(ids, 9, temperature=0).tolist()
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(IndexError):
        model.generate(tg.Tensor([[99]]), 1).tolist()
    assert [module.training for module in model.modules()] == modes
    assert tg.is_grad_enabled()


@pytest.mark.parametrize("dtype", [tg.float64, tg.float16, tg.bfloat16])
def test_generation_in_other_types(dtype, device):
    model = make(dtype=dtype)
    for ids in (tg.Tensor([[1, 2]]), tg.Tensor([[1, 2]], dtype=tg.int32)):
        found = model.generate(ids, 10, seed=0)
        assert found.shape == (1, 12)
        assert found.dtype == ids.dtype
        assert found.tolist()[0][:2] == [1, 2]
        assert 0 <= found.min().item() <= found.max().item() < 16


def test_no_new_tokens(device):
    assert make().generate(tg.Tensor([[1, 2]]), 0).tolist() == [[1, 2]]


# Errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
        ({"block_size": -1}, ValueError, "block_size must be at least 1, got -1"),
        ({"n_layer": 1.5}, TypeError, "n_layer must be an int, got 1.5"),
        ({"n_embd": 33}, ValueError, "n_embd must be a multiple of n_head, got 33 and 4"),
        ({"n_kv_head": 3}, ValueError, "n_head must be a multiple of n_kv_head, got 4 and 3"),
        ({"n_kv_head": 0}, ValueError, "n_kv_head must be at least 1, got 0"),
        ({"dropout": 1.5}, ValueError, r"dropout: the probability must be in \[0, 1\], got 1.5"),
        ({"dropout": None}, TypeError, "dropout: the probability must be a number, got NoneType"),
        ({"activation": "tanh"}, ValueError, "activation must be one of .*, got 'tanh'"),
    ],
)
def test_impossible_configurations(changes, error, message):
    with pytest.raises(error, match=f"GPTConfig: {message}"):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([[[1]]], ValueError, r"GPT: ids must be a Tensor of shape \(B, T\), got list"),
        ([np.array([1])], ValueError, r"GPT: ids must be a Tensor of shape \(B, T\), got \(1,\)"),
        ([np.zeros((1, 9), int)], ValueError, "GPT: T must be at most block_size = 8, got 9"),
        ([np.zeros((1, 2))], TypeError, "embedding: ids must have an integer dtype, got float64"),
        ([np.array([[1, 16]])], IndexError, r"ids must be in \[0, 16\), got 16 at position \(0, 1\)"),
        ([np.array([[1]]), np.array([1])], ValueError, r"targets must have x's shape .*, \(1, 1\), got \(1,\)"),
        ([np.array([[1]]), np.array([[16]])], IndexError, r"targets must be in \[0, 16\) or -100, got 16"),
    ],
)
def test_errors_of_the_model(inputs, error, message, device):
    inputs = [tg.Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
    with pytest.raises(error, match=message):
        make()(*inputs).numpy()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ids": [1]}, ValueError, r"ids must be a Tensor of shape \(B, T\), T > 0, got \(1,\)"),
        ({"ids": [[]]}, ValueError, r"ids must be a Tensor of shape \(B, T\), T > 0, got \(1, 0\)"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0, got -1"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an int, got 2.0"),
        ({"temperature": -1}, ValueError, "temperature must be a finite number of at least 0, got -1"),
        ({"temperature": math.nan}, ValueError, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": math.inf}, ValueError, "temperature must be a finite number of at least 0, got inf"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got 2.0"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, ValueError, r"top_p must be in \(0, 1\], got 1.1"),
        ({"top_p": math.nan}, ValueError, r"top_p must be in \(0, 1\], got nan"),
    ],
)
def test_errors_of_generate(options, error, message, device):
    options = {"ids": [[1]], "max_new_tokens": 1, **options}
    with pytest.raises(error, match=f"generate: {message}"):
        make().generate(tg.Tensor(options.pop("ids")), **options)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_model_that_broke_does_not_generate(weight, temperature, device):
    model = make()
    with tg.no_grad():
        model.ln_f.weight[...] = weight
    with pytest.raises(ValueError, match="generate: the model's logits must be finite numbers, got NaN or infinity"):
        model.generate(tg.Tensor([[1]]), 1, temperature=temperature)


# On the kernels


def three_steps(variant, dtype):
    """The losses of three training steps, and the weights after them. A large eps: without it AdamW turns rounding
    into steps of the size of the learning rate where the gradient is 0, as that of the keys' bias is."""
    model = make(SMALL, dtype, dropout=0.1, n_layer=1, **VARIANTS[variant])
    optimizer = tg.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, max_grad_norm=1.0)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(seed=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.numpy().astype(np.float64) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("variant", "dtype"), [*((v, tg.float32) for v in VARIANTS), ("gpt2", tg.bfloat16)], ids=lambda x: str(x)
)
def test_training_on_kernels_is_training_on_the_mathematics(kernels, monkeypatch, variant, dtype):
    """Every kernel that training uses, every access checked: the same losses and, to rounding, the same weights."""
    losses, weights = three_steps(variant, dtype)
    monkeypatch.setattr(kernel, "runs", lambda x: False)
    expected, exact = three_steps(variant, dtype)
    assert np.allclose(losses, expected, rtol=1e-6 if dtype == tg.float32 else 1e-2)
    for name, w in weights.items():
        assert abs(w - exact[name]).max() <= (1e-6 if dtype == tg.float32 else 4e-3), name
