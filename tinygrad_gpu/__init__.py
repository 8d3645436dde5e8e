"""tinygrad_gpu: a small GPU training stack; tensors and autograd on CuPy or NumPy, with explicit backward rules."""

from . import autograd, cuda, data, functional, gpt, io, nn, optim, testing, trainer
from ._version import __version__
from .autograd import enable_grad, is_grad_enabled, no_grad
from .config import config
from .creation import arange, from_dlpack, full, ones, ones_like, rand, randint, randn, zeros, zeros_like
from .device import default_device, set_default_device
from .dtypes import bfloat16, float16, float32, float64, int32, int64
from .dtypes import bool_ as bool
from .random import manual_seed
from .recompute import checkpoint
from .tensor import Tensor, concat, matmul, maximum, minimum, stack, where
