"""The programs that gpu_hazards.py runs as processes: `python FILE NAME [ARGUMENT ...]`."""

import contextlib
import ctypes
import faulthandler
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from gpu_hazard_jobs import LIMIT, Job, inside, mpirun, since

# The functions below import the rest: one of them starts ranks, and in that process neither MPI nor
# CUDA may start.

# Of a rank, its step, all steps.
HAZARDS = {
    "hang": (1, 100, 5000),
    "kill": (2, 500, 600),
    "none": (-1, 0, 600),
}
ROW, BEGINS = "a row of the table: ", "the hazard begins"
SPIN = r"""
extern "C" __global__ void spin(const volatile int* flag, long long nanoseconds) {
    long long begin, now;  // by the GPU's own clock too: a host that is frozen sets no flag
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (!*flag && now - begin < nanoseconds);
}
extern "C" __global__ void nothing() {}
"""


def show(case, seen, seconds, is_well=True):
    print(ROW + json.dumps([case, seen, seconds, is_well]), flush=True)


def device():
    import cupy as cp
    from cupy.cuda import nccl

    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    gpus, driver = cp.cuda.runtime.getDeviceCount(), cp.cuda.runtime.driverGetVersion()
    text = f"{gpus} x {name}, driver {driver}, CuPy {cp.__version__}, NCCL {nccl.get_version()}"
    print(json.dumps({"gpus": gpus, "is_simulated": name == "simulated GPU", "text": text}))


class Spinner:
    """Puts a kernel on the current stream that ends at `release` or by itself."""

    def __init__(self):
        import cupy as cp
        import numpy as np

        self._memory = cp.cuda.alloc_pinned_memory(4)  # the GPU sees it at the same address
        self._flag = np.frombuffer(self._memory, np.int32, 1)
        self._kernel, self.nothing = (cp.RawKernel(SPIN, name) for name in ("spin", "nothing"))
        self(0)  # compiles and loads it
        self.nothing((1,), (1,), ())
        cp.cuda.Device().synchronize()

    def __call__(self, seconds):
        self._flag[0] = 0
        self._kernel((1,), (1,), (self._memory.ptr, int(1e9 * seconds)))

    def release(self):
        self._flag[0] = 1


def queue(most=20_000, released_after=1.0, ends_after=4.0):
    """One thread fills a stream's queue, this thread makes a call: again for each call.

    A third thread ticks.
    """
    import cupy as cp

    spinner, device, stream = Spinner(), cp.cuda.Device(), cp.cuda.Stream(non_blocking=True)
    # CDLL releases the GIL.
    event, driver = (
        cp.cuda.Event(block=True, disable_timing=True),
        ctypes.CDLL("libcuda.so.1"),
    )
    launched = ticks = 0

    def launch():
        nonlocal launched
        device.use()
        with stream:
            spinner(ends_after)
            event.record(stream)
            for _ in range(most):
                spinner.nothing((1,), (1,), ())
                launched += 1

    def tick():
        nonlocal ticks
        while True:
            ticks += 1
            time.sleep(1e-3)

    threading.Thread(target=tick, daemon=True).start()
    tried = {
        "event.done, by CuPy": lambda: event.done,
        "cuEventQuery, by ctypes": lambda: driver.cuEventQuery(ctypes.c_void_p(event.ptr)),
        "an event made and dropped": lambda: cp.cuda.Event(disable_timing=True),
        "Device.use": device.use,
        "synchronize() of a blocking event": event.synchronize,
    }
    for case, call in tried.items():
        launched, before = 0, -1
        thread, timer = (
            threading.Thread(target=launch),
            threading.Timer(released_after, spinner.release),
        )
        thread.start()
        while thread.is_alive() and launched > before:  # until no launch was added for a while
            before = launched
            time.sleep(0.3)
        queue = f"behind {launched:,} launches, the next of which {'blocks' if thread.is_alive() else 'DOES NOT BLOCK'}"
        timer.start()
        begin, before = time.perf_counter(), ticks
        call()
        seconds, ticked = time.perf_counter() - begin, ticks - before
        how = (
            "at once"
            if seconds < 0.1
            else "waits"
            if ticked > 100 * seconds
            else "waits WITH THE GIL"
        )
        show(
            case,
            f"{how}: {1e3 * seconds:,.3f} ms, {ticked:,} ticks of another thread; {queue}",
            seconds,
        )
        timer.join()
        thread.join()
        device.synchronize()


