"""Libraries from the C compiler: which is loaded, who compiles, and what is left behind."""

import hashlib
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest
from internals import library_cache

pytestmark = pytest.mark.skipif(library_cache.compiler() is None, reason="there is no C compiler")

SOURCE = "int answer(void) {{ return {}; }}"
PROGRAM = """
import sys
from hpcstrat._update import library_cache
library_cache._SECONDS = float(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(library_cache.load_library("int answer(void) { return 42; }").answer())
"""
LIMIT = 60  # seconds: whatever takes longer hangs


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The folder of the libraries, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "hpcstrat"


@pytest.fixture
def start():
    """Starts a process that loads a library when told to, with a time limit for the compiler."""
    processes = []

    def start(seconds=LIMIT, before=""):
        command = [sys.executable, "-c", before + PROGRAM, str(seconds)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, text=True, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
        )
        processes.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that hangs while a file `hangs` exists. It records its pid and its child's.

    It has read its source then, so the process that started it is in the block that ends it.
    """

    class Compiler:
        hangs = tmp_path / "hangs"
        noted = tmp_path / "noted"

        def processes(self):
            """The pids of all compilers, as soon as there are any."""
            begin = time.monotonic()
            while not self.noted.exists() or not self.noted.read_text().endswith("\n"):
                assert time.monotonic() < begin + LIMIT
                time.sleep(0.01)
            return [int(one) for one in self.noted.read_text().split()]

        def has_ended(self):
            """Whether all processes of the compiler end."""
            begin = time.monotonic()
            while any(map(is_running, self.processes())):
                if time.monotonic() > begin + LIMIT / 2:
                    return False
                time.sleep(0.01)
            return True

    path = tmp_path / "cc"
    path.write_text(f"""#!/bin/sh
cat >source.c
if [ -e {Compiler.hangs} ]; then
    sleep 1000 &
    echo $$ $! >>{Compiler.noted}
    while [ -e {Compiler.hangs} ]; do sleep 0.05; done
    kill $!
fi
exec {library_cache.compiler()} "$@" <source.c
""")
    path.chmod(0o700)
    monkeypatch.setenv("CC", os.fspath(path))
    Compiler.hangs.touch()
    yield Compiler()
    for line in Compiler.noted.read_text().splitlines() if Compiler.noted.exists() else []:
        for one in filter(is_running, map(int, line.split())):
            os.kill(one, signal.SIGKILL)


def is_running(process):
    try:
        return (
            pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False


def begun(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process


def loaded(process):
    """What the process's library answers, and its errors."""
    out, err = process.communicate("\n", timeout=LIMIT)
    return out.strip(), err


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def foreign(path):
    """Creates a valid library at this path, which answers 13."""
    command = [library_cache.compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", os.fspath(path)]
    subprocess.run(command, input=SOURCE.format(13), text=True, check=True)
    path.write_bytes(
        path.read_bytes() + hashlib.blake2b(path.read_bytes(), digest_size=32).digest()
    )
    path.chmod(0o600)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:700])


def zero_the_end(path):
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(len(content) - 4096))


