"""What parts of a matrix product take: written by benchmarks/tune_gemm.py, read by gemm_config.py.

NVIDIA H200, 2026-11-30, in microseconds. Of each kernel and tile: a step of its depth along K, and besides all steps of
a piece its begin and end, by where a and b lie ("kn": a along K, b along N). Of pieces' sums: a launch, and a megabyte.
MEMORY: megabytes that memory moves.
"""

COSTS = {
    ("gemm_sm90", "128x192"): {"kk": (0.4869, 0.54), "kn": (0.4859, 0.72), "mk": (0.4837, 0.68), "mn": (0.484, 0.75)},
    ("gemm_sm90", "128x256"): {"kk": (0.6336, 1.84), "kn": (0.6331, 1.84), "mk": (0.6304, 1.92), "mn": (0.6307, 1.94)},
    ("gemm_sm90", "192x192"): {"kk": (0.7482, 1.84), "kn": (0.7415, 2.15), "mk": (0.7482, 2.02), "mn": (0.7404, 2.18)},
    ("gemm_sm90", "128x128"): {"kk": (0.3286, 0.48), "kn": (0.3265, 0.89), "mk": (0.3293, 0.83), "mn": (0.3281, 0.89)},
    ("gemm_sm80", "128x256"): {"kk": (1.0854, 5.44), "kn": (1.0814, 5.47), "mk": (1.0933, 5.41), "mn": (1.0915, 5.41)},
    ("gemm_sm80", "64x64"): {"kk": (0.9603, 0.94), "kn": (0.9518, 1.29), "mk": (0.9705, 1.15), "mn": (0.9471, 1.56)},
    ("gemm", "128x128"): {"kk": (3.4908, 1.99), "kn": (3.584, 2.14), "mk": (3.5926, 2.05), "mn": (3.4681, 1.68)},
    ("gemm", "64x64"): {"kk": (1.2044, 0.0), "kn": (1.1233, 0.0), "mk": (1.1893, 0.0), "mn": (1.1445, 0.0)},
}
SUM = (3.75, 0.25)
MEMORY = 4.27
