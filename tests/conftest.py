"""Fixtures of several test modules. mpx is imported late, so that its types are checked."""

import pytest


@pytest.fixture(params=["value_and_grad", "filter_grad", "filter_value_and_grad"])
def grad_of(request):
    from grad_cases import GRAD_FUNCTIONS

    return GRAD_FUNCTIONS[request.param]


@pytest.fixture
def problem():
    from models import exact_problem

    return exact_problem()
