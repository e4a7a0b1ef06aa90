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
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        ROOT / folder / "README.md"
        for folder in ("examples", "examples/ported", "slurm", "benchmarks")
    ),
]
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
    """A code block.

    Attributes:
        page: the page's path in the repository.
        line: its first line.
        language: `python`, `sh` or `text`.
        text: its text; for a program that continues another, both.
        says: what the comment says.
        output: the next block, if that is `text`.
    """

    page: str
    line: int
    language: str
    text: str
    says: dict[str, str]
    output: "Block | None"

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
        if (
            self.output is None
            or "not run" in self.output.says
            or str(ranks) not in self.output.says.get("ranks", str(ranks)).split()
        ):
            return None
        return self.output.text

    def prints(self, stdout):
        """What was printed, in the page's order if it may come in any."""
        if self.output is None or "any order" not in self.output.says:
            return stdout
        shown = self.output.text.splitlines(keepends=True)
        lines = stdout.splitlines(keepends=True)
        return "".join(
            sorted(lines, key=lambda line: shown.index(line) if line in shown else len(shown))
        )


def blocks_of(path):
    """All blocks of a page, in order."""
    text = path.read_text()
    found = []
    for match in reversed(list(_FENCE.finditer(text))):
        says = dict(_pair(word) for word in (match["says"] or "").split("; ") if word)
        assert says.keys() <= _WORDS, f"{path}: {match['says']}"
        output = found[-1] if found and found[-1].language == "text" else None
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(
            Block(
                path.relative_to(ROOT).as_posix(),
                line,
                match["language"],
                match["text"],
                says,
                output,
            )
        )
    found.reverse()
    for i, block in enumerate(found):
        if "continues" in block.says:
            program = next(before for before in reversed(found[:i]) if before.language == "python")
            found[i] = dataclasses.replace(block, text=f"{program.text}\n\n{block.text}")
    return found


def _pair(word):
    name, _, value = word.partition(": ")
    return name, value


BLOCKS = {path.relative_to(ROOT).as_posix(): blocks_of(path) for path in PAGES}
