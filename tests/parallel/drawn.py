"""Random numbers as gradients, whose sums over the ranks are exact if need be, and what they give."""

import numpy as np


def numbers(random, shape, dtype, exact):
    """Numbers from -0.5 to 0.5 of this generator.

    NCCL adds up in another order in each of its operations. Where gradients cancel, an optimizer
    that divides by their size makes any difference of what is left of them.

    Args:
        exact: multiples of 1/256, of which even float16 holds the sums of eight ranks.
    """
    values = random.random(shape) - 0.5
    return (np.round(values * 256) / 256 if exact else values).astype(dtype)


def check_equal(found, expected, place):
    """The same bits on the host; nearly on GPUs."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if place.kind == "CPU":
            np.testing.assert_array_equal(one, other, strict=True)
        else:
            check_close(one, other)


def check_close(one, other):
    """Equal but for some roundings, from exact sums of gradients."""
    np.testing.assert_allclose(
        one, other, rtol=2e-3 if one.dtype == np.float16 else 1e-5, atol=1e-6
    )
