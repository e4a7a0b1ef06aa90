"""Molecular dynamics of a Lennard-Jones liquid, after miniMD (github.com/Mantevo/miniMD, LGPL-3.0).

    python examples/ported/molecular_dynamics/before.py

miniMD's problem: a face-centred cubic lattice that melts, in a periodic box, with its density,
temperature, time step and cutoff, in units of the potential's depth, its radius and the mass of a
particle; velocity Verlet. In place of neighbour lists all pairs are looked at, and the potential is
shifted so that it is zero at the cutoff: then the total energy is conserved.
"""

import argparse

import numpy as np

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


def forces(xp, positions, box):
    """On each particle, of shape (n, 3), and the potential energy."""
    apart = positions[:, None] - positions
    apart -= box * xp.rint(apart / box)  # to the nearest image
    squares = (apart**2).sum(axis=2)
    is_near = (squares < CUTOFF**2) & (squares > 0)
    squares = xp.where(is_near, squares, xp.inf)
    sixth = squares**-3
    strengths = 48 * sixth * (sixth - 0.5) / squares
    at_cutoff = CUTOFF**-12 - CUTOFF**-6
    energy = 2 * (sixth * (sixth - 1) - at_cutoff * is_near).sum()  # each pair counts twice
    return (strengths[:, :, None] * apart).sum(axis=1), energy


def simulate(xp, positions, velocities, box, steps):
    """The last positions, and the kinetic and potential energies after each step."""
    history = []
    force, _ = forces(xp, positions, box)
    for _ in range(steps):
        velocities = velocities + 0.5 * TIME_STEP * force
        positions = (positions + TIME_STEP * velocities) % box
        force, potential = forces(xp, positions, box)
        velocities = velocities + 0.5 * TIME_STEP * force
        kinetic = 0.5 * (velocities**2).sum()
        history.append((float(kinetic), float(potential)))
    return positions, history


def main():
    parser = argparse.ArgumentParser(description="A liquid of Lennard-Jones particles.")
    parser.add_argument("--cells", type=int, nargs=3, default=(6, 4, 4), help="of four particles")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gpu", action="store_true", help="compute with CuPy")
    options = parser.parse_args()
    if options.gpu:
        import cupy as xp
    else:
        xp = np

    start, box = lattice(options.cells)
    velocities = random_velocities(len(start))
    given = map(xp.asarray, (start, velocities, box))
    end, history = simulate(xp, *given, options.steps)

    history = np.array(history) / len(start)
    for step in range(20, options.steps + 1, 20):
        kinetic, potential = history[step - 1]
        print(f"step {step:3}: energies {kinetic:.9f} {potential:.9f} {kinetic + potential:.9f}")
    for i in range(0, len(start), 77):
        print(f"particle {i:3} is at ({', '.join(f'{x:.9f}' for x in end[i].tolist())})")
    return box, start, end, history


if __name__ == "__main__":
    main()
