"""Every case forward: out and lse within the derived bound of the truth, -inf exactly where no key is read."""

import cases
import evaluate
import pytest


@pytest.mark.parametrize("case", [case.id for case in cases.CASES])
def test_forward(case, backend, dtype):
    evaluate.check(evaluate.kernel(case, dtype, backend), case, dtype, "out", "lse")
