"""One set of kernel signatures, three interchangeable implementations.

`native` (C++, the default), `numba` (portable and fast) and `reference` (NumPy, the readable definition) are modules
with the same functions, equal on the same input. The choice is the caller's: nothing falls back silently.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MODULES = {"native": "fastrl._native", "numba": "fastrl.kernels.numba", "reference": "fastrl.kernels.reference"}
WAYS_OUT = {
    "native": "install fastrl with a C++ compiler (`pip install .`), or choose `--kernels numba --attention plain`",
    "numba": "`pip install numba`, or choose `--kernels native`",
    "reference": "`pip install numpy`",
}


def choose(name: str) -> ModuleType:
    """The module of kernels called `name`: "native", "numba" or "reference".

    Raises: ValueError for an unknown name, or when that implementation cannot be loaded here, with the reason.
    """
    if name not in MODULES:
        raise ValueError(f"kernels must be one of {', '.join(MODULES)}; got {name!r}")
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ValueError(f"the {name} kernels are not available ({error}): {WAYS_OUT[name]}") from error


def available() -> dict[str, str | None]:
    """For each implementation, None if it loads here, else the reason why not."""

    def reason(name: str) -> str | None:
        try:
            choose(name)
        except ValueError as error:
            return str(error)
        return None

    return {name: reason(name) for name in MODULES}
