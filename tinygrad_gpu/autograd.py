"""Reverse-mode differentiation: `Function`, the graph that its calls build, and the walk that takes gradients back.

A call of an op makes a node (the Function instance, `ctx`), which holds an edge for each input that needs a gradient:
to the node that made the input, or to the leaf itself. Nodes are numbered as they are made, so walking them in
descending order meets every consumer before its producers (Griewank and Walther, Evaluating Derivatives, chapter 3).
Nodes hold arrays, never their output Tensor: nothing here is a reference cycle, and memory goes when the last user
lets go.
"""

import contextlib
import inspect
import itertools
import threading
import weakref

import numpy as np

from . import device
from .dtypes import is_float


class _Mode(threading.local):
    enabled = True  # whether calls are recorded
    outer = ()  # what `enabled` was around each grad mode that is entered
    spies = ()  # callables that see every Tensor given to an op (recompute.py)


_mode = _Mode()
_order = itertools.count()


class _GradMode(contextlib.ContextDecorator):
    enabled: bool

    def __enter__(self):
        _mode.outer, _mode.enabled = (*_mode.outer, _mode.enabled), self.enabled

    def __exit__(self, *_):
        *_mode.outer, _mode.enabled = _mode.outer

    def __call__(self, fn):
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            name = type(self).__name__
            raise TypeError(
                f"{name}: the body of {fn.__name__} runs after the call returns; use `with {name}()` inside"
            )
        return super().__call__(fn)


class no_grad(_GradMode):
    """Within it (a context manager or a decorator) no graph is recorded: results have requires_grad False.

    >>> import tinygrad_gpu as tg
    >>> w = tg.ones(2, requires_grad=True)
    >>> with tg.no_grad():
    ...     print((w * 2).requires_grad)
    False
    """

    enabled = False


class enable_grad(_GradMode):
    """Within it the graph is recorded again, inside a `no_grad`.

    >>> import tinygrad_gpu as tg
    >>> w = tg.ones(2, requires_grad=True)
    >>> with tg.no_grad(), tg.enable_grad():
    ...     print((w * 2).requires_grad)
    True
    """

    enabled = True


def is_grad_enabled() -> bool:
    """Whether ops record the graph just now.

    >>> import tinygrad_gpu as tg
    >>> tg.is_grad_enabled()
    True
    """
    return _mode.enabled


@contextlib.contextmanager
def spying(see):
    """Within it, `see(tensor)` is called for each Tensor that an op takes, recorded or not."""
    before = _mode.spies
    _mode.spies = (*before, see)
    try:
        yield
    finally:
        _mode.spies = before


class Version:
    """The changes in place of the memory that a tensor shares with its views: how many (`value`), how many of them were
    recorded in a graph (`recorded`), of which the other tensors of that memory are no part, and which array the last of
    these changed (`changed`)."""

    __slots__ = ("changed", "recorded", "value")

    def __init__(self):
        self.value, self.recorded, self.changed = 0, 0, None

    def record(self, array):
        """Count a recorded change, of what `array` covers; gives the new count."""
        self.recorded, self.changed = self.recorded + 1, array
        return self.recorded


class Place:
    """Where the gradient of one leaf is summed: `array`, and whether it already holds a part of the sum (`filled`).

    A backward rule that asks for it (`ctx.grad_place`) writes `array` with = where `filled` is False, adds into it
    where it is True, sets `filled` at once, since another input may be the same leaf, and returns the Place itself as
    that input's gradient.
    """

    __slots__ = ("array", "filled")

    def __init__(self, array, filled):
        self.array, self.filled = array, filled

    def add(self, g):
        if self.filled:
            self.array += g
        else:
            self.array[...] = g
        self.filled = True


