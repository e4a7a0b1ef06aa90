"""What tells of datasets, and transformations beyond those of datasets.py."""
import os
import tempfile

import numpy as np

from _common import in_order, local, on, plain, raises, spec


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
        "spec of the element": [spec(s) for s in iter(pairs).get_next_as_optional().element_spec],
        "spec of none": spec(iter(hs.data.Dataset.range(0)).get_next_as_optional().element_spec),
    }


def case_distributed_optional(hs, strategy):
    def taken(dataset):
        iterator = iter(strategy.experimental_distribute_dataset(in_order(hs, dataset)))
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


def counts(hs):
    """Arrays of 1, 2, 3 and 4 elements, which are as large as there are elements."""
    def generate():
        for n in range(1, 5):
            yield np.full(n, n, np.int64)
    return hs.data.Dataset.from_generator(generate, output_signature=hs.TensorSpec(shape=(None,), dtype=np.int64))


def case_dataset_padded_batches(hs, strategy):
    dataset = counts(hs)
    pairs = dataset.map(lambda x: (x, x * 2))
    return {
        "largest": items(hs, dataset.padded_batch(2)),
        "given": items(hs, dataset.padded_batch(3, padded_shapes=[5], padding_values=np.int64(-1))),
        "one size": items(hs, dataset.padded_batch(2, padded_shapes=5)),
        "minus one": items(hs, dataset.padded_batch(3, padded_shapes=[-1], drop_remainder=True)),
        "none": items(hs, dataset.padded_batch(3, padded_shapes=[None])),
        "pairs": items(hs, pairs.padded_batch(2, padded_shapes=([4], [None]), padding_values=(np.int64(7), None))),
        "one value": items(hs, pairs.padded_batch(2, padding_values=np.int64(9))),
        "scalars": items(hs, hs.data.Dataset.range(5).padded_batch(2)),
        "too small": raises(lambda: items(hs, dataset.padded_batch(3, padded_shapes=[2]))),
        "dimensions": raises(lambda: items(hs, dataset.padded_batch(3, padded_shapes=[2, 2]))),
        "dtype": raises(lambda: items(hs, dataset.padded_batch(3, padding_values=1.5))),
        "zero": raises(lambda: items(hs, dataset.padded_batch(0))),
        "cardinality": int(hs.data.Dataset.range(5).padded_batch(2).cardinality()),
        "spec": spec(dataset.padded_batch(3).element_spec),
        "spec given": spec(dataset.padded_batch(3, padded_shapes=[5], drop_remainder=True).element_spec),
    }


WINDOWS = [(3,), (3, None, 1, True), (3, 1), (3, 1, 1, True), (3, 1, 2), (3, 1, 2, True), (2, 5), (2, 5, 1, True),
           (3, 2, 2), (3, 2, 2, True), (20,), (20, None, 1, True)]


def case_dataset_windows(hs, strategy):
    Dataset = hs.data.Dataset
    labels = {}
    for arguments in WINDOWS:
        windows = Dataset.range(13).window(*arguments)
        labels[f"{arguments}"] = [items(hs, window) for window in windows]
        labels[f"{arguments} cardinality"] = int(windows.cardinality())
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3) * 10))
    return {
        **labels,
        "pairs": [[items(hs, a), items(hs, b)] for a, b in pairs.window(2)],
        "dict": [{k: items(hs, v) for k, v in w.items()}
                 for w in Dataset.from_tensor_slices({"a": np.arange(3), "b": np.ones(3)}).window(2)],
        "spec": spec(Dataset.range(3).window(2).element_spec.element_spec),
        "to batches": items(hs, Dataset.range(5).window(2).flat_map(lambda w: w.batch(2))),
        "of pairs to batches": items(hs, pairs.window(2, 1, 1, True).flat_map(
            lambda a, b: Dataset.zip((a.batch(2), b.batch(2))))),
        "reduced": items(hs, Dataset.range(5).window(2).map(lambda w: w.reduce(np.int64(0), lambda a, b: a + b))),
        "size": raises(Dataset.range(3).window, 0),
        "shift": raises(Dataset.range(3).window, 2, -1),
        "stride": raises(Dataset.range(3).window, 2, 1, 0),
    }


