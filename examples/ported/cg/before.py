"""Conjugate gradients, after CuPy's cg example (github.com/cupy/cupy, MIT).

    python examples/ported/cg/before.py

Solves A x = b for random symmetric matrices, and compares with the x from which b was made. The
matrices are smaller than the original's, and better conditioned, so that it takes a second.
"""

import argparse

import numpy as np


def solve(xp, a, b, tol, max_iter):
    """The solution x, of shape (n,), and the residual's norm after each iteration."""
    x = xp.zeros_like(b)
    residual = direction = b
    square = residual @ residual
    norms = []
    for _ in range(max_iter):
        image = a @ direction
        step = square / (direction @ image)
        x = x + step * direction
        residual = residual - step * image
        last, square = square, residual @ residual
        norms.append(float(square) ** 0.5)
        if norms[-1] < tol:
            break
        direction = residual + square / last * direction
    return x, norms


def main():
    parser = argparse.ArgumentParser(description="Conjugate gradients.")
    parser.add_argument("--num", type=int, default=503, help="equations")
    parser.add_argument("--tol", type=float, default=0.1)
    parser.add_argument("--max-iter", type=int, default=5000)
    parser.add_argument("--gpu", action="store_true", help="compute with CuPy")
    options = parser.parse_args()
    if options.gpu:
        import cupy as xp
    else:
        xp = np

    random = np.random.default_rng(0)
    history = []
    for trial in range(3):
        a = random.integers(-50, 50, size=(options.num, options.num)).astype(np.float64)
        a = a @ a.T + 500 * options.num * np.eye(options.num)
        answer = random.integers(-50, 50, size=options.num).astype(np.float64)
        b = a @ answer

        x, norms = solve(xp, xp.asarray(a), xp.asarray(b), options.tol, options.max_iter)
        error = float(((x - xp.asarray(answer)) ** 2).sum()) ** 0.5
        print(f"trial {trial}: {len(norms)} iterations, error {error:.3e}")
        history.append(norms)
    return history


if __name__ == "__main__":
    main()
