"""The one exception class of the library's own."""


class ReplicaMismatchError(ValueError):
    """Replicas disagree where they must agree: on the call, on a shape, on a dtype, on an option.

    It is raised on every rank, and its message names every rank's value.
    """
