"""The code blocks of the documentation, and the invisible comments above them on how they run.

<!-- file: first.py -->    a program's name, by which other programs and commands on the page find it
<!-- continues -->         the program continues the previous one
<!-- needs: torch -->      a requirement: a module, or one of `NEEDS`
<!-- not run: the reason -->
<!-- fails -->             a command whose output is on standard error; its exit status is not 0
<!-- ranks: 2 3 -->        a program or an output for these numbers of ranks only
<!-- any order -->         the lines of an output come in any order
"""

import dataclasses
import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
_FOLDERS = "", "examples", "examples/ported", "slurm", "benchmarks"
PAGES = [ROOT / "CONTRIBUTING.md", *(ROOT / folder / "README.md" for folder in _FOLDERS)]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

NEEDS = {
    "GPU": "it is for a host with GPUs",
    "Slurm": "it is for a Slurm cluster; test_slurm.py runs the scripts",
    "TensorFlow": "it is TensorFlow's; test_the_script_that_moves runs it",
}
_WORDS = {"file", "continues", "needs", "not run", "fails", "ranks", "any order"}
_FENCE = re.compile(
    r"(?:^<!-- (?P<says>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block."""

    page: str  # its path in the repository
    line: int
    language: str  # `python`, `sh` or `text`
    text: str  # for a program that continues another, both
    says: dict[str, str]  # in the comment
    output: "Block | None"  # the next block, if that is `text`

    def __str__(self):
        return f"{self.page}:{self.line}"

    def reason_to_skip(self):
        """Why it does not run here; None if it does."""
        if "not run" in self.says:
            return self.says["not run"]
        needs = self.says.get("needs")
        if needs is None or (needs not in NEEDS and importlib.util.find_spec(needs)):
            return None
        return NEEDS.get(needs, f"{needs} is not installed")

    def expects(self, ranks):
        """The output that the page shows for this number of ranks, or for any; else None."""
        output = self.output
        if output is None or "not run" in output.says:
            return None
        is_for_them = str(ranks) in output.says.get("ranks", str(ranks)).split()
        return output.text if is_for_them else None

    def prints(self, stdout):
        """What was printed, in the page's order if it may come in any."""
        if self.output is None or "any order" not in self.output.says:
            return stdout
        shown = self.output.text.splitlines(keepends=True)
        lines = stdout.splitlines(keepends=True)
        order = {line: i for i, line in enumerate(shown)}
        return "".join(sorted(lines, key=lambda line: order.get(line, len(shown))))


def blocks_of(path):
    """All blocks of a page, in order."""
    text, page = path.read_text(), path.relative_to(ROOT).as_posix()
    found = []
    for match in reversed(list(_FENCE.finditer(text))):
        words = [word.partition(": ") for word in (match["says"] or "").split("; ") if word]
        says = {name: value for name, _, value in words}
        assert says.keys() <= _WORDS, f"{path}: {match['says']}"
        output = found[-1] if found and found[-1].language == "text" else None
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"], match["text"], says, output))
    found.reverse()
    for i, block in enumerate(found):
        if "continues" in block.says:
            program = next(before for before in reversed(found[:i]) if before.language == "python")
            found[i] = dataclasses.replace(block, text=f"{program.text}\n\n{block.text}")
    return found


BLOCKS = {path.relative_to(ROOT).as_posix(): blocks_of(path) for path in PAGES}
