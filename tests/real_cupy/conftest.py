"""Real CuPy on a host without a GPU, or with its GPUs hidden: what CuPy itself refuses, and what its compiler does."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # the arrays of these tests are in host memory, which a GPU must not touch
)
