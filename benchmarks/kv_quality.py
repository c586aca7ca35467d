"""How much a quantized key/value cache costs a model in prediction, against bytes a token: paired with the unquantized cache.

    python benchmarks/kv_quality.py MODEL --text TEXT [--schemes "int8;turboquant:4;k4v3"] [--window 512] [--max-tokens 20992]
                                    [--json results.json] [--plot plot.png]

Every token of the text is predicted from keys and values that were quantized and read back, as a decode of one token at a time would
find them (one forward a window: ``hal_core.integrations.transformers_kv_simulated``; the tests hold that it equals the packed pages).
The difference of the mean negative log likelihood is paired by token; its standard error takes windows as clusters. ``--json`` is
written after each scheme, and schemes that it has for the same text and window are not run again. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hal_core
from hal_core.cli.perplexity import encode_text, read_text
from hal_core.integrations.transformers_kv_conditioning import is_useful
from hal_core.integrations.transformers_kv_simulated import simulated_cache
from hal_core.kv.scheme import KV_GROUP, parse_pair
from hal_core.perplexity import TextLoss, compare, measure
from hal_core.spec import KVCacheSpec

SCHEMES = (
    "int8", "fp8", "turboquant:4", "int4", "k4v3", "turboquant:3", "turboquant:2.5", "bf16", "k=int8,v=turboquant:4",
    "k=turboquant:4,v=int4", "int8:token", "int4:token", "turboquant:5", "turboquant:2", "turboquant:4 unconditioned",
    "turboquant:4:raw", "turboquant:4:unbiased",
)  # fmt: skip
BASELINE = "unquantized"
#: Keys with one scale a vector are conditioned by so many tokens of each window, as by a prompt; not so under this suffix.
PROMPT, PLAIN = 64, " unconditioned"
#: Largest relative increase of the negative log likelihood that is asked for.
TARGETS = {"int8": 0.002, "fp8": 0.005, "turboquant:4": 0.03}
#: turboquant:4 may cost at most this part of what int4 costs.
AGAINST_INT4 = 0.7


def token_bytes(config: Any, text: str) -> float:
    """Bytes a token takes in all layers, scales and norms included."""
    keys, values = parse_pair(text.removesuffix(PLAIN))
    heads, dim = config.num_attention_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = KVCacheSpec(heads, config.num_key_value_heads, dim, KV_GROUP, keys, values)
    return float(config.num_hidden_layers * spec.token_bytes)


def bar(name: str) -> Any:
    started = time.perf_counter()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total:
            text = f"\r{name}: {done}/{total} tokens, {time.perf_counter() - started:.0f} s"
            print(text, end="\n" if done == total else "", file=sys.stderr)

    return show


def run(model: Any, ids: torch.Tensor, window: int, scheme: str) -> TextLoss:
    if scheme == BASELINE:
        return measure(model, ids, window, progress=bar(scheme))
    keys, values = parse_pair(scheme.removesuffix(PLAIN))
    prompt = PROMPT if is_useful(keys) and not scheme.endswith(PLAIN) else 0
    with simulated_cache(model, keys, values, prompt=prompt):
        # one window a call where its first tokens condition the keys, as those of one prompt would
        return measure(model, ids, window, 1 if prompt else None, progress=bar(scheme))


def row(model: Any, scheme: str, base: TextLoss, loss: TextLoss) -> dict[str, Any]:
    found = compare(base, loss)
    wide = token_bytes(model.config, "bf16")
    size = wide if scheme == BASELINE else token_bytes(model.config, scheme)
    return {
        "scheme": scheme, "bytes_per_token": size, "of_bf16": size / wide, "nll": loss.nll, "perplexity": loss.perplexity,
        "nll_difference": found.nll, "nll_difference_error": found.nll_standard_error, "relative_nll": found.nll / base.nll,
        "relative_nll_error": None if found.nll_standard_error is None else found.nll_standard_error / base.nll,
        "relative_perplexity": found.relative_perplexity, "predicted_tokens": found.predicted,
        "losses": [[round(value, 7) for value in part.tolist()] for part in loss.windows],
    }  # fmt: skip


def saved_loss(found: dict[str, Any]) -> TextLoss:
    return TextLoss(tuple(torch.tensor(part, dtype=torch.float64) for part in found["losses"]))


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the baseline and of every scheme; those already in the JSON file are taken from there."""
    saved = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rows": []}
    asked = {"model": Path(args.model).name, "text": args.text.name, "window": args.window, "max_tokens": args.max_tokens}
    rows = {row["scheme"]: row for row in saved["rows"]} if all(saved.get(key) == value for key, value in asked.items()) else {}
    wanted = [BASELINE, *(name for name in args.schemes if name != BASELINE)]
    if not all(name in rows for name in wanted):
        path = Path(args.model)
        ids = encode_text(path, None, read_text(args.text))[: args.max_tokens]
        model = hal_core.load(path, numerics="exact", dtype="fp32")
        asked |= {"kernels": model.hal.kernels(), "torch": torch.__version__}
        for name in wanted:
            if name not in rows:
                loss = run(model, ids, args.window, name)
                rows[name] = row(model, name, loss if name == BASELINE else saved_loss(rows[BASELINE]), loss)
                if args.json:
                    args.json.write_text(json.dumps({**saved, **asked, "rows": list(rows.values())}, indent=1) + "\n")
                print(line(rows[name]), flush=True)
    return [rows[name] for name in wanted]


