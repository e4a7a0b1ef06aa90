"""The calls of CuPy in the sources of this repository, found by syntax."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "hpcstrat").rglob("*.py"))
PROGRAMS = [*sorted((ROOT / "examples").glob("*.py")), ROOT / "benchmarks" / "gpu_step.py"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The names that mean CuPy, or a module of it, when they precede a dot.
_MODULES = {
    **dict.fromkeys(("xp", "cupy", "load_cupy", "array_module"), "cupy"),
    **{"runtime": "cupy.cuda.runtime", "nvtx": "cupy.cuda.nvtx"},
    **dict.fromkeys(("nccl", "_nccl"), "cupy.cuda.nccl"),
}
_OF_FILES = dict.fromkeys(
    (
        *(f"hpcstrat/_transports/{name}.py" for name in ("nccl", "nccl_start")),
        "benchmarks/gpu_step.py",
    ),
    dict.fromkeys(("comm", "_comm", "_opened"), "cupy.cuda.nccl.NcclCommunicator"),
)


def blocks(path):
    """The Python programs on a page, without the magic commands of notebooks."""
    found = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [re.sub(r"^%.*$", "", text, flags=re.MULTILINE) for text in found]


def calls(paths):
    """The callee of each call of an attribute in files and in the programs on pages.

    It starts with `cupy.` if it is CuPy's, else it is `.` and the name of the method.
    """
    for path in paths:
        modules = _MODULES | _OF_FILES.get(path.relative_to(ROOT).as_posix(), {})
        for text in blocks(path) if path.suffix == ".md" else [path.read_text()]:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    # What `partial` calls later counts too.
                    is_later = isinstance(node.func, ast.Name) and node.func.id == "partial"
                    function = node.args[0] if is_later else node.func
                    if isinstance(function, ast.Attribute):
                        yield _meant(function, modules)


def _meant(node, modules):
    """`cupy.cuda.Stream` for `self.stream.xp.cuda.Stream`, `.sum` for `errors.sum`."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        names.append(node.func.attr)
    names.append(node.id if isinstance(node, ast.Name) else "")
    names.reverse()
    for i in range(len(names) - 2, -1, -1):
        if names[i] in modules:
            return ".".join([modules[names[i]], *names[i + 1 :]])
    return f".{names[-1]}"
