"""``hal dequantize``: a quantized checkpoint as float32 weights under their published names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.cli.common import CHECKPOINT, JSON, OUT, console, examples, human_bytes, print_json, progress_bar

if TYPE_CHECKING:
    import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("dequantize", epilog=examples("hal dequantize model.gguf --out model-fp32.safetensors"))
    def dequantize_command(checkpoint: CHECKPOINT, out: OUT, as_json: JSON = False) -> None:
        """Write every parameter in float32, with the names and shapes of the published unquantized checkpoint."""
        from hal_core.dequantize import dequantize_checkpoint
        from hal_core.hub import resolve_checkpoint
        from hal_core.outputs import check_output

        path = resolve_checkpoint(checkpoint)
        target = check_output(out, path)
        with progress_bar("dequantizing", as_json) as progress:
            dequantize_checkpoint(path, target, progress=progress)
        size = target.stat().st_size
        if as_json:
            print_json({"checkpoint": checkpoint, "out": str(out), "bytes": size})
        else:
            console().print(f"wrote {out} ({human_bytes(size)})")
