"""Every message of the library names the call that it is of, and the way out."""

import re
from pathlib import Path

import pytest
from messages import ALLOWED, CALLS, COMMANDS, METHODS, TO_DO, names_call, tells_way_out, way_out
from templates import Source, calls, sources

import hpcstrat

PACKAGE = Path(hpcstrat.__file__).parent
FILES = sources(PACKAGE)
VOCABULARY = {"allowed": ALLOWED, "to_do": TO_DO, "commands": COMMANDS}
MESSAGES = list(dict.fromkeys(message for file in FILES for message in file.messages()))
CLASSES = "|".join(sorted(name for name in CALLS if name[0].isupper() and "." not in name))

FILLED_IN = re.compile(
    r"\{([\w.]+\.)?_?call\}"
    r"|\{type\(self\).__name__\}[.:]"
    rf"|({CLASSES})\.\{{\w+\}}"
    rf"|\{{self\.name\}}\.({'|'.join(METHODS)})\b"
    r"|the environment variable \{name\}"
)
"""Fields by which a template names its call: `test_what_reaches_call` sees to the first."""
AFTERWARDS = ("_verdict", "return", "Fault")
"""What says the end of a text that begins elsewhere: `hpcstrat: `, the call, what `python -m hpcstrat info` found."""

CHECKPOINT = "a part: Checkpoint puts the call before it, and behind it what to do"
SLURM = "a part: SlurmClusterResolver puts its name before it, and behind it what to do"
ARRAY = "a part: what makes arrays of other libraries' puts the call before it, and behind it what to do"
COMMAND = "a part: `python -m hpcstrat timeline` puts its name before it"
PASSED_ON = "collected where it comes from"
NEVER = "cannot be, unless the library has a fault"
MEMORY = "the traceback names the call, which is any that needs memory"
PARTS = {
    "a name occurs twice": CHECKPOINT,
    "another program is writing to it": CHECKPOINT,
    "it is a directory": CHECKPOINT,
    "it is no regular file": CHECKPOINT,
    "its arrays end at byte {end}": CHECKPOINT,
    "its facts have no names": CHECKPOINT,
    "the file became shorter while it was read": CHECKPOINT,
    "there is no such file": CHECKPOINT,
    "{error.filename} is a file and not a folder": CHECKPOINT,
    "{name} has shape {shape}": CHECKPOINT,
    "{name} is not where it should be": CHECKPOINT,
    "{number} is no count": CHECKPOINT,
    "{number} is no whole number": CHECKPOINT,
    "{path} is no checkpoint of hpcstrat": CHECKPOINT,
    "{self.path} has something behind its end": CHECKPOINT,
    "{self.path} is cut off": CHECKPOINT,
    "{self.path} is damaged": CHECKPOINT,
    "{self.path} is no checkpoint of hpcstrat": CHECKPOINT,
    "{nodes} is no list of Slurm's nodes": SLURM,
    "{tasks} is no list of numbers of tasks": SLURM,
    "NumPy has bfloat16 by the package ml_dtypes": ARRAY,
    "{str(error)}": ARRAY,
    "shape {array.shape} is not {shape}": "a part: Dataset.from_generator catches it",
    "{message} (found by rank {rank})": "another rank's, whole",
    "{message}": PASSED_ON,
    "{problems[0]}": PASSED_ON,
    "{verdict.text}": PASSED_ON,
    "{main()}": "an exit status",
    "{self._exit_status}": "an exit status",
    "a block has no {name}": NEVER,
    "hpcstrat is not imported completely": NEVER,
    "the rank was checked": NEVER,
    "{message} is no note": NEVER,
}
NAME_NO_CALL = PARTS | {
    "--plot needs matplotlib": COMMAND,
    "no address space for variables": MEMORY,
    "no memory for a message between replicas": MEMORY,
    "no {nbytes} bytes in a row": MEMORY,
    "rank {rank} ran {": COMMAND,
    "starting NCCL: ": "of the first strategy on these GPUs, whose constructor the traceback shows",
    "the ranks must make the same call": "each rank's call follows, a line each",
    "{lines}hpcstrat: this exception ": "the traceback of the exception comes first",
    "{lines}hpcstrat: the job ends: what the program had put ": "likewise",
    "{path} is no timeline": COMMAND,
    "{nbytes} bytes are wanted": MEMORY,
    "{nbytes} bytes cannot be had": MEMORY,
    "{nbytes} bytes of pinned host memory": MEMORY,
    "{self.path} is of format": CHECKPOINT,
    "{wanted} bytes are wanted": MEMORY,
    "{wanted_by} needs CuPy": "the call or the device, by who asks",
}
TELL_NO_WAY_OUT = PARTS | {
    "no memory for a message between replicas": "the ranks' reasons, which follow, do",
    "{call}: what the replicas exchange goes through host memory": "the reason, which follows, does",
}
WORDS = {
    "": "an attempt whose error is nobody's",
    "None": "no update runs any more",
    "call {note.number}, {note.call}": "of the watch's reports",
    "check": "`python -m hpcstrat check`",
    "connecting the GPUs": "before there is a strategy",
    "connecting the ranks": "before there is a strategy",
    "info": "`python -m hpcstrat info`",
    "iterating over {": "the name of what is iterated over follows",
    "new values": "on the way of a call that has named itself",
    "no call": "of the watch's reports",
    "starting NCCL": "before there is a strategy",
    "the broadcast of new values": "on the way of a call that has named itself",
    "the end of the program": "the ranks leave, and call nothing",
    "the sum of gradients": "on the way of a call that has named itself",
    "{self.name}: {name} of {v.name}": "an optimizer's slots: its name, theirs and the variable's",
}
"""What is no public name, and yet is given to something named `call`."""


