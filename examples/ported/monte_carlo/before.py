"""European options by Monte Carlo, after CuPy's finance examples (github.com/cupy/cupy, MIT).

    python examples/ported/monte_carlo/before.py

The mean of discounted payoffs over random prices at the time of exercise, compared with the
formula of Black and Scholes. There are fewer options and samples than in the original, and array
operations in place of its kernel.
"""

import argparse
import math

import numpy as np

RATE, VOLATILITY = 0.02, 0.3


def black_scholes(stock, strike, years):
    """The exact price of a call option."""

    def normal(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    spread = VOLATILITY * math.sqrt(years)
    d = (math.log(stock / strike) + (RATE + VOLATILITY**2 / 2) * years) / spread
    return stock * normal(d) - strike * math.exp(-RATE * years) * normal(d - spread)


def simulate(xp, seed, samples, stock, strike, years):
    """The sum of so many discounted payoffs for each option: of shape (options,)."""
    random = xp.random.default_rng(seed)
    drift, spread = (RATE - VOLATILITY**2 / 2) * years, VOLATILITY * xp.sqrt(years)
    moves = drift + spread * random.standard_normal((samples, len(stock)))
    payoffs = xp.maximum(stock * xp.exp(moves) - strike, 0)
    return xp.exp(-RATE * years) * payoffs.sum(axis=0)


def main():
    parser = argparse.ArgumentParser(description="European options by Monte Carlo.")
    parser.add_argument("--n-options", type=int, default=400)
    parser.add_argument("--n-samples", type=int, default=10_001, help="for each option")
    parser.add_argument("--gpu", action="store_true", help="compute with CuPy")
    options = parser.parse_args()
    if options.gpu:
        import cupy as xp
    else:
        xp = np

    random = np.random.default_rng(0)
    bounds = [(5, 30), (1, 100), (0.25, 10)]
    terms = [random.uniform(low, high, options.n_options) for low, high in bounds]

    stock, strike, years = (xp.asarray(term) for term in terms)
    sums = simulate(xp, 0, options.n_samples, stock, strike, years)
    prices = sums / options.n_samples
    exact = xp.asarray([black_scholes(*term) for term in zip(*terms, strict=True)])
    print(f"{options.n_options} options, {options.n_samples} samples for each")
    print(f"mean price {float(prices.mean()):.4f}, exact {float(exact.mean()):.4f}")
    print(f"error {float(((prices - exact) ** 2).mean()) ** 0.5:.4f}")
    return *terms, prices


if __name__ == "__main__":
    main()
