"""`hpcstrat run`: which mpiexec it finds, and with which options it starts it."""

import argparse
import os
import sys
import types

import pytest
from internals import launcher, mpi_library

VERSIONS = {
    "Open MPI": "mpiexec (Open MPI) 5.0.8",
    "MPICH": "HYDRA build details:\n    Version: 5.0.0",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.9",
    "unknown": "some launcher 1.0",
}


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host with mpiexecs of these MPIs, in PATH order; mpi4py loads the library of `library`."""

    def make(library, *programs, name="mpiexec"):
        folders = []
        for program in programs:
            folder = tmp_path / program.replace(" ", "_")
            folder.mkdir()
            # It writes down how it was started.
            text = f"echo '{VERSIONS[program]}'; printf '%s\\n' \"$*\" >>{tmp_path}/started"
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
            folders.append(str(folder))
        monkeypatch.setenv("PATH", os.pathsep.join([*folders, "/usr/bin", "/bin"]))
        monkeypatch.setattr(os, "get_exec_path", lambda: folders)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
        nothing = types.SimpleNamespace(read_text=lambda: "")
        monkeypatch.setattr(launcher, "Path", lambda path: nothing)
        fake = types.SimpleNamespace(get_vendor=lambda: (library, (5, 0, 1)))
        monkeypatch.setattr(mpi_library, "load", lambda: fake)
        return folders

    return make


@pytest.mark.parametrize(
    ("library", "programs", "name"),
    [  # the last program is the one
        ("MPICH", ["MPICH"], "mpiexec"),
        ("MPICH", ["Intel MPI"], "mpiexec"),
        ("Intel MPI", ["MPICH"], "mpiexec"),
        ("MVAPICH", ["Open MPI", "MPICH"], "mpiexec"),
        ("MPICH", ["unknown", "Open MPI", "MPICH"], "mpiexec"),
        ("Open MPI", ["MPICH", "unknown", "Open MPI"], "mpirun"),
        ("Open MPI", ["Open MPI"], "mpiexec.openmpi"),
    ],
)
def test_an_mpiexec_of_the_library_is_found(host, library, programs, name):
    path = f"{host(library, *programs, name=name)[-1]}/{name}"
    assert launcher.find_mpiexec() == ([path], programs[-1])
    words = [path, "--hosts", "a, b"]
    assert launcher.find_mpiexec(f"{path} --hosts 'a, b'") == (words, programs[-1])


@pytest.mark.parametrize(
    ("library", "other", "said"),
    [
        ("MPICH", "Open MPI", "is that of Open MPI"),
        ("Open MPI", "Intel MPI", "is that of Intel MPI"),
        ("MPICH", "unknown", "is no known mpiexec"),
    ],
)
def test_another_is_refused(host, library, other, said):
    (folder,) = host(library, other)
    for named in (None, f"{folder}/mpiexec", f"{folder}/mpiexec --option 3"):
        facts = f"^mpi4py loads {library} 5.0.1, but {named or f'{folder}/mpiexec'} {said}"
        with pytest.raises(RuntimeError, match=facts):
            launcher.find_mpiexec(named)


def test_none(host, monkeypatch):
    host("MPICH")
    with pytest.raises(RuntimeError, match="^mpi4py loads MPICH 5.0.1, but no mpiexec .*--mpiexec"):
        launcher.find_mpiexec()
    with pytest.raises(RuntimeError, match="mpiexec.here -x is no known mpiexec"):
        launcher.find_mpiexec("mpiexec.here -x")
    for error in (ModuleNotFoundError("mpi4py"), RuntimeError("cannot load")):

        def load(error=error):
            raise error

        monkeypatch.setattr(mpi_library, "load", load)
        with pytest.raises(RuntimeError, match=rf"MPI is missing \({error}\): `pip install "):
            launcher.find_mpiexec()


@pytest.mark.parametrize(
    ("vendor", "more"),
    [("MPICH", ""), ("Open MPI", "--bind-to none --oversubscribe --allow-run-as-root ")],
)
def test_the_options_of_mpiexec(host, tmp_path, vendor, more):
    (folder,) = host(vendor, vendor)
    options = argparse.Namespace(n=3, restarts=0, mpiexec=f"{folder}/mpiexec --x y")
    options.python_option, options.program, options.arguments = ["-m"], "a", ["-n"]
    assert launcher.run(options) == 0
    started = (tmp_path / "started").read_text().splitlines()
    # First it was asked for its version.
    assert started == ["--x y --version", f"--x y -n 3 {more}{sys.executable} -m a -n"]
