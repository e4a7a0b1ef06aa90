"""hpcstrat.torch where there is no PyTorch, or nobody asks for it."""

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


@pytest.mark.parametrize(
    "call", [lambda: hs.torch.seed(0), lambda: hs.torch.load(__file__), lambda: hs.torch.save({}, "unused")]
)
def test_without_pytorch(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^(seed|load|save) needs PyTorch, which cannot be imported .*; install it"):
        call()
