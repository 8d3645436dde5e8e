"""Tensor: an array of NumPy or CuPy that knows how it was made. One method an op, each calling its Function."""

import math

import numpy as np

from . import autograd, device, dtypes
from .autograd import Function, Place, Version
from .ops import elementwise, gelu, gemm, reduce, shape, softmax
from .ops.common import check_axis

_NUMBERS = (bool, int, float)


class Tensor:
    """An n-dimensional array on a CPU or GPU, with its gradient.

    data: an array (copied), a Tensor, a number or nested lists. Arrays keep their dtype and CuPy arrays their device;
    Python floats become float32, integers int64. device: "cpu", "cuda", "cuda:1" (a ROCm GPU too); by default
    `tg.default_device()`. With requires_grad, `backward()` of what is computed from it fills `.grad`.
    TypeError for data that are no real numbers, a dtype that is not one of tg's, or a gradient of integers; ValueError
    for nested lists of several lengths, numbers outside an integer dtype, or a name of no device.

    >>> import tinygrad_gpu as tg
    >>> x = tg.Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    tensor([[2., 4.],
            [6., 8.]])
    """

    __slots__ = ("__weakref__", "_base", "_finals", "_grad", "_grad_version", "_home", "_hooks", "_index", "_node",
                 "_requires_grad", "_seen", "_version", "data")  # fmt: skip
    __array_ufunc__ = None  # array + tensor asks Tensor.__radd__

    def __init__(self, data, *, dtype=None, device=None, requires_grad=False):
        self._set(_to_array(data, dtype, device, "Tensor"))
        self.requires_grad_(requires_grad)

    def _set(self, array, base=None, version=None):
        self.data, self._requires_grad = array, False
        self._node, self._index = None, 0
        self._base = None  # a tensor that this is a view of, and that an error about leaves must know
        if base is None:
            self._version = version or Version()
            self._seen = self._version.recorded
        else:
            self._base = base if base._requires_grad or base._base is None else base._base
            self._version, self._seen = base._version, base._seen
        self._grad = None  # the gradient's array, once a backward has reached this leaf
        self._grad_version = None  # the Version of that array, once someone has asked for it
        self._home = None  # where an optimiser wants it
        self._hooks = self._finals = None  # dicts, once there are hooks

    @classmethod
    def _wrap(cls, array, base=None, version=None):
        """A Tensor around an array, with no copy; `base` is the Tensor that it is a view of, `version` its memory's."""
        t = Tensor.__new__(Tensor)
        t._set(array, base, version)
        return t

    # What it is

    requires_grad = property(
        lambda self: self._requires_grad,
        lambda self, value: self.requires_grad_(value),
        doc="Whether backward computes its gradient; can be set for a leaf, as by `requires_grad_`.",
    )
    shape = property(lambda self: self.data.shape, doc="The length of each axis, a tuple.")
    ndim = property(lambda self: self.data.ndim, doc="The number of axes.")
    size = property(lambda self: self.data.size, doc="The number of elements.")
    dtype = property(lambda self: self.data.dtype, doc="The NumPy dtype: tg.float32 …")
    device = property(lambda self: device.of(self.data), doc='The device: "cpu" or "cuda:N".')
    is_leaf = property(lambda self: self._node is None, doc="Whether no recorded op made it.")
    T = property(lambda self: self.permute(*reversed(range(self.ndim))), doc="With the order of axes reversed.")

    def __len__(self):
        if not self.ndim:
            raise TypeError("len: a tensor with no axes has no length")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        values = self.numpy()
        values = values.astype(np.float32) if self.dtype == dtypes.bfloat16 else values
        text = np.array2string(values, precision=4, separator=", ", prefix="tensor(")
        notes = [text]
        if self.dtype not in (dtypes.float32, dtypes.int64, dtypes.bool_):
            notes.append(f"dtype={self.dtype.name}")
        if self.device.partition(":")[0] != device.default_device().partition(":")[0]:
            notes.append(f"device='{self.device}'")
        if not self.size and self.ndim != 1:
            notes.append(f"shape={self.shape}")
        if self.requires_grad:
            notes.append("requires_grad=True")
        return f"tensor({', '.join(notes)})"

    # Values out, and exchange with other libraries

    def numpy(self):
        """The values as a NumPy array: shared memory on the CPU (backward knows of no change there), a copy from a GPU.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2).numpy()
        array([1., 1.], dtype=float32)
        """
        array = device.put(self.data, "cpu")
        device.synchronized()
        return array

    def item(self):
        """The value of a one-element tensor as a Python number; ValueError for another size.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([2.5]).item()
        2.5
        """
        if self.size != 1:
            raise ValueError(f"item: the tensor must have one element, got shape {self.shape}")
        return self.numpy().item()

    def tolist(self):
        """The values as nested lists (a number for a tensor with no axes).

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([[1, 2], [3, 4]]).tolist()
        [[1, 2], [3, 4]]
        """
        return self.numpy().tolist()

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())

    def __format__(self, spec):
        return format(self.item(), spec) if spec and not self.ndim else object.__format__(self, spec)

    def __array__(self, dtype=None, copy=None):
        if not isinstance(self.data, np.ndarray):
            raise TypeError(f"__array__: the tensor is on {self.device}; use .numpy() to copy it from there")
        if copy is False and dtype is not None and dtype != self.dtype:
            raise ValueError(f"__array__: a {self.dtype} tensor as {dtype} needs a copy")
        return self.data.astype(dtype or self.dtype, copy=bool(copy))

    @property
    def __cuda_array_interface__(self):
        if isinstance(self.data, np.ndarray):
            raise AttributeError("__cuda_array_interface__: the tensor is on the CPU")
        return self.data.__cuda_array_interface__

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()

    # Gradients

    @property
    def grad(self):
        """The gradient, a Tensor, or None before a backward reaches this leaf. It is a view of the place where backward
        sums it; assigning copies into that place, assigning None forgets it."""
        if self._grad is None:
            return None
        self._grad_version = self._grad_version or Version()
        return Tensor._wrap(self._grad, version=self._grad_version)

    @grad.setter
    def grad(self, value):
        if value is None:
            self._forget_grad()
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"grad: must be a Tensor or None, got {type(value).__name__}")
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"grad: must have shape {self.shape} on {self.device}, got {value.shape} on {value.device}"
            )
        place = self._grad_place().array if self._grad is None else self._grad
        if place is not value.data:
            with device.current(place), np.errstate(all="ignore"):
                place[...] = value.data
            self._keep_grad(place)

    @property
    def _grad_dtype(self):
        return self.dtype

    def _empty_grad(self):
        with device.current(self.data):
            return device.array_module(self.data).empty(self.shape, self._grad_dtype)

    def _grad_place(self):
        """The Place in which a backward sums this leaf's gradient. A hook sees what this backward brings, so that where
        there is a gradient already and a hook too, the sum comes after the hook."""
        if self._grad is not None and not self._hooks:
            return Place(self._grad, True)
        return Place(self._empty_grad() if self._home is None or self._grad is not None else self._home, False)

    def _take_grad(self, place):
        """The walk has summed this leaf's gradient in `place`: run the hooks and keep it."""
        array = place.array
        if self._hooks:
            changed = autograd.call_hooks(self._hooks, array)
            if changed is not array:
                array[...] = changed
        if self._grad is not None and self._grad is not array:
            self._grad += array
            array = self._grad
        self._keep_grad(array)
        for fn in list((self._finals or {}).values()):
            fn(self)

    def _keep_grad(self, array):
        """`array` was written and is the gradient now: count the change for those who saved what `.grad` gave."""
        self._grad = array
        if self._grad_version is not None:
            self._grad_version.value += 1

    def _forget_grad(self):
        self._grad = None
        if self._home is None:  # the next gradient gets memory of its own
            self._grad_version = None

    def _add_retained(self, g):
        self._grad = g.copy() if self._grad is None else device.as_array(self._grad + g)
        self._grad_version = None

    def backward(self, gradient=None, retain_graph=False):
        """Add the gradient of this tensor to the `.grad` of every leaf it was computed from.

        gradient: dL/dself, a Tensor of this shape; 1 by default for one element. The graph is released as it is passed;
        retain_graph=True keeps it for a second backward. RuntimeError where there is no graph, where it was released,
        or where an array that it needs was changed in place, before any gradient changes.

        >>> import tinygrad_gpu as tg
        >>> x = tg.Tensor([1.0, 2.0], requires_grad=True)
        >>> (3 * x).backward(tg.Tensor([1.0, 10.0]))
        >>> x.grad
        tensor([ 3., 30.])
        """
        autograd.backward(self, gradient, retain_graph)

    def requires_grad_(self, requires_grad=True):
        """Ask for the gradient of a leaf, or no longer; gives the tensor itself.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).requires_grad_()
        tensor([1.], requires_grad=True)
        """
        if requires_grad and not dtypes.is_float(self.dtype):
            raise TypeError(f"requires_grad_: only floating tensors have gradients, got {self.dtype}")
        if not requires_grad and self._node is not None:
            raise RuntimeError("requires_grad_: only a leaf can stop requiring its gradient; use detach()")
        self._requires_grad = bool(requires_grad)
        return self

    def retain_grad(self):
        """Keep the gradient of a result in its `.grad` too, as for a leaf.

        >>> import tinygrad_gpu as tg
        >>> y = tg.ones(1, requires_grad=True) * 3
        >>> y.retain_grad()
        >>> (y * y).backward()
        >>> y.grad
        tensor([6.])
        """
        if not self.requires_grad:
            raise RuntimeError("retain_grad: the tensor does not require a gradient")
        if self._node is not None:
            autograd.retain(self)

    def register_hook(self, fn):
        """Call fn(grad) in each backward once the gradient of this tensor is complete; a Tensor it returns replaces it.

        fn may not change grad in place: others may share it. Gives a function that removes the hook again.

        >>> import tinygrad_gpu as tg
        >>> x = tg.ones(1, requires_grad=True)
        >>> remove = x.register_hook(lambda grad: grad * 10)
        >>> (x * 2).backward()
        >>> x.grad
        tensor([20.])
        """
        if not self.requires_grad:
            raise RuntimeError("register_hook: the tensor does not require a gradient")
        if self._node is not None:
            return autograd.add_hook(autograd.hooks_of(self).functions, fn)
        self._hooks = self._hooks or {}
        return autograd.add_hook(self._hooks, fn)

    def register_post_accumulate_grad_hook(self, fn):
        """Call fn(self) in each backward once `.grad` of this leaf is final (data parallel training sends it off then).

        Gives a function that removes the hook again.

        >>> import tinygrad_gpu as tg
        >>> x = tg.ones(1, requires_grad=True)
        >>> remove = x.register_post_accumulate_grad_hook(lambda leaf: print(leaf.grad))
        >>> (x * 2).backward()
        tensor([2.])
        """
        if self._node is not None or not self.requires_grad:
            raise RuntimeError(
                "register_post_accumulate_grad_hook: only a leaf that requires a gradient has a final one"
            )
        self._finals = self._finals or {}
        return autograd.add_hook(self._finals, fn)

    def detach(self):
        """A tensor of the same memory outside the graph.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1, requires_grad=True).detach().requires_grad
        False
        """
        return Tensor._wrap(self.data, version=self._version)

    def __deepcopy__(self, memo):
        if self._node is not None:
            raise RuntimeError("deepcopy: only leaves can be copied so; use detach() or clone()")
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        with device.current(self.data):
            new._set(self.data.copy())
            new._requires_grad = self.requires_grad
            new._grad = None if self._grad is None else self._grad.copy()
        return new

    # Changes in place

    def _check_current(self, name):
        if self._seen != self._version.recorded:
            raise RuntimeError(
                f"{name}: this tensor's memory was changed in place through another view of it, in a graph that this "
                f"tensor is no part of; take the view again after the change, or write base[key] = value"
            )

    def _check_in_place(self, name):
        """RuntimeError where a change in place could not be right."""
        if not device.is_writable(self.data):
            raise RuntimeError(f"{name}: an expanded tensor holds an element several times; clone() it first")
        if not autograd.is_grad_enabled():
            return
        self._check_current(name)
        base = self
        while base is not None:
            if base.requires_grad and base._node is None:
                what = f"{'a leaf' if base is self else 'a view of a leaf'} that requires a gradient"
                raise RuntimeError(f"{name}: {what} cannot be changed in place; do it under no_grad(), or on a clone()")
            base = base._base

    def _replace(self, name, new):
        """Take over the values of `new` in place, and its part in the graph."""
        if new.shape != self.shape:
            raise ValueError(f"{name}: the result must keep the shape {self.shape}, got {new.shape}")
        with device.current(self.data):
            self.data[...] = new.data
        self._version.value += 1
        if autograd.is_grad_enabled() and (new.requires_grad or self.requires_grad):
            self._seen = self._version.record(self.data)
            autograd.take_over(self, new)
        return self

    def _update(self, name, function, other):
        """self = function(self, other) in place, kept in this dtype."""
        self._check_in_place(name)
        # A rule that needs the old values of self saves them; they are about to go.
        keeps = isinstance(other, Tensor) and other.requires_grad and function in (elementwise.Mul, elementwise.Div)
        new = _binary(name, function, self.clone() if keeps else self, other)
        if not dtypes.holds(self.dtype, new.dtype):
            raise TypeError(f"{name}: a {new.dtype} result cannot go into a {self.dtype} tensor")
        return self._replace(name, new.to(self.dtype))

    def __iadd__(self, other):
        return self._update("+=", elementwise.Add, other)

    def __isub__(self, other):
        return self._update("-=", elementwise.Sub, other)

    def __imul__(self, other):
        return self._update("*=", elementwise.Mul, other)

    def __itruediv__(self, other):
        return self._update("/=", elementwise.Div, other)

    def __setitem__(self, key, value):
        key = _to_key(self, key)
        if self._changed_only_at(key, value):
            self._seen = value._seen
        self._check_in_place("setitem")
        if not isinstance(value, _NUMBERS):
            value = _to_tensor(value, self).to(self.dtype)
        self._replace("setitem", shape.SetItem.apply(self, value, key=key))

    def _changed_only_at(self, key, value):
        """Whether the one recorded change that left this tensor behind was of its part at `key`, through the view
        `value`. Python does so in x[key] += y, then assigns the view to x[key]: that makes the change part of x."""
        version = self._version
        if not isinstance(value, Tensor) or value._version is not version:
            return False
        if not value._seen == version.recorded == self._seen + 1:
            return False
        with autograd.no_grad():
            part = self[key].data
        return device.same_elements(part, value.data) and device.same_elements(part, version.changed)

    def __getitem__(self, key):
        return shape.GetItem.apply(self, key=_to_key(self, key))

    # Copies in another form

    def clone(self):
        """A copy, in the graph.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).clone()
        tensor([1.])
        """
        return shape.Contiguous.apply(self)

    def contiguous(self):
        """The tensor itself where its memory is C-contiguous, else a copy that is.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(2, 3).T.contiguous().data.flags.c_contiguous
        True
        """
        return self if self.data.flags.c_contiguous else shape.Contiguous.apply(self)

    def to(self, target):
        """As another dtype or on another device: `x.to(tg.float16)`, `x.to("cuda")`; itself where nothing changes.

        TypeError for what is neither, RuntimeError for a GPU where there is none.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).to(tg.float16)
        tensor([1.], dtype=float16)
        """
        if isinstance(target, str) and target.partition(":")[0] in ("cpu", "cuda"):
            number = device.index(target, "to")
            there = "cpu" if number is None else f"cuda:{number}"
            return self if there == self.device else shape.Move.apply(self, device=there)
        dtype = dtypes.as_dtype(target, "to")
        return self if dtype == self.dtype else elementwise.Cast.apply(self, dtype=dtype)

    def float(self):
        """As float32.

        >>> import tinygrad_gpu as tg
        >>> tg.arange(2).float()
        tensor([0., 1.])
        """
        return self.to(dtypes.float32)

    def half(self):
        """As float16.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).half()
        tensor([1.], dtype=float16)
        """
        return self.to(dtypes.float16)

    def bfloat16(self):
        """As bfloat16.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).bfloat16()
        tensor([1.], dtype=bfloat16)
        """
        return self.to(dtypes.bfloat16)

    def cpu(self):
        """On the CPU.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).cpu().device
        'cpu'
        """
        return self.to("cpu")

    def cuda(self):
        """On the current GPU; RuntimeError where there is none.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(1).cuda().device if tg.cuda.is_available() else "cuda:0"
        'cuda:0'
        """
        return self.to("cuda")

    # Arithmetic; operands broadcast, dtypes promote as in PyTorch

    def __add__(self, other):
        return _binary("add", elementwise.Add, self, other)

    def __radd__(self, other):
        return _binary("add", elementwise.Add, other, self)

    def __sub__(self, other):
        return _binary("sub", elementwise.Sub, self, other)

    def __rsub__(self, other):
        return _binary("sub", elementwise.Sub, other, self)

    def __mul__(self, other):
        return _binary("mul", elementwise.Mul, self, other)

    def __rmul__(self, other):
        return _binary("mul", elementwise.Mul, other, self)

    def __truediv__(self, other):
        return _binary("div", elementwise.Div, self, other)

    def __rtruediv__(self, other):
        return _binary("div", elementwise.Div, other, self)

    def __pow__(self, other):
        return _binary("pow", elementwise.Pow, self, other)

    def __rpow__(self, other):
        return _binary("pow", elementwise.Pow, other, self)

    def __matmul__(self, other):
        return self.matmul(other)

    def __rmatmul__(self, other):
        return _to_tensor(other, self).matmul(self)

    def __neg__(self):
        return elementwise.Neg.apply(self)

    def __abs__(self):
        return self.abs()

    def __eq__(self, other):
        return _compare("eq", np.equal, self, other)

    def __ne__(self, other):
        return _compare("ne", np.not_equal, self, other)

    def __lt__(self, other):
        return _compare("lt", np.less, self, other)

    def __le__(self, other):
        return _compare("le", np.less_equal, self, other)

    def __gt__(self, other):
        return _compare("gt", np.greater, self, other)

    def __ge__(self, other):
        return _compare("ge", np.greater_equal, self, other)

    def __invert__(self):
        if self.dtype != dtypes.bool_:
            raise TypeError(f"invert: only a bool tensor has a complement, got {self.dtype}")
        return _compare("invert", np.equal, self, False)

    __hash__ = object.__hash__

    def exp(self):
        """e to the power of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([0.0, 1.0]).exp()
        tensor([1.    , 2.7183])
        """
        return elementwise.Exp.apply(_to_float(self))

    def log(self):
        """The natural logarithm of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 10.0]).log()
        tensor([0.    , 2.3026])
        """
        return elementwise.Log.apply(_to_float(self))

    def sqrt(self):
        """The square root of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([4.0]).sqrt()
        tensor([2.])
        """
        return elementwise.Sqrt.apply(_to_float(self))

    def rsqrt(self):
        """1 / sqrt(x) of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([4.0]).rsqrt()
        tensor([0.5])
        """
        return elementwise.Rsqrt.apply(_to_float(self))

    def tanh(self):
        """The hyperbolic tangent of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0]).tanh()
        tensor([0.7616])
        """
        return elementwise.Tanh.apply(_to_float(self))

    def sigmoid(self):
        """1 / (1 + e^-x) of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([0.0]).sigmoid()
        tensor([0.5])
        """
        return elementwise.Sigmoid.apply(_to_float(self))

    def relu(self):
        """max(x, 0) of each element.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([-1.0, 2.0]).relu()
        tensor([0., 2.])
        """
        return elementwise.Relu.apply(self)

    def gelu(self, approximate="none"):
        """x Phi(x) of each element, as `F.gelu`.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0]).gelu()
        tensor([0.8413])
        """
        return gelu.Gelu.apply(self, approximate=approximate)

    def silu(self):
        """x sigmoid(x) of each element (arXiv:1702.03118).

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0]).silu()
        tensor([0.7311])
        """
        return elementwise.Silu.apply(_to_float(self))

    def sin(self):
        """The sine of each element, in radians.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([0.0]).sin()
        tensor([0.])
        """
        return elementwise.Sin.apply(_to_float(self))

    def cos(self):
        """The cosine of each element, in radians.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([0.0]).cos()
        tensor([1.])
        """
        return elementwise.Cos.apply(_to_float(self))

    def abs(self):
        """The absolute value of each element; its gradient at 0 is 0.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([-2.0]).abs()
        tensor([2.])
        """
        return elementwise.Abs.apply(self)

    def clamp(self, min=None, max=None):
        """Each element held within [min, max] (numbers; None is no bound), where the gradient is 1, else 0.

        Float bounds of an integer tensor make it float32. ValueError where both are None, TypeError for no number.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([-2.0, 0.5, 2.0]).clamp(-1, 1)
        tensor([-1. ,  0.5,  1. ])
        """
        bounds = [b for b in (min, max) if b is not None]
        for b in bounds:
            if not isinstance(b, _NUMBERS):
                raise TypeError(f"clamp: min and max must be numbers or None, got {type(b).__name__}")
        return elementwise.Clamp.apply(self.to(dtypes.promote(self, *bounds)), low=min, high=max)

    def pow(self, exponent):
        """x ** exponent, a number or a tensor.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([3.0]).pow(2)
        tensor([9.])
        """
        return self**exponent

    def maximum(self, other):
        """The larger of the two, element by element; a tie shares its gradient.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 5.0]).maximum(3)
        tensor([3., 5.])
        """
        return _binary("maximum", elementwise.Maximum, self, other)

    def minimum(self, other):
        """The smaller of the two, element by element; a tie shares its gradient.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 5.0]).minimum(3)
        tensor([1., 3.])
        """
        return _binary("minimum", elementwise.Minimum, self, other)

    def masked_fill(self, mask, value):
        """A copy with `value` (a number) where the bool tensor `mask` holds; no gradient flows there.

        TypeError for a mask that is not bool, or a value that the dtype cannot hold.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2).masked_fill(tg.Tensor([True, False]), 0.0)
        tensor([0., 1.])
        """
        if not isinstance(mask, Tensor) or mask.dtype != dtypes.bool_:
            raise TypeError(
                f"masked_fill: mask must be a bool Tensor, got {getattr(mask, 'dtype', type(mask).__name__)}"
            )
        if not isinstance(value, _NUMBERS):
            raise TypeError(f"masked_fill: value must be a number, got {type(value).__name__}")
        if not dtypes.holds(self.dtype, dtypes.promote(value)):
            raise TypeError(f"masked_fill: a {self.dtype} tensor cannot hold {value!r}")
        return where(mask, value, self)

    # Reductions: axis an int, several or None for all

    def sum(self, axis=None, keepdims=False):
        """The sum over `axis`; integers and bools give int64, half types are summed in float32.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2, 3).sum(axis=1)
        tensor([3., 3.])
        """
        return reduce.Sum.apply(self, axis=axis, keepdims=keepdims)

    def mean(self, axis=None, keepdims=False):
        """The mean over `axis`; TypeError for integers.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 2.0]).mean()
        tensor(1.5)
        """
        return reduce.Mean.apply(self, axis=axis, keepdims=keepdims)

    def var(self, axis=None, correction=1, keepdims=False):
        """The variance over `axis`: squared distances from the mean, over n - correction.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 2.0, 3.0]).var()
        tensor(1.)
        """
        return reduce.Var.apply(self, axis=axis, keepdims=keepdims, correction=correction)

    def std(self, axis=None, correction=1, keepdims=False):
        """The square root of `var`.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 3.0]).std(correction=0)
        tensor(1.)
        """
        return reduce.Std.apply(self, axis=axis, keepdims=keepdims, correction=correction)

    def max(self, axis=None, keepdims=False):
        """The largest element over `axis` (values alone; `argmax` finds them); ties share the gradient.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([[1.0, 2.0], [4.0, 3.0]]).max(axis=1)
        tensor([2., 4.])
        """
        return reduce.Max.apply(self, axis=axis, keepdims=keepdims)

    def min(self, axis=None, keepdims=False):
        """The smallest element over `axis`; ties share the gradient.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([[1.0, 2.0], [4.0, 3.0]]).min()
        tensor(1.)
        """
        return reduce.Min.apply(self, axis=axis, keepdims=keepdims)

    def argmax(self, axis=None, keepdims=False):
        """Where the first largest element is along `axis` (an int, or None for the flat tensor), int64.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 3.0, 2.0]).argmax()
        tensor(1)
        """
        return Tensor._wrap(reduce.arg("argmax", self.data, axis, keepdims))

    def argmin(self, axis=None, keepdims=False):
        """Where the first smallest element is along `axis`, int64.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([1.0, 3.0, 2.0]).argmin()
        tensor(0)
        """
        return Tensor._wrap(reduce.arg("argmin", self.data, axis, keepdims))

    def logsumexp(self, axis=None, keepdims=False):
        """log(sum(exp(x))) over `axis`, without overflow.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([100.0, 100.0]).logsumexp()
        tensor(100.6931)
        """
        return reduce.LogSumExp.apply(self, axis=axis, keepdims=keepdims)

    def softmax(self, axis=-1):
        """As `F.softmax`.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(2).softmax()
        tensor([0.5, 0.5])
        """
        return softmax.Softmax.apply(self, axis=axis)

    def log_softmax(self, axis=-1):
        """As `F.log_softmax`.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(2).log_softmax()
        tensor([-0.6931, -0.6931])
        """
        return softmax.LogSoftmax.apply(self, axis=axis)

    def matmul(self, other):
        """The matrix product over the last two axes, batches broadcast, as numpy.matmul; half types sum in float32.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2, 3) @ tg.ones(3, 1)
        tensor([[3.],
                [3.]])
        """
        return gemm.MatMul.apply(self, _to_tensor(other, self))

    # Shapes: views of the same memory where NumPy can

    def reshape(self, *shape_):
        """The same elements under another shape; one entry may be -1. A view where the memory allows, else a copy.

        >>> import tinygrad_gpu as tg
        >>> tg.arange(6).reshape(2, -1)
        tensor([[0, 1, 2],
                [3, 4, 5]])
        """
        return shape.Reshape.apply(self, shape=_spread("reshape", shape_))

    def view(self, *shape_):
        """`reshape` that never copies: ValueError where it would have to.

        >>> import tinygrad_gpu as tg
        >>> tg.arange(4).view(2, 2)
        tensor([[0, 1],
                [2, 3]])
        """
        new = self.reshape(*shape_)
        if self.size and not device.may_share_memory(new.data, self.data):
            raise ValueError(
                f"view: shape {new.shape} of a tensor with strides {self.data.strides} needs a copy; use reshape"
            )
        return new

    def flatten(self, start_axis=0, end_axis=-1):
        """The axes from start_axis to end_axis (included) joined into one.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(2, 3, 4).flatten(1).shape
        (2, 12)
        """
        if not self.ndim:
            return self.reshape(1)
        start, end = (check_axis("flatten", a, self.ndim) for a in (start_axis, end_axis))
        if start > end:
            raise ValueError(f"flatten: start_axis must not be after end_axis, got {start_axis} and {end_axis}")
        return self.reshape(*self.shape[:start], math.prod(self.shape[start : end + 1]), *self.shape[end + 1 :])

    def squeeze(self, axis=None):
        """Without its axes of length 1: all of them, or those of `axis` that have it.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(1, 3, 1).squeeze().shape
        (3,)
        """
        return self.reshape(shape.squeezed("squeeze", self.shape, axis))

    def unsqueeze(self, axis):
        """With a new axis of length 1 at `axis`.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(3).unsqueeze(-1).shape
        (3, 1)
        """
        axis = check_axis("unsqueeze", axis, self.ndim + 1)
        return self.reshape(*self.shape[:axis], 1, *self.shape[axis:])

    def transpose(self, a, b):
        """With axes a and b exchanged: a view.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(2, 3, 4).transpose(0, 2).shape
        (4, 3, 2)
        """
        order = list(range(self.ndim))
        a, b = check_axis("transpose", a, self.ndim), check_axis("transpose", b, self.ndim)
        order[a], order[b] = b, a
        return shape.Permute.apply(self, axes=order)

    def permute(self, *axes):
        """With its axes in the given order: a view.

        >>> import tinygrad_gpu as tg
        >>> tg.zeros(2, 3, 4).permute(2, 0, 1).shape
        (4, 2, 3)
        """
        return shape.Permute.apply(self, axes=_spread("permute", axes))

    def expand(self, *shape_):
        """Broadcast to a shape with no copy; -1 keeps the length of an axis.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2, 1).expand(-1, 3).shape
        (2, 3)
        """
        return shape.Expand.apply(self, shape=_spread("expand", shape_))

    def split(self, size, axis=0):
        """Views of pieces along `axis`: each `size` long (the last may be shorter), or of the lengths in a list.

        >>> import tinygrad_gpu as tg
        >>> [piece.shape for piece in tg.zeros(5).split(2)]
        [(2,), (2,), (1,)]
        """
        length = self.shape[check_axis("split", axis, self.ndim)]
        if isinstance(size, int):
            if size < 1:
                raise ValueError(f"split: size must be at least 1, got {size}")
            size = [min(size, length - i) for i in range(0, length, size)] or [0]
        if not isinstance(size, (list, tuple)):
            raise TypeError(f"split: size must be an int or a list of them, got {size!r}")
        return shape.Split.apply(self, sizes=list(size), axis=axis)

    def chunk(self, chunks, axis=0):
        """Views of at most `chunks` pieces of one length (the last may be shorter) along `axis`.

        >>> import tinygrad_gpu as tg
        >>> [piece.shape for piece in tg.zeros(5).chunk(2)]
        [(3,), (2,)]
        """
        if not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"chunk: chunks must be a positive int, got {chunks!r}")
        length = self.shape[check_axis("chunk", axis, self.ndim)]
        return self.split(max(-(-length // chunks), 1), axis)

    def gather(self, axis, index):
        """y[i, j] = x[i, index[i, j]] (for axis 1): index is an integer tensor with as many axes.

        >>> import tinygrad_gpu as tg
        >>> tg.Tensor([[1.0, 2.0], [3.0, 4.0]]).gather(1, tg.Tensor([[1], [0]]))
        tensor([[2.],
                [3.]])
        """
        return shape.Gather.apply(self, _to_tensor(index, self), axis=axis)

    def tril(self, diagonal=0):
        """With 0 above the given diagonal of the last two axes.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2, 2).tril()
        tensor([[1., 0.],
                [1., 1.]])
        """
        return shape.Triangle.apply(self, lower=True, k=diagonal)

    def triu(self, diagonal=0):
        """With 0 below the given diagonal of the last two axes.

        >>> import tinygrad_gpu as tg
        >>> tg.ones(2, 2).triu()
        tensor([[1., 1.],
                [0., 1.]])
        """
        return shape.Triangle.apply(self, lower=False, k=diagonal)


def _to_array(data, dtype, where_, name):
    """A fresh array of `data` on the device `where_`, in one of our dtypes."""
    wanted = None if dtype is None else dtypes.as_dtype(dtype, name)
    array = data.data if isinstance(data, Tensor) else device.as_array(data)
    if not device.is_array(array):
        array, default = _from_python(array, name)
        wanted = wanted or default
    if array.dtype.kind not in "biuf" and not dtypes.is_float(array.dtype):
        raise TypeError(f"{name}: data must be real numbers, got {array.dtype}")
    wanted = wanted or dtypes.as_dtype(array.dtype, name)
    on_host = isinstance(array, np.ndarray)
    if where_ is None:
        where_ = device.default_device() if on_host else device.of(array)
    device.index(where_, name)
    if on_host:
        if wanted.kind == "i" and array.size and not np.can_cast(array.dtype, wanted):
            bounds, low, high = np.iinfo(wanted), array.min().item(), array.max().item()
            if not bounds.min <= low <= high <= bounds.max:
                raise ValueError(f"{name}: data must fit in {wanted}, got {low} to {high}")
        with np.errstate(all="ignore"):
            return device.put(array.astype(wanted), where_)
    moved = device.put(array, where_)
    with device.current(moved):
        return moved.astype(wanted, copy=moved is array)


def _from_python(data, name):
    """A number or nested lists (of Tensors and arrays, too) as a NumPy array, and the dtype that they should have."""

    def on_host(x):
        if isinstance(x, (list, tuple)):
            return [on_host(y) for y in x]
        return x.numpy() if isinstance(x, Tensor) else x

    try:
        array = np.asarray(on_host(data))
    except ValueError:
        raise ValueError(f"{name}: nested lists must have one length at each depth") from None
    integer = array.size and array.dtype.kind in "iu"
    return array, dtypes.int64 if integer else dtypes.bool_ if array.dtype == bool else dtypes.float32


def _to_tensor(x, like):
    """x as a Tensor on the device of `like`; a Tensor as it is."""
    return x if isinstance(x, Tensor) else Tensor(x, device=like.device)


def _to_float(x):
    """Integers and bools as float32, as PyTorch does for functions with real values."""
    return x if dtypes.is_float(x.dtype) else x.to(dtypes.float32)


def _promoted(a, b):
    """Two operands as Tensors of one dtype, or one of them as a Python number of that dtype's kind."""
    like = a if isinstance(a, Tensor) else b
    a, b = (x if isinstance(x, _NUMBERS) else _to_tensor(x, like) for x in (a, b))
    dtype = dtypes.promote(a, b)
    return _cast(a, dtype), _cast(b, dtype), dtype


def _cast(x, dtype):
    """A Tensor in a dtype, or a Python number of its kind."""
    if isinstance(x, Tensor):
        return x if x.dtype == dtype else x.to(dtype)
    return float(x) if dtypes.is_float(dtype) else x


def _binary(name, function, a, b):
    for x in (a, b):
        if not (isinstance(x, (Tensor, np.generic, list, *_NUMBERS)) or device.is_array(x)):
            raise TypeError(f"{name}: operands must be Tensors, arrays or numbers, got {type(x).__name__}")
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        raise TypeError(f"{name}: one operand must be a Tensor, got {type(a).__name__} and {type(b).__name__}")
    a, b, dtype = _promoted(a, b)
    if function is elementwise.Div and not dtypes.is_float(dtype):
        a, b = _cast(a, dtypes.float32), _cast(b, dtypes.float32)
    if function is elementwise.Sub and dtype == dtypes.bool_:
        raise TypeError("sub: bool tensors cannot be subtracted; use != or ~")
    return function.apply(a, b)


def _compare(name, ufunc, a, b):
    if not (isinstance(b, (Tensor, np.generic, list, *_NUMBERS)) or device.is_array(b)):
        return NotImplemented
    a, b, _ = _promoted(a, b)
    if isinstance(b, Tensor) and b.device != a.device:
        raise ValueError(f"{name}: all tensors must be on one device, got {a.device} and {b.device}")
    elementwise.check_broadcast(name, a.data, b.data if isinstance(b, Tensor) else b)
    with device.current(a.data):
        xp = device.array_module(a.data)
        result = getattr(xp, ufunc.__name__)(a.data, b.data if isinstance(b, Tensor) else b)
    return Tensor._wrap(xp.asarray(result))


def _to_key(x, key):
    """A key of [...] as a tuple of ints, slices, None, Ellipsis and arrays on x's device; IndexError for all else."""
    parts = []
    for k in key if isinstance(key, tuple) else (key,):
        if isinstance(k, (list, tuple)):
            try:
                k = Tensor(k, device=x.device, dtype=None if len(k) else dtypes.int64)
            except (TypeError, ValueError):
                raise IndexError(f"getitem: a list as an index must hold integers or bools, got {k!r}") from None
        if isinstance(k, Tensor) or device.is_array(k):
            k = k.data if isinstance(k, Tensor) else k
            if k.dtype.kind not in "iub":
                raise IndexError(f"getitem: an index must hold integers or bools, got {k.dtype}")
            k = device.put(k, x.device)
            if autograd.is_grad_enabled():
                k = k.copy()  # a backward rule needs it as it is now
        elif isinstance(k, (int, np.integer)) and not isinstance(k, bool):
            k = int(k)
        elif isinstance(k, slice):
            if not all(n is None or isinstance(n, (int, np.integer)) for n in (k.start, k.stop, k.step)):
                raise IndexError(f"getitem: the bounds and step of a slice must be ints or None, got {k}")
        elif not (k is None or k is Ellipsis):
            raise IndexError(f"getitem: an index must be an int, slice, None, ... or array, got {type(k).__name__}")
        parts.append(k)
    shapes = [k.shape for k in parts if device.is_array(k) and k.dtype != dtypes.bool_]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise IndexError(f"getitem: the shapes of index arrays must broadcast, got {shapes}") from None
    return tuple(parts)


def _spread(name, args):
    """shape arguments given one by one or as one sequence; TypeError unless all are ints."""
    args = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    for n in args:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"{name}: expected ints, got {n!r}")
    return tuple(int(n) for n in args)


def where(condition, a, b):
    """a where the bool tensor `condition` holds, else b: tensors that broadcast, or numbers.

    TypeError for a condition that is not bool, ValueError for shapes that do not broadcast.

    >>> import tinygrad_gpu as tg
    >>> tg.where(tg.Tensor([True, False]), 1.0, tg.zeros(2))
    tensor([1., 0.])
    """
    if not isinstance(condition, Tensor):
        raise TypeError(f"where: condition must be a Tensor, got {type(condition).__name__}")
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = Tensor(a, device=condition.device)
    a, b, _ = _promoted(a, b)
    return elementwise.Where.apply(condition, a, b)


def maximum(a, b):
    """The larger of a and b, element by element (tensors or numbers, broadcast); a tie shares its gradient.

    >>> import tinygrad_gpu as tg
    >>> tg.maximum(tg.Tensor([1.0, 5.0]), tg.Tensor([2.0, 3.0]))
    tensor([2., 5.])
    """
    return _binary("maximum", elementwise.Maximum, a, b)


def minimum(a, b):
    """The smaller of a and b, element by element; a tie shares its gradient.

    >>> import tinygrad_gpu as tg
    >>> tg.minimum(tg.Tensor([1.0, 5.0]), tg.Tensor([2.0, 3.0]))
    tensor([1., 3.])
    """
    return _binary("minimum", elementwise.Minimum, a, b)


def matmul(a, b):
    """The matrix product of two Tensors, as `Tensor.matmul`.

    >>> import tinygrad_gpu as tg
    >>> tg.matmul(tg.ones(2), tg.ones(2))
    tensor(2.)
    """
    if not isinstance(a, Tensor):
        raise TypeError(f"matmul: operands must be Tensors, got {type(a).__name__}")
    return a.matmul(b)


def concat(tensors, axis=0):
    """The tensors one after another along `axis`; their other axes and devices must agree, dtypes promote.

    >>> import tinygrad_gpu as tg
    >>> tg.concat([tg.zeros(1), tg.ones(2)])
    tensor([0., 1., 1.])
    """
    tensors = _sequence("concat", tensors)
    dtype = dtypes.promote(*tensors)
    return shape.Concat.apply(*(t.to(dtype) for t in tensors), axis=axis)


def stack(tensors, axis=0):
    """Tensors of one shape along a new axis.

    >>> import tinygrad_gpu as tg
    >>> tg.stack([tg.zeros(2), tg.ones(2)], axis=1)
    tensor([[0., 1.],
            [0., 1.]])
    """
    tensors = _sequence("stack", tensors)
    for t in tensors:
        if t.shape != tensors[0].shape:
            raise ValueError(f"stack: shapes must be the same, got {tensors[0].shape} and {t.shape}")
    axis = check_axis("stack", axis, tensors[0].ndim + 1)
    return concat([t.unsqueeze(axis) for t in tensors], axis)


def _sequence(name, tensors):
    """`tensors` as a list; TypeError unless it is a sequence of Tensors, ValueError where it is empty."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name}: expected a list or tuple of Tensors, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"{name}: needs at least one tensor, got none")
    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected Tensors, got {type(t).__name__}")
    return list(tensors)


__all__ = ["Function", "Tensor", "concat", "matmul", "maximum", "minimum", "stack", "where"]
