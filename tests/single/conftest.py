"""tests/single runs in one process, on the CPU."""

import pytest
from internals import gpu


@pytest.fixture(scope="module", autouse=True)
def _no_gpus():
    """Tests here print and compare NumPy arrays; tests/parallel and tests/launch test GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        gpu.visible_gpus.cache_clear()  # tests of another folder may have asked before
        yield
    gpu.visible_gpus.cache_clear()
