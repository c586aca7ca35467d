"""``hal run``: generate text with a quantized model and say what served it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hal_core.cli.common import (
    CHECKPOINT,
    JSON,
    KV_CACHE,
    NUMERICS,
    POLICY,
    RECAST,
    SEED,
    THREADS,
    console,
    examples,
    human_bytes,
    kv_cache_line,
    module_pattern,
    peak_memory_bytes,
    print_json,
    progress_bar,
    recast_of,
)  # fmt: skip
from hal_core.errors import FormatError, SettingError

if TYPE_CHECKING:
    from pathlib import Path

    from hal_core.report import LoadReport

__all__ = ["register"]


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Stopwatch:
    """A transformers streamer that notes when each token arrives and prints text as it becomes whole words."""

    def __init__(self, tokenizer: Any, quiet: bool) -> None:
        self.tokenizer, self.quiet = tokenizer, quiet
        self.times: list[float] = []
        self.ids: list[int] = []
        self.shown = ""
        self.prompt_seen = False

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # the first call carries the prompt
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.ids += value.reshape(-1).tolist()
        if not self.quiet:
            self._print(self.text(), final=False)

    def end(self) -> None:
        if not self.quiet:
            self._print(self.text(), final=True)
            typer.echo("")

    def text(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    def _print(self, text: str, final: bool) -> None:
        # a replacement character at the end is a letter whose last bytes have not come yet
        stable = text if final else text.rstrip("\ufffd")
        if stable.startswith(self.shown):
            typer.echo(stable[len(self.shown) :], nl=False)
            self.shown = stable


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        "run",
        epilog=examples(
            'hal run model.gguf --prompt "Why is the sky blue?"',
            "hal run CKPT --prompt Hi --policy require:cpu --max-new-tokens 32 --json",
            "hal run CKPT --prompt Hi --kv-cache turboquant:4",
        ),
    )
    def run_command(
        checkpoint: CHECKPOINT,
        prompt: Annotated[str, typer.Option(help="What to say to the model.", show_default=False)],
        max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
        policy: POLICY = None,
        numerics: NUMERICS = "checkpoint",
        kv_cache: KV_CACHE = None,
        dtype: Annotated[str, typer.Option(help="Activation dtype: auto, fp32, bf16 or fp16.")] = "auto",
        recast: RECAST = None,
        chat: Annotated[
            bool | None, typer.Option(help="Wrap the prompt in the checkpoint's chat template.", show_default="when it has one")
        ] = None,
        temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
        top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus mass, used with a temperature.")] = 1.0,
        seed: SEED = 0,
        threads: THREADS = None,
        as_json: JSON = False,
    ) -> None:
        """Stream a completion, then print speed of prefill and decode, peak memory and the kernels that served each layer."""
        import torch

        import hal_core
        from hal_core.hub import resolve_checkpoint

        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        path = resolve_checkpoint(checkpoint)
        tokenizer = load_tokenizer(path)
        with progress_bar("loading", as_json) as progress:
            started = time.perf_counter()
            changed = recast_of(recast)
            model = hal_core.load(path, policy=policy, numerics=numerics, dtype=dtype, recast=changed, progress=progress)
            load_seconds = time.perf_counter() - started
        ids = encode(tokenizer, prompt, chat)
        cache = None if kv_cache is None else packed_cache(model, kv_cache, policy)
        result = generate(model, tokenizer, ids, max_new_tokens, temperature, top_p, quiet=as_json, cache=cache)
        result = {
            "checkpoint": checkpoint,
            **result,
            "load_seconds": load_seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            **describe(model.hal),
            "kv_cache": None if cache is None else cache.report(),
        }
        if as_json:
            print_json(result)
        else:
            _print_summary(result)


def load_tokenizer(path: Path) -> Any:
    """The checkpoint's own tokenizer: from its folder, or from inside the GGUF file."""
    from transformers import AutoTokenizer

    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise FormatError(
            f"tokenizer of {path}", f"none of {', '.join(_TOKENIZER_FILES)} is there", "add them, or use 'hal logits' with token ids"
        )
    try:
        if path.is_file():
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(f"tokenizer of {path}", reason, "add tokenizer files, or use 'hal logits' with token ids") from error


