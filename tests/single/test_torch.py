"""hpcstrat.torch without PyTorch, or not imported."""

import subprocess
import sys

import pytest

import hpcstrat as hs


def test_it_is_imported_when_it_is_named():
    program = """if True:
        import sys
        import hpcstrat as hs
        assert "hpcstrat.torch" not in sys.modules
        assert hs.torch is sys.modules["hpcstrat.torch"] and "torch" not in sys.modules
        assert not hasattr(hs, "tensorflow")
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


CALLS = {"as_tensors": (0,), "device": (hs.MirroredStrategy(["CPU:0"]),)}


@pytest.mark.parametrize("call", CALLS)
def test_without_pytorch(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=rf"^{call} needs PyTorch, which cannot be imported .*; install it"
    ):
        getattr(hs.torch, call)(*CALLS[call])


def test_the_device_of_what_is_no_strategy():
    with pytest.raises(TypeError, match="^device: strategy is of type str; pass a strategy"):
        hs.torch.device("cuda")  # pyright: ignore[reportArgumentType]
