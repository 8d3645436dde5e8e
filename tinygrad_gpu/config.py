"""The few switches, as attributes of one object: `tg.config.gemm = "kernel"`."""

_CHOICES = {"gemm": ("auto", "kernel", "blas"), "allow_tf32": (False, True), "deterministic": (True, False)}


class Config:
    """Settings of the whole process; ValueError for a value that a switch does not have, AttributeError for others.

    gemm: what multiplies matrices on a GPU: "blas" is the vendor's library through CuPy, "kernel" our own, and "auto"
    our own on NVIDIA's GPUs from sm_80 on, elsewhere the library; float64 is always the library's. That never depends
    on whether a graph is being captured: replayed and eager steps agree.
    allow_tf32: whether float32 products may round their factors to TF32's 10 bits of fraction; False: float32 it is.
    deterministic: whether the same seed gives the same bits, run after run. So far every op does, whatever it says.

    >>> import tinygrad_gpu as tg
    >>> tg.config
    Config(gemm='auto', allow_tf32=False, deterministic=True)
    """

    def __init__(self):
        for name, choices in _CHOICES.items():
            setattr(self, name, choices[0])

    def __setattr__(self, name, value):
        if name not in _CHOICES:
            raise AttributeError(f"config: there is no {name}, only {', '.join(_CHOICES)}")
        if value not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"config: {name} must be one of {choices}, got {value!r}")
        super().__setattr__(name, value)

    def __repr__(self):
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in _CHOICES)})"


config = Config()
