"""One pytest run over all ranks: rank 0 prints, outcomes are agreed, one rank's failure ends all.

The ranks talk over their own communicator, through mpi4py and not through the library under test.
"""

import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib

import numpy as np
import pytest
from internals import failure

_GRACE = 1.0  # seconds that a failed rank gives the others to report
_PASSED, _SKIPPED, _FAILED = range(3)


class Ranks:
    """The plugin of one rank."""

    def __init__(self, config):
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.config = config
        self.ended = False
        self.reports = []
        self.folder = None
        # Ranks would clean up each other's folders.
        if self.comm.size > 1 and not config.option.basetemp:
            self.folder = self.comm.bcast(
                tempfile.mkdtemp(prefix="hpcstrat-test-") if self.comm.rank == 0 else None
            )
            os.makedirs(self.folder, exist_ok=True)
            config.option.basetemp = os.path.join(self.folder, f"rank{self.comm.rank}")
        abort = failure._abort

        def print_first(status):  # a rank that ends the job prints what pytest has captured
            self.print_captured()
            abort(status)

        failure._abort = print_first

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self):
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if self.comm.rank > 0:
            reporter._tw._file = open(os.devnull, "w")

    def pytest_report_header(self):
        vendor, version = self.mpi.get_vendor()
        ranks = f"{self.comm.size} rank{'s' if self.comm.size > 1 else ''}"
        return f"MPI: {ranks} under {vendor} {'.'.join(map(str, version))}"

    def pytest_collectreport(self, report):
        if report.failed and self.comm.rank > 0:
            self.print_tagged(f"ERROR collecting {report.nodeid}\n{report.longreprtext}")

    def pytest_collection_finish(self, session):
        for name in ("lfplugin", "nfplugin") if self.comm.rank > 0 else ():
            # They would write pytest's cache at the same time as rank 0's.
            if self.config.pluginmanager.hasplugin(name):
                self.config.pluginmanager.unregister(name=name)
        names = "\n".join(item.nodeid for item in session.items)
        collected = self.comm.allgather(
            (session.testsfailed, len(session.items), zlib.crc32(names.encode()))
        )
        if len(set(collected)) > 1:
            counts = ", ".join(
                f"rank {rank}: {count}" for rank, (_, count, _) in enumerate(collected)
            )
            self.ended = True
            raise session.Failed(
                f"the ranks collected different tests, or one had an error ({counts})"
            )

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.reports.clear()
        result = yield
        self.agree(item)
        return result

    def agree(self, item):
        """Ends the run unless the test passed, or was skipped, on all ranks."""
        failures = [report for report in self.reports if report.failed]
        text = "\n".join(
            f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}"
            + "".join(f"\n----- {title} -----\n{content}" for title, content in report.sections)
            for report in failures
        )
        skipped = any(report.skipped for report in self.reports)
        outcome = _FAILED if failures else _SKIPPED if skipped else _PASSED
        # The last line of an error, without what differs between ranks with the same failure.
        error = zlib.crc32(failures[0].longreprtext.splitlines()[-1].encode()) if failures else 0
        record = np.array([outcome, error, zlib.crc32(item.nodeid.encode())], np.int64)
        records = np.empty((self.comm.size, 3), np.int64)
        request = self.comm.Iallgather(record, records)
        if failures:
            deadline = time.monotonic() + _GRACE
            while not request.Test():
                if time.monotonic() > deadline:
                    self.print_tagged(text)
                    self.abort()
                time.sleep(0.001)
        else:
            request.Wait()
        outcomes, errors, names = (column.tolist() for column in records.T)
        if len(set(names)) > 1:
            self.end(item, "the ranks run different tests")
        elif _FAILED in outcomes:
            alike = [
                r for r in range(self.comm.rank) if outcomes[r] == _FAILED and errors[r] == error
            ]
            if failures and alike:
                self.print_tagged(f"FAILED {item.nodeid}: as on rank {alike[0]}")
            elif failures:
                self.print_tagged(text)
            self.end(item, f"failed on {_ranks(outcomes, _FAILED)}")
        elif len(set(outcomes)) > 1:
            self.end(item, f"skipped on {_ranks(outcomes, _SKIPPED)} only")

    def end(self, item, reason):
        item.session.shouldfail = f"{item.nodeid} {reason}"
        self.ended = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item, settings):
        """Like pytest-timeout's own timer in a thread, but every rank's stacks show, tagged."""

        def report():
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                stacks = "".join(
                    line for line in file if "/_pytest/" not in line and "/pluggy/" not in line
                )
            self.print_tagged(f"TIMEOUT {item.nodeid} after {settings.timeout:g} s\n{stacks}")
            time.sleep(_GRACE)
            self.abort()

        timer = threading.Timer(settings.timeout, report)
        timer.daemon = True
        item.cancel_timeout = timer.cancel
        timer.start()
        return True

    def pytest_keyboard_interrupt(self, excinfo):
        self.print_tagged(f"INTERRUPTED: {excinfo.exconly()}")
        self.abort()

    def pytest_internalerror(self, excrepr):
        self.print_tagged(f"INTERNAL ERROR\n{excrepr}")
        self.abort()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        if not self.ended:
            self.comm.Barrier()  # a slower rank still looks through the folder
            self.remove_folder()
        else:  # not by the library's own ending: the ranks may be out of step
            sys.stdout.flush()
            request = self.comm.Ibarrier()
            deadline = time.monotonic() + 5 * _GRACE
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(0.001)
            self.abort()

    def remove_folder(self):
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def print_tagged(self, text):
        """Prints to the standard error from before pytest's capture."""
        lines = "".join(f"[rank {self.comm.rank}] {line}\n" for line in text.splitlines())
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(lines, end="", file=sys.__stderr__, flush=True)

    def print_captured(self):
        """Prints what pytest captured: if the library ends the job, its report is there."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        out, err = capture.read_global_capture()
        with capture.global_and_fixture_disabled():
            print(out + err, end="", file=sys.__stderr__, flush=True)

    def abort(self):
        if self.comm.size == 1:
            os._exit(1)
        self.remove_folder()
        self.mpi.COMM_WORLD.Abort(1)


def _ranks(outcomes, outcome):
    found = [str(rank) for rank, other in enumerate(outcomes) if other == outcome]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"