def line(found: dict[str, Any]) -> str:
    error = found["relative_nll_error"]
    around = "" if error is None else f" ± {100 * error:.4f}"
    return (
        f"| {found['scheme']} | {found['bytes_per_token']:.0f} | {found['of_bf16']:.3f} | {found['perplexity']:.3f} "
        f"| {100 * found['relative_nll']:+.4f}{around} | {100 * found['relative_perplexity']:+.3f} |"
    )


def word(met: bool) -> str:
    return "met   " if met else "MISSED"


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each target: met or missed."""
    by_name = {row["scheme"]: row for row in rows}
    out = []
    for name, most in TARGETS.items():
        if name in by_name:
            found = by_name[name]["relative_nll"]
            out.append(f"{word(found <= most)} {name}: nll {100 * found:+.4f} %, at most {100 * most:g} %")
    if {"int4", "turboquant:4"} <= set(by_name):
        ours, theirs = by_name["turboquant:4"], by_name["int4"]
        ratio = ours["nll_difference"] / theirs["nll_difference"]
        sizes = f"{ours['bytes_per_token']:.0f} against {theirs['bytes_per_token']:.0f} bytes a token"
        out.append(f"{word(ratio <= AGAINST_INT4)} turboquant:4: {ratio:.2f} of int4's increase, at most {AGAINST_INT4}; {sizes}")
    return out


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Perplexity against bytes a token, one point a scheme."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=100)
    axes = figure.subplots()
    for found in rows:
        if found["scheme"] != BASELINE:
            axes.plot(found["bytes_per_token"], found["perplexity"], "o", color="#1f5fa8", markersize=5)
            axes.annotate(found["scheme"], (found["bytes_per_token"], found["perplexity"]), (4, 4), textcoords="offset points", fontsize=7)
        else:
            axes.axhline(found["perplexity"], color="#888888", linewidth=1, linestyle="--", label="unquantized cache")
    axes.set(xscale="log", xlabel="bytes a token (all layers, keys and values)", ylabel="perplexity")
    axes.legend(loc="upper right", frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="checkpoint folder or .gguf file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--schemes", type=lambda text: text.split(";"), default=list(SCHEMES), help="separated by semicolons")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=41 * 512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = measured(args)
    print("\n| scheme | bytes a token | of bf16 | perplexity | nll, % | perplexity, % |\n|---|---|---|---|---|---|")
    print("\n".join(map(line, rows)))
    print("\n".join(("", *verdicts(rows))))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