def events(power, count=1000):
    """With arrays so large that the GPU, not the host, takes the time."""
    import cupy as cp

    array, stream = cp.ones(1 << int(power), cp.float32), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()

    def microseconds(call, *arguments):
        begin = time.perf_counter()
        for _ in range(count):
            call(*arguments)
        return 1e6 * (time.perf_counter() - begin) / count

    def kernels(event):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        with stream:
            begin.record(stream)
            for _ in range(count):
                cp.add(array, 1, out=array)
                if event is not None:
                    event.record(stream)
            end.record(stream)
        end.synchronize()
        return cp.cuda.get_elapsed_time(begin, end)

    for block in None, False, True:
        begin, case, host = time.perf_counter(), "no event", ""
        event = None if block is None else cp.cuda.Event(block=block, disable_timing=True)
        if event is not None:
            case, host = (
                f"Event(block={block})",
                f"record {microseconds(event.record, stream):.2f} us, ",
            )
            stream.synchronize()
            host += f"synchronize() when done {microseconds(event.synchronize):.2f} us; a record after each of "
        seconds = min(kernels(event) for _ in range(4)) / 1e3
        show(
            case,
            f"{host}{count:,} kernels: {1e3 * seconds:.2f} ms on the GPU",
            time.perf_counter() - begin,
        )


def calls(name):
    import cupy as cp
    from cupy.cuda import nccl
    from mpi4py import MPI

    comm, kind = MPI.COMM_WORLD, nccl.NCCL_FLOAT32
    cp.cuda.Device(
        comm.Split_type(MPI.COMM_TYPE_SHARED).rank % cp.cuda.runtime.getDeviceCount()
    ).use()
    arrays, stream = (
        [cp.zeros(comm.size << 20, cp.float32) for _ in range(2)],
        cp.cuda.Stream(non_blocking=True),
    )
    cp.cuda.Device().synchronize()
    a, b, s = *(array.data.ptr for array in arrays), stream.ptr

    def used():
        comm.Barrier()
        free, total = cp.cuda.runtime.memGetInfo()
        return (total - free) / 2**20

    def timed(call, count):
        """Milliseconds of the slowest rank: in the call, and until it is done."""
        comm.Barrier()
        begin = time.perf_counter()
        call(count)
        in_call = time.perf_counter() - begin
        stream.synchronize()
        return [
            1e3 * comm.allreduce(one, MPI.MAX) for one in (in_call, time.perf_counter() - begin)
        ]

    def send_and_receive(count):
        nccl.groupStart()
        link.send(a, count, kind, (comm.rank + 1) % comm.size, s)
        link.recv(b, count, kind, (comm.rank - 1) % comm.size, s)
        nccl.groupEnd()

    identity, before = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None), used()
    begin = time.perf_counter()
    link = nccl.NcclCommunicator(comm.size, identity, comm.rank)
    seconds, started, rows = time.perf_counter() - begin, used(), []
    ways = {
        "allReduce": lambda count: link.allReduce(a, b, count, kind, nccl.NCCL_SUM, s),
        "reduce": lambda count: link.reduce(a, b, count, kind, nccl.NCCL_SUM, 0, s),
        "broadcast": lambda count: link.broadcast(a, b, count, kind, 0, s),
        "allGather": lambda count: link.allGather(a, b, count, kind, s),
        "send, recv": send_and_receive,
    }
    for way, call in ways.items():
        begin, texts = time.perf_counter(), []
        for size, count in ("4 B", 1), ("4 MB", 1 << 20):
            (in_call, first), (_, second) = timed(call, count), timed(call, count)
            texts.append(
                f"{size}: first {first:.2f} ms, {in_call:.2f} of it in the call, second "
                f"{second:.2f} ms"
            )
        rows.append((f"{name}, {way}", "; ".join(texts), time.perf_counter() - begin))
    memory = f"{started - before:,.0f} MiB on rank 0's GPU, of all its ranks; {used() - before:,.0f} after the calls"
    if comm.rank == 0:
        for row in (f"{name}, start", memory, seconds), *rows:
            show(*row)
    link.destroy()


