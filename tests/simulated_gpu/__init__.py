"""Enters the simulation: for this process, or for programs that it starts. See README.md."""

import ctypes
import functools
import hashlib
import os
import pathlib
import sys

_HERE = pathlib.Path(__file__).parent


def is_wanted():
    """Whether HPCSTRAT_TEST_GPU requests it."""
    return os.environ.get("HPCSTRAT_TEST_GPU") == "simulated"


def is_available():
    """Whether it can run here: it needs a C++ compiler."""
    import kernels_on_host

    return kernels_on_host.is_available()


def enter():
    """Makes `import cupy` find the simulation, and the package find its GPUs."""
    sys.path.insert(0, os.fspath(_HERE))
    # Once loaded, `dlopen` finds the driver by name when the package asks for it.
    ctypes.CDLL(os.fspath(_driver()))


def environment():
    """Variables with which a program finds both. None means to remove the variable."""
    paths = os.fspath(_HERE), os.fspath(_HERE.parent), os.environ.get("PYTHONPATH")
    folders = os.fspath(_driver().parent), os.environ.get("LD_LIBRARY_PATH")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
        "CUDA_VISIBLE_DEVICES": None,  # tests in this process may use it to hide the GPUs
    }


@functools.cache
def _driver():
    import kernels_on_host

    source = (_HERE / "libcuda.cpp").read_text()
    folder = kernels_on_host.cache() / f"driver-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    path = folder / "libcuda.so.1"
    if not path.exists():
        kernels_on_host.build(source, path, ("-O2", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"))
    return path
