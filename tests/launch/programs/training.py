"""Trains for 40 steps to a known end; a lost or repeated element, slot or step changes it.

Each start and each step leaves a file; `log` tells where a start went on, its steps and deaths.
"""

import argparse
import fractions
import glob
import os
import pathlib
import signal
import threading
import time

STEPS = 40

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--before", default="", help="a statement before the library is imported")
parser.add_argument("--first", default="", help="a statement after what was saved is restored")
parser.add_argument(
    "--attack", default="", help="a statement in each step, which knows `step`, `rank` and `start`"
)
parser.add_argument(
    "--deaths", nargs="*", default=[], help="for each start: rank, how, after which steps, seconds"
)
parser.add_argument("--step-seconds", type=float, default=0.0, help="more seconds in each step")
parser.add_argument("--strategy", default="CentralStorageStrategy")
parser.add_argument("--sizes", type=int, nargs="*", default=[5], help="of variables")
parser.add_argument("--momentum", type=float, default=0.0, help="theirs, a sum of powers of two")
parser.add_argument("--every", type=int, default=2, help="steps between saves")
parser.add_argument("--background", action="store_true", help="saves in the background")
parser.add_argument("--path", default="checkpoint")
options = parser.parse_args()
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
exec(options.before)

log = os.open("log", os.O_RDWR | os.O_APPEND | os.O_CREAT)


def note(*words):
    """In one piece, whatever kills this process next."""
    os.write(log, (" ".join(map(str, words)) + "\n").encode())


def count_deaths():
    return pathlib.Path("log").read_text().count("death")


steps_done = threading.Semaphore(0)  # of this start


def die(how, steps, seconds):
    for _ in range(steps):
        steps_done.acquire(timeout=2)
    time.sleep(seconds)
    note("death", rank, how)
    if how == "exit":
        os._exit(0)
    while True:  # MPICH ignores USR1 until its default action is restored below
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(0.01)


if (number := count_deaths()) < len(options.deaths):
    victim, how, steps, seconds = options.deaths[number].split()
    if int(victim) == rank:
        arguments = (how, int(steps), float(seconds))
        threading.Thread(target=die, args=arguments, daemon=True).start()

import numpy as np  # noqa: E402

import hpcstrat as hs  # noqa: E402

last = hs.size() - 1
alone = {"device": "CPU:0"} if options.strategy == "OneDeviceStrategy" else {}
strategy = getattr(hs, options.strategy)(**alone)
start = hs.on_lead(lambda: len(list(pathlib.Path().glob("start-*"))))
hs.on_lead(lambda: pathlib.Path(f"start-{start}").touch())
random = np.random.default_rng(0)
x, y = random.standard_normal((48, 6)), random.standard_normal((48, 2))
with strategy.scope():
    variables = [hs.Variable(np.zeros(size)) for size in options.sizes]
    w, b = hs.Variable(np.zeros((6, 2))), hs.Variable(np.zeros(2))
    epoch, loss = hs.Variable(0, dtype=np.int64), hs.metrics.Mean()
    exact = hs.optimizers.SGD(1.0, momentum=options.momentum)
    rate = hs.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    optimizer = hs.optimizers.Adam(rate, global_clipnorm=0.5)
dataset = hs.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=5).batch(12)
batches = strategy.experimental_distribute_dataset(dataset)
checkpoint = hs.checkpoint.Checkpoint(
    model={"w": w, "b": b, "exact": variables},
    optimizers=[optimizer, exact],
    epoch=epoch,
    loss=loss,
    batches=batches,
)


def train_step(batch):
    x, y = batch
    error = x @ w + b - y
    loss.update_state(error**2)
    optimizer.apply_gradients([(x.T @ error, w), (error.sum(axis=0), b)])
    exact.apply_gradients([(np.full(v.shape, rank + 1.0), v) for v in variables])


def show():
    """Prints what was learned, exactly."""
    arrays = [v.numpy().tobytes().hex() for v in (w, b)]
    print("learned", *arrays, float(loss.result()).hex(), optimizer.iterations)


with hs.checkpoint.CheckpointManager(
    checkpoint, options.path, every=options.every, blocking=not options.background
) as manager:
    signal.signal(
        signal.SIGUSR1, signal.SIG_DFL if options.deaths else signal.getsignal(signal.SIGUSR1)
    )
    manager.restore_or_initialize()
    if rank == 0:
        note("from", manager.steps)
    exec(options.first)
    while epoch.numpy() < STEPS // 4:
        for batch in batches:
            step = manager.steps + 1
            while step == STEPS and count_deaths() < len(options.deaths):
                time.sleep(0.01)  # before the last step the plan is fulfilled
            strategy.run(train_step, args=(batch,))
            exec(options.attack)
            time.sleep(options.step_seconds)
            manager.step()
            steps_done.release()
            if rank == 0:
                note("step", step, len(glob.glob(options.path + ".partial-*")))
                pathlib.Path(f"step-{step}").touch()
        epoch.assign_add(1)
show()
print("weight", *{fractions.Fraction(one) for v in variables for one in np.unique(v.numpy())})