def train(hazard, folder, launches=0, reads=0):
    """Steps, with a hazard for one rank: only the first time, if `folder` is the same.

    In a hang its GPU spins, and the others' next reduction waits for it; it would continue after
    the package's time limit.
    """
    import numpy as np

    import hpcstrat as hs

    strategy, (rank, number, steps) = hs.CentralStorageStrategy(), HAZARDS[hazard]
    with strategy.scope():
        weights, optimizer = hs.Variable(np.zeros(1 << 16, np.float32)), hs.optimizers.SGD(0.1)
    gradient, small = strategy.xp.ones(1 << 16, np.float32), strategy.xp.ones(8, np.float32)
    checkpoint = hs.checkpoint.Checkpoint(weights=weights, optimizer=optimizer)
    manager = hs.checkpoint.CheckpointManager(checkpoint, f"{folder}/checkpoint", every=10)
    spins = hazard == "hang" and "SIMULATED_GPU_FAULTS" not in os.environ
    spinner, happened = Spinner() if spins else None, pathlib.Path(folder, "happened")

    def step():
        for _ in range(int(launches)):
            strategy.xp.add(small, 1, out=small)
        optimizer.apply_gradients([(gradient, weights)])
        if int(reads):
            weights.value().get()

    manager.restore_or_initialize()
    print(f"training from step {manager.steps}", flush=True)
    while manager.steps < steps:
        if (hs.rank(), manager.steps) == (rank, number) and not happened.exists():
            happened.touch()
            print(BEGINS, flush=True)
            if hazard == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if spinner is not None:
                strategy.run(lambda: spinner(40))
        strategy.run(step)
        manager.step()
    weights.numpy()


def kills(log, ranks):
    """Two jobs in one daemon, and the state between them."""

    def train(name, hazard):
        command = mpirun(ranks, "train", hazard, tempfile.mkdtemp(dir=log))
        return Job(command, pathlib.Path(log, f"kills-{name}.log"), 60)

    def look(when):
        begin, seen = time.monotonic(), ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            seen = subprocess.run(
                inside("driver"), stdout=subprocess.PIPE, text=True, timeout=15
            ).stdout.strip()
        show(
            f"a new process, {when}",
            seen or "it says nothing",
            time.monotonic() - begin,
            bool(seen),
        )

    look("before")
    job = train("first", "kill")
    end, killed = time.monotonic(), job.when(BEGINS)
    seen = f"the launcher ends {since(killed, job.seconds)}, the last rank {since(killed, job.gone)}; {job.how()}"
    show("SIGKILL of rank 2", seen, job.seconds, killed is not None and not job.stayed)
    for seconds in 1, 2, 5:
        time.sleep(max(end + seconds - time.monotonic(), 0))
        look(f"{seconds} s later")
    job = train("again", "none")
    seen = f"trains {since(0, job.when('training from'))}; {job.how()}"
    show("the same ranks again", seen, job.seconds, job.status == 0)


def driver():
    """What the driver tells a new process, without the second that CuPy takes to load."""
    driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for name, *arguments in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
    ):
        if not hasattr(driver, name):
            return print(f"cuInit returns 0; there is no {name} here")
        if code := getattr(driver, name)(*arguments):
            return print(f"{name} returns {code}")
    print(f"cuInit returns 0; {(total.value - free.value) / 2**20:,.0f} MiB of the GPU are in use")


if __name__ == "__main__":
    # Shows where it is before its time is over, even where the GIL is held.
    faulthandler.dump_traceback_later(max(float(os.environ.get(LIMIT, 60)) - 3, 1))
    globals()[sys.argv[1]](*sys.argv[2:])
