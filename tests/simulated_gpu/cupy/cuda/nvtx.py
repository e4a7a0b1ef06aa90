"""NVTX's ranges, which must be closed in the order in which they were opened."""

from cupy import _checker

available = True
_open: "list[str]" = []


def RangePush(message, id_color=-1):
    _open.append(message)


def RangePop():
    if not _open:
        raise _checker.report("the simulated GPU: RangePop without a range that is open")
    _open.pop()
