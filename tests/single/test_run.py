"""`hpcstrat run`: which mpiexec it finds, and with which options."""

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
            text = f"echo '{VERSIONS[program]}'; printf '%s\\n' \"$@\" >>{tmp_path}/started"
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
            folders.append(str(folder))
        monkeypatch.setenv("PATH", os.pathsep.join([*folders, "/usr/bin", "/bin"]))
        monkeypatch.setattr(os, "get_exec_path", lambda: folders)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
        monkeypatch.setattr(
            launcher, "Path", lambda path: types.SimpleNamespace(read_text=lambda: "")
        )
        fake = types.SimpleNamespace(get_vendor=lambda: (library, (5, 0, 1)))
        monkeypatch.setattr(mpi_library, "load", lambda: fake)
        return folders

    return make


@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("MPICH", "MPICH"),
        ("MPICH", "Intel MPI"),
        ("Intel MPI", "MPICH"),
        ("MVAPICH", "MPICH"),
        ("Open MPI", "Open MPI"),
    ],
)
def test_its_own(host, library, program):
    (folder,) = host(library, program)
    assert launcher.find_mpiexec() == ([f"{folder}/mpiexec"], program)
    words = [f"{folder}/mpiexec", "--hosts", "a, b"]
    assert launcher.find_mpiexec(f"{folder}/mpiexec --hosts 'a, b'") == (words, program)


@pytest.mark.parametrize(
    ("library", "other"), [("MPICH", "Open MPI"), ("Open MPI", "MPICH"), ("Open MPI", "unknown")]
)
def test_another_comes_first(host, library, other):
    folders = host(library, other, library)
    assert launcher.find_mpiexec() == ([f"{folders[1]}/mpiexec"], library)


@pytest.mark.parametrize("name", ["mpirun", "mpiexec.openmpi"])
def test_other_names(host, name):
    (folder,) = host("Open MPI", "Open MPI", name=name)
    assert launcher.find_mpiexec() == ([f"{folder}/{name}"], "Open MPI")


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
        words = named or f"{folder}/mpiexec"
        with pytest.raises(
            RuntimeError, match=f"^mpi4py loads {library} 5.0.1, but {words} {said}"
        ):
            launcher.find_mpiexec(named)


def test_none(host):
    host("MPICH")
    with pytest.raises(RuntimeError, match="^mpi4py loads MPICH 5.0.1, but no mpiexec .*--mpiexec"):
        launcher.find_mpiexec()
    with pytest.raises(RuntimeError, match="mpiexec.here -x is no known mpiexec"):
        launcher.find_mpiexec("mpiexec.here -x")


@pytest.mark.parametrize("error", [ModuleNotFoundError("mpi4py"), RuntimeError("cannot load")])
def test_no_mpi(host, monkeypatch, error):
    host("MPICH", "MPICH")

    def load():
        raise error

    monkeypatch.setattr(mpi_library, "load", load)
    with pytest.raises(RuntimeError, match=rf"MPI is missing \({error}\): `pip install "):
        launcher.find_mpiexec()


@pytest.mark.parametrize("vendor", ["MPICH", "Open MPI"])
def test_the_options_of_mpiexec(host, tmp_path, vendor):
    (folder,) = host(vendor, vendor)
    options = argparse.Namespace(
        n=3,
        restarts=0,
        mpiexec=f"{folder}/mpiexec --x y",
        python_option=["-m"],
        program="a",
        arguments=["-n"],
    )
    assert launcher.run(options) == 0
    expected = ["-n", "3"]
    if vendor == "Open MPI":
        expected += ["--bind-to", "none", "--oversubscribe", "--allow-run-as-root"]
    started = (tmp_path / "started").read_text().splitlines()
    # First it was asked for its version.
    assert started == [
        "--x",
        "y",
        "--version",
        "--x",
        "y",
        *expected,
        sys.executable,
        "-m",
        "a",
        "-n",
    ]
