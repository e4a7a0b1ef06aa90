"""Probes whether a training step can be one CUDA graph, with cuBLAS, CuPy and NCCL.

    mpirun -n 2 python benchmarks/graph_probe.py                     # a GPU for each rank
    launch/share-gpu mpirun -n 2 python benchmarks/graph_probe.py    # one GPU for all

A perceptron is trained by SGD on half the squared error, by hand: eagerly, and by one graph that is
replayed. The graph has cuBLAS's products, CuPy's kernels and NCCL's all-reduce. CuPy refuses matrix
products while it captures, because cuBLAS would allocate its workspace inside the graph. So they go
to cuBLAS by ctypes here, with their own workspace. The learning rate is in device memory, and is
halved midway without another capture. Both ways must end with the same weights, and the same bits
on one or two ranks. The graph is destroyed before the communicator: NCCL would wait for ever for
what a graph still holds.

The tests run it on simulated GPUs, without cuBLAS.
"""

import argparse
import ctypes
import functools
import gc
import itertools
import statistics
import time

import cupy as cp
import numpy as np
from cupy.cuda import nccl
from mpi4py import MPI

COMM = MPI.COMM_WORLD
NETWORKS = {(64, 32, 10): 32, (1024, 2048, 2048, 1024): 16}  # layers: batch per replica
RATE = 1e-3
WORKSPACE = 32 << 20  # bytes, as many as cuBLAS takes for itself on Hopper