def case_dataset_flat_map(hs, strategy):
    Dataset = hs.data.Dataset
    mapped = Dataset.range(3).flat_map(lambda x: Dataset.range(x))
    return {
        "repeated": items(hs, Dataset.range(3).flat_map(lambda x: Dataset.from_tensors(x).repeat(x))),
        "ranges": items(hs, mapped),
        "twice": items(hs, mapped.flat_map(lambda x: Dataset.range(x + 1))),
        "batches": items(hs, Dataset.range(3).flat_map(lambda x: Dataset.range(5).batch(2)).batch(2).take(1)),
        "rows": items(hs, Dataset.from_tensor_slices(np.arange(6).reshape(3, 2)).flat_map(
            lambda row: Dataset.from_tensor_slices(row))),
        "of pairs": items(hs, Dataset.from_tensor_slices((np.arange(3), np.arange(3, 6))).flat_map(
            lambda a, b: Dataset.range(a, b))),
        "none": items(hs, Dataset.range(0).flat_map(lambda x: Dataset.range(2))),
        "cardinality": int(mapped.cardinality()),
        "spec": spec(mapped.element_spec),
    }


def case_dataset_interleave(hs, strategy):
    Dataset = hs.data.Dataset

    def of(cycle, block, counts=(1, 2, 3, 4, 5)):
        dataset = Dataset.from_tensor_slices(np.array(counts))
        return items(hs, dataset.interleave(lambda x: Dataset.from_tensors(x).repeat(x), cycle, block))
    return {
        **{f"{cycle} {block}": of(cycle, block) for cycle in (1, 2, 3, 7) for block in (1, 2, 3)},
        "documented": items(hs, Dataset.range(1, 6).interleave(
            lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4)),
        "empty ones": of(2, 1, (0, 2, 0, 0, 3, 1, 0)),
        "empty ones 3 2": of(3, 2, (0, 2, 0, 0, 3, 1, 0)),
        "only empty ones": of(3, 2, (0, 0)),
        "cycle 0": raises(lambda: of(0, 1)),
        "block 0": raises(lambda: of(1, 0)),
    }


def case_dataset_scan(hs, strategy):
    ten = hs.data.Dataset.range(10)
    pairs = hs.data.Dataset.from_tensor_slices((np.arange(3), np.arange(3, 6)))
    return {
        "sums": items(hs, ten.scan(np.int64(0), lambda s, x: (s + x, s + x))),
        "state before": items(hs, ten.scan(np.int64(5), lambda s, x: (s + x, s))),
        "pairs": items(hs, pairs.scan(np.int64(0), lambda s, x: (s + x[0], (s, x[1])))),
        "nest": items(hs, ten.take(4).scan((np.int64(0), np.int64(1)), lambda s, x: ((s[1], s[0] + s[1]), s[0]))),
        "no pair": raises(lambda: items(hs, ten.scan(np.int64(0), lambda s, x: s + x))),
        "cardinality": int(ten.scan(np.int64(0), lambda s, x: (s + x, s)).cardinality()),
        "again": [items(hs, d) for d in [ten.scan(np.int64(0), lambda s, x: (s + x, s))] for _ in range(2)],
    }


def case_dataset_reduce(hs, strategy):
    ten = hs.data.Dataset.range(10)
    pairs = hs.data.Dataset.from_tensor_slices((np.arange(3), np.arange(3, 6)))
    return {
        "sum": plain(hs, ten.reduce(np.int64(0), lambda s, x: s + x)),
        "count": plain(hs, ten.batch(3).reduce(0, lambda s, x: s + 1)),
        "nest": plain(hs, ten.reduce((np.int64(0), 0), lambda s, x: (s[0] + x, s[1] + 1))),
        "dict": plain(hs, ten.reduce({"sum": np.int64(0)}, lambda s, x: {"sum": s["sum"] + x})),
        "pairs": plain(hs, pairs.reduce(np.int64(0), lambda s, x: s + x[0] * x[1])),
        "empty": plain(hs, hs.data.Dataset.range(0).reduce(np.int64(7), lambda s, x: s + x)),
        "structure": raises(ten.reduce, (np.int64(0), 0), lambda s, x: s[0] + x),
    }


def case_dataset_rebatch(hs, strategy):
    eight = hs.data.Dataset.range(8).batch(4)
    sizes = [1, 3, [2, 1], [2, 1, 3], 8, 20]
    return {
        **{f"{n}": items(hs, eight.rebatch(n)) for n in sizes},
        **{f"{n} whole": items(hs, eight.rebatch(n, drop_remainder=True)) for n in sizes},
        "spec": spec(eight.rebatch(3).element_spec),
        "spec whole": spec(eight.rebatch(3, drop_remainder=True).element_spec),
    }


