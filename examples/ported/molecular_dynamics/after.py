"""Molecular dynamics in slabs of the box, one for each replica: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/molecular_dynamics/after.py

After each move `to_owners` sends the particles that have left a slab to the replica whose slab they
are in now, by `all_to_all`. `ghosts` brings copies of the neighbours' particles near the faces, for
the forces, by `neighbor_exchange`. Both take any number of particles. miniMD cuts the box along all
three axes; here it is cut along x, into slabs that are no narrower than the cutoff.
"""

import argparse

import numpy as np

import hpcstrat as hs

DENSITY, TEMPERATURE, TIME_STEP, CUTOFF = 0.8442, 1.44, 0.005, 2.5


def lattice(cells):
    """Positions, of shape (n, 3), and the sides of the box."""
    side = (4 / DENSITY) ** (1 / 3)
    corners = np.indices(cells).reshape(3, -1).T[:, None]
    atoms = np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    return (corners + atoms).reshape(-1, 3) * side, np.array(cells) * side


def random_velocities(count):
    """Of the given temperature; their sum is zero."""
    velocities = np.random.default_rng(0).uniform(-1, 1, (count, 3))
    velocities -= velocities.mean(axis=0)
    return velocities * np.sqrt(TEMPERATURE * 3 * (count - 1) / (velocities**2).sum())


def to_owners(xp, particles, length):
    """Arrays of the particles that are in this replica's slab now."""
    replica = hs.get_replica_context()
    slabs = replica.num_replicas_in_sync
    owners = (particles[0][:, 0] * (slabs / length)).astype(int)
    owners = xp.minimum(owners, slabs - 1)  # where `% box` has rounded up to the side of the box
    received = replica.all_to_all([[one[owners == r] for one in particles] for r in range(slabs)])
    return [xp.concatenate(parts) for parts in zip(*received, strict=True)]


def ghosts(xp, positions, length):
    """The neighbours' particles near this slab; beyond the ends of the box, their images."""
    replica = hs.get_replica_context()
    slab, slabs = replica.rank, replica.num_replicas_in_sync
    x, low, high = positions[:, 0], slab * length / slabs, (slab + 1) * length / slabs
    along_x = xp.asarray([length, 0, 0])
    to_left = positions[x < low + CUTOFF] + along_x * (slab == 0)
    to_right = positions[x > high - CUTOFF] - along_x * (slab == slabs - 1)
    return xp.concatenate(replica.neighbor_exchange(to_left, to_right, periodic=True))


def forces(xp, positions, box, length):
    """On each particle, of shape (n, 3), and their part of the potential energy."""
    apart = positions[:, None] - xp.concatenate([positions, ghosts(xp, positions, length)])
    apart[..., 1:] -= box[1:] * xp.rint(apart[..., 1:] / box[1:])  # to the nearest image
    squares = (apart**2).sum(axis=2)
    is_near = (squares < CUTOFF**2) & (squares > 0)
    squares = xp.where(is_near, squares, xp.inf)
    sixth = squares**-3
    strengths = 48 * sixth * (sixth - 0.5) / squares
    at_cutoff = CUTOFF**-12 - CUTOFF**-6
    energy = 2 * (sixth * (sixth - 1) - at_cutoff * is_near).sum()  # each pair counts twice
    return (strengths[:, :, None] * apart).sum(axis=1), energy


def simulate(xp, positions, velocities, ids, box, length, steps):
    """This replica's last positions and ids, and the kinetic and potential energies."""
    replica = hs.get_replica_context()
    history = []
    positions, velocities, ids = to_owners(xp, (positions, velocities, ids), length)
    force, _ = forces(xp, positions, box, length)
    for _ in range(steps):
        velocities = velocities + 0.5 * TIME_STEP * force
        positions = (positions + TIME_STEP * velocities) % box
        positions, velocities, ids = to_owners(xp, (positions, velocities, ids), length)
        force, potential = forces(xp, positions, box, length)
        velocities = velocities + 0.5 * TIME_STEP * force
        kinetic = 0.5 * (velocities**2).sum()
        history.append([float(one) for one in replica.all_reduce("SUM", (kinetic, potential))])
    return positions, ids, np.array(history)


def main():
    parser = argparse.ArgumentParser(description="A liquid of Lennard-Jones particles.")
    parser.add_argument("--cells", type=int, nargs=3, default=(6, 4, 4), help="of four particles")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp

    start, box = lattice(options.cells)
    if box[0] < CUTOFF * strategy.num_replicas_in_sync:
        raise ValueError("the slabs are narrower than the cutoff: more --cells, or fewer replicas")
    velocities = random_velocities(len(start))
    given = strategy.scatter((start, velocities, np.arange(len(start))))
    box, length = xp.asarray(box), float(box[0])
    positions, ids, history = strategy.run(simulate, args=(xp, *given, box, length, options.steps))
    positions, ids = strategy.gather((positions, ids), axis=0)
    end = positions[ids.argsort()]

    history = strategy.experimental_local_results(history)[0] / len(start)
    for step in range(20, options.steps + 1, 20):
        kinetic, potential = history[step - 1]
        print(f"step {step:3}: energies {kinetic:.9f} {potential:.9f} {kinetic + potential:.9f}")
    for i in range(0, len(start), 77):
        print(f"particle {i:3} is at ({', '.join(f'{x:.9f}' for x in end[i].tolist())})")
    return box, start, end, history


if __name__ == "__main__":
    main()
