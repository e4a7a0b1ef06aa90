"""What tests/single is: one process, on the CPU."""

import os

# Examples and tests here print and compare NumPy arrays; what GPUs do is for tests/parallel and tests/launch.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
