"""Every case backward, with random cotangents of out and lse; and what must hold of gradients beside being right."""

import cases
import evaluate
import pytest


@pytest.mark.parametrize("case", [case.id for case in cases.CASES])
def test_backward(case, backend, dtype):
    evaluate.check(evaluate.kernel(case, dtype, backend), case, dtype, *evaluate.names(cases.BY_ID[case]))
