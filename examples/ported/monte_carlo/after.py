"""European options by Monte Carlo on any number of replicas: before.py with hpcstrat.

    mpirun -n 4 python examples/ported/monte_carlo/after.py

Each replica draws a part of the samples, from its own random stream, and their sums are summed
over the replicas. With another number of replicas the samples are others, and just as many.
"""

import argparse
import math

import numpy as np

import hpcstrat as hs

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
    replica = hs.get_replica_context()
    random = replica.random_generator(seed)
    samples = len(range(hs.replica_id(), samples, replica.num_replicas_in_sync))
    drift, spread = (RATE - VOLATILITY**2 / 2) * years, VOLATILITY * xp.sqrt(years)
    moves = drift + spread * random.standard_normal((samples, len(stock)))
    payoffs = xp.maximum(stock * xp.exp(moves) - strike, 0)
    return xp.exp(-RATE * years) * payoffs.sum(axis=0)


def main():
    parser = argparse.ArgumentParser(description="European options by Monte Carlo.")
    parser.add_argument("--n-options", type=int, default=400)
    parser.add_argument("--n-samples", type=int, default=10_001, help="for each option")
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy()
    xp = strategy.xp

    random = np.random.default_rng(0)
    bounds = [(5, 30), (1, 100), (0.25, 10)]
    terms = [random.uniform(low, high, options.n_options) for low, high in bounds]

    stock, strike, years = (xp.asarray(term) for term in terms)
    sums = strategy.run(simulate, args=(xp, 0, options.n_samples, stock, strike, years))
    sums = strategy.reduce("SUM", sums, axis=None)
    prices = sums / options.n_samples
    exact = xp.asarray([black_scholes(*term) for term in zip(*terms, strict=True)])
    print(f"{options.n_options} options, {options.n_samples} samples for each")
    print(f"mean price {float(prices.mean()):.4f}, exact {float(exact.mean()):.4f}")
    print(f"error {float(((prices - exact) ** 2).mean()) ** 0.5:.4f}")
    return *terms, prices


if __name__ == "__main__":
    main()
