"""What the pure tests of the performance model share: compiled loops are kept between runs, facts are read once.

Owns: switching the cache of compiled code on, and reading the catalogue and the shipped coefficients, once a session.
Does not own: the cache (`adapters.compiled_code`). Without it each process would wait for the compiler.
"""

from __future__ import annotations

import pytest

from perfmodel.adapters.catalog import Catalog, load_catalog
from perfmodel.adapters.coefficient_file import CoefficientFile, load_coefficients
from perfmodel.adapters.compiled_code import remember_compiled_loops


@pytest.fixture(scope="session", autouse=True)
def _loops_compiled_once() -> None:
    remember_compiled_loops()


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="session")
def shipped() -> CoefficientFile:
    return load_coefficients()
