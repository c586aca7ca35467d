"""One hierarchy of errors: what was asked, what refused it, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core.refusal import Refusal

__all__ = [
    "CapacityError",
    "ContractError",
    "FormatError",
    "HalError",
    "HalWarning",
    "MissingDependencyError",
    "NoKernelError",
    "OutputError",
    "PolicyError",
    "SettingError",
    "ShapeError",
    "UnfitWeightsError",
    "ValueDecodeError",
]


class HalError(Exception):
    """Base of every error raised on purpose; the message is one clear sentence or a short list.

    Args:
        asked: what the caller wanted, e.g. ``"tensor model.layers.0.mlp.up_proj.qweight"``.
        found: what stands in the way, with the numbers.
        fix: what the caller can do about it.
    """

    def __init__(self, asked: str, found: str = "", fix: str = "") -> None:
        self.asked, self.found, self.fix = asked, found, fix
        message = asked if not found else f"{asked}: {found}"
        super().__init__(f"{message}; {fix}" if fix else message)


class HalWarning(UserWarning):
    """Something works in another way than was hoped for; the message says why and what to change."""


class FormatError(HalError):
    """A checkpoint file, tensor or config field that cannot be read as what it claims to be."""


class ValueDecodeError(HalError):
    """JSON that does not describe the value it is decoded into (unknown field, wrong type, bad range)."""


class OutputError(HalError):
    """A file that cannot or must not be written."""


class PolicyError(HalError):
    """A policy text that does not parse, or that names nothing known."""


class SettingError(HalError):
    """An environment variable or command-line setting with an invalid value."""


class ShapeError(HalError):
    """A tensor whose shape, dtype or range does not fit the op it is given to."""


class CapacityError(HalError):
    """A cache without room for what is asked; nothing was changed."""


class UnfitWeightsError(ShapeError):
    """Weights whose values a kernel's layout cannot hold, though their scheme and shape are served."""


class ContractError(HalError):
    """A plugin that breaks the backend contract; the message names the plugin."""


class MissingDependencyError(HalError):
    """An optional library is needed for what was asked and is not installed."""


class NoKernelError(HalError):
    """No kernel may serve the spec under the policy; ``refusals`` holds every candidate's reasons."""

    def __init__(self, asked: str, refusals: Sequence[tuple[str, Sequence[Refusal]]], fix: str = "") -> None:
        self.refusals = tuple((name, tuple(reasons)) for name, reasons in refusals)
        # Those that only the policy excludes say nothing about the problem: one line for all.
        only_policy = [name for name, reasons in self.refusals if {reason.code for reason in reasons} == {"policy.excluded"}]
        lines = [f"  {name}: {reason}" for name, reasons in self.refusals for reason in reasons if reason.code != "policy.excluded"]
        lines += [f"  excluded by the policy: {', '.join(only_policy)}"] if only_policy else []
        found = "no kernel accepts it" + ("\n" + "\n".join(lines) if lines else " (none is registered for this op)")
        super().__init__(asked, f"{found}\n{fix}" if fix else found)
        self.found, self.fix = found, fix
