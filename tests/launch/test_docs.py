"""Every code block of the documentation runs and prints what the page shows; all names exist."""

import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from documents import BLOCKS, PAGES, ROOT, Block

FOLDERS = ("examples", "benchmarks", "launch", "slurm", "tests", "docs")
SECONDS = re.compile(r"\d+ s\b")
ALL = [block for page in BLOCKS.values() for block in page]


PROGRAMS = [block for block in ALL if block.language == "python"]


def write_files(page, folder):
    for block in BLOCKS[page]:
        if "file" in block.says:
            (folder / block.says["file"]).write_text(block.text)


def skip_unless_it_runs(block: Block):
    reason = block.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)


def check_program(launch, place, block, numbers):
    """The block prints what the page shows, on these numbers of ranks or on those that it names."""
    skip_unless_it_runs(block)
    place.skip_unless_it_has(block.says.get("needs"))
    program = launch.folder / block.says["file"] if "file" in block.says else block.text
    for ranks in place.choose(*[int(n) for n in block.says.get("ranks", numbers).split()]):
        shutil.rmtree(launch.folder)  # a program may make folders, which must not be there
        launch.folder.mkdir()
        write_files(block.page, launch.folder)
        result = place(program, ranks, timeout=120 if place.has_gpus else 90)
        assert (result.status, result.err, result.leftovers) == (0, "", [])
        expected = block.expects(ranks)
        if expected is not None:
            assert block.prints(result.out) == expected


@pytest.mark.parametrize("block", [b for b in PROGRAMS if b.page == "README.md"], ids=str)
def test_program_of_the_readme(launch, place, block):
    check_program(launch, place, block, "3")


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in PROGRAMS if b.page != "README.md"], ids=str)
def test_program(launch, place, block):
    check_program(launch, place, block, "1 3")


def test_code_stands_in_blocks_of_a_known_language():
    assert len(BLOCKS) > 30 and all(
        len(BLOCKS[page]) > 2 for page in ("README.md", "docs/model.md")
    )
    wrong = {}
    for path in PAGES:
        text, page = path.read_text(), path.relative_to(ROOT).as_posix()
        if 2 * len(BLOCKS[page]) != len(re.findall(r"^ *```", text, re.MULTILINE)):
            wrong[page, "fences"] = "one has no end, or is indented"
        if others := {block.language for block in BLOCKS[page]} - {"python", "sh", "text"}:
            wrong[page, "languages"] = others
        outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        # Code too: no fence says which language it is.
        if indented := re.findall(r"\n\n(?: {4,}|\t).*", outside):
            wrong[page, "without a fence"] = indented
    assert wrong == {}


def test_output_belongs_to_what_runs():
    outputs = [id(block.output) for block in ALL]
    texts = [block for block in ALL if block.language == "text" and "not run" not in block.says]
    assert [str(block) for block in texts if id(block) not in outputs] == []


def test_each_event_in_a_call_has_an_example_that_runs():
    pages = [BLOCKS["docs/how_it_works.md"], BLOCKS["docs/hangs.md"]]
    commands = [block.text for page in pages for block in page if block.language == "sh"]
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    _, _, *rows = re.findall(r"^\| event in a call (?:.*\n)+?\n", text, re.M)[0].splitlines()[:-1]
    assert len(rows) == 7
    for row in rows:
        (name,) = re.findall(r"`(\w+\.py)`", row.split("|")[-2])
        assert sum(f"python {name}" in command for command in commands) == 1, row


def test_the_script_that_moves_is_tensorflows():
    python = os.environ.get("HPCSTRAT_TEST_TENSORFLOW")
    if python is None:
        pytest.skip("HPCSTRAT_TEST_TENSORFLOW does not name a Python that has TensorFlow")
    (script,) = [
        block for block in BLOCKS["docs/moving.md"] if block.says.get("needs") == "TensorFlow"
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [python, "-c", script.text], capture_output=True, text=True, timeout=100, env=env
    )
    assert (result.returncode, result.stdout) == (0, script.expects(1)), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in ALL if block.language == "sh"], ids=str)