def lose_the_last_byte(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_text(path):
    path.write_text("text")


def empty(path):
    path.write_bytes(b"")


def replace_by_link(path):
    foreign(path)
    path.rename(path.parent.parent / "elsewhere.so")
    path.symlink_to(path.parent.parent / "elsewhere.so")


def replace_by_fifo(path):
    path.unlink()
    os.mkfifo(path)


def open_to_all(path):
    foreign(path)
    path.chmod(0o666)


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files to other users")
    foreign(path)
    os.chown(path, 65534, 65534)


DAMAGES = [
    *(cut_off, zero_the_end, lose_the_last_byte, replace_by_text, empty),
    *(replace_by_link, replace_by_fifo, open_to_all, give_away),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_this_users_whole_library_is_made_anew(home, start, damage):
    library_cache.load_library("int answer(void) { return 42; }")
    (name,) = files(home)
    content = (home / name).read_bytes()
    (home / name).unlink()  # damage to a file that this process has loaded would kill it
    (home / name).write_bytes(content)
    damage(home / name)
    assert loaded(start()) == ("42", "")
    assert files(home) == [name] and (home / name).read_bytes() == content
    status = (home / name).lstat()
    assert stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


@pytest.mark.parametrize("event", ["open", "ctypes.dlopen"])
def test_a_folder_that_takes_the_place_of_the_one_checked_is_not_used(home, start, event):
    """Swapped just before the library is opened, or just before it is loaded."""
    library_cache.load_library("int answer(void) { return 42; }")
    (name,) = files(home)
    home.with_name("other").mkdir(0o700)
    foreign(home.with_name("other") / name)
    program = f"""
import os, sys
import hpcstrat._update.library_cache
os.chdir({os.fspath(home.parent)!r})
def hook(event, arguments):
    if event == {event!r} and str(arguments[0]).endswith({name!r}) and os.path.exists("other"):
        os.rename("hpcstrat", "aside")
        os.rename("other", "hpcstrat")
sys.addaudithook(hook)
"""
    assert loaded(start(before=program)) == ("42", "")
    assert files(home.parent) == ["aside", "hpcstrat"]


def test_libraries_are_told_apart_though_descriptors_are_closed(start):
    program = """
import os
from hpcstrat._update.library_cache import load_library
for number in range(3):
    assert load_library(f"int answer(void) {{ return {number}; }}").answer() == number
    os.closerange(3, 256)
"""
    assert loaded(start(before=program)) == ("42", "")


def test_a_library_is_written_to_the_disk_before_it_gets_its_name(home, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name: (done.append(name), real(*a))[1]
        )
    umask = os.umask(0)
    try:
        assert library_cache.load_library(SOURCE.format(1)).answer() == 1
    finally:
        os.umask(umask)
    assert done == ["fsync", "replace", "fsync"]
    (path,) = home.glob("*.so")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_compiler_that_hangs_ends_with_its_children_and_is_not_tried_again(
    home, compiler, monkeypatch
):
    monkeypatch.setattr(library_cache, "_SECONDS", 0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        library_cache.load_library(SOURCE.format(1))
    assert compiler.has_ended() and files(home) == []
    with pytest.raises(OSError, match="does not try it again"):
        library_cache.load_library(SOURCE.format(2))
    assert len(compiler.processes()) == 2


def test_a_compiler_that_hangs_is_tried_by_one_process(home, compiler, start):
    processes = [start(1) for _ in range(3)]
    processes = [begun(process) for process in processes]
    assert [loaded(process)[0] for process in processes] == [""] * 3
    assert len(compiler.processes()) == 2 and compiler.has_ended() and files(home) == []


def test_others_take_what_one_process_compiles(home, compiler, start):
    processes = [begun(process) for process in [start(), start()]]
    compiler.processes()
    compiler.hangs.unlink()
    assert [loaded(process) for process in processes] == [("42", "")] * 2
    assert len(compiler.processes()) == 2 and len(files(home)) == 1


def test_a_process_that_is_stopped_while_it_compiles_does_not_stop_others(
    home, compiler, start, monkeypatch
):
    first = begun(start())
    compiler.processes()
    first.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(library_cache, "_SECONDS", 0.5)
    with pytest.raises(OSError, match="another process"):
        library_cache.load_library("int answer(void) { return 42; }")
    compiler.hangs.unlink()
    with pytest.raises(OSError, match="does not try it again"):
        library_cache.load_library(SOURCE.format(1))
    monkeypatch.setattr(library_cache, "_hung", set())
    # Another library has another lock.
    assert library_cache.load_library(SOURCE.format(1)).answer() == 1


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_compiles_leaves_nothing_for_long(home, compiler, start):
    if shutil.which("timeout") is None:
        pytest.skip("coreutils' timeout, which ends the compiler, is not here")
    first = begun(start(1))
    compiler.processes()
    first.kill()
    assert compiler.has_ended()
    compiler.hangs.unlink()
    assert loaded(start()) == ("42", "")
    (name,) = files(home)
    assert name.endswith(".so")


def test_an_interrupt_ends_the_compiler(home, compiler, start):
    process = begun(start())
    compiler.processes()
    process.send_signal(signal.SIGINT)
    out, err = loaded(process)
    assert out == "" and err.endswith("KeyboardInterrupt\n")
    assert compiler.has_ended() and files(home) == []
