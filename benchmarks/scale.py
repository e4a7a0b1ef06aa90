"""Shows what a training step costs on many hosts: central storage beside mirrored variables, by a model.

    python benchmarks/scale.py

`scale_model.py` has the formulas, `scale_simulation.py` goes through every message of small cases, and the first table
puts the two beside each other. `scale_links.py` measures the constants of the machine that it runs on. Adam, float32;
tables in Markdown. docs/scale.md says what they mean.
"""

import argparse
from dataclasses import replace

import scale_model as model
from rounds import header, row
from scale_simulation import schedule, simulate

SIZES = {"10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9, "10 GB": 10**10}
HOSTS = (1, 2, 8, 32, 128, 1024)


def gpu_hosts(hosts, gpus):
    """Hosts like NVIDIA's DGX H100: published figures, named in docs/scale.md."""
    nvlink = model.Link(latency=1.9e-6, bandwidth=450e9)
    infiniband = model.Link(latency=4.0e-6, bandwidth=50e9)
    return model.Machine(hosts, gpus, nvlink, infiniband, nics=gpus, memory=3350e9, launch=10e-6)


def cpu_hosts(hosts, ranks):
    """Hosts of CPU replicas in shared memory, as `scale_links.py` measured it on 2 cores, with one NIC as above."""
    shared_memory = model.Link(latency=1.0e-6, bandwidth=11e9)
    infiniband = model.Link(latency=4.0e-6, bandwidth=50e9)
    return model.Machine(hosts, ranks, shared_memory, infiniband, nics=1, memory=20e9)


def show_simulation(gpus=4, nbytes=240_000_000):
    print(f"\n## The simulation beside the formulas: {gpus} GPUs a host, {nbytes // 10**6} MB\n")
    ways = ("simulated", "formula")
    header("step", "hosts", *(f"{name}, {way}" for name in ("messages", "GB", "us") for way in ways))
    for name, step in model.STEPS.items():
        for hosts in (1, 2, 3, 8):
            machine = replace(gpu_hosts(hosts, gpus), launch=0.0)  # the simulation knows of messages only
            costs = simulate(schedule(name, machine, nbytes)), step(machine, nbytes)
            messages = [f"{cost.messages_inside + cost.messages_between:,}" for cost in costs]
            moved = [f"{(cost.bytes_inside + cost.bytes_between) / 1e9:.2f}" for cost in costs]
            row(name, hosts, *messages, *moved, *(f"{1e6 * cost.seconds:,.0f}" for cost in costs))


def show_volume(gpus, size):
    print(f"\n## Messages and bytes of a step: {gpus} GPUs a host, {size} of parameters\n")
    header("step", "hosts", "messages inside", "GB inside", "messages between", "GB between", "GB through busiest NIC")
    for name, step in model.STEPS.items():
        for hosts in HOSTS:
            cost = step(gpu_hosts(hosts, gpus), SIZES[size])
            inside, between = f"{cost.bytes_inside / 1e9:,.0f}", f"{cost.bytes_between / 1e9:,.0f}"
            counts = f"{cost.messages_inside:,}", inside, f"{cost.messages_between:,}", between
            row(name, hosts, *counts, f"{cost.busiest_nic / 1e9:,.2f}")


def show_seconds(title, machine_of, sizes, hosts):
    print(f"\n## Milliseconds of communication and update: {title}\n")
    header("parameters", "hosts", *model.STEPS)
    for size in sizes:
        for count in hosts:
            times = [1e3 * step(machine_of(count), SIZES[size]).seconds for step in model.STEPS.values()]
            row(size, count, *(f"{time:,.0f}" if time >= 100 else f"{time:.3g}" for time in times))


def show_ratios(title, machine_of, sizes, hosts):
    """What is not mirrored, divided by the fastest that is."""
    print(f"\n## That divided by the fastest mirrored step: {title}\n")
    mirrored = [step for name, step in model.STEPS.items() if name.startswith("mirrored")]
    others = {name: step for name, step in model.STEPS.items() if step not in mirrored}
    header("parameters", "hosts", *others)
    for size in sizes:
        for count in hosts:
            machine, nbytes = machine_of(count), SIZES[size]
            fastest = min(step(machine, nbytes).seconds for step in mirrored)
            row(size, count, *(f"{step(machine, nbytes).seconds / fastest:,.2f}" for step in others.values()))


def show_memory(gpus, size):
    print(f"\n## GB of a GPU for {size} of parameters, 32 hosts of {gpus} GPUs\n")
    header("step", "on the parameter rank", "on a rank of another host")
    for name in model.STEPS:
        row(name, *(f"{n / 1e9:.1f}" for n in model.memory_of_a_gpu(name, gpu_hosts(32, gpus), SIZES[size])))


def draw(machine_of, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes, hosts = ("10 MB", "100 MB", "10 GB"), [2**n for n in range(11)]
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.6), dpi=100, layout="constrained")
    for axis, size in zip(axes, sizes, strict=True):
        for name, step in model.STEPS.items():
            if name != "central, flat":  # far above all others
                line = {"central": "-", "mirrored": "--", "sharded": ":"}[name.split(",")[0]]
                axis.plot(hosts, [1e3 * step(machine_of(n), SIZES[size]).seconds for n in hosts], line, label=name)
        axis.set(xscale="log", yscale="log", xlabel="hosts")
        axis.set_title(f"{size} of parameters", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("milliseconds a step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 4], help="of a host (8 and 4)")
    parser.add_argument("--plot", help="a file to draw milliseconds by hosts in")
    options = parser.parse_args()
    show_simulation()
    first = options.gpus[0]
    show_volume(first, "1 GB")
    for gpus in options.gpus:
        show_seconds(f"{gpus} GPUs a host", lambda hosts, gpus=gpus: gpu_hosts(hosts, gpus), SIZES, HOSTS)
        show_ratios(f"{gpus} GPUs a host", lambda hosts, gpus=gpus: gpu_hosts(hosts, gpus), SIZES, HOSTS)
    show_seconds(f"{first} CPU replicas a host", lambda hosts: cpu_hosts(hosts, first), ("10 MB", "1 GB"), HOSTS)
    show_ratios(f"{first} CPU replicas a host", lambda hosts: cpu_hosts(hosts, first), ("10 MB", "1 GB"), HOSTS)
    show_memory(first, "10 GB")
    if options.plot:
        draw(lambda hosts: gpu_hosts(hosts, first), options.plot)


if __name__ == "__main__":
    main()
