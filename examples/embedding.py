"""Learns vectors for people and films from ratings; each step touches a few rows of large tables.

    mpirun -n 4 python examples/embedding.py

A rating is roughly the product of the two vectors. A table's gradient is an `IndexedSlices`: it has
only the rows that occur in the batch, and only these rows are sent, read and written.
"""

import argparse

import numpy as np

import hpcstrat as hs

PEOPLE, FILMS, WIDTH = 20_000, 5_000, 8


def make_ratings(count, seed):
    """People, films and ratings: three arrays of shape (count,).

    The ratings are products of hidden vectors.
    """
    random = np.random.default_rng(seed)
    hidden = [random.normal(0, 1, (rows, WIDTH)).astype(np.float32) for rows in (PEOPLE, FILMS)]
    # A few people and films occur often: the square of a uniform number is often small.
    people, films = (
        (random.random(count) ** 2 * rows).astype(np.int64) for rows in (PEOPLE, FILMS)
    )
    return people, films, (hidden[0][people] * hidden[1][films]).sum(axis=1) / WIDTH**0.5


def main():
    parser = argparse.ArgumentParser(description="Embeddings from ratings.")
    parser.add_argument("--ratings", type=int, default=200_000, help="how many (%(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=4000,
        help="ratings per step, of all replicas (%(default)s)",
    )
    parser.add_argument(
        "--epochs", type=int, default=4, help="passes over the ratings (%(default)s)"
    )
    options = parser.parse_args()

    strategy = hs.CentralStorageStrategy()
    random = np.random.default_rng(1)
    with strategy.scope():
        tables = [
            hs.Variable(random.normal(0, 0.5, (rows, WIDTH)).astype(np.float32), name=name)
            for rows, name in ((PEOPLE, "people"), (FILMS, "films"))
        ]
        optimizer = hs.optimizers.Adagrad(0.3)
        loss = hs.metrics.Mean()
    ratings = hs.data.Dataset.from_tensor_slices(make_ratings(options.ratings, seed=0))
    batches = strategy.experimental_distribute_dataset(ratings.batch(options.batch_size))

    def step(people, films, rating):
        of_people, of_films = tables[0].value()[people], tables[1].value()[films]
        errors = (of_people * of_films).sum(axis=1) - rating
        gradients = [
            hs.IndexedSlices(errors[:, None] * other, rows, table.shape)
            for other, rows, table in ((of_films, people, tables[0]), (of_people, films, tables[1]))
        ]
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        loss.update_state(errors**2)

    for epoch in range(1, options.epochs + 1):
        loss.reset_state()
        for batch in batches:
            strategy.run(step, args=batch)
        print(f"epoch {epoch}: mean squared error {loss.result():.4f}", flush=True)


if __name__ == "__main__":
    main()
