"""What is asked of the plugin, by ``additional_config={"hal": {...}}``: it reaches every process and counts in vLLM's compile cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hal_core.errors import SettingError
from hal_core.numerics import numerics_from_word
from hal_core.policy import current_policy

if TYPE_CHECKING:
    from hal_core.policy import Policy

__all__ = ["HalOptions"]


@dataclass(frozen=True)
class HalOptions:
    """The texts given.

    policy: None for ``HAL_POLICY``, else auto. numerics: a word of :func:`hal_core.numerics.numerics_from_word`. kv_cache: scheme of the
    key/value pages; None for vLLM's own cache.
    """

    policy: str | None = None
    numerics: str = "checkpoint"
    kv_cache: str | None = None

    @classmethod
    def of(cls, additional_config: Any) -> HalOptions:
        """The options of vLLM's ``additional_config``.

        Raises:
            SettingError: an unknown name, or a value that is no text. PolicyError, ValueDecodeError: a text that does not parse.
        """
        given = additional_config.get("hal", {}) if isinstance(additional_config, Mapping) else {}
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise SettingError("additional_config['hal']", f"{type(given).__name__}", f"give a mapping with {', '.join(known)}")
        for name, value in given.items():
            if name not in known:
                raise SettingError(f"additional_config['hal'][{name!r}]", "unknown", f"use {', '.join(known)}")
            if not isinstance(value, str) and (value is not None or name == "numerics"):
                raise SettingError(f"additional_config['hal'][{name!r}]", f"{value!r:.60} is not a text", "give a text")
        options = cls(**given)
        numerics_from_word(options.numerics)
        current_policy(options.policy)
        return options

    @property
    def chosen_policy(self) -> Policy:
        """The policy in force: the one given, else that of the environment."""
        return current_policy(self.policy)
