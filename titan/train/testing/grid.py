"""Cases of a test of which every run takes some, and //tools/bench:exhaustive the rest."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def grid(cases: Mapping[str, Any], exhaustive: Collection[str]) -> list[Any]:
    """Parameters with the names as ids, those of `exhaustive` marked so.

    Raises:
      KeyError: a name of `exhaustive` that is no case.
    """
    for name in exhaustive:
        cases[name]
    return [
        pytest.param(case, id=name, marks=[pytest.mark.exhaustive] if name in exhaustive else [])
        for name, case in cases.items()
    ]
