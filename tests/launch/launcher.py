"""What is needed for `torch` and `jax` in jobs."""

import importlib.util

import pytest
import simulated_gpu


def skip_unless_it_computes(library, are_gpus_seen):
    """Skips a test of `torch` or `jax`, or of neither, that cannot compute where replicas do."""
    if library not in ("torch", "jax"):
        return
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if are_gpus_seen and simulated_gpu.is_wanted():
        pytest.skip(f"{library} does not know simulated GPUs")
    if are_gpus_seen and not _has_cuda(library):
        pytest.skip(f"{library} is installed without CUDA")


def _has_cuda(library):
    # How it was built: CUDA must not start in the process of the tests.
    if library == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        return torch.version.cuda is not None
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
