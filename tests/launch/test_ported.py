"""The ported programs of examples/ported print what the originals print, on any number of ranks.

A new port is a folder, a row in `PORTS`, a row in the table of examples/ported/README.md, and, if
it has a picture.py, its picture in docs/gallery.
"""

import ast
import dataclasses
import difflib
import pathlib
import re

import pytest
from launcher import skip_unless_it_computes

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ported"
ENV = {
    "OMP_NUM_THREADS": "1",
    # On GPUs JAX would take all memory, and round factors to 10 bits.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Port:
    """A folder of `examples/ported`, with `before.py`, `after.py` and perhaps `picture.py`.

    Attributes:
        name: the folder's.
        rel: how far the printed numbers may be apart, relatively.
        why: the reason for that.
        abs: how far, absolutely, for numbers near zero.
        needs: a module without which neither program runs, and which chooses where `before.py`
            computes; else `before.py` takes `--gpu`.
        recorded: whether `before.py` needs a package that the tests do not install. What it
            printed is in `before.txt`, below a line with the package's version.
        mpi4py: whether `before.py` is an mpi4py program, which computes with NumPy only.
        options: of both programs.
        few: options with which there is less data than four replicas.
    """

    name: str
    rel: float
    why: str
    abs: float = 0
    needs: str | None = None
    recorded: bool = False
    mpi4py: bool = False
    options: tuple[str, ...] = ()
    few: tuple[str, ...] = ()

    def path(self, name):
        return FOLDER / self.name / name


PORTS = [
    Port(
        "kmeans",
        rel=1e-6,
        abs=2e-6,
        why="six decimals are printed; the sums' order differs",
        few=("--num", "1"),
    ),
    Port("gmm", rel=1e-6, abs=2e-6, why="six decimals are printed; the sums' order differs"),
    Port(
        "cg",
        rel=2e-3,
        abs=1e-13,
        why="four digits are printed, of an error that rounding changes",
        few=("--num", "3"),
    ),
    Port("monte_carlo", rel=0.3, why="four standard errors of an error that samples show"),
    Port("jacobi", mpi4py=True, rel=0, why="each point is computed by the same operations"),
    Port(
        "matrix_product",
        mpi4py=True,
        rel=1e-12,
        abs=2e-9,
        why="nine decimals are printed; the sums' order differs",
        few=("--shape", "3", "2", "2"),
    ),
    Port(
        "molecular_dynamics",
        rel=0,
        abs=2e-9,
        why="nine decimals are printed; the sums' order differs",
    ),
    Port(
        "tf_custom_training",
        recorded=True,
        rel=1e-4,
        abs=2e-5,
        why="five decimals are printed; 92 steps in 32 bits, and Adam divides by small gradients",
    ),
    Port(
        "torch_ddp_series",
        needs="torch",
        rel=1e-5,
        abs=2e-6,
        why="six decimals are printed; 256 steps in 32 bits towards one minimum",
    ),
    Port(
        "torch_gpt",
        needs="torch",
        rel=0,
        abs=2e-6,
        why="six decimals are printed; 200 steps in 64 bits",
    ),
    Port(
        "jax_mnist",
        needs="jax",
        rel=1e-4,
        abs=2e-6,
        why="six decimals are printed; 96 steps in 32 bits",
    ),
]


QUICK = "jacobi", "kmeans"  # on the CPU, what `launch/test` runs without --all


def cases():
    """Each port on 2 or 3 ranks, in turn; at night alone and on the other numbers of ranks."""
    found, slow = [], pytest.mark.slow
    for i, port in enumerate(PORTS):
        quick = (2, 3)[i % 2]
        name = "-".join(filter(None, [port.name, port.needs]))
        for gpus in ("CPU", "GPU"):
            marks = [slow] * (gpus == "CPU" and port.name not in QUICK)
            found.append(pytest.param(gpus, port, [quick], id=f"{name}-{gpus}", marks=marks))
            rest = [None, 1, 5 - quick, 4]
            found.append(pytest.param(gpus, port, rest, id=f"{name}-{gpus}-nightly", marks=slow))
    return found


def original(launch, port, are_seen, options):
    """What the original prints: one process."""
    if port.recorded:
        return port.path("before.txt").read_text().partition("\n")[2]
    if are_seen and not port.mpi4py and port.needs is None:
        options = [*options, "--gpu"]
    result = launch(port.path("before.py"), None, *options, gpus=are_seen, env=ENV)
    assert result.status == 0
    return result.stdout


def check(launch, port, counts, are_seen=False, options=()):
    """The port prints, on these numbers of ranks, what the original prints."""
    skip_unless_it_computes(port.needs, are_seen)
    options = [*port.options, *options]
    before = original(launch, port, are_seen, options)
    expected = [float(number) for number in NUMBER.findall(before)]
    assert expected
    for ranks in counts:
        result = launch(port.path("after.py"), ranks, *options, gpus=are_seen, env=ENV)
        assert (result.status, result.leftovers) == (0, [])
        assert "Warning" not in result.stderr
        assert NUMBER.sub("#", result.stdout) == NUMBER.sub("#", before)
        found = [float(number) for number in NUMBER.findall(result.stdout)]
        assert found == pytest.approx(expected, rel=port.rel, abs=port.abs), port.why


@pytest.mark.parametrize(("gpus", "port", "counts"), cases(), indirect=["gpus"])
def test_a_port_prints_what_the_original_prints(launch, gpus, port, counts):
    are_seen, numbers = gpus
    check(launch, port, [ranks for ranks in counts if ranks in numbers] or [1], are_seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "port", [pytest.param(port, id=f"{port.name}-nightly") for port in PORTS if port.few]
)
def test_some_replicas_have_no_data(launch, port):
    check(launch, port, [4], options=port.few)


@pytest.mark.slow
@pytest.mark.parametrize(
    "port", [pytest.param(port, id=f"{port.name}-nightly") for port in PORTS if port.mpi4py]
)
def test_an_mpi4py_program_prints_the_same_on_any_number_of_ranks(launch, port):
    """What it prints alone is what hpcstrat's is compared with."""
    alone = original(launch, port, False, port.options)
    result = launch(port.path("before.py"), 3, *port.options, env=ENV)
    assert (result.status, result.stdout, result.leftovers) == (0, alone, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "port",
    [
        pytest.param(port, id=f"{port.name}-nightly")
        for port in PORTS
        if port.path("picture.py").exists()
    ],
)
def test_pictures_of_the_gallery(launch, port, tmp_path):
    """docs/gallery has two of each, light and dark; the gallery's command draws it again."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    skip_unless_it_computes(port.needs, False)
    pictures = sorted((ROOT / "docs" / "gallery").glob(f"ported-{port.name}-*"))
    assert [path.stem.rpartition("-")[2] for path in pictures] == ["dark", "light"]
    assert all(path.stat().st_size < 60_000 for path in pictures if path.suffix == ".svg")
    drawn = tmp_path / f"drawn{pictures[0].suffix}"
    result = launch(FOLDER / "draw.py", 4, port.name, drawn, *port.options, env=ENV)
    assert (result.status, result.leftovers) == (0, [])
    assert "Warning" not in result.stderr
    assert drawn.stat().st_size > 1000


def program_lines(path):
    """A program's lines without the docstring at its top and without empty lines."""
    source = path.read_text()
    first = ast.parse(source).body[0]
    return [line for line in source.splitlines()[first.end_lineno :] if line.strip()]


def row(name):
    """The numbers in the README's row: lines before, lines after, and those changed."""
    before, after = (program_lines(FOLDER / name / f"{one}.py") for one in ("before", "after"))
    changes = [
        (j2 - j1, i2 - i1)
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
            None, before, after, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    ]
    added, removed = map(sum, zip(*changes, strict=True))
    return f"{len(before)} | {len(after)} | +{added} -{removed}"


def test_the_table_has_every_port_and_counts_its_lines():
    names = {path.parent.name for path in FOLDER.glob("*/after.py")}
    assert sorted(port.name for port in PORTS) == sorted(names)
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\1/after\.py\) \| [^|]+ \| (\d+ \| \d+ \| \+\d+ -\d+) \|",
        (FOLDER / "README.md").read_text(),
        re.MULTILINE,
    )
    assert dict(rows) == {name: row(name) for name in names}
    longest = max(FOLDER.rglob("*.py"), key=lambda path: path.read_text().count("\n"))
    assert longest.read_text().count("\n") < 150, longest
