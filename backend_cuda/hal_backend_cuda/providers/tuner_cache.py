"""Autotune caches of providers, shared by models and processes: loading adds, saving merges, and nobody's results are lost.

FlashInfer's own ``autotune(cache=path)`` forgets what was loaded before it loads, so a second model's cache takes the first one's
away; and its save reads, merges and replaces the file without a lock, so of two processes that save at once one loses. Here the
file is read and written under a lock, what was loaded stays in memory, and what was in the file stays in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core.calls import Call, bind, find
from hal_core.errors import HalError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CALLS", "TunerCache"]

CALLS = {
    "get": Call("flashinfer.autotuner.AutoTuner.get", ()),
    "load": Call("flashinfer.autotuner.AutoTuner.load_configs", ("path",)),
    "save": Call("flashinfer.autotuner.AutoTuner.save_configs", ("path",)),
    "tune": Call("flashinfer.autotuner.autotune", ("tune_mode",)),
}
#: Keys of the file that are no results begin so.
_PRIVATE = "_"
#: No cache of real models comes near; a larger file is damaged.
_MOST_BYTES = 256 << 20


def _is_result(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, list) and len(value) >= 2 and isinstance(value[0], str)


@dataclass(frozen=True)
class TunerCache:
    """One cache file, e.g. of a model. Several may be open at once; all of them fill the one tuner of the process.

    path: JSON, made at the first save. Beside it lies ``<name>.lock``, which holds nothing.
    """

    path: Path

    def load(self) -> int:
        """Add the file's results to the tuner, and leave all that it has; returns how many the file holds, 0 where there is none.

        Results of another environment (device, CUDA or library version) are not taken: the tuner says so, and saving keeps them.

        Raises:
            HalError: the file is damaged.
        """
        with self._locked():
            found = self._results()
            if found:
                self._tuner().load_configs(str(self.path))
        return len(found)

    def save(self) -> int:
        """Write the tuner's results into the file, beside what is there; returns how many it holds then.

        Where both have a result for one key, the tuner's holds.
        """
        with self._locked():
            before = self._results()
            self._tuner().save_configs(str(self.path))
            after = self._read()
            # a version that takes the file for one of an unknown environment starts it anew: what was there is put back
            lost = {key: value for key, value in before.items() if key not in after}
            if lost:
                self._write({**after, **lost})
            return sum(_is_result(key, value) for key, value in {**lost, **after}.items())

    @contextlib.contextmanager
    def entered(self, *, tune: bool = False) -> Iterator[None]:
        """Load, then run with what is known, or tune what is not; what was tuned is saved, also when the body raises.

        Args:
            tune: measure shapes that no result covers.
        """
        self.load()
        try:
            with bind(CALLS["tune"]).target(tune_mode=tune):
                yield
        finally:
            if tune:
                self.save()

    @staticmethod
    def _tuner() -> Any:
        for name in ("load", "save"):
            bind(CALLS[name])
        return find(CALLS["get"].function)()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(self.path.name + ".lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():
            return {}
        size = self.path.stat().st_size
        if size > _MOST_BYTES:
            raise self._damaged(f"{size} bytes")
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"not JSON ({error})") from error
        if not isinstance(data, dict):
            raise self._damaged(f"a JSON {type(data).__name__}, not an object")
        return data

    def _results(self) -> dict[str, Any]:
        data = self._read()
        wrong = [key for key, value in data.items() if not key.startswith(_PRIVATE) and not _is_result(key, value)]
        if wrong:
            raise self._damaged(f"the entry {wrong[0][:80]!r} is not [runner, tactic]")
        return {key: value for key, value in data.items() if not key.startswith(_PRIVATE)}

    def _damaged(self, found: str) -> HalError:
        return HalError(f"autotune cache {self.path}", found, "remove the file; its shapes are tuned again")

    def _write(self, data: dict[str, Any]) -> None:
        """Whole or not at all: a reader without the lock never sees half a file."""
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=2)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
