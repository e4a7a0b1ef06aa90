"""hpcstrat.torch without PyTorch, or not imported."""

import sys

import pytest

import hpcstrat as hs

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