class Function:
    """An op with an explicit gradient; a subclass gives `forward` and `backward`, and `apply` calls and records it.

    forward(ctx, *arrays, **options) takes the arrays of the Tensors given to `apply` (Python numbers and None pass as
    they are) and returns an array or a tuple of arrays. backward(ctx, *grads) takes one gradient an output, of its
    shape and dtype (zeros for an output nobody used; None with `materialize_grads = False`), and returns one an input,
    a tuple if there are several; None for no gradient. It may not change the arrays it is given. Both may be static.

    `ctx.save_for_backward(*arrays)` in forward gives `ctx.saved_arrays` in backward; `ctx.needs_input_grad` says which
    inputs want a gradient. Arrays kept as other attributes of ctx work too, but changes of them in place go unseen.

    >>> import tinygrad_gpu as tg
    >>> class Cube(tg.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x**3
    ...
    ...     @staticmethod
    ...     def backward(ctx, dy):
    ...         (x,) = ctx.saved_arrays
    ...         return 3 * x**2 * dy
    >>> x = tg.Tensor([2.0], requires_grad=True)
    >>> Cube.apply(x).backward()
    >>> x.grad
    tensor([12.])
    """

    __slots__ = ("__weakref__", "_edges", "_hooks", "_order", "_outputs", "_released", "_run", "_saved",
                 "needs_input_grad")  # fmt: skip

    materialize_grads = True

    def save_for_backward(self, *arrays):
        """Keep arrays for the backward rule; a no-op where no input needs a gradient."""
        if any(self.needs_input_grad):
            self._saved = [(a, ()) for a in arrays]

    @property
    def saved_arrays(self):
        """The tuple of arrays given to `save_for_backward`."""
        return tuple(a for a, _ in self._saved)

    def grad_place(self, i):
        """In backward: the Place where the gradient of input i is summed if that input is a leaf, else None.

        >>> import tinygrad_gpu as tg
        >>> class Twice(tg.autograd.Function):
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     def backward(ctx, dy):
        ...         place = ctx.grad_place(0)
        ...         if place is None or place.filled:
        ...             return 2 * dy
        ...         place.array[...] = 2 * dy  # no array between the rule and the leaf
        ...         place.filled = True
        ...         return place
        >>> x = tg.ones(1, requires_grad=True)
        >>> Twice.apply(x).backward()
        >>> x.grad
        tensor([2.])
        """
        target, _ = self._edges[i] or (None, 0)
        return None if target is None or isinstance(target, Function) else self._run.place(target)

    @classmethod
    def apply(cls, *inputs, **options):
        """Run the op on Tensors (Python numbers and None pass through), recording it if a gradient may be asked for.

        TypeError where an input is none of these, an option is a Tensor (it would get no gradient) or forward gives no
        array; ValueError where the Tensors are on several devices; RuntimeError where a recorded change in place of the
        memory of one left it behind.
        """
        Tensor = _tensor.Tensor
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        for t in inputs:
            if not (t is None or isinstance(t, (Tensor, int, float))):
                raise TypeError(f"{cls.__name__}: inputs must be Tensors, numbers or None, got {type(t).__name__}")
        for key, option in options.items():
            if isinstance(option, Tensor):
                raise TypeError(f"{cls.__name__}: Tensors must be given by position, got one as the option {key}")
        first = tensors[0] if tensors else None
        for t in tensors:
            if t is not first and (type(t.data) is not type(first.data) or t.device != first.device):
                raise ValueError(
                    f"{cls.__name__}: all tensors must be on one device, got {first.device} and {t.device}"
                )
            if _mode.enabled:
                t._check_current(cls.__name__)
            for see in _mode.spies:
                see(t)

        ctx = cls()
        ctx.needs_input_grad = tuple(_mode.enabled and isinstance(t, Tensor) and t.requires_grad for t in inputs)
        ctx._saved, ctx._hooks, ctx._released, ctx._run = (), None, False, None
        recorded = any(ctx.needs_input_grad)
        arrays = [t.data if isinstance(t, Tensor) else t for t in inputs]
        with device.current(first.data) if tensors else contextlib.nullcontext(), np.errstate(all="ignore"):
            results = cls.forward(ctx, *arrays, **options)
        several = isinstance(results, tuple)
        outputs, known = [], list(tensors)
        for i, array in enumerate(results if several else (results,)):
            array = device.as_array(array)
            if not device.is_array(array):
                raise TypeError(f"{cls.__name__}.forward: must return arrays, got {type(array).__name__}")
            source = next((t for t in known if array is t.data or _is_view(array, t.data)), None)
            out = Tensor._wrap(array, base=source)
            if recorded and is_float(array.dtype):
                out._requires_grad, out._node, out._index = True, ctx, i
            outputs.append(out)
            known.append(out)
        if recorded:
            ctx._order = next(_order)
            ctx._edges = tuple(
                _edge(t) if needed else None for t, needed in zip(inputs, ctx.needs_input_grad, strict=True)
            )
            ctx._outputs = [(out.shape, out.dtype) for out in outputs]
            ctx._watch(known)
        return tuple(outputs) if several else outputs[0]

    def _watch(self, tensors):
        """Note the version of each saved array that is memory of one of `tensors`."""
        self._saved = [
            (a, [(t._version, t._version.value) for t in tensors if device.may_share_memory(a, t.data)])
            if device.is_array(a)
            else (a, ())
            for a, _ in self._saved
        ]

    def _check(self):
        """RuntimeError unless backward can still run: the graph not released, nothing saved since changed."""
        name = type(self).__name__
        if self._released:
            raise RuntimeError(
                f"backward: the graph through {name} was released by an earlier backward; "
                f"give that one retain_graph=True"
            )
        for i, (a, versions) in enumerate(self._saved):
            if any(version.value != seen for version, seen in versions):
                raise RuntimeError(
                    f"backward: an array that {name} saved (number {i}, shape {a.shape}) was changed in place after "
                    f"the forward pass; use an operation that makes a new tensor, or clone() it first"
                )

    def _release(self):
        self._saved, self._edges, self._released, self._hooks = (), (), True, None
        getattr(self, "__dict__", {}).clear()  # what forward kept as attributes


