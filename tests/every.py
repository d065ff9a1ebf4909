"""One test for many small cases: cheaper than as many tests, and a failure still names every case that fails."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any


def every(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with every combination of the values, as parametrized tests would, and report all failures at once.

    Fixtures are shared between the calls. Nothing is skipped in such a test: a skip would hide the other cases.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        cases = [dict(zip(values, case, strict=True)) for case in product(*map(tuple, values.values()))]
        assert cases, f"{test.__name__} has no cases"

        @wraps(test)
        def calls(*args: Any, **fixtures: Any) -> None:
            failures = []
            for case in cases:
                try:
                    test(*args, **fixtures, **case)
                except Exception as error:  # noqa: BLE001 - reported below, with all others
                    error.add_note(f"with {', '.join(f'{name}={shown(value)}' for name, value in case.items())}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases of {test.__name__}", failures)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in values]
        calls.__signature__ = signature.replace(parameters=left)  # what remains for pytest to fill in
        return calls

    return decorate


def shown(value: Any) -> str:
    """A case's own name where it has one: a graph as text is of no help."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or repr(value))