def test_command(launch, block, tmp_path):
    check_words(block.text)
    skip_unless_it_runs(block)
    folder = tmp_path / "bin"
    folder.mkdir()
    mpirun = [shutil.which(launch.mpirun[0]), *launch.mpirun[1:]]
    for name, command in {"python": [sys.executable], "mpirun": mpirun}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    for name in FOLDERS:
        (tmp_path / name).symlink_to(ROOT / name)
    write_files(block.page, tmp_path)
    (tmp_path / "commands.sh").write_text(f"set -euo pipefail\n{block.text}")
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    result = launch(["bash", tmp_path / "commands.sh"], env=env, timeout=60)
    assert (result.status != 0, result.leftovers) == ("fails" in block.says, [])
    expected = block.expects(None)
    if expected is not None and "fails" in block.says:
        seen, shown = (SECONDS.sub("N s", text).splitlines() for text in (result.err, expected))
        assert [line for line in shown if line not in seen] == []
    elif expected is not None:
        assert block.prints(result.out) == expected


@pytest.mark.slow
def test_pytest_on_several_ranks_prints_one_report(launch, tmp_path):
    """By docs/debugging.md's `conftest.py`; a failure on another rank is shown as well."""
    pytest.importorskip("pytest_mpi", reason="pytest-mpi is not installed")
    files = [block for block in BLOCKS["docs/debugging.md"] if "file" in block.says]
    for block in files:
        (tmp_path / block.says["file"]).write_text(block.text)
    failing = "import hpcstrat as hs\ndef test_one(): pass\ndef test_two(): assert hs.rank() != 1\n"
    (tmp_path / "test_failing.py").write_text(failing)
    words = "pytest", "-p", "hpcstrat", "-p", "no:cacheprovider", "--with-mpi"
    for name, failures in ("mean", 0), ("failing", 1):
        result = launch(pathlib.Path("-m"), 3, *words, tmp_path / f"test_{name}.py", timeout=60)
        assert result.status == failures
        assert re.findall(r"(\d+) passed in", result.out) == ["2"]
        assert result.err.count("assert 1 != 1") == failures
        of_rank_1 = re.findall(r"^\[rank 1\] .*test_failing.py::test_two$", result.err, re.M)
        assert len(of_rank_1) == failures


def check_words(commands):
    """Bash accepts the commands; the files that they name exist and take their options."""
    subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
    for line in commands.replace("\\\n", "").splitlines():
        source = None
        for word in shlex.split(line, comments=True):
            if word.startswith(tuple(f"{name}/" for name in FOLDERS)):
                if (ROOT / word).is_dir():
                    continue
                source = (ROOT / word).read_text()
                # Of a batch script, which passes options on.
                default = re.search(r"\$\{PROGRAM:-(.*?)\}", source)
                source += (ROOT / default[1]).read_text() if default else "--help"
            elif word in ("python", "mpirun", "sbatch", "srun"):
                source = None
            elif source is not None and word.startswith("--"):
                assert word.partition("=")[0] in source, line


def test_addresses_are_those_of_the_package():
    """`[project.urls]` is the one place that knows them; what cannot read it says the same."""
    pairs = importlib.metadata.metadata("hpcstrat").get_all("Project-URL") or []
    urls = dict(pair.split(", ", 1) for pair in pairs)
    found = re.findall(r"https?://\S*hpcstrat[^\s)>\"`]*", (ROOT / "README.md").read_text())
    assert set(found) <= set(urls.values())
    cited = re.findall(r"^repository-code: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == [url for name, url in urls.items() if name == "Repository"]


def test_files_that_pages_name_exist():
    missing = {}
    for path in PAGES:
        text, page = path.read_text(), path.relative_to(ROOT).as_posix()
        linked = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
        linked += re.findall(r'(?:src|srcset)="([^":]+)"', text)
        named = re.findall(rf"`[^`\n]*?(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w./-]*)", text)
        found = [name for name in linked if not (path.parent / name).exists()]
        found += [name for name in named if not (ROOT / name).exists()]
        if found or not (linked or named or BLOCKS[page] or "\n::: " in text):
            missing[page] = found
    assert missing == {}