def encode(tokenizer: Any, prompt: str, chat: bool | None) -> Any:
    """Token ids ``[1, T]`` of the prompt, in the chat template when asked or when there is one."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SettingError("--prompt", "is not text in the terminal's encoding", "use a UTF-8 locale, e.g. LC_ALL=C.UTF-8") from error
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise SettingError("--chat", "the checkpoint has no chat template", "leave it out, or use --no-chat")
    if has_template and chat is not False:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[-1] == 0:
        raise SettingError("--prompt", "it has no tokens", "write something")
    return ids


def packed_cache(model: Any, scheme: str, policy: str | None) -> Any:
    """An empty quantized cache for a model."""
    from hal_core.integrations.transformers import KVCache

    return KVCache(model, scheme, policy=policy)


def generate(
    model: Any, tokenizer: Any, ids: Any, count: int, temperature: float, top_p: float, quiet: bool, cache: Any = None
) -> dict[str, Any]:
    """Generate through transformers' own ``generate``, with its key/value cache (appended in place) or the one given; time its phases."""
    import torch

    from hal_core.integrations.transformers_growing import cache_argument, growing_cache

    watch = Stopwatch(tokenizer, quiet)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature > 0 else {"do_sample": False}
    if temperature == 0:
        # a checkpoint's sampling settings would only draw warnings from greedy search
        model.generation_config.temperature = model.generation_config.top_p = model.generation_config.top_k = None
    cache = growing_cache(model) if cache is None else cache
    options = {} if cache is None else {cache_argument(model): cache}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = ids.to(model.device)
    with torch.inference_mode():
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, streamer=watch, pad_token_id=pad, **sampling, **options
        )
    prefill = watch.times[0] - started
    decode = watch.times[-1] - watch.times[0]
    decoded = len(watch.times) - 1
    return {
        "text": watch.text(), "token_ids": watch.ids, "prompt_tokens": int(ids.shape[-1]), "new_tokens": len(watch.ids),
        "prefill_tokens_per_second": ids.shape[-1] / prefill, "decode_tokens_per_second": decoded / decode if decoded else None,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def describe(report: LoadReport) -> dict[str, Any]:
    """The kernels that serve the model, layers of one pattern together."""
    layers: dict[tuple[str, str, str], int] = {}
    for op in report.ops:
        key = (module_pattern(op.module), op.kernel, str(op.selection.spec))
        layers[key] = layers.get(key, 0) + 1
    rows = [{"layers": pattern, "count": count, "kernel": kernel, "spec": spec} for (pattern, kernel, spec), count in layers.items()]
    return {
        "format": report.format, "dtype": report.dtype, "numerics": report.numerics, "computed": list(report.computed),
        "policy": report.policy, "kernels": report.kernels(),
        "layers": rows, "notes": [*report.notes, *(f"{op.module}: {note}" for op in report.ops for note in op.notes), *_changed(report)],
        "decoder_layers": list(report.layers), "packed_bytes": report.packed_bytes, "unquantized_bytes": report.unquantized_bytes,
    }  # fmt: skip


def _changed(report: LoadReport) -> tuple[str, ...]:
    """What was done to weights that loses information, layers of one pattern together."""
    changes = (f"{module_pattern(op.module)}: {change}" for op in report.ops for change in op.selection.transforms)
    return tuple(dict.fromkeys(changes))


def _print_summary(result: dict[str, Any]) -> None:
    out = console()
    table = Table(title="Kernels", title_justify="left")
    for header in ("layers", "count", "kernel", "spec"):
        table.add_column(header, overflow="fold")
    for row in result["layers"]:
        table.add_row(row["layers"], str(row["count"]), row["kernel"], Text(row["spec"]))
    out.print()
    out.print(table)
    for note in (*result["decoder_layers"], *result["notes"]):
        out.print(note)
    if result["kv_cache"] is not None:
        out.print(f"{kv_cache_line(result['kv_cache'])}; {human_bytes(result['kv_cache']['used_bytes'])} in use", markup=False)
    decode = result["decode_tokens_per_second"]
    out.print(
        f"prefill {result['prompt_tokens']} tokens at {result['prefill_tokens_per_second']:.1f} tokens/s; "
        f"decode {result['new_tokens']} tokens at {'-' if decode is None else f'{decode:.1f}'} tokens/s; {result['threads']} threads"
    )
    peak, computed = result["peak_memory_bytes"], " and ".join(result["computed"]) or "nothing quantized"
    out.print(
        f"weights {human_bytes(result['packed_bytes'])} packed + {human_bytes(result['unquantized_bytes'])} unquantized; "
        f"peak memory {human_bytes(peak) if peak else '?'}; loaded in {result['load_seconds']:.1f} s; "
        f"numerics {result['numerics']} (computed: {computed}), policy {result['policy']}, activations {result['dtype']}"
    )
