"""Options of datasets, with the attributes of `tf.data.Options`."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar, final


class AutoShardPolicy(enum.IntEnum):
    """How TensorFlow divides a dataset between workers; see `Options`."""

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _OptionGroup:
    """A group of options, `None` or other groups until they are set; unknown names raise."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes, _name=name)

    if TYPE_CHECKING:  # type checkers do not know the attributes

        def __getattr__(self, attribute: str) -> Any: ...

    def __setattr__(self, attribute: str, value: Any) -> None:
        known = [name for name in self.__dict__ if name != "_name"]
        if attribute not in known:
            raise AttributeError(
                f"{self._name} has no attribute {attribute!r}; it has {', '.join(known)}"
            )
        self.__dict__[attribute] = value

    def __repr__(self) -> str:
        given = {
            name: value
            for name, value in self.__dict__.items()
            if name != "_name" and value is not None
        }
        return f"{self._name}({', '.join(map('{}={!r}'.format, given, given.values()))})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    __hash__: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]


@final
class Options(_OptionGroup):
    """Options for `Dataset.with_options`.

    A pipeline keeps its options, and `Dataset.options` returns them; only one has an effect.

    With `experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF`, a short batch fills the
    replicas in order, each up to its share of a full batch, instead of being split evenly; a
    strategy with several workers refuses it. The order of elements is always kept, whatever
    `deterministic` is. The groups are `autotune`, `experimental_distribute`,
    `experimental_optimization` and `threading`.
    """

    def __init__(self) -> None:
        groups = {
            name: _OptionGroup(f"Options.{name}", dict(attributes))
            for name, attributes in _GROUPS.items()
        }
        super().__init__("Options", {**dict.fromkeys(_ATTRIBUTES), **groups})

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute in _GROUPS and not isinstance(value, _OptionGroup):
            raise TypeError(
                f"Options: {attribute} has attributes of its own, so {value!r} cannot replace it; "
                f"set them instead: options.{attribute}.<name> = ..."
            )
        super().__setattr__(attribute, value)

    def merge(self, options: Options) -> Options:
        """A copy of these options, overridden by those that are set in `options`."""
        merged = Options()
        for source in (self, options):
            for name in _ATTRIBUTES:
                if getattr(source, name) is not None:
                    setattr(merged, name, getattr(source, name))
            for group, attributes in _GROUPS.items():
                for name, default in attributes.items():
                    if (value := getattr(getattr(source, group), name)) != default:
                        setattr(getattr(merged, group), name, value)
        return merged


_ATTRIBUTES = (
    "deterministic",
    "experimental_deterministic",
    "experimental_external_state_policy",
    "experimental_slack",
    "experimental_symbolic_checkpoint",
    "experimental_warm_start",
)
_GROUPS: dict[str, dict[str, Any]] = {
    "autotune": dict.fromkeys(("autotune_algorithm", "cpu_budget", "enabled", "ram_budget")),
    "experimental_distribute": {"auto_shard_policy": AutoShardPolicy.AUTO, "num_devices": None},
    "experimental_optimization": dict.fromkeys(
        (
            "apply_default_optimizations",
            "filter_fusion",
            "filter_parallelization",
            "inject_prefetch",
            "map_and_batch_fusion",
            "map_and_filter_fusion",
            "map_fusion",
            "map_parallelization",
            "noop_elimination",
            "parallel_batch",
            "seq_interleave_prefetch",
            "shuffle_and_repeat_fusion",
        )
    ),
    "threading": dict.fromkeys(("max_intra_op_parallelism", "private_threadpool_size")),
}
