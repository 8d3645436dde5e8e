"""What parts of a matrix product take: written by benchmarks/tune_gemm.py, read by gemm_config.py.

NVIDIA H200, 2026-11-30, in microseconds. Of each kernel and tile: a step of its depth along K, and besides all steps of
a piece its begin and end, by where a and b lie ("kn": a along K, b along N). Of pieces' sums: a launch, and a megabyte.
MEMORY: megabytes that memory moves.
"""

COSTS = {
    ("gemm_sm90", "128x192"): {"kk": (0.49, 0.34), "kn": (0.4928, 0.53), "mk": (0.4906, 0.45), "mn": (0.4901, 0.66)},
    ("gemm_sm90", "128x256"): {"kk": (0.6415, 1.92), "kn": (0.6421, 2.07), "mk": (0.64, 2.0), "mn": (0.639, 2.17)},
    ("gemm_sm90", "192x192"): {"kk": (0.8003, 1.57), "kn": (0.7905, 1.89), "mk": (0.7978, 1.75), "mn": (0.752, 2.24)},
    ("gemm_sm90", "128x128"): {"kk": (0.3373, 0.51), "kn": (0.3297, 0.81), "mk": (0.3319, 0.8), "mn": (0.3281, 0.97)},
    ("gemm_sm80", "128x256"): {"kk": (1.0965, 5.69), "kn": (1.091, 5.71), "mk": (1.1003, 5.76), "mn": (1.1036, 5.71)},
    ("gemm_sm80", "64x64"): {"kk": (0.975, 0.98), "kn": (0.9558, 1.51), "mk": (0.9845, 1.1), "mn": (0.9661, 1.6)},
    ("gemm", "128x128"): {"kk": (3.4961, 2.16), "kn": (3.5817, 2.2), "mk": (3.5897, 2.15), "mn": (3.4679, 1.66)},
    ("gemm", "64x64"): {"kk": (1.2044, 0.0), "kn": (1.1231, 0.0), "mk": (1.1893, 0.0), "mn": (1.1467, 0.0)},
}
SUM = (3.75, 0.211)
MEMORY = 4.26