def unnamed(messages):
    """Those that name no call, and must."""
    return [
        one
        for one in messages
        if one.says not in AFTERWARDS
        and not FILLED_IN.match(one.text)
        and not names_call(one.text)
        and not _is_bare(one)
    ]


def untold(messages):
    """Those that tell no way out, and must."""
    return [one for one in messages if not tells_way_out(one.text) and not _is_bare(one)]


def _is_bare(message):
    """What Python's protocol wants, and what is passed on as it is."""
    return message.says in ("StopIteration", "error") and not message.text


def but(found, exceptions):
    """What no exception is made for; an exception is the beginning of a text."""
    return [one for one in found if not any(one.text.startswith(text) for text in exceptions)]


def test_every_line_that_raises_is_collected():
    raising = {
        f"{path.relative_to(PACKAGE.parent)}:{number}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s+raise \S", line)
    }
    assert len(raising) > 150
    assert raising <= {message.place for message in MESSAGES}


def test_every_message_names_its_call():
    assert but(unnamed(MESSAGES), NAME_NO_CALL) == []


def test_every_message_tells_the_way_out():
    assert but(untold(MESSAGES), TELL_NO_WAY_OUT) == []


def test_what_reaches_call():
    found = {text: place for place, text in calls(FILES) if not FILLED_IN.match(text) and not names_call(f"{text}: ")}
    assert {text: place for text, place in found.items() if not _is_in_words(text)} == {}


def _is_in_words(text):
    return any(text == one or (one.endswith("{") and text.startswith(one)) for one in WORDS)


@pytest.mark.parametrize("text", NAME_NO_CALL)
def test_an_exception_is_needed_for_the_call(text):
    assert any(message.text.startswith(text) for message in unnamed(MESSAGES))


@pytest.mark.parametrize("text", TELL_NO_WAY_OUT)
def test_an_exception_is_needed_for_the_way_out(text):
    assert any(message.text.startswith(text) for message in untold(MESSAGES))


@pytest.mark.parametrize("text", WORDS)
def test_words_in_the_place_of_a_call_are_there(text):
    assert any(other.startswith(text) for _, other in calls(FILES))


