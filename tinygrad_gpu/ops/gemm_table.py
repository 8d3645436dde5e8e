"""What parts of a matrix product take: written by benchmarks/tune_gemm.py, read by gemm_config.py.

NVIDIA H200, 2026-11-30, in microseconds. Of each kernel and tile: a step of its depth along K, and besides all steps of
a piece its begin and end, by where a and b lie ("kn": a along K, b along N). Of pieces' sums: a launch, and a megabyte.
MEMORY: megabytes that memory moves.
"""

COSTS = {
    ("gemm_sm90", "128x192"): {"kk": (0.4973, 0.46), "kn": (0.4902, 0.78), "mk": (0.4945, 0.51), "mn": (0.4915, 0.67)},
    ("gemm_sm90", "128x256"): {"kk": (0.6479, 1.95), "kn": (0.6449, 2.07), "mk": (0.6467, 1.97), "mn": (0.6439, 2.01)},
    ("gemm_sm90", "192x192"): {"kk": (0.7683, 1.83), "kn": (0.758, 2.19), "mk": (0.7626, 2.11), "mn": (0.7574, 2.32)},
    ("gemm_sm90", "128x128"): {"kk": (0.3357, 0.46), "kn": (0.3297, 0.94), "mk": (0.3327, 0.83), "mn": (0.3325, 0.95)},
    ("gemm_sm80", "128x256"): {"kk": (1.1028, 5.54), "kn": (1.101, 5.49), "mk": (1.1082, 5.57), "mn": (1.1137, 5.48)},
    ("gemm_sm80", "128x128"): {"kk": (1.2433, 4.35), "kn": (1.2216, 4.91), "mk": (1.2128, 4.42), "mn": (1.1664, 4.65)},
    ("gemm_sm80", "64x64"): {"kk": (0.9645, 1.0), "kn": (0.948, 1.55), "mk": (0.9669, 1.31), "mn": (0.9521, 1.56)},
    ("gemm", "128x128"): {"kk": (3.4922, 1.98), "kn": (3.5834, 2.18), "mk": (3.5903, 2.13), "mn": (3.468, 1.81)},
    ("gemm", "64x64"): {"kk": (1.2046, 0.0), "kn": (1.1231, 0.0), "mk": (1.189, 0.0), "mn": (1.1467, 0.0)},
}
SUM = (10.27, 0.083)
MEMORY = 4.27