def case_dataset_of_several(hs, strategy):
    Dataset = hs.data.Dataset
    few, more = Dataset.range(3), Dataset.range(10, 15)

    def chosen(numbers, **options):
        choices = Dataset.from_tensor_slices(np.array(numbers, np.int64))
        return items(hs, Dataset.choose_from_datasets([few, more], choices, **options))

    def sampled(**options):
        return items(hs, Dataset.sample_from_datasets([few, more], seed=3, **options))
    return {
        "chosen": chosen([0, 1, 1, 0, 1]),
        "chosen to the end": chosen([0, 1, 1, 0, 0, 0, 1]),
        "chosen without the end": chosen([0, 1, 1, 0, 0, 0, 1], stop_on_empty_dataset=False),
        "chosen out of range": raises(lambda: chosen([0, 2])),
        "sampled": sorted(sampled()),
        "sampled in order": [[x for x in sampled() if x < 10], [x for x in sampled() if x >= 10]],
        "sampled with weights": sorted(sampled(weights=[1., 3.])),
        "sampled with a weight of 0": sampled(weights=[1., 0.]),
        "sampled to the end": sampled(weights=[1., 0.], stop_on_empty_dataset=True),
        "one": items(hs, Dataset.sample_from_datasets([few])),
        "the same again": [sampled() == sampled()] + [items(hs, d) == items(hs, d) for d in [
            Dataset.sample_from_datasets([Dataset.range(50), Dataset.range(50, 100)])]],
        "batches": sorted(sum(items(hs, Dataset.sample_from_datasets([few, more], seed=1).batch(3)), [])),
        "none": raises(Dataset.sample_from_datasets, []),
        "weights": raises(Dataset.sample_from_datasets, [few, more], weights=[1.]),
        "kinds": raises(Dataset.sample_from_datasets, [few, Dataset.from_tensors(1.5)]),
        "cardinality": int(Dataset.sample_from_datasets([few, more]).cardinality()),
        "cardinality of chosen": int(Dataset.choose_from_datasets([few, more], few).cardinality()),
        "infinite": int(Dataset.sample_from_datasets([few.repeat(), more.repeat()]).cardinality()),
    }


@on("one_device", ns=(1,))
def case_dataset_save(hs, strategy):
    Dataset = hs.data.Dataset

    def saved(dataset):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "saved")
            dataset.save(path)
            found = Dataset.load(path)
            return [items(hs, found), int(found.cardinality())]

    def twice():
        with tempfile.TemporaryDirectory() as folder:
            Dataset.range(5).save(folder + "/saved")
            Dataset.range(3).save(folder + "/saved")
            return items(hs, Dataset.load(folder + "/saved"))
    return {
        "range": saved(Dataset.range(5)),
        "nest": saved(Dataset.from_tensor_slices((np.arange(6).reshape(3, 2), {"a": np.array([1.5, 2.5, 3.5])}))),
        "batches": saved(Dataset.range(5).batch(2)),
        "sizes": saved(counts(hs)),
        "twice": twice(),
        "nothing": raises(lambda: Dataset.load("/no/such/folder").cardinality()),
    }


def case_dataset_list_files(hs, strategy):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("b.txt", "a.txt", "c.dat"):
            with open(os.path.join(folder, name), "w") as file:
                file.write(name)

        def names(*arguments, **options):
            found = hs.data.Dataset.list_files(*arguments, **options)
            return [os.path.basename(os.fsdecode(str(x) if isinstance(x, str) else x)) for x in found.as_numpy_iterator()]

        pattern = os.path.join(folder, "*.txt")
        return {
            "sorted": names(pattern, shuffle=False),
            "several": names([os.path.join(folder, "*.dat"), pattern], shuffle=False),
            "shuffled": sorted(names(pattern)),
            "seeded": names(pattern, seed=1) == names(pattern, seed=1),
            "cardinality": int(hs.data.Dataset.list_files(pattern, shuffle=False).cardinality()),
            "nothing": raises(lambda: names(os.path.join(folder, "*.png"))),
        }


def case_dataset_options(hs, strategy):
    options = hs.data.Options()
    options.deterministic = False
    other = hs.data.Options()
    other.experimental_optimization.map_fusion = True
    dataset = hs.data.Dataset.range(3).with_options(options).map(lambda x: x + 1)
    both = dataset.with_options(other)
    return {
        "elements": items(hs, both),
        "kept": dataset.options().deterministic,
        "added": [both.options().deterministic, both.options().experimental_optimization.map_fusion],
        "not the first": dataset.options().experimental_optimization.map_fusion is None,
        "not set": options.experimental_optimization.map_fusion is None,
        "unknown": raises(lambda: setattr(options, "determinism", True)),
    }


