"""What `import hpcstrat` changes in a process that is one of several ranks."""

from __future__ import annotations

from hpcstrat._core.user_frames import warn
from hpcstrat._process import failure, launchers, output, settings
from hpcstrat._replicas.contexts import is_one_of_several_replicas


def start() -> None:
    """Installs what ranks need before they are connected. Starts nothing.

    What they need from then on is in `hpcstrat/_transports/connection.py`: hooks for failing
    threads and crashes, the watchdog, and the end of the program.

    Raises:
        RuntimeError: a variable is not as launchers set it.
        ValueError: a variable has a value that is not allowed.
    """
    launcher = launchers.find()
    if launcher is not None and not launcher.alone:
        # First the end of all ranks, so that an error of what follows, here or in a later import,
        # ends them: they wait in the start of MPI, or soon will.
        if not launchers.is_child():
            failure.install(launcher.rank)  # sys.excepthook
        output.install(launcher, is_one_of_several_replicas)  # sys.stdout, stderr, unraisablehook
    # A misspelt variable would silently do nothing.
    for name, nearest in settings.unknown().items():
        warn(f"unknown environment variable {name}; did you mean {nearest}?", UserWarning)
