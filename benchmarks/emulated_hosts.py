r"""Runs a command on emulated hosts: network namespaces with links of limited bandwidth.

    sudo env PATH="$PATH" python benchmarks/emulated_hosts.py --hosts 2 --ranks 4 \
        python benchmarks/hosts_step.py

It is `mpirun -n RANKS COMMAND`, with the ranks spread over the hosts in blocks. It needs Linux,
root, iproute2 and MPICH. Each host has one link to a switch, limited by `tc` to `--gbit` in each
direction, and MPI sees no shared memory between hosts: everything between them goes over TCP.
Cores, disks and the real memory are shared, so this measures the network's part of a step. The
latency is the kernel's, about 10 us; an Ethernet switch has 50.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

NETWORK = "10.77.0"
SWITCH = "hpcstrat-switch"
LINK = "eth0"
LAUNCHER = """#!/bin/sh
# Called as ssh is: options, a host, a command.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" sh -c "$*"
"""


def addresses(hosts):
    return [f"{NETWORK}.{host + 1}" for host in range(hosts)]


def ip(*words, namespace=None):
    tool, *rest = words
    subprocess.run([tool, *([] if namespace is None else ["-n", namespace]), *rest], check=True)


def remove_left(name):
    """Deletes the namespace of a killed run; one with processes belongs to another run."""
    if pathlib.Path("/run/netns", name).exists():
        output = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout
        if output:
            sys.exit(f"{name}: another run of emulated_hosts.py is using this network namespace")
        ip("ip", "netns", "delete", name)


@contextlib.contextmanager
def network(hosts, gbit):
    """A block during which namespaces exist, named by their addresses and linked by a switch."""
    made = []
    try:
        for name in (*addresses(hosts), SWITCH):
            remove_left(name)
            ip("ip", "netns", "add", name)
            made.append(name)
        ip("ip", "link", "add", "bridge", "type", "bridge", namespace=SWITCH)
        ip("ip", "link", "set", "bridge", "up", namespace=SWITCH)
        for number, host in enumerate(addresses(hosts)):
            port = f"port{number}"
            ip(
                "ip",
                "link",
                "add",
                LINK,
                "netns",
                host,
                "type",
                "veth",
                "peer",
                port,
                "netns",
                SWITCH,
            )
            ip("ip", "addr", "add", f"{host}/24", "dev", LINK, namespace=host)
            ip("ip", "link", "set", port, "master", "bridge", namespace=SWITCH)
            for name, device in ((host, "lo"), (host, LINK), (SWITCH, port)):
                ip("ip", "link", "set", device, "up", namespace=name)
            # Both directions: what a host sends, and what the switch sends to it.
            for name, device in ((host, LINK), (SWITCH, port)):
                limit = ["rate", f"{gbit}gbit", "burst", "128kb", "latency", "20ms"]
                ip("tc", "qdisc", "add", "dev", device, "root", "tbf", *limit, namespace=name)
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def run(hosts, ranks, gbit, command):
    """The exit status of a command on `ranks` ranks of `hosts` hosts."""
    with tempfile.TemporaryDirectory() as folder, network(hosts, gbit):
        launcher = pathlib.Path(folder, "launcher")
        launcher.write_text(LAUNCHER)
        launcher.chmod(0o755)
        counts = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
        where = ",".join(
            f"{host}:{count}" for host, count in zip(addresses(hosts), counts, strict=True)
        )
        mpirun = [
            "mpirun",
            "-launcher",
            "ssh",
            "-launcher-exec",
            launcher,
            "-iface",
            LINK,
            "-hosts",
            where,
        ]
        # UCX would notice that the hosts are one machine, and copy from process to process. It
        # moves 8 KiB per system call by default, which takes cores from the computation.
        segments = {f"UCX_TCP_{way}_SEG_SIZE": "128k" for way in ("TX", "RX")}
        environment = segments | {**os.environ, "UCX_TLS": "tcp,self", "GLOO_SOCKET_IFNAME": LINK}
        words = ["ip", "netns", "exec", addresses(hosts)[0], *mpirun, "-n", str(ranks), *command]
        return subprocess.run(words, env=environment, check=False).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="to emulate (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="on all of them (%(default)s)")
    parser.add_argument(
        "--gbit",
        type=float,
        default=1.0,
        help="a second, of each link in each direction (%(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="of each rank")
    options = parser.parse_args()
    if not 0 < options.hosts <= options.ranks:
        parser.error("--hosts: every host needs a rank")
    if not options.command:
        parser.error("COMMAND: it is missing")
    sys.exit(run(options.hosts, options.ranks, options.gbit, options.command))


if __name__ == "__main__":
    main()
