"""What tests/single is: one process, on the CPU."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_gpus():
    """Examples and tests here print and compare NumPy arrays; what GPUs do is for tests/parallel and tests/launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