def case_dataset_parallel_calls(hs, strategy):
    ten = hs.data.Dataset.range(10)
    return {
        "two": items(hs, ten.map(lambda x: x * 2, num_parallel_calls=2)),
        "autotune": items(hs, ten.map(lambda x: (x, x + 1), num_parallel_calls=hs.data.AUTOTUNE)),
        "batches": items(hs, ten.batch(4, num_parallel_calls=2).map(lambda x: x * 2, num_parallel_calls=3)),
        "interleave": items(hs, ten.interleave(lambda x: hs.data.Dataset.range(x), cycle_length=3, block_length=2,
                                               num_parallel_calls=2)),
        "interleave autotune": items(hs, ten.interleave(lambda x: hs.data.Dataset.range(x), cycle_length=3,
                                                        num_parallel_calls=hs.data.AUTOTUNE)),
        "prefetch": items(hs, ten.prefetch(3)),
        "prefetch autotune": items(hs, ten.batch(4).prefetch(hs.data.AUTOTUNE)),
        "none": items(hs, ten.take(0).map(lambda x: x, num_parallel_calls=2).prefetch(2)),
    }


@on("central", "mirrored", oracle="mirrored")  # TensorFlow's CentralStorageStrategy drops steps that are not whole
def case_distributed_pipelines(hs, strategy):
    """Parts of the replicas: uneven, and empty in the last steps."""
    Dataset = hs.data.Dataset

    def parts(dataset):
        return [local(hs, strategy, x) for x in strategy.experimental_distribute_dataset(in_order(hs, dataset))]

    def repeated(x):
        return Dataset.from_tensors(x).repeat(x)

    windows = Dataset.range(13).window(3, 1, 1, True).flat_map(lambda w: w.batch(3, drop_remainder=True))
    choices = Dataset.from_tensor_slices(np.array([0, 1, 1, 0, 0, 1]))
    return {
        "windows": parts(windows.batch(4)),
        "windows and labels": parts(windows.map(lambda w: (w[:-1], w[-1])).batch(4)),
        "flat_map": parts(Dataset.range(6).flat_map(repeated).batch(4)),
        "interleave": parts(Dataset.range(6).interleave(repeated, cycle_length=3, block_length=2).batch(5)),
        "in threads": parts(Dataset.range(6).interleave(repeated, cycle_length=2, num_parallel_calls=2).batch(4).prefetch(2)),
        "padded": parts(Dataset.range(1, 7).padded_batch(4)),
        "padded to the largest": parts(counts(hs).padded_batch(3)),
        "scan": parts(Dataset.range(9).scan(np.int64(0), lambda s, x: (s + x, s)).batch(4)),
        "rebatch": parts(Dataset.range(25).batch(5).rebatch(12)),
        "choose": parts(Dataset.choose_from_datasets([Dataset.range(5), Dataset.range(10, 20)], choices).batch(4)),
        "sample": parts(Dataset.sample_from_datasets([Dataset.range(5), Dataset.range(10, 15)], [0.0, 1.0]).batch(4)),
        "parallel map": parts(Dataset.range(10).map(lambda x: x * 2, num_parallel_calls=2).batch(4)),
    }


@on("mirrored")
def case_input_per_replica(hs, strategy):
    """TensorFlow's CentralStorageStrategy and OneDeviceStrategy refuse it."""
    seen = []

    def dataset_fn(context):
        seen.append([context.num_input_pipelines, context.num_replicas_in_sync])
        index = context.input_pipeline_id
        return hs.data.Dataset.range(100 * index, 100 * index + 4).batch(2)

    def options(fetch, place):
        return hs.InputOptions(
            experimental_fetch_to_device=fetch, experimental_place_dataset_on_device=place,
            experimental_replication_mode=hs.InputReplicationMode.PER_REPLICA)

    def steps(fetch, place):
        distributed = strategy.distribute_datasets_from_function(dataset_fn, options(fetch, place))
        return [[plain(hs, x) for x in strategy.experimental_local_results(step)] for step in distributed]
    return {
        "steps": steps(False, False),
        "fetched": steps(True, False),
        "placed": steps(False, True),
        "both": raises(lambda: steps(True, True)),
        "contexts": seen[0],
        "of a dataset": raises(strategy.experimental_distribute_dataset, hs.data.Dataset.range(4).batch(2),
                               options(False, False)),
    }


@on("one_device", ns=(1,))
def case_input_per_replica_refused(hs, strategy):
    options = hs.InputOptions(experimental_replication_mode=hs.InputReplicationMode.PER_REPLICA)
    return {"from function": raises(strategy.distribute_datasets_from_function,
                                    lambda context: hs.data.Dataset.range(4).batch(2), options)}
