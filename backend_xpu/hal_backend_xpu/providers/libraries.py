"""The libraries whose functions are called: versions served, and how their functions come to be there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.calls import bind
from hal_core.errors import MissingDependencyError

if TYPE_CHECKING:
    from hal_core.calls import Bound, Call

__all__ = ["ARK", "TORCH", "VLLM", "Library", "bound"]


@dataclass(frozen=True)
class Library:
    """distribution, versions (PEP 440) and install: for the user. loads: modules whose import registers the functions."""

    distribution: str
    versions: str
    install: str
    loads: tuple[str, ...]


#: Signatures are those of 0.1.16.2, which is built for torch 2.14+xpu.
VLLM = Library(
    "vllm-xpu-kernels",
    ">=0.1.16,<0.2",
    "pip install 'hal-backend-xpu[vllm]', beside the torch it was built for",
    tuple(f"vllm_xpu_kernels.{name}" for name in ("_C", "_moe_C", "_xpu_C")),
)
#: Signatures are those of 0.16.0.
ARK = Library("auto-round-lib", ">=0.16,<0.17", "pip install 'hal-backend-xpu[ark]'", ("auto_round_kernel",))
#: torch itself, where it has the product with scales as recipes.
TORCH = Library("torch", ">=2.10", "install a torch with XPU support, 2.10 or later", ())


def bound(library: Library, call: Call) -> Bound:
    """The function of ``call``, its library loaded and its signature checked.

    Raises:
        MissingDependencyError: the library cannot be imported. ContractError: it has no such function, or another signature.
    """
    for module in library.loads:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            raise MissingDependencyError(call.function, f"{error}", library.install) from error
    return bind(call)
