"""Every case forward: out and lse within the derived bound of the truth, -inf exactly where no key is read."""

import cases
import evaluate
import pytest


@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.id)
def test_forward(case, backend, dtype):
    evaluate.skip_what_cuda_lacks(case, backend, dtype)
    got = evaluate.kernel(case, dtype, backend)
    evaluate.check(got, case, dtype, "out", "lse")