def _is_view(array, of):
    return array.base is not None and device.may_share_memory(array, of)


def _edge(tensor):
    return (tensor, 0) if tensor._node is None else (tensor._node, tensor._index)


def _key(edge):
    return (id(edge[0]), edge[1])


class _Sum:
    """The gradient of one node output so far. The first part is kept as it came (it may be shared: never written to);
    a second one makes an array of our own, into which further parts are added."""

    __slots__ = ("array", "owned")

    def __init__(self, array):
        self.array, self.owned = array, False

    def add(self, g):
        if self.owned:
            self.array += g
        else:
            self.array, self.owned = device.as_array(self.array + g), True


class _Run:
    """One backward walk.

    Gradients go to the leaves' own places; or, given `targets` (Tensors), to these alone: `found` then receives each by
    its key, and no rule runs that leads to no target. With `stop`, the walk does not go on past a target.
    """

    def __init__(self, roots, targets=None, stop=False, places=()):
        self.targets = None if targets is None else {_key(_edge(t)) for t in targets}
        self.stop = stop
        self.found = {}  # key of a target: its gradient array
        self.places = dict(places)  # id of a leaf: its Place
        self.leaves = {}  # id of a leaf: how many contributions are still to come
        self.sums = {}  # id of a node: a _Sum or None for each output
        self.nodes, self.passed = self._discover([_edge(t) for t in roots])
        self.wanted = self._prune()

    def _is_target(self, edge):
        return self.targets is not None and _key(edge) in self.targets

    def _discover(self, edges):
        """Every node that the roots depend on, latest first, and the ids of those whose inputs the walk goes on to."""
        nodes, passed, stack = {}, set(), list(edges)
        while stack:
            edge = stack.pop()
            target = edge[0]
            if not isinstance(target, Function):
                self.leaves[id(target)] = self.leaves.get(id(target), 0) + 1
                continue
            nodes[id(target)] = target
            if id(target) not in passed and not (self.stop and self._is_target(edge)):
                passed.add(id(target))
                stack.extend(e for e in target._edges if e is not None)
        return sorted(nodes.values(), key=lambda node: node._order, reverse=True), passed

    def _prune(self):
        """Ids of the nodes whose rule must run: all, or those that lead to a target."""
        wanted = set()
        for node in reversed(self.nodes):
            if id(node) in self.passed and (
                self.targets is None
                or any(e is not None and (self._is_target(e) or id(e[0]) in wanted) for e in node._edges)
            ):
                wanted.add(id(node))
        return wanted

    def wants(self, edge):
        """Whether a gradient must be computed for what an edge leads to."""
        if edge is None:
            return False
        if self.targets is None:  # a leaf may have been frozen since
            return isinstance(edge[0], Function) or edge[0].requires_grad
        return self._is_target(edge) or id(edge[0]) in self.wanted

    def place(self, leaf):
        """The Place of a leaf in this run, made when first asked for."""
        place = self.places.get(id(leaf))
        if place is None:
            place = leaf._grad_place() if self.targets is None else Place(leaf._empty_grad(), False)
            self.places[id(leaf)] = place
        return place

    def deliver(self, edge, g, name):
        """Add g, the gradient that the rule `name` gave (an array, a Place or None), where the edge leads."""
        target, index = edge
        if isinstance(g, Place):
            g.filled = True
            return
        if g is None:
            return
        g = device.as_array(g)
        shape, dtype = target._outputs[index] if isinstance(target, Function) else (target.shape, None)
        _check_grad(g, shape, name)
        with device.current(g):
            if dtype is None:
                self.place(target).add(g)
                return
            g = g if g.dtype == dtype else g.astype(dtype)
            sums = self.sums.setdefault(id(target), [None] * len(target._outputs))
            if sums[index] is None:
                sums[index] = _Sum(g)
            else:
                sums[index].add(g)

    def arrive(self, leaf):
        """One contribution to a leaf is in; with the last its gradient is final."""
        self.leaves[id(leaf)] -= 1
        place = self.places.get(id(leaf))
        if self.leaves[id(leaf)] or place is None or not place.filled:
            return
        if self.targets is None:
            with device.current(place.array):
                leaf._take_grad(place)
        elif (id(leaf), 0) in self.targets:
            self.found[id(leaf), 0] = place.array

    @np.errstate(all="ignore")
    def execute(self, roots, starts, retain_graph):
        """Check the whole graph, then walk it from `roots` with their gradients `starts`."""
        for node in self.nodes:
            if id(node) in self.wanted:
                node._check()
        for root, g in zip(roots, starts, strict=True):
            self.deliver(_edge(root), g, "backward")
            if root._node is None:
                self.arrive(root)
        for node in self.nodes:
            edges, sums = node._edges, self.sums.pop(id(node), None)
            if sums is not None:
                self._step(node, [s and s.array for s in sums])
            if id(node) in self.passed:
                for edge in edges:
                    if edge is not None and not isinstance(edge[0], Function):
                        self.arrive(edge[0])
            if id(node) in self.wanted and not retain_graph:
                node._release()

    def _step(self, node, grads):
        """The gradients of a node's outputs are complete: run their hooks, keep those asked for, run the rule."""
        some = next(g for g in grads if g is not None)
        with device.current(some):
            for index, g in enumerate(grads):
                target = g is not None and self._is_target((node, index))
                if target and self.stop:  # the walk that goes on from here will run the hooks
                    self.found[id(node), index], grads[index] = g, None
                elif g is not None:
                    if node._hooks and index in node._hooks:
                        grads[index] = node._hooks[index].run(g)
                    if target:
                        self.found[id(node), index] = grads[index]
            if id(node) in self.wanted and any(g is not None for g in grads):
                self._apply_rule(node, grads, device.array_module(some))

    def _apply_rule(self, node, grads, xp):
        name = type(node).__name__
        if node.materialize_grads:
            grads = [xp.zeros(*out) if g is None else g for g, out in zip(grads, node._outputs, strict=True)]
        node.needs_input_grad = tuple(self.wants(e) for e in node._edges)
        node._run = self
        try:
            results = type(node).backward(node, *grads)
        finally:
            node._run = None
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(node._edges):
            raise RuntimeError(
                f"{name}.backward: must return {len(node._edges)} gradients, one an input, got {len(results)}"
            )
        for edge, g in zip(node._edges, results, strict=True):
            if self.wants(edge):
                self.deliver(edge, g, name)


