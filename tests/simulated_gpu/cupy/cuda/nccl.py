"""NCCL as in CuPy: operations are work on streams, done when all ranks have reached them."""

import copy
import functools
import itertools
import os
import sys
import threading
import time

import numpy as np
from cupy import _checker, _faults, _graphs, _memory, _ring, _streams

available = True

(NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG) = range(5)
NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = 3, 4, 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9
_DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
_SUM = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.fmax, NCCL_MIN: np.fmin}
_COLLECTIVES = ["allReduce", "reduce", "broadcast", "allGather"]
_OPERATIONS = ["SUM", "PROD", "MAX", "MIN", "AVG"]
# CuPy's table ends here: it lacks NCCL's results 7 (in progress) and 8 (time-out).
_RESULTS = {
    1: "UNHANDLED_CUDA_ERROR: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    2: "SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",
    4: "INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    """CuPy's. An unknown result raises KeyError."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"NCCL_ERROR_{_RESULTS[status]}")


def get_version():
    return int(os.environ.get("SIMULATED_NCCL_VERSION", "23203"))


def get_unique_id():
    return _ring.new_id()


_group = threading.local()
_latest: list["NcclCommunicator"] = []  # the communicator that was used or made last


def groupStart():
    _group.depth = getattr(_group, "depth", 0) + 1
    if _group.depth == 1:
        _group.calls = []


def groupEnd():
    _group.depth -= 1
    if _group.depth:
        return
    calls, _group.calls = _group.calls, []
    if calls:
        communicators = {communicator for communicator, *_ in calls}
        streams = {stream for _, stream, _ in calls}
        if len(communicators) > 1 or len(streams) > 1:
            raise _checker.report(
                "the simulated GPU: one group of NCCL calls has several communicators or streams"
            )
        communicators.pop()._put(streams.pop(), [call for *_, call in calls])
    elif _latest and _latest[0]._is_open:
        # A rank without messages to or from others. NCCL works without it, the simulation does not.
        _latest[0]._put(_streams.get_current_stream().ptr, [])


class NcclCommunicator(_faults.Partial):
    def __init__(self, ndev, commId, rank):
        _faults.counted["communicators"] += 1
        while _faults.value("nccl-start-hangs", "communicators") is not None:
            time.sleep(0.01)
        if (status := _faults.value("nccl-start-fails", "communicators")) is not None:
            raise NcclError(status)
        if not isinstance(commId, bytes):
            raise TypeError(f"commId must be bytes, not {type(commId).__name__}")
        self._device = _streams.state().device
        self._ring = _ring.Ring(ndev, commId, rank, self._device)
        if (
            len(set(self._ring.facts)) < ndev
            and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"
        ):
            raise NcclError(5)
        self._rank, self._size = rank, ndev
        self._is_open = True
        self._under_way = 0
        self._graphs = _graphs.Holders()
        connects_now = os.environ.get("NCCL_RUNTIME_CONNECT") == "0"
        self._connected = {(verb, None) for verb in _COLLECTIVES} if connects_now else set()
        _latest[:] = [self]

    def size(self):
        return self._size

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._call(stream, "allReduce", sendbuf, recvbuf, count, datatype, op=op)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        target = recvbuf if root == self._rank else 0
        self._call(stream, "reduce", sendbuf, target, count, datatype, op=op, root=root)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        source = sendbuff if root == self._rank else 0
        self._call(stream, "broadcast", source, recvbuff, count, datatype, root=root)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        received = count * self._size
        self._call(stream, "allGather", sendbuf, recvbuf, count, datatype, received)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._call(stream, "send", sendbuf, 0, count, datatype, peer=peer)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._call(stream, "recv", 0, recvbuf, count, datatype, peer=peer)

    def check_async_error(self):
        self._check_open()
        status = _faults.value("nccl-breaks", "nccl calls", lasts=True)
        if status is not None:
            raise NcclError(status)

    def destroy(self):
        """CuPy's: it waits for work in flight, without a time limit."""
        self._check_open()
        if self._graphs:
            raise _checker.report(
                "the simulated GPU: an NCCL communicator is destroyed at "
                f"{_checker.shown(_checker.place())} while a graph holds calls of it, and waits "
                "for ever; drop the graph first"
            )
        while self._under_way:
            with _streams.lock:
                _streams.progress()
            time.sleep(1e-4)
        self._is_open = False
        self._ring.close()

    def _check_open(self):
        if not self._is_open:
            raise _checker.report(
                "the simulated GPU: an NCCL communicator is used at "
                f"{_checker.shown(_checker.place())} after it was destroyed, which crashes"
            )

    def _call(self, stream, verb, source, target, count, datatype, received=None, **facts):
        self._check_open()
        _faults.counted["nccl calls"] += 1
        if (status := _faults.value("nccl-fails", "nccl calls")) is not None:
            raise NcclError(status)
        while _faults.value("nccl-blocks", "nccl calls") is not None:
            time.sleep(0.01)
        dtype = _dtype(datatype)
        call = _Call(verb, dtype, count, facts, _checker.place())
        _latest[:] = [self]
        call.hangs = _faults.value("nccl-hangs", "nccl calls") is not None
        if source:
            call.source = self._memory(source, count, dtype)
        if target:
            call.target = self._memory(target, count if received is None else received, dtype)
        if getattr(_group, "depth", 0):
            _group.calls.append((self, stream, call))
        else:
            self._put(stream, [call])

    def _memory(self, address, count, dtype):
        """(block, range of bytes, array of the elements) at an address."""
        block, nbytes = _memory.block_at(address), count * dtype.itemsize
        if (
            block is None
            or block.is_free
            or block.device != self._device
            or address + nbytes > block.ptr + block.size
        ):
            raise _checker.report(
                f"the simulated GPU: NCCL is called at {_checker.shown(_checker.place())} with "
                f"{nbytes:,} bytes that are not, or no longer, memory of GPU {self._device}"
            )
        if address % dtype.itemsize:
            raise _checker.report(
                f"the simulated GPU: NCCL is called at {_checker.shown(_checker.place())} with "
                f"{dtype} at an address that is not a multiple of {dtype.itemsize}"
            )
        start = address - block.ptr
        return block, range(start, start + nbytes), block.buffer[start : start + nbytes].view(dtype)

    def _put(self, stream, calls):
        """Enqueues a group of calls on a stream."""
        queue = next((one for one in _streams.queues() if one.address == stream), None)
        queue = _streams.null_queue(self._device) if not stream else queue
        if queue is None:
            raise _checker.report(
                "the simulated GPU: NCCL is called with a stream that is not there any more"
            )
        if queue.captured is not None:
            queue.captured.append(functools.partial(self._put_again, stream, calls))
            self._graphs.add(queue.captured)
            return
        self._refuse_overlaps(calls)
        queue.start()
        for call in calls:
            for memory, writes in ((call.source, False), (call.target, True)):
                if memory is not None and len(memory[1]):
                    memory[0].history.access(queue, memory[1].start, memory[1].stop, writes)
        self._under_way += 1
        queue.put(_Work(self, calls))
        self._connect(queue, calls)

    def _put_again(self, stream, calls):
        """`_put` in a launch of a graph."""
        calls = [copy.copy(call) for call in calls]  # an earlier launch may not be done
        for call in calls:
            _faults.counted["nccl calls"] += 1
            call.hangs = _faults.value("nccl-hangs", "nccl calls") is not None
        self._put(stream, calls)

    def _refuse_overlaps(self, calls):
        """Raises if a call writes what it, or another call of its group, also reads or writes.

        NCCL allows only exact in-place forms: data leave in pieces while others arrive.
        """
        found = sorted(
            (memory[0].ptr + memory[1].start, memory[0].ptr + memory[1].stop, writes, i)
            for i, call in enumerate(calls)
            for memory, writes in ((call.source, False), (call.target, True))
            if memory is not None and len(memory[1])
        )
        for i, (_, stop, writes, one) in enumerate(found):
            for other_start, _, other_writes, other in itertools.islice(found, i + 1, None):
                if other_start >= stop:
                    break
                if (writes or other_writes) and (
                    one != other or not calls[one].is_in_place(self._rank)
                ):
                    first, second = (
                        f"{calls[k].verb} at {_checker.shown(calls[k].where)}" for k in (one, other)
                    )
                    whose = "itself" if one == other else f"that of {second}, in one group"
                    raise _checker.report(
                        f"the simulated GPU: the memory that NCCL's {first} reads or writes "
                        f"overlaps {whose}, and one of the two writes it; a call may work in "
                        "place, where NCCL says so, or apart"
                    )

    def _connect(self, queue, calls):
        """Waits in the first call of a kind, or with a peer, because NCCL connects ranks then."""
        kinds = {
            (call.verb, peer) for call in calls if (peer := call.facts.get("peer")) != self._rank
        }
        if not kinds <= self._connected:
            self._connected |= kinds
            _faults.counted["nccl connects"] += 1
            _streams.wait_for(queue.marker())

    def _finish(self):
        self._under_way -= 1


class _Call:
    """One call: its operation, its memory, and its place in the program."""

    hangs = False
    source = target = None

    def __init__(self, verb, dtype, count, facts, where):
        self.verb, self.dtype, self.count, self.facts, self.where = verb, dtype, count, facts, where

    def is_in_place(self, rank):
        """Whether the result overlaps the input in the way that NCCL's documentation allows."""
        part = rank * self.count * self.dtype.itemsize if self.verb == "allGather" else 0
        source = self.source[0].ptr + self.source[1].start
        target = self.target[0].ptr + self.target[1].start
        return target + part == source

    def described(self):
        """What all ranks, or the two ranks of a message, must agree on."""
        return self.verb, self.dtype.name, self.count, tuple(sorted(self.facts.items()))


class _Work:
    """A group of calls as work on a stream: posted in order, done when all ranks have posted."""

    def __init__(self, communicator, calls):
        self._communicator, self._calls = communicator, calls
        self._number = None
        self._differs = False

    def __call__(self):
        communicator = self._communicator
        if self._differs or any(call.hangs for call in self._calls):
            return False
        ring = communicator._ring
        if self._number is None:
            sources = [None if one.source is None else one.source[2] for one in self._calls]
            self._number = ring.post(
                [
                    (call.described(), None if data is None else data.tobytes(), call.where)
                    for call, data in zip(self._calls, sources, strict=True)
                ]
            )
        everyones = None if self._number is None else ring.everyones(self._number)
        if everyones is None:
            return False
        if not self._fit(everyones):
            self._differs = True
            return False
        self._move(everyones)
        ring.finish(self._number)
        communicator._finish()
        return True

    def _fit(self, everyones):
        """Whether the ranks' groups match; prints a report if not, because NCCL would just hang."""
        collectives = [
            [call for call, *_ in group if call[0] not in ("send", "recv")] for group in everyones
        ]
        is_paired = all(
            _between(everyones, a, b, "send", "peer") == _between(everyones, b, a, "recv", "peer")
            for a in range(len(everyones))
            for b in range(len(everyones))
        )
        if is_paired and all(one == collectives[0] for one in collectives):
            return True
        lines = [
            f"\n  rank {rank}: "
            f"{', '.join(f'{_shown(call)} at {_checker.shown(where)}' for call, _, where in group)}"
            for rank, group in enumerate(everyones)
        ]
        text = f"the simulated GPU: the ranks make different calls of NCCL, which hangs:{''.join(lines)}"
        print(text, file=sys.__stderr__, flush=True)
        return False

    def _move(self, everyones):
        rank = self._communicator._rank
        for i, call in enumerate(self._calls):
            if call.target is None:
                continue
            target = call.target[2]
            if call.verb == "recv":
                peer = call.facts["peer"]
                mine = [
                    one for one in self._calls if one.verb == "recv" and one.facts["peer"] == peer
                ]
                sent = [
                    data
                    for (verb, _, _, facts), data, _ in everyones[peer]
                    if verb == "send" and facts == (("peer", rank),)
                ]
                target[...] = np.frombuffer(sent[mine.index(call)], call.dtype)
                continue
            # The i-th collective of a group is the i-th on all ranks; messages do not count.
            place = [one for one in self._calls[:i] if one.verb not in ("send", "recv")]
            parts = [
                [data for (verb, *_), data, _ in group if verb not in ("send", "recv")][len(place)]
                for group in everyones
            ]
            if call.verb == "broadcast":
                target[...] = np.frombuffer(parts[call.facts["root"]], call.dtype)
            elif call.verb == "allGather":
                target[...] = np.frombuffer(b"".join(parts), call.dtype)
            else:
                target[...] = _reduced(
                    [np.frombuffer(part, call.dtype) for part in parts],
                    call.facts["op"],
                    last=call.facts.get("root", 0),
                )


def _between(everyones, rank, peer, verb, fact):
    """(dtype, count) of each message of a kind between a rank and a peer."""
    return [
        call[1:3] for call, *_ in everyones[rank] if call[0] == verb and call[3] == ((fact, peer),)
    ]


def _shown(call):
    verb, dtype, count, facts = call
    named = [f"{name} {_OPERATIONS[value] if name == 'op' else value}" for name, value in facts]
    return f"{verb}({', '.join([f'{count} {dtype}', *named])})"


def _reduced(parts, op, last):
    """Reduces around the ring of ranks up to the last; 16-bit floats as float32, rounded once.

    NCCL's orders too depend on the call, and on an element's place in it.
    """
    parts = parts[last + 1 :] + parts[: last + 1]
    wide = [part.astype(np.float32) if part.dtype.itemsize == 2 else part for part in parts]
    total = wide[0].copy()
    with np.errstate(all="ignore"):
        for part in wide[1:]:
            _SUM[op](total, part, out=total)
        return total.astype(parts[0].dtype)


def _dtype(datatype):
    if datatype == NCCL_BFLOAT16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_DTYPES[datatype])
