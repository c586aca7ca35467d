"""``hal explain``: for a checkpoint's layers or for one op, which kernel would run and why each other would not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hal_core.cli.common import JSON, NUMERICS, POLICY, RECAST, console, examples, human_bytes, print_json, recast_of
from hal_core.cli.facts import FACTS, machine_of
from hal_core.errors import SettingError

if TYPE_CHECKING:
    from hal_core.explain import Explanation
    from hal_core.explain_checkpoint import CheckpointExplanation, LayerGroup
    from hal_core.numerics import Numerics
    from hal_core.schemes import WeightScheme
    from hal_core.selection import Selection
    from hal_core.spec import Spec

__all__ = ["register"]

_OPS = ("linear", "moe", "embedding", "kv")
_MATRIX, _WEIGHTS = ("linear", "embedding"), ("linear", "moe", "embedding")
#: What each option says something of: kinds of op, or a checkpoint. Those that are not here hold for all.
_OF: dict[str, tuple[str, ...]] = {
    "n": _MATRIX, "k": _MATRIX, "scheme": _WEIGHTS, "numerics": ("checkpoint", *_WEIGHTS),
    **dict.fromkeys(("bias", "lora"), ("linear", "moe")),
    **dict.fromkeys(("experts", "top_k", "hidden", "intermediate", "activation", "alpha", "limit"), ("moe",)),
    **dict.fromkeys(("heads", "kv_heads", "head_dim", "page_size", "window", "kv_cache", "kv_scales"), ("kv",)),
    **dict.fromkeys(("dtype", "policy", "facts"), ("checkpoint", *_OPS)),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        "explain",
        epilog=examples(
            "hal explain CKPT", "hal explain CKPT --tp 4 --facts h200", "hal explain CKPT --policy require:cpu --numerics exact",
            "hal explain --op linear --n 4096 --k 4096 --scheme int4:g128",
            "hal explain --op moe --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --scheme int4:g32:zero --json",
            "hal explain --op kv --heads 32 --kv-heads 8 --head-dim 128 --kv-cache turboquant:4",
            "hal explain CKPT --json > a.json", "hal explain --diff a.json b.json",
        ),
    )  # fmt: skip
    def explain_command(
        context: typer.Context,
        checkpoint: Annotated[
            str | None, typer.Argument(metavar="[CKPT]", help="A checkpoint folder or .gguf file, unless --op or --diff is given.")
        ] = None,
        op: Annotated[str | None, typer.Option(help="linear, moe, embedding or kv, in place of a checkpoint.")] = None,
        diff: Annotated[
            tuple[Path, Path] | None, typer.Option("--diff", help="Two files of 'hal explain ... --json': print what differs.")
        ] = None,
        n: Annotated[int, typer.Option(help="Outputs of a linear; rows of an embedding.")] = 4096,
        k: Annotated[int, typer.Option(help="Inputs of a linear; width of an embedding.")] = 4096,
        experts: Annotated[int, typer.Option(help="Experts of a block.")] = 128,
        top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 8,
        hidden: Annotated[int, typer.Option(help="Hidden size of a block of experts.")] = 2048,
        intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert.")] = 768,
        heads: Annotated[int, typer.Option(help="Query heads of a key/value cache.")] = 32,
        kv_heads: Annotated[int, typer.Option(help="Its key/value heads.")] = 8,
        head_dim: Annotated[int, typer.Option(help="Its channels of a head.")] = 128,
        page_size: Annotated[int, typer.Option(help="Its tokens of a page.")] = 32,
        window: Annotated[int | None, typer.Option(help="Tokens that a query sees.", show_default="all")] = None,
        kv_cache: Annotated[str, typer.Option("--kv-cache", help="How it stores them: int8, turboquant:4, k4v3 ...")] = "turboquant:4",
        kv_scales: Annotated[
            str, typer.Option("--kv-scales", help="Where its static scales come from: computed, calibrated or default.")
        ] = "computed",
        scheme: Annotated[
            str, typer.Option(help="Weight scheme, e.g. int4:g128, int4:g32:zero, int4:g32:min, int8:channel.")
        ] = "int4:g128",
        activation: Annotated[str, typer.Option(help="silu, gelu, gelu_tanh, swiglu_oai or relu2.")] = "silu",
        alpha: Annotated[float | None, typer.Option(help="Sigmoid slope of swiglu_oai.")] = None,
        limit: Annotated[float | None, typer.Option(help="Clamp of gate and up.")] = None,
        bias: Annotated[bool, typer.Option("--bias", help="With a bias.")] = False,
        lora: Annotated[bool, typer.Option("--lora", help="With a LoRA delta.")] = False,
        dtype: Annotated[
            str | None, typer.Option(help="Activation dtype: fp32, bf16 or fp16.", show_default="the checkpoint's, or bf16")
        ] = None,
        tp: Annotated[int, typer.Option("--tp", help="Ranks of tensor parallelism of a checkpoint.")] = 1,
        recast: RECAST = None,
        policy: POLICY = None,
        numerics: NUMERICS = "checkpoint",
        facts: FACTS = None,
        as_json: JSON = False,
    ) -> None:
        """Print the chosen kernel with its layout and numerics, and every other candidate with all its refusals and fixes."""
        from hal_core.kv.scheme import parse_pair
        from hal_core.numerics import numerics_from_word
        from hal_core.schemes import WeightScheme
        from hal_core.spec import Activation, KVCacheSpec, MoESpec

        _check_form(checkpoint, op, diff, tp)
        _check_options(context, "checkpoint" if checkpoint is not None else op or "diff")
        if recast and checkpoint is None:
            raise SettingError("--recast", "without a checkpoint", "give the scheme that is read with --scheme")
        if diff is not None:
            _diff(*diff, as_json)
            return
        if checkpoint is not None:
            _explain_checkpoint(checkpoint, dtype, policy, numerics, facts, tp, recast_of(recast), as_json)
            return
        if op == "kv":
            keys, values = parse_pair(kv_cache)
            cache = KVCacheSpec(heads, kv_heads, head_dim, page_size, keys, values, dtype=dtype or "bf16", window=window, scales=kv_scales)
            _explain_op(cache, policy, facts, as_json)
            return
        weights = WeightScheme.parse(scheme)
        request, word = numerics_from_word(numerics, None, weights.granularity.group), dtype or "bf16"
        if op == "moe":
            act = Activation(activation, alpha, limit)
            gate = None if activation == "relu2" else weights
            spec: Spec = MoESpec(
                experts, top_k, hidden, intermediate, weights, weights, gate, act, numerics=request, dtype=word, bias=bias, lora=lora
            )
        else:
            spec = _matrix_spec(op == "embedding", n, k, weights, request, word, bias, lora)
        _explain_op(spec, policy, facts, as_json)


def _check_form(checkpoint: str | None, op: str | None, diff: tuple[Path, Path] | None, tp: int) -> None:
    """Exactly one of a checkpoint, --op and --diff."""
    from hal_core.sharding import check_degree

    given = [word for word, value in (("a checkpoint", checkpoint), ("--op", op), ("--diff", diff)) if value is not None]
    if not given:
        raise SettingError("hal explain", "neither a checkpoint nor --op given", "see 'hal explain --help'")
    if len(given) > 1:
        raise SettingError("hal explain", f"{' and '.join(given)} given, not both at once please", "see 'hal explain --help'")
    if op is not None and op not in _OPS:
        raise SettingError(f"--op {op!r}", "unknown", f"use one of {', '.join(_OPS)}")
    if check_degree(tp) != 1 and checkpoint is None:
        raise SettingError(f"--tp {tp}", "without a checkpoint", "one op is described as a rank sees it: give the sizes after sharding")


def _check_options(context: typer.Context, form: str) -> None:
    """An option that would change nothing was meant for something else."""
    for name, forms in _OF.items():
        source = context.get_parameter_source(name)
        if form not in forms and source is not None and source.name == "COMMANDLINE":
            ours = form if form in ("checkpoint", "diff") else f"--op {form}"
            raise SettingError(f"--{name.replace('_', '-')} with {ours}", "says nothing of it", f"it is for {', '.join(forms)}")


def _matrix_spec(table: bool, n: int, k: int, weights: WeightScheme, request: Numerics, dtype: str, bias: bool, lora: bool) -> Spec:
    from hal_core.spec import EmbeddingSpec, LinearSpec

    if table:
        return EmbeddingSpec(n, k, weights, request, dtype)
    return LinearSpec(n, k, weights, numerics=request, dtype=dtype, bias=bias, lora=lora)


def _explain_op(spec: Spec, policy: str | None, facts: str | None, as_json: bool) -> None:
    import hal_core

    explanation = hal_core.explain(spec, machine_of(facts), policy)
    if as_json:
        print_json(explanation.to_json())
    else:
        print_explanations([explanation])


def _diff(before: Path, after: Path, as_json: bool) -> None:
    from hal_core.explain_diff import diff_explanations, read_explanation
    from hal_core.jsonable import to_json

    found = diff_explanations(read_explanation(before), read_explanation(after))
    if as_json:
        print_json(to_json(found))
    else:
        console().print(Text(str(found)))


def _explain_checkpoint(
    path: str, dtype: str | None, policy: str | None, numerics: str, facts: str | None, tp: int, recast: dict[str, str], as_json: bool
) -> None:
    import hal_core
    from hal_core.explain_checkpoint import explain_checkpoint
    from hal_core.policy import current_policy
    from hal_core.registry import default_registry

    registry, machine = default_registry(), machine_of(facts)
    found = explain_checkpoint(
        hal_core.open_checkpoint(path), machine, current_policy(policy), registry.kernels(), registry.rows(),
        dtype=dtype, numerics=numerics, tp=tp, name=path, recast=recast,
    )  # fmt: skip
    if as_json:
        print_json(found.to_json())
        return
    _print_checkpoint(found, facts)


def _print_checkpoint(found: CheckpointExplanation, facts: str | None) -> None:
    out = console()
    if facts is not None or found.tp > 1:
        ranks = f"each of {found.tp} ranks" if found.tp > 1 else "it"
        out.print(Text(f"{ranks}: {found.machine}"))
    table = Table(title=f"Layers of {found.checkpoint}", title_justify="left", show_lines=True)
    for header in ("layers", "count", "spec", "kernel", "layout", "bytes"):
        table.add_column(header, overflow="fold")
    for group in found.groups:
        table.add_row(*_layer_row(group))
    out.print(table)
    if not found.groups:
        out.print("no quantized layers: transformers serves the whole model")
        return
    held = sum(group.rank_bytes or 0 for group in found.groups)
    stored = sum(group.file_bytes for group in found.groups)
    out.print(f"{human_bytes(stored)} in the files, {human_bytes(held)} of weights on {'each rank' if found.tp > 1 else 'one device'}")
    for group in found.groups:
        for refusal in group.refusals:
            out.print(Text(f"{', '.join(group.layers)}: {refusal}", style="red"))
        for note in group.notes:
            out.print(Text(f"{', '.join(group.layers)}: {note}", style="yellow"))
    print_explanations([group.explanation for group in found.groups if group.explanation is not None])


def _layer_row(group: LayerGroup) -> tuple[Any, ...]:
    s, layers = group.selection, Text("\n".join(group.layers))
    if group.explanation is None:
        return layers, str(group.count), Text(f"cannot be cut: {group.refusals[0].found}", style="red"), Text("none", style="red"), "-", "-"
    spec = str(group.explanation.spec) + (f"\n{group.shard}" if group.shard != "whole" else "")
    if s is None:
        return layers, str(group.count), Text(spec), Text("none", style="red"), "-", "-"
    kernels = Text("\n".join(map(str, s.intervals)), style="green")
    return layers, str(group.count), Text(spec), kernels, s.layout, human_bytes(group.rank_bytes or 0)


def print_explanations(explanations: list[Explanation]) -> None:
    """Specs whose candidates fare alike share one table: what runs, then every candidate with its reasons."""
    alike: dict[tuple[Any, ...], list[Explanation]] = {}
    for explanation in explanations:
        alike.setdefault((explanation.candidates, explanation.problem), []).append(explanation)
    out = console()
    for members in alike.values():
        out.print()
        for explanation in dict.fromkeys(members):
            out.print(Text(str(explanation.spec), style="bold"))
            for line in _changes(explanation.selection):
                out.print(Text(line, style="yellow"))
        first, s = members[0], members[0].selection
        if s is None:
            out.print(Text(f"nothing serves it under {first.policy}: {first.problem}", style="red"))
        else:
            out.print(
                Text(f"{', '.join(map(str, s.intervals))}; layout {s.layout}; numerics {s.numerics}; policy {s.policy}", style="green")
            )
        out.print(_candidates_table(first))


def _changes(selection: Selection | None) -> list[str]:
    """What is done to the weights of a spec before the kernel sees them."""
    if selection is None:
        return []
    lines = [f"  changes: {transform}" for transform in selection.transforms]
    lines += [f"  padding: {p.dim} {p.asked} to {p.padded}" for p in selection.padding]
    return lines + ([f"  adapters: {', '.join(selection.adapters)}"] if selection.adapters else [])


def _candidates_table(explanation: Explanation) -> Table:
    table = Table(show_lines=False)
    for header, fold in (("candidate", True), ("verdict", True), ("code", False), ("asked", True), ("found", True), ("what to do", True)):
        table.add_column(header, overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    for candidate in explanation.candidates:
        verdict = (
            Text("chosen", style="green") if candidate.chosen else Text("accepted") if candidate.accepted else Text("refused", style="red")
        )
        if not candidate.refusals:
            table.add_row(candidate.kernel, verdict, "", "", "ranks lower" if explanation.served and not candidate.chosen else "", "")
        for index, refusal in enumerate(candidate.refusals):
            first = (candidate.kernel, verdict) if index == 0 else ("", "")
            table.add_row(*first, Text(refusal.code), Text(refusal.asked), Text(refusal.found), Text(refusal.fix))
    return table
