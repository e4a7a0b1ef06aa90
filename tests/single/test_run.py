"""`hpcstrat run`: which mpiexec it uses, and with which command line."""

import os
import signal
import sys
import types

import pytest
from internals import LaunchError, mpiexec, python_command, worlds

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
            (folder / name).write_text(f"#!/bin/sh\necho '{VERSIONS[program]}'\n")
            (folder / name).chmod(0o755)
            folders.append(str(folder))
        monkeypatch.setenv("PATH", os.pathsep.join(folders))
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
        monkeypatch.setattr(mpiexec, "_find_libraries", lambda: [])
        fake = types.SimpleNamespace(get_vendor=lambda: (library, (5, 0, 1)))
        monkeypatch.setattr(worlds, "load_mpi", lambda: fake)
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
    found = mpiexec.find()
    assert (found.words, found.vendor.name) == ((f"{folder}/mpiexec",), program)


@pytest.mark.parametrize(
    ("library", "other"), [("MPICH", "Open MPI"), ("Open MPI", "MPICH"), ("Open MPI", "unknown")]
)
def test_another_comes_first(host, library, other):
    folders = host(library, other, library)
    assert mpiexec.find().words == (f"{folders[1]}/mpiexec",)


def test_a_systems_name(host):
    (folder,) = host("Open MPI", "Open MPI", name="mpiexec.openmpi")
    assert mpiexec.find().words == (f"{folder}/mpiexec.openmpi",)


@pytest.mark.parametrize(("library", "other"), [("MPICH", "Open MPI"), ("Open MPI", "Intel MPI")])
def test_another_is_refused(host, library, other):
    (folder,) = host(library, other)
    for named in (None, f"{folder}/mpiexec", f"{folder}/mpiexec --option 3"):
        with pytest.raises(
            LaunchError,
            match=rf"mpiexec.* belongs to {other}; but mpi4py loads {library} 5.0.1: each",
        ):
            mpiexec.find(named)


def test_an_unknown_one_is_refused(host):
    host("MPICH", "unknown")
    with pytest.raises(
        LaunchError, match="belongs to an MPI that hpcstrat does not know; but mpi4py loads MPICH"
    ):
        mpiexec.find()


def test_none(host):
    host("MPICH")
    with pytest.raises(
        LaunchError, match="mpi4py loads MPICH 5.0.1, but there is no mpiexec .* --mpiexec PATH"
    ):
        mpiexec.find()
    with pytest.raises(LaunchError, match="--mpiexec: there is no program 'mpiexec.here -x'"):
        mpiexec.find("mpiexec.here -x")


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (ModuleNotFoundError("mpi4py"), "mpi4py"),
        (RuntimeError("cannot load"), "an MPI library that mpi4py can load"),
    ],
    ids=["no mpi4py", "no library"],
)
def test_no_mpi(host, monkeypatch, error, missing):
    host("MPICH", "MPICH")

    def load():
        raise error

    monkeypatch.setattr(worlds, "load_mpi", load)
    with pytest.raises(
        LaunchError, match=f"^{missing} is missing. `pip install .*The error was: {error}"
    ):
        mpiexec.find()


@pytest.mark.parametrize("program", ["MPICH", "Intel MPI"])
def test_the_command_line_of_hydra(host, program):
    (folder,) = host("MPICH", program)
    found = mpiexec.find(f"{folder}/mpiexec --hosts 'a, b'")
    words = [f"{folder}/mpiexec", "--hosts", "a, b", "-n", "3", "python", "a b.py"]
    assert found.command(3, ["python", "a b.py"], ["OMP_NUM_THREADS"]) == words
    assert found.vendor.end_signal == signal.SIGKILL


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("user", [0, 1000])
def test_the_command_line_of_open_mpi(host, monkeypatch, user, ranks):
    (folder,) = host("Open MPI", "Open MPI")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(mpiexec, "physical_cores", lambda: 2)
    words = [f"{folder}/mpiexec", "-n", str(ranks), "--bind-to", "none"]
    words += (
        ["--oversubscribe"] * (ranks == 3)
        + ["--allow-run-as-root"] * (user == 0)
        + ["-x", "OMP_NUM_THREADS"]
    )
    assert mpiexec.find().command(ranks, ["program"], ["OMP_NUM_THREADS"]) == [*words, "program"]


def test_what_a_rank_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "script").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "tool").touch()
    (tmp_path / "tool").chmod(0o755)
    python = sys.executable
    for words, command in [
        (["train.py", "-n", "3"], [python, "train.py", "-n", "3"]),
        (["script"], [python, "script"]),
        (["folder"], [python, "folder"]),
        (["python", "-c", "pass"], [python, "-c", "pass"]),
        (["./tool", "x"], ["./tool", "x"]),
        (["sh", "-c", "true"], ["sh", "-c", "true"]),
    ]:
        assert python_command(words, None) == command
    for option in ("-m", "-c"):
        assert python_command(["a.b", "-x"], option) == [python, option, "a.b", "-x"]
    for name in ("missing.py", "no-such-program"):
        with pytest.raises(
            LaunchError, match=f"^there is no file '{name}', and no program of this name"
        ):
            python_command([name], None)


def test_the_threads_of_a_core_count_once():
    assert 1 <= mpiexec.physical_cores() <= len(os.sched_getaffinity(0))