@pytest.mark.parametrize("kind, word", [(kind, word) for kind, words in VOCABULARY.items() for word in words])
def test_every_word_of_the_vocabulary_is_needed(kind, word):
    fewer = way_out(**VOCABULARY | {kind: [other for other in VOCABULARY[kind] if other != word]})
    assert any(tells_way_out(message.text) and not fewer.search(message.text) for message in MESSAGES)


PLANTED = """
_CALL = "Strategy.plant"

class Strategy:
    def reduce(self, value):
        call = "Strategy.reduce"
        if value is None:
            raise ValueError
        if value == 0:
            raise ValueError("wrong value")
        if value == 1:
            text = f"{call}: {value} is wrong"
            raise TypeError(text)
        if value == 2:
            raise OSError(5, f"{call}: it is gone; pass another")
        if value == 3:
            raise _told(call, "bad")
        if value == 4:
            raise RuntimeError(self._problem("Strategy.run"))
        if value == 5:
            raise KeyError(_CALL + ": leave it" if value else "it is lost")
        warnings.warn("take care", stacklevel=2)
        _failure.end_job(f"hpcstrat: the end on {value}")

    def _problem(self, call):
        return f"{call} was called too late; call it before"

    def gather(self, call):
        self._checked(call, 1)
        self._checked("gathering", 2)

    def _checked(self, call, value): ...

def _told(call, error):
    text = f"{call}: {error}"
    return OSError(1, text) if error else OSError(f"{text}; pass a path")

def why_not():
    return "" if good else "no device is there"
"""


def test_what_is_planted_is_found():
    planted = Source("planted.py", PLANTED)
    messages = list(planted.messages())
    assert {(one.says, one.text) for one in messages} == {
        ("ValueError", ""),
        ("ValueError", "wrong value"),
        ("TypeError", "Strategy.reduce: {value} is wrong"),
        ("OSError", "Strategy.reduce: it is gone; pass another"),
        ("OSError", "Strategy.reduce: bad"),
        ("OSError", "Strategy.reduce: bad; pass a path"),
        ("RuntimeError", "Strategy.run was called too late; call it before"),
        ("KeyError", "Strategy.plant: leave it"),
        ("KeyError", "it is lost"),
        ("warn", "take care"),
        ("end_job", "hpcstrat: the end on {value}"),
        ("return", "no device is there"),
    }
    assert {one.text for one in unnamed(messages)} == {
        *("", "wrong value", "Strategy.plant: leave it", "it is lost", "take care")
    }
    assert {one.text for one in untold(messages)} == {
        *("", "wrong value", "Strategy.reduce: {value} is wrong", "Strategy.reduce: bad", "it is lost", "take care"),
        *("hpcstrat: the end on {value}", "no device is there"),
    }
    assert {text for _, text in calls([planted])} == {"Strategy.reduce", "Strategy.run", "{call}", "gathering"}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "Strategy.reduce: axis is 3",
            "Variable 'w' is old",
            "SGD: momentum is 2",
            "barrier: late",
            "TF_CONFIG is no",
        ),
        *("the environment variable HPCSTRAT_CHECK is 2", "/dev/shm has 3 MiB left", "hpcstrat: the job ends"),
    ],
)
def test_the_call_is_named(text):
    assert names_call(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "axis is 3; Strategy.reduce takes 0", "rank 0 is late", "Strategy.reduction: no", "StrategyX: no"),
        *("the variable 'w' is old", "_Adam: beta_1 is 2", "Strategy._merge_call: no", "Only HPCSTRAT_CHECK is known"),
    ],
)
def test_no_call_is_named(text):
    assert not names_call(text)


@pytest.mark.parametrize(
    "text",
    [
        "axis is 3; it must be 0",
        "no such axis: pass 0",
        "it is gone. Start with srun",
        "start, or leave it",
        "`pip install x`",
    ],
)
def test_the_way_out_is_told(text):
    assert tells_way_out(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "axis is 3", "the call is wrong", "no name was given", "its use is not allowed", "`fn` is not callable"),
        *("nothing may communicate there", "it cannot be cast, or is lost", "the start; the makers"),
    ],
)
def test_no_way_out_is_told(text):
    assert not tells_way_out(text)