class Products:
    """Matrix products of float32 arrays on one stream, which may be capturing."""

    def __init__(self, stream):
        self._cublas = ctypes.CDLL(library_of_cublas())
        self._handle = ctypes.c_void_p()
        self._workspace = cp.empty(WORKSPACE, cp.uint8)  # must outlive the graph
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        # After the stream, because setting the stream resets the workspace.
        workspace = ctypes.c_void_p(self._workspace.data.ptr), ctypes.c_size_t(WORKSPACE)
        self._call("cublasSetWorkspace_v2", self._handle, *workspace)

    def __call__(self, a, b, out):
        """Writes `a @ b` to `out`, which is C-contiguous; `a` and `b` are too, or transposed."""
        (rows, inner), columns = a.shape, b.shape[1]
        # cuBLAS stores columns: to it, a C-contiguous array is its transpose, and out.T is
        # b.T @ a.T.
        operands = []
        for one in (b, a):
            is_plain = one.flags.c_contiguous
            lead = one.shape[1] if is_plain else one.shape[0]
            operands.append((0 if is_plain else 1, ctypes.c_void_p(one.data.ptr), lead))
        (op_b, b_at, lead_b), (op_a, a_at, lead_a) = operands
        shape = columns, rows, inner
        one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
        into = ctypes.c_void_p(out.data.ptr), columns
        self._call(
            "cublasSgemm_v2",
            self._handle,
            op_b,
            op_a,
            *shape,
            one,
            b_at,
            lead_b,
            a_at,
            lead_a,
            zero,
            *into,
        )

    def close(self):
        """Destroys cuBLAS's handle."""
        self._call("cublasDestroy_v2", self._handle)

    def _call(self, name, *arguments):
        status = getattr(self._cublas, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned {status}")


def library_of_cublas():
    """The path or name of the library that CuPy takes its products from."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return f"libcublas.so.{cp.cuda.runtime.runtimeGetVersion() // 1000}"
    return load_nvidia_dynamic_lib("cublas").abs_path


class Network:
    """A perceptron with ReLU, its batch, and the memory of its step, on one stream."""

    def __init__(self, layers, batch, communicator, stream):
        self._communicator, self._stream, self._product = communicator, stream, Products(stream)
        random = np.random.default_rng(0)
        shapes = [shape for a, b in itertools.pairwise(layers) for shape in ((a, b), (b,))]
        sizes = [int(np.prod(shape)) for shape in shapes]
        ends = list(itertools.accumulate(sizes))
        self.flat = cp.asarray(random.normal(0, 0.05, ends[-1]).astype(np.float32))
        self._sum = cp.empty_like(self.flat)
        self._weights, self._gradients = (
            [
                flat[end - size : end].reshape(shape)
                for end, size, shape in zip(ends, sizes, shapes, strict=True)
            ]
            for flat in (self.flat, self._sum)
        )
        own = np.random.default_rng(COMM.rank)
        self._x = cp.asarray(own.random((batch, layers[0]), np.float32))
        self._y = cp.asarray(own.random((batch, layers[-1]), np.float32))
        self.rate = cp.full((), RATE, cp.float32)
        # Outputs and their gradients of each layer; the products write here.
        self._outputs = [cp.empty((batch, layer), cp.float32) for layer in layers[1:]]
        self._deltas = [cp.empty((batch, layer), cp.float32) for layer in layers[1:]]

    def step(self):
        """Forward, backward, all-reduce, update."""
        inputs = [self._x, *self._outputs[:-1]]
        for i, output in enumerate(self._outputs):
            self._product(inputs[i], self._weights[2 * i], output)
            output += self._weights[2 * i + 1]
            if i < len(self._outputs) - 1:
                cp.maximum(output, 0, out=output)
        cp.subtract(self._outputs[-1], self._y, out=self._deltas[-1])
        self._deltas[-1] /= len(self._x)
        for i in reversed(range(len(self._outputs))):
            delta = self._deltas[i]
            self._product(inputs[i].T, delta, self._gradients[2 * i])
            cp.sum(delta, axis=0, out=self._gradients[2 * i + 1])
            if i:
                self._product(delta, self._weights[2 * i].T, self._deltas[i - 1])
                self._deltas[i - 1] *= self._outputs[i - 1] > 0
        message = self._sum.data.ptr, self._sum.data.ptr, self._sum.size
        self._communicator.allReduce(*message, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, self._stream.ptr)
        self.flat -= self.rate * self._sum

    def close(self):
        """Destroys cuBLAS's handle."""
        self._product.close()


def trained(network, step, steps, stream):
    """Seconds per step, and the weights; restores weights and rate. Midway it halves the rate."""
    start = network.flat.copy()
    stream.synchronize()
    COMM.Barrier()
    begin = time.perf_counter()
    for i in range(steps):
        if i == steps // 2:
            network.rate *= 0.5
        step()
    stream.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    weights = network.flat.get()
    network.flat[...] = start
    network.rate[...] = RATE
    return seconds, weights


def compare(eager, replayed, steps):
    """How the weights of the two ways agree, in the words of the printed line.

    The sum of two numbers has one order. With more ranks NCCL may choose another order in a graph,
    whose buffers it registers (NCCL_GRAPH_REGISTER), and each step may then differ in the last
    place of the largest weight.

    Raises:
        AssertionError: they differ by more.
    """
    if COMM.size <= 2 or np.array_equal(replayed, eager):
        np.testing.assert_array_equal(replayed, eager)
        return "same bits"
    tolerance = steps * np.finfo(np.float32).eps * np.abs(eager).max()
    np.testing.assert_allclose(replayed, eager, rtol=0, atol=tolerance)
    return f"equal within {tolerance:.1e}"


def probe(layers, batch, communicator, steps, rounds):
    """Prints one line for a network."""
    stream, pool = cp.cuda.Stream(non_blocking=True), cp.cuda.MemoryPool()
    with stream:
        network = Network(layers, batch, communicator, stream)
        start = network.flat.copy()
        # A pool for captured memory only: its temporaries return to it, and every replay
        # writes to them.
        with cp.cuda.using_allocator(pool.malloc):
            for _ in range(3):  # kernels are compiled, the pool fills, NCCL connects
                network.step()
            stream.synchronize()
            COMM.Barrier()  # a capture is collective in NCCL
            stream.begin_capture()
            try:
                network.step()
            finally:
                graph = stream.end_capture()
        graph.upload(stream)
        network.flat[...] = start
        ways = {"eager": network.step, "graph": functools.partial(graph.launch, stream)}
        seconds, weights = {name: [] for name in ways}, {name: [] for name in ways}
        for _ in range(rounds):
            for name, step in ways.items():
                taken, trained_weights = trained(network, step, steps, stream)
                seconds[name].append(taken)
                weights[name].append(trained_weights)
        # Each round starts with the same weights, so each way always ends with the same bits, on
        # all ranks.
        for first, *others in weights.values():
            for other in (*others, *COMM.allgather(first)):
                np.testing.assert_array_equal(other, first)
            assert (first != start.get()).any(), "nothing was trained"
        agreement = compare(weights["eager"][0], weights["graph"][0], steps)
        # Every graph before ncclCommDestroy, on every rank.
        stream.synchronize()
        ways.clear()
        del graph, step
        network.close()
    gc.collect()
    eager, replayed = (
        COMM.allreduce(statistics.median(seconds[name]), MPI.MAX) for name in ("eager", "graph")
    )
    if COMM.rank == 0:
        name = "-".join(map(str, layers))
        figures = (
            f"eager {1e6 * eager:,.1f} us, graph {1e6 * replayed:,.1f} us ({replayed / eager:.2f})"
        )
        print(f"{name} on {COMM.size} ranks: {figures}, {agreement}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="replays in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way (%(default)s)")
    options = parser.parse_args()
    local = COMM.Split_type(MPI.COMM_TYPE_SHARED).rank
    cp.cuda.Device(local % cp.cuda.runtime.getDeviceCount()).use()
    identity = COMM.bcast(nccl.get_unique_id() if COMM.rank == 0 else None)
    communicator = nccl.NcclCommunicator(COMM.size, identity, COMM.rank)
    for layers, batch in NETWORKS.items():
        probe(layers, batch, communicator, options.steps, options.rounds)
    communicator.destroy()
    COMM.Barrier()
    if COMM.rank == 0:
        print("ended: the communicator was destroyed after the graphs", flush=True)


if __name__ == "__main__":
    main()
