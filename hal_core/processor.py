"""What is known of the processor beyond its instruction sets: cores, memory nodes, caches, register states. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from hal_core.errors import ValueDecodeError

__all__ = ["Cache", "NumaNode", "Processor"]

_MOST_CPUS = 1 << 16
_MOST_BYTES = 1 << 50


def _check(owner: str, most: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 <= value <= most:
            raise ValueDecodeError(f"{owner}.{name}", f"{value} is not between 0 and {most}")


@dataclass(frozen=True)
class NumaNode:
    """Memory with the logical processors next to it. ``cpus`` counts them."""

    node: int
    cpus: int
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        _check("numa", _MOST_CPUS, node=self.node, cpus=self.cpus)
        _check("numa", _MOST_BYTES, memory_bytes=self.memory_bytes)


@dataclass(frozen=True)
class Cache:
    """One cache of the first processor. kind: ``data``, ``instruction`` or ``unified``. shared_by: logical processors that use it."""

    level: int
    kind: str
    size_bytes: int
    shared_by: int = 1

    def __post_init__(self) -> None:
        _check("cache", 8, level=self.level)
        _check("cache", _MOST_BYTES, size_bytes=self.size_bytes)
        _check("cache", _MOST_CPUS, shared_by=self.shared_by)

    def __str__(self) -> str:
        kind = {"data": "d", "instruction": "i"}.get(self.kind, "")
        return f"L{self.level}{kind} {self.size_bytes // 1024} KiB" + (f" for {self.shared_by}" if self.shared_by > 1 else "")


@dataclass(frozen=True)
class Processor:
    """cores: physical ones. threads: logical ones. ``Device.units`` counts the logical ones that this process may use.

    states: register states that the operating system saves (``avx512``, ``amx_tile``, ...); empty when it does not say.
    """

    cores: int | None = None
    threads: int | None = None
    numa: tuple[NumaNode, ...] = ()
    caches: tuple[Cache, ...] = ()
    states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("processor", _MOST_CPUS, cores=self.cores, threads=self.threads)

    def __str__(self) -> str:
        parts = [f"{self.cores} cores"] if self.cores else []
        parts += [f"{self.threads} threads"] if self.threads else []
        parts += [f"{len(self.numa)} memory node{'s' * (len(self.numa) > 1)}"] if self.numa else []
        return ", ".join([*parts, *map(str, self.caches)])
