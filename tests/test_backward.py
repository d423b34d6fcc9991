"""Every case backward, with random cotangents of out and lse; and what must hold of gradients beside being right."""

import cases
import evaluate
import pytest


@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.id)
def test_backward(case, backend, dtype):
    evaluate.skip_what_cuda_lacks(case, backend, dtype)
    got = evaluate.kernel(case, dtype, backend)
    evaluate.check(got, case, dtype, *evaluate.names(case))
    evaluate.check_zeros(got, case, dtype)
