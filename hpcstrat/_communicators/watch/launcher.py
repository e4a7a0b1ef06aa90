"""The thread that ends a rank whose launcher is gone, which could neither end it nor tell that it goes on."""

from __future__ import annotations

import threading
import time

from hpcstrat import _failure, _launcher

_LOOK_SECONDS = 1.0


def end_with_launcher() -> None:
    """From now on this rank ends when its launcher's process, which has started it, is no more."""
    launcher, process = _launcher.find(), _launcher.find_process()
    if launcher is not None and process is not None:
        threading.Thread(target=_watch, args=(launcher.name, process), name="hpcstrat-launcher", daemon=True).start()


def _watch(name: str, process: int) -> None:
    while _launcher.is_there(process):
        time.sleep(_LOOK_SECONDS)
    _failure.end_rank(
        f"hpcstrat: this rank ends: the process that has started it ({name}, process {process}) was killed; look who "
        "ends it, and at its host's memory"
    )
