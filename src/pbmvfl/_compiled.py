"""Compilation of the few loops that numpy cannot do fast enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Names of functions that are being compiled, in any thread.
_compiling: list[str] = []


def is_compiling() -> bool:
    """Return whether a first call waits for Numba at this moment."""
    return bool(_compiling)


def compiled(function: _Function) -> _Function:
    """Compile with Numba at the first call and keep the result on disk: 2 s the first time, 0.4 s after that.

    Numba itself is imported then too: commands that only count bytes or epsilons never load it.
    """
    return _compiled(function)


def compiled_sums(function: _Function) -> _Function:
    """Compile like `compiled`, with sums of floats in any order, which wide registers need.

    Nothing else is relaxed: NaN stays NaN.
    """
    return _compiled(function, fastmath={"reassoc", "contract"})


def load_compiler() -> None:
    """Load Numba and what it loads at its first call, for processes that are forked from this one."""
    compiled(_first)(0)


def _first(value: int) -> int:
    return value


def _compiled(function: _Function, **options: Any) -> _Function:
    machine_code: Callable[..., Any] | None = None

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal machine_code
        if machine_code is None:
            _compiling.append(function.__name__)
            try:
                import numba

                machine_code = numba.njit(cache=True, nogil=True, **options)(function)
                return machine_code(*arguments)
            except OSError:  # it cannot be kept, as on a full disk: these loops touch no files themselves
                machine_code = numba.njit(nogil=True, **options)(function)
                return machine_code(*arguments)
            finally:
                _compiling.remove(function.__name__)
        return machine_code(*arguments)

    return cast(_Function, call)