def _check_grad(g, shape, name):
    if not device.is_array(g):
        raise TypeError(f"{name}.backward: must return arrays or None, got {type(g).__name__}")
    if g.shape != shape:
        raise RuntimeError(f"{name}.backward: the gradient of an input of shape {shape} has shape {g.shape}")


class OutputHooks:
    """What is called when the gradient of one output of a node is complete: hooks, and Tensors that retain it."""

    def __init__(self):
        self.functions = {}
        self.retaining = {}  # id of a Tensor: a weak reference, since a node never holds its output

    def run(self, g):
        g = call_hooks(self.functions, g)
        for ref in self.retaining.values():
            tensor = ref()
            if tensor is not None:
                tensor._add_retained(g)
        return g


def add_hook(hooks, fn):
    """Add fn to the dict `hooks`; gives the function that removes it again."""
    key = object()
    hooks[key] = fn

    def remove():
        hooks.pop(key, None)

    return remove


def call_hooks(hooks, g):
    """The gradient array g after the functions in `hooks`, in their order: what one returns takes its place."""
    Tensor = _tensor.Tensor
    for fn in list(hooks.values()):
        new = fn(Tensor._wrap(g))
        if new is None:
            continue
        if not isinstance(new, Tensor):
            raise TypeError(f"register_hook: the hook must return None or a Tensor, got {type(new).__name__}")
        if new.shape != g.shape or new.device != device.of(g):
            raise ValueError(
                f"register_hook: the hook must return shape {g.shape} on {device.of(g)}, "
                f"got {new.shape} on {new.device}"
            )
        g = new.data.astype(g.dtype, copy=False)
    return g


