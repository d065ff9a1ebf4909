"""One test for many small cases: cheaper than as many tests, and a failure still names every case that fails."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any

import pytest


def every(parts: int = 1, **values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with every combination of the values, as parametrized tests would, and report all failures at once.

    Fixtures are shared between the calls. Nothing is skipped in such a test: a skip would hide the other cases.
    With ``parts``, there are so many tests, and each has its share of the cases.
    """
    cases = [dict(zip(values, case, strict=True)) for case in product(*map(tuple, values.values()))]
    assert len(cases) >= parts, f"{len(cases)} cases of {', '.join(values)} for {parts} tests"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def calls(*args: Any, part: int = 0, **fixtures: Any) -> None:
            failures = []
            for case in cases[part::parts]:
                try:
                    test(*args, **fixtures, **case)
                except pytest.skip.Exception:
                    pytest.fail(f"{test.__name__} skips a case, which would hide all others: take it off the cases")
                except Exception as error:  # noqa: BLE001 - reported below, with all others
                    error.add_note(f"with {', '.join(f'{name}={shown(value)}' for name, value in case.items())}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise ExceptionGroup(f"{len(failures)} cases of {test.__name__} fail", failures)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in values]
        if parts > 1:
            left.append(inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY))
        calls.__signature__ = signature.replace(parameters=left)  # what remains for pytest to fill in
        return pytest.mark.parametrize("part", range(parts))(calls) if parts > 1 else calls

    return decorate


def shown(value: Any) -> str:
    """A case's own name where it has one: a graph as text is of no help."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)
