"""What every message of the library must say: which call it is of, and the way out."""

import re

from public_api import PUBLIC_MODULES, public_names


def _short(name):
    """`Dataset.batch` of `hpcstrat.data.Dataset.batch`."""
    module = max((m.__name__ for m in PUBLIC_MODULES if name.startswith(f"{m.__name__}.")), key=len)
    return name.removeprefix(f"{module}.")


CALLS = {_short(name) for name in public_names()}
"""`Strategy.reduce`, `SGD`, `barrier` ..."""
METHODS = {name.rpartition(".")[2] for name in CALLS if "." in name}

_IS_A_WORD = re.compile("[a-z]+")  # `rank` and `agree` begin other sentences as well
_CALL = "|".join(
    re.escape(name) + (":" if _IS_A_WORD.fullmatch(name) else r"(?=[: ])")
    for name in sorted(CALLS, key=len, reverse=True)
)
_CONCERNED = (
    r"hpcstrat cannot connect the ranks: ",  # the first call, whichever it is
    r"hpcstrat: ",  # the end of the job, where the ranks' calls follow
    r"(the environment variable )?[A-Z]+_[A-Z_]+\b",
    r"/dev/shm ",
)
_NAMED = re.compile("|".join([_CALL, *_CONCERNED]))

ALLOWED = ("must", "is not allowed:", "did you mean")
"""What says what is allowed."""
TO_DO = (
    *("add", "batch", "call", "cast", "correct", "do", "gather", "give", "install", "leave", "look", "make", "name"),
    *("number", "pad", "pass", "raise", "reduce", "restore", "start", "try", "use", "write"),
)
"""What says what to do, where a clause begins with it."""
COMMANDS = ("pip install ", "launch/", "with ")
"""What says it in code."""


def way_out(allowed=ALLOWED, to_do=TO_DO, commands=COMMANDS):
    """The pattern of what is allowed or to be done, in these words."""
    return re.compile(
        rf"\b({'|'.join(allowed)})(?!\w)"
        rf"|(^|[;:,.?] |\b(and|or|so) )((or|and|so) )?({'|'.join(to_do)})\b"
        rf"|`({'|'.join(commands)})",
        re.IGNORECASE,
    )


_WAY_OUT = way_out()


def names_call(text):
    """Whether a message begins with a public name, or with the variable, file or start that it is of."""
    return _NAMED.match(text) is not None


def tells_way_out(text):
    """Whether a message says what is allowed, or what to do."""
    return _WAY_OUT.search(text) is not None
