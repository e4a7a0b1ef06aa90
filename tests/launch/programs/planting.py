"""What programs with a planted fault have in common: `from planting import *`."""

import os
import re
import signal
import sys
import time
from typing import Any


def loop():
    while True:
        time.sleep(0.01)


def compute():
    while True:
        pass


def hold_python():
    re.match("(a+)+b", 40 * "a")  # takes years, in C code that lets no other thread run


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(function, error: Any = KeyboardInterrupt):
    """The library's next call of this function raises, as a signal's handler may at any moment."""

    def look(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name == function and "hpcstrat" in code.co_filename:
            sys.setprofile(None)
            raise error

    sys.setprofile(look)


def mpirun():
    """The process that the test started: the farthest ancestor with the job's mark."""
    mark, process = os.environ["LAUNCHED_BY_TEST"].encode(), os.getpid()
    while True:
        with open(f"/proc/{process}/status") as file:
            found = re.search("PPid:.([0-9]+)", file.read())
        assert found
        with open(f"/proc/{found[1]}/environ", "rb") as file:
            if mark not in file.read():
                return process
        process = int(found[1])


def set_limits(stall, timeout):
    """The watchdog reads them when the ranks have connected; until then one of them may be late."""
    from hpcstrat._watchdog import channels

    def connect(*arguments, connect=channels.connect):
        channel = connect(*arguments)
        limits = {"HPCSTRAT_STALL_SECONDS": stall, "HPCSTRAT_TIMEOUT_SECONDS": timeout}
        os.environ.update(limits)
        return channel

    channels.connect = connect


if "LIMITS" in os.environ:
    set_limits(*os.environ["LIMITS"].split())
if "RANK_0_FIRST" in os.environ:
    # It prints what all ranks raise, even if it comes later on a busy machine.
    from hpcstrat._process import failure

    failure._LEAD_DELAY = 30
