"""What tells of datasets, and longer pipelines."""
import numpy as np

from _common import local, on, plain, raises, spec


def items(hs, dataset):
    return [plain(hs, x) for x in dataset]


def case_dataset_optional(hs, strategy):
    def taken(iterator):
        found = [iterator.get_next_as_optional() for _ in range(4)]
        return [plain(hs, x.get_value()) if x.has_value() else "nothing" for x in found]

    pairs = hs.data.Dataset.from_tensor_slices((np.arange(2), np.ones((2, 3), np.float32)))
    return {
        "numbers": taken(iter(hs.data.Dataset.range(2))),
        "pairs": taken(iter(pairs)),
        "none": taken(iter(hs.data.Dataset.range(0))),
        "no value": raises(iter(hs.data.Dataset.range(0)).get_next_as_optional().get_value),
        "get_next": int(iter(hs.data.Dataset.range(2)).get_next()),
        "spec of the iterator": [spec(s) for s in iter(pairs).element_spec],
    }


def case_distributed_optional(hs, strategy):
    def taken(dataset):
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        found = []
        while True:
            step = iterator.get_next_as_optional()
            if not step.has_value():
                return found
            found.append([plain(hs, x) for x in strategy.experimental_local_results(step.get_value())])

    n = strategy.num_replicas_in_sync
    return {
        "whole": taken(hs.data.Dataset.range(4 * n).batch(2 * n)),
        "short": taken(hs.data.Dataset.range(4 * n + 1).batch(2 * n)),
        "none": taken(hs.data.Dataset.range(0).batch(n)),
    }


def case_distributed_cardinality(hs, strategy):
    Dataset, n = hs.data.Dataset, strategy.num_replicas_in_sync

    def of(dataset):
        return int(strategy.experimental_distribute_dataset(dataset).cardinality)

    return {
        "batches": of(Dataset.range(6 * n).batch(2 * n)),
        "short": of(Dataset.range(6 * n + 1).batch(2 * n)),
        "infinite": of(Dataset.range(6).batch(n).repeat()),
        "filtered": of(Dataset.range(6).filter(lambda x: x > 1).batch(n)),
    }


def case_dataset_options(hs, strategy):
    options = hs.data.Options()
    options.deterministic = False
    dataset = hs.data.Dataset.range(3).with_options(options).map(lambda x: x + 1)
    return {
        "elements": items(hs, dataset),
        "twice": items(hs, dataset.with_options(hs.data.Options()).batch(2)),
        "deterministic": [hs.data.Options().deterministic, options.deterministic],
        "unknown": raises(lambda: setattr(options, "determinism", True)),
    }


def case_dataset_parallel_calls(hs, strategy):
    ten = hs.data.Dataset.range(10)
    return {
        "two": items(hs, ten.map(lambda x: x * 2, num_parallel_calls=2)),
        "autotune": items(hs, ten.map(lambda x: (x, x + 1), num_parallel_calls=hs.data.AUTOTUNE)),
        "batches": items(hs, ten.batch(4, num_parallel_calls=2).map(lambda x: x * 2, num_parallel_calls=3)),
        "prefetch": items(hs, ten.prefetch(3)),
        "prefetch autotune": items(hs, ten.batch(4).prefetch(hs.data.AUTOTUNE)),
        "none": items(hs, ten.take(0).map(lambda x: x, num_parallel_calls=2).prefetch(2)),
    }


@on("central", "mirrored")
def case_distributed_pipelines(hs, strategy):
    """Parts of the replicas: uneven, and empty in the last steps."""
    Dataset, n = hs.data.Dataset, strategy.num_replicas_in_sync

    def parts(dataset):
        return [local(hs, strategy, x) for x in strategy.experimental_distribute_dataset(dataset)]

    def repeated():
        for x in range(6):
            yield from [x] * x

    def padded():
        for x in range(4 * n + 1):
            yield np.pad(np.full(x % 4, x), (0, 3 - x % 4))

    generated = Dataset.from_generator(repeated, output_signature=hs.TensorSpec(shape=(), dtype=np.int64))
    rows = Dataset.from_generator(padded, output_signature=hs.TensorSpec(shape=(3,), dtype=np.int64))
    windows = Dataset.from_tensor_slices(np.lib.stride_tricks.sliding_window_view(np.arange(4 * n + 3), 3))
    return {
        "windows": parts(windows.batch(2 * n)),
        "windows and labels": parts(windows.map(lambda w: (w[:-1], w[-1])).batch(2 * n)),
        "generator": parts(generated.batch(2 * n)),
        "generator in threads": parts(generated.map(lambda x: x * 2, num_parallel_calls=2).batch(2 * n).prefetch(2)),
        "padded rows": parts(rows.batch(2 * n)),
        "batches of another size": parts(Dataset.range(25).batch(5).unbatch().batch(2 * n)),
        "parallel map": parts(Dataset.range(4 * n + 1).map(lambda x: x * 2, num_parallel_calls=2).batch(2 * n)),
    }


@on("central", "mirrored", "one_device")
def case_input_per_replica_refused(hs, strategy):
    options = hs.InputOptions(experimental_replication_mode=hs.InputReplicationMode.PER_REPLICA)
    dataset = hs.data.Dataset.range(4).batch(2)
    return {"from function": raises(strategy.distribute_datasets_from_function, lambda context: dataset, options),
            "of a dataset": raises(strategy.experimental_distribute_dataset, dataset, options)}
