"""The bound that every numeric test relies on must itself be able to fail."""

import numpy as np
import pytest

from jax_flash2.testing import assert_accurate, error_bound

EXACT = np.array([1.0, -4.0, -np.inf])
PLAIN = np.array([1.0, -4.125, -np.inf])
EPS = float(np.finfo(np.float32).eps)


def test_the_bound_is_twice_the_plain_error_and_eight_roundings_of_the_largest():
    assert error_bound(PLAIN, EXACT, "float32") == pytest.approx(2 * 0.125 + 8 * EPS * 4)
    assert error_bound(EXACT, EXACT, "bfloat16") == 8 * 2.0**-7 * 4
    assert error_bound(np.zeros(0), np.zeros(0), "float32") == 0


def test_within_the_bound():
    assert_accurate(np.array([1.25, -4.25, -np.inf]), PLAIN, EXACT, "float32")
    assert_accurate(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3)), "float32")


@pytest.mark.parametrize(
    "got",
    [
        [1.0, -4.2501, -np.inf],
        [np.nan, -4.0, -np.inf],
        [1.0, np.inf, -np.inf],
        [1.0, -4.0, -1e38],
        [-np.inf, -4.0, -np.inf],
        [1.0, -4.0, np.inf],
        [1.0, -4.0, np.nan],
        [1.0, -4.0],
    ],
    ids=str,
)
def test_beyond_the_bound(got):
    with pytest.raises(AssertionError, match=r"out .*, not "):
        assert_accurate(np.array(got), PLAIN, EXACT, "float32", "out")


def test_slack_multiplies_the_bound():
    assert_accurate(np.array([1.0, -4.75, -np.inf]), PLAIN, EXACT, "float32", slack=3)
    with pytest.raises(AssertionError, match=r"result .*, not "):
        assert_accurate(np.array([1.0, -4.7501, -np.inf]), PLAIN, EXACT, "float32", slack=3)
