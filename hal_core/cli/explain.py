"""``hal explain``: for a checkpoint's layers or for one op, which kernel would run and why each other would not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hal_core.cli.common import JSON, NUMERICS, POLICY, console, examples, module_pattern, print_json
from hal_core.errors import SettingError

if TYPE_CHECKING:
    from hal_core.explain import Explanation
    from hal_core.spec import Spec

__all__ = ["register"]

_OPS = ("linear", "moe", "embedding")


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        "explain",
        epilog=examples(
            "hal explain CKPT", "hal explain CKPT --policy require:cpu --numerics exact",
            "hal explain --op linear --n 4096 --k 4096 --scheme int4:g128",
            "hal explain --op moe --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --scheme int4:g32:zero --json",
        ),
    )  # fmt: skip
    def explain_command(
        checkpoint: Annotated[
            str | None, typer.Argument(metavar="[CKPT]", help="A checkpoint folder or .gguf file, unless --op is given.")
        ] = None,
        op: Annotated[str | None, typer.Option(help="linear, moe or embedding, in place of a checkpoint.")] = None,
        n: Annotated[int, typer.Option(help="Outputs of a linear; rows of an embedding.")] = 4096,
        k: Annotated[int, typer.Option(help="Inputs of a linear; width of an embedding.")] = 4096,
        experts: Annotated[int, typer.Option(help="Experts of a block.")] = 128,
        top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 8,
        hidden: Annotated[int, typer.Option(help="Hidden size of a block of experts.")] = 2048,
        intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert.")] = 768,
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
        policy: POLICY = None,
        numerics: NUMERICS = "checkpoint",
        as_json: JSON = False,
    ) -> None:
        """Print the chosen kernel with its layout and numerics, and every other candidate with all its refusals and fixes."""
        import hal_core
        from hal_core.numerics import numerics_from_word
        from hal_core.schemes import WeightScheme
        from hal_core.spec import Activation, EmbeddingSpec, LinearSpec, MoESpec

        if (checkpoint is None) == (op is None):
            found = "a checkpoint and --op given, not both at once please" if op else "neither a checkpoint nor --op given"
            raise SettingError("hal explain", found, "see 'hal explain --help'")
        if checkpoint is not None:
            _explain_checkpoint(checkpoint, dtype, policy, numerics, as_json)
            return
        if op not in _OPS:
            raise SettingError(f"--op {op!r}", "unknown", f"use one of {', '.join(_OPS)}")
        weights = WeightScheme.parse(scheme)
        request, word = numerics_from_word(numerics, None, weights.granularity.group), dtype or "bf16"
        spec: Spec
        if op == "linear":
            spec = LinearSpec(n, k, weights, numerics=request, dtype=word, bias=bias, lora=lora)
        elif op == "embedding":
            spec = EmbeddingSpec(n, k, weights, request, word)
        else:
            act = Activation(activation, alpha, limit)
            gate = None if activation == "relu2" else weights
            spec = MoESpec(
                experts, top_k, hidden, intermediate, weights, weights, gate, act, numerics=request, dtype=word, bias=bias, lora=lora
            )
        explanation = hal_core.explain(spec, policy=policy)
        if as_json:
            print_json(explanation.to_json())
        else:
            print_explanations([explanation])


def _explain_checkpoint(path: str, dtype: str | None, policy: str | None, numerics: str, as_json: bool) -> None:
    groups = explain_checkpoint(path, dtype, policy, numerics)
    if as_json:
        rows = [{**group, "explanation": group["explanation"].to_json()} for group in groups]
        print_json({"checkpoint": path, "numerics": numerics, "policy": policy or "auto", "groups": rows})
        return
    out = console()
    table = Table(title=f"Layers of {path}", title_justify="left", show_lines=True)
    for header in ("layers", "count", "spec", "kernel", "layout"):
        table.add_column(header, overflow="fold")
    for group in groups:
        explanation: Explanation = group["explanation"]
        s = explanation.selection
        kernel = Text("none", style="red") if s is None else Text(", ".join(map(str, s.intervals)), style="green")
        table.add_row("\n".join(group["layers"]), str(group["count"]), Text(str(explanation.spec)), kernel, s.layout if s else "-")
    out.print(table)
    if not groups:
        out.print("no quantized layers: transformers serves the whole model")
    print_explanations([group["explanation"] for group in groups])


def explain_checkpoint(path: str, dtype: str | None, policy: str | None, numerics: str) -> list[dict[str, Any]]:
    """Layers that ask for the same thing, each group with one explanation; reads headers only."""
    import hal_core
    from hal_core.plan import checkpoint_dtype, plan_checkpoint

    checkpoint = hal_core.open_checkpoint(path)
    by_spec: dict[Spec, list[str]] = {}
    for planned in plan_checkpoint(checkpoint, checkpoint_dtype(checkpoint, dtype), numerics):
        by_spec.setdefault(planned.spec, []).append(planned.module)
    groups = []
    for spec, modules in by_spec.items():
        patterns = list(dict.fromkeys(map(module_pattern, modules)))
        groups.append({"layers": patterns, "count": len(modules), "modules": modules, "explanation": hal_core.explain(spec, policy=policy)})
    return groups


def print_explanations(explanations: list[Explanation]) -> None:
    """Specs whose candidates fare alike share one table: what runs, then every candidate with its reasons."""
    alike: dict[tuple[Any, ...], list[Explanation]] = {}
    for explanation in explanations:
        alike.setdefault((explanation.candidates, explanation.problem), []).append(explanation)
    out = console()
    for members in alike.values():
        out.print()
        for explanation in members:
            out.print(Text(str(explanation.spec), style="bold"))
        first, s = members[0], members[0].selection
        if s is None:
            out.print(Text(f"nothing serves it under {first.policy}: {first.problem}", style="red"))
        else:
            out.print(
                Text(f"{', '.join(map(str, s.intervals))}; layout {s.layout}; numerics {s.numerics}; policy {s.policy}", style="green")
            )
        out.print(_candidates_table(first))


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
