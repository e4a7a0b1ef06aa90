"""Real CuPy on a host without GPUs, or with hidden GPUs: its argument checks and compiler."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # the arrays of these tests are in host memory, which a GPU must not touch
)