def hooks_of(tensor) -> OutputHooks:
    """The OutputHooks of a Tensor that an op made, created when first asked for."""
    node = tensor._node
    if node._hooks is None:
        node._hooks = {}
    return node._hooks.setdefault(tensor._index, OutputHooks())


def retain(tensor):
    """Let a Tensor that an op made keep its gradient in `.grad`."""
    hooks_of(tensor).retaining[id(tensor)] = weakref.ref(tensor)


def take_over(tensor, result):
    """Give `tensor`, just changed in place, the part of `result` in the graph; `retain_grad` goes with the tensor."""
    hooks = tensor._node and (tensor._node._hooks or {}).get(tensor._index)
    retained = hooks and hooks.retaining.pop(id(tensor), None)
    tensor._requires_grad, tensor._node, tensor._index = result._requires_grad, result._node, result._index
    if retained:
        retain(tensor)


def _start(name, outputs, gradients):
    """The arrays with which a backward starts, checked: ones for a tensor of one element, else as given."""
    starts = []
    for out, g in zip(outputs, gradients, strict=True):
        if not out.requires_grad:
            raise RuntimeError(f"{name}: the tensor does not require a gradient and has no graph")
        out._check_current(name)
        if g is None:
            if out.size != 1:
                raise RuntimeError(
                    f"{name}: a gradient is needed for an output of shape {out.shape}; only one element has a default"
                )
            starts.append(device.array_module(out.data).ones(out.shape, out.dtype))
            continue
        if not isinstance(g, _tensor.Tensor):
            raise TypeError(f"{name}: the gradient must be a Tensor, got {type(g).__name__}")
        if g.shape != out.shape or g.device != out.device:
            raise ValueError(
                f"{name}: the gradient must have shape {out.shape} on {out.device}, got {g.shape} on {g.device}"
            )
        starts.append(g.data)
    return starts


def backward(tensor, gradient=None, retain_graph=False):
    """`Tensor.backward`: add the gradient of `tensor` to the `.grad` of every leaf that it depends on."""
    starts = _start("backward", [tensor], [gradient])
    with device.current(tensor.data):
        _Run([tensor]).execute([tensor], starts, retain_graph)


def grad(outputs, inputs, grad_outputs=None, retain_graph=False):
    """The gradients of `outputs` with respect to `inputs`, as a tuple of Tensors; no leaf's `.grad` changes.

    outputs, inputs: a Tensor or a list or tuple of them; inputs may be leaves or results. grad_outputs: one Tensor an
    output, of its shape; None (or left out) means 1 for an output of one element. An input on which no output depends
    gets None. Hooks run. TypeError for what is no Tensor; ValueError for another number or shape of gradients;
    RuntimeError for a tensor that requires no gradient, or a graph already released.

    >>> import tinygrad_gpu as tg
    >>> x = tg.Tensor([3.0], requires_grad=True)
    >>> tg.autograd.grad(x * x, x)
    (tensor([6.]),)
    """
    Tensor = _tensor.Tensor
    outputs, inputs, given = (x if isinstance(x, (tuple, list)) else (x,) for x in (outputs, inputs, grad_outputs))
    if not outputs:
        raise ValueError("grad: needs at least one output, got none")
    for t in (*outputs, *inputs):
        if not isinstance(t, Tensor):
            raise TypeError(f"grad: outputs and inputs must be Tensors, got {type(t).__name__}")
        if not t.requires_grad:
            raise RuntimeError("grad: every output and input must require a gradient")
    if grad_outputs is None:
        given = (None,) * len(outputs)
    if len(given) != len(outputs):
        raise ValueError(f"grad: grad_outputs must have one entry an output ({len(outputs)}), got {len(given)}")
    arrays = gradients(outputs, inputs, _start("grad", outputs, given), retain_graph)
    return tuple(
        None if g is None else Tensor._wrap(call_hooks(t._hooks or {}, g).copy())
        for t, g in zip(inputs, arrays, strict=True)
    )


def gradients(outputs, inputs, starts, retain_graph=False, stop=False, places=()):
    """The arrays behind `grad`. With `stop`, an input is taken as given: no gradient reaches it through another input.
    `places` (id of a leaf: Place) says where to sum for leaves."""
    run = _Run(outputs, inputs, stop, places)
    with device.current(starts[0]):
        run.execute(outputs, starts, retain_graph)
    return [run.found.get(_key(_edge(t))) for t in inputs]


from . import tensor as _tensor  # noqa: E402  (at the end: Tensor's methods need Function)
