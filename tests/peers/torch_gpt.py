"""The GPT of tinygrad_gpu.gpt, written in PyTorch from the same papers: every step spelled out, names as there."""

import math

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

ACTIVATIONS = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.key_heads = config.n_head, config.n_kv_head or config.n_head
        self.width = config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, self.width * (self.heads + 2 * self.key_heads), config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, config.bias)

    def forward(self, x):
        b, t, c = x.shape
        heads = self.c_attn(x).view(b, t, self.heads + 2 * self.key_heads, self.width).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.key_heads, self.key_heads), dim=1)
        k, v = (a.repeat_interleave(self.heads // self.key_heads, dim=1) for a in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.width)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.act, gated = ACTIVATIONS[config.activation], config.activation == "swiglu"
        width = 8 * math.ceil(config.n_embd / 3) if gated else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, width, config.bias)
        self.c_gate = nn.Linear(config.n_embd, width, config.bias) if gated else None
        self.c_proj = nn.Linear(width, config.n_embd, config.bias)

    def forward(self, x):
        return self.c_proj(self.act(self.c_gate(x)) * self.c_fc(x) if self.c_gate else self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        if self.norm_first:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def loss(model, ids, targets):
    """The mean cross-entropy of the targets that are not -100."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
