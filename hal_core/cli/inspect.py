"""``hal inspect``: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hal_core.cli.common import CHECKPOINT, JSON, console, examples, human_bytes, module_pattern, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    import typer

    from hal_core.formats.base import Checkpoint, Entry

__all__ = ["describe_checkpoint", "register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("inspect", epilog=examples("hal inspect CKPT", "hal inspect model.gguf --json"))
    def inspect_command(checkpoint: CHECKPOINT, as_json: JSON = False) -> None:
        """Show the scheme, shape and bytes of every layer, equal layers together, and the totals; reads no weights."""
        import hal_core

        found = {"checkpoint": checkpoint, **describe_checkpoint(hal_core.open_checkpoint(checkpoint))}
        if as_json:
            print_json(found)
        else:
            _print(found)


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Layers of one pattern, shape and scheme together, in the order of the files; bytes are those in the files."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in checkpoint.entries.values():
        groups.setdefault((module_pattern(entry.name), entry.shape, entry.scheme, entry.activations), []).append(entry)
    config = checkpoint.config
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "model_type": config.get("model_type"),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "files": [{"name": file.name, "bytes": file.stat().st_size} for file in checkpoint.files],
        "notes": list(checkpoint.notes),
        "layers": [_group(pattern, entries) for (pattern, *_), entries in groups.items()],
        "totals": {
            "all": _total(checkpoint.entries.values()),
            "quantized": _total(e for e in checkpoint.entries.values() if e.quantized),
            "unquantized": _total(e for e in checkpoint.entries.values() if not e.quantized),
        },
    }


def _group(pattern: str, entries: list[Entry]) -> dict[str, Any]:
    first = entries[0]
    return {
        "layers": pattern.removesuffix(".weight"),
        "count": len(entries),
        "shape": list(first.shape),
        "scheme": str(first.scheme),
        "activations": None if first.activations is None else str(first.activations),
        "quantized": first.quantized,
        **_total(entries),
    }


def _total(entries: Iterable[Entry]) -> dict[str, Any]:
    sizes = [(math.prod(entry.shape), entry.nbytes) for entry in entries]
    elements, nbytes = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    # scales, zero points and group indices count: this is what a weight really costs
    return {"parameters": elements, "bytes": nbytes, "bits_per_weight": round(8 * nbytes / elements, 3) if elements else None}


def _print(found: dict[str, Any]) -> None:
    out = console()
    table = Table(title=Text(f"{found['checkpoint']}: {found['format']}, {found['model_type']}"), title_justify="left")
    for header in ("layers", "count", "shape", "scheme", "activations", "bytes", "bits/weight"):
        table.add_column(header, overflow="fold", justify="right" if header in ("count", "bytes", "bits/weight") else "left")
    for row in found["layers"]:
        table.add_row(
            row["layers"], str(row["count"]), "x".join(map(str, row["shape"])) or "scalar", row["scheme"],
            row["activations"] or "none", human_bytes(row["bytes"]), _bits(row),
        )  # fmt: skip
    out.print(table)
    for name, total in found["totals"].items():
        if total["parameters"] or name == "all":
            out.print(f"{name}: {total['parameters']:,} parameters, {human_bytes(total['bytes'])}, {_bits(total)} bits per weight")
    for note in found["notes"]:
        out.print(f"note: {note}")
    size = sum(file["bytes"] for file in found["files"])
    out.print(f"files: {len(found['files'])}, {human_bytes(size)}; activations in {found['dtype'] or 'fp32 (the config names no dtype)'}")


def _bits(total: dict[str, Any]) -> str:
    return "-" if total["bits_per_weight"] is None else f"{total['bits_per_weight']:.2f}"
