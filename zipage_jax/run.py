"""`python -m zipage_jax.run`: arguments -> config -> LLM -> text or JSONL. No logic of its own.

Without `--model` it runs SmolLM2-135M-Instruct under a small KV budget, without prompts on a few built-in ones.
"""

import dataclasses
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from zipage_jax.chat import render_chat
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.explain import explain
from zipage_jax.llm import LLM
from zipage_jax.request import RequestOutput, RequestsFailed, SamplingParams

DEMO_PROMPTS = (
    "What is the capital of France?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and her cat.",
    "List ten animals and say one thing about each of them.",
)


@dataclass(frozen=True)
class Arguments:
    """Generate text with a fixed KV budget per request.

    Attributes:
        model: "smollm2", a Hugging Face directory or hub id, a GGUF file, or a checkpoint of `python -m models.convert`.
        random_weights: draw random weights of a named shape instead (no tokenizer; for benchmarks).
        prompt: a prompt, run as a chat turn unless `raw` is set; may be given several times.
        prompts: a JSONL file: one {"prompt": …}, {"messages": …} or {"prompt_token_ids": …} a line.
        chat: talk to the model.
        raw: give prompts to the model as they are, without its chat template.
        output: write one JSON object a request to this file.
        explain: print the memory plan on a GPU of this name (h200, a100, …) instead of running; loads no weights.
        version: print the versions of zipage-jax and jax.
        budget_pages: pages a request keeps when it compresses; "None" is full KV.
        policy: which entries it keeps: a preset of zipage_jax.scoring.
        window: last tokens of a page whose queries score the cache.
        sink_len: first entries that are always kept.
        layer_stride: layers that one slice of an asynchronous compression processes.
        engine: the engine's own options.
    """

    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "smollm2"
    random_weights: bool = False
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(aliases=["-p"])] = ()
    prompts: Path | None = None
    chat: bool = False
    raw: bool = False
    output: Path | None = None
    explain: str | None = None
    version: bool = False
    budget_pages: int | None = None
    policy: str = "zipage"
    window: int = 16
    sink_len: int = 0
    layer_stride: int = 8
    max_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    ignore_eos: bool = False
    engine: tyro.conf.AvoidSubcommands[tyro.conf.OmitArgPrefixes[EngineConfig]] = field(default_factory=EngineConfig)

    def sampling_params(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "ignore_eos")
        return SamplingParams(**{name: getattr(self, name) for name in names})

    def engine_config(self) -> EngineConfig:
        if self.budget_pages is None:
            return self.engine
        compression = CompressionConfig(
            budget_pages=self.budget_pages,
            window=self.window,
            policy=self.policy,
            sink_len=self.sink_len,
            layer_stride=self.layer_stride,
        )
        return dataclasses.replace(self.engine, compression=compression)


DEMO = Arguments(budget_pages=4, engine=EngineConfig(page_size=16, max_num_seqs=16))
"""Defaults while no model is named: pages of 16 tokens, so that a few hundred tokens compress several times."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    console = Console()
    named = any(arg in ("-m", "--model") or arg.startswith("--model=") for arg in argv)
    arguments = tyro.cli(Arguments, args=argv, default=Arguments() if named else DEMO, prog="python -m zipage_jax.run")
    if arguments.version:
        console.print(", ".join(f"{name} {version(name)}" for name in ("zipage-jax", "jax")), highlight=False)
        return 0
    try:
        config = arguments.engine_config()
        if arguments.explain is not None:
            console.print(explain(arguments.model, config, arguments.explain))
            return 0
        prompts = read_prompts(arguments)
        if arguments.output is not None:
            check_output(arguments.output)
        params = arguments.sampling_params()
        options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        with LLM(arguments.model, random_weights=arguments.random_weights, **options) as llm:
            if arguments.chat:
                chat_loop(llm, params, console)
                return 0
            start = time.perf_counter()
            outputs = generate(llm, prompts, params, raw=arguments.raw)
            seconds = time.perf_counter() - start
            if arguments.output is not None:
                write_outputs(arguments.output, prompts, outputs)
            show(console, prompts, outputs, seconds, config)
            return int(any(sample.error is not None for output in outputs for sample in output.outputs))
    except (ValueError, TypeError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


def read_prompts(arguments: Arguments) -> list[dict]:
    """What to run, one dict a request: from --prompt, --prompts or the built-in list; ValueError names a bad line."""
    records = [{"prompt": text} for text in arguments.prompt]
    if arguments.prompts is not None:
        for number, line in enumerate(arguments.prompts.read_text().splitlines(), start=1):
            if line.strip():
                records.append(_parse_line(line, f"{arguments.prompts}:{number}"))
        if not records:
            raise ValueError(
                f"{arguments.prompts} has no prompts; write one JSON object a line, or leave --prompts out"
            )
    return records or [{"prompt": text} for text in DEMO_PROMPTS]


def _parse_line(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object ({error.msg}); write one object a line") from None
    known = {"prompt", "messages", "prompt_token_ids"}
    if not isinstance(record, dict) or len(known & set(record)) != 1:
        raise ValueError(f"{where}: needs exactly one of {sorted(known)}")
    return record


def generate(llm: LLM, prompts: list[dict], params: SamplingParams, *, raw: bool) -> list[RequestOutput]:
    """Outputs in the order of `prompts`, those that failed too. Texts are one user turn each, unless `raw` or without template."""
    templated = not raw and llm.tokenizer is not None and llm.tokenizer.chat_template
    ready = []
    for record in prompts:
        messages = record.get("messages")
        if "prompt" in record and templated:
            messages = [{"role": "user", "content": record["prompt"]}]
        if messages is not None:
            record = record | {"prompt_token_ids": render_chat(llm.get_tokenizer(), messages)}
        ready.append({k: v for k, v in record.items() if k in ("prompt", "prompt_token_ids")})
    try:
        return llm.generate(ready, params)
    except RequestsFailed as failed:
        return failed.outputs


def chat_loop(llm: LLM, params: SamplingParams, console: Console) -> None:
    """Read a line, stream the answer, until end of file. Pages of the conversation so far are reused."""
    messages: list[dict] = []
    while True:
        try:
            line = console.input("[bold]> [/bold]")
        except EOFError:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        shown = ""
        for output in llm.stream({"prompt_token_ids": render_chat(llm.get_tokenizer(), messages)}, params):
            text = output.outputs[0].text
            console.print(text[len(shown) :], end="", markup=False, highlight=False)
            shown = text
        console.print(output.outputs[0].error or "", markup=False, highlight=False)
        messages.append({"role": "assistant", "content": shown})


def check_output(path: Path) -> None:
    """ValueError for a path that cannot become a file: known before anything runs."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"--output {path} must be a file in a folder that exists; make the folder or choose another path"
        )


def write_outputs(path: Path, prompts: list[dict], outputs: list[RequestOutput]) -> None:
    """One JSON object a request: its record's keys and its output's.

    Written beside `path` and moved over it, so that a full disk leaves no half file.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w") as file:
            for record, output in zip(prompts, outputs, strict=True):
                file.write(json.dumps(record | dataclasses.asdict(output)) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"could not write {path}: {error.strerror}; free space or choose another --output") from error


def show(
    console: Console, prompts: list[dict], outputs: list[RequestOutput], seconds: float, config: EngineConfig
) -> None:
    """The texts, then a table of what they cost."""
    for record, output in zip(prompts, outputs, strict=True):
        title = record.get("prompt") or (record["messages"][-1]["content"] if "messages" in record else "token ids")
        for sample in output.outputs:
            console.rule(str(title), align="left", style="dim")
            console.print(
                sample.error or sample.text or f"{len(sample.token_ids)} tokens", markup=False, highlight=False
            )
    console.rule(style="dim")
    samples = [sample for output in outputs for sample in output.outputs]
    tokens = sum(len(sample.token_ids) for sample in samples)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    # The last token drawn is never cached.
    full_pages = sum(-(-(sample.stats.length - 1) // config.page_size) for sample in samples)
    table = Table(show_header=False, box=None)
    for name, value in (
        ("requests", f"{len(outputs)}"),
        ("tokens", f"{prompt_tokens} in, {tokens} out"),
        ("speed", f"{prompt_tokens / seconds:.1f} tok/s in, {tokens / seconds:.1f} tok/s out ({seconds:.1f} s)"),
        ("compressions", f"{sum(s.stats.num_compressions for s in samples)}"),
        ("entries evicted", f"{sum(s.stats.entries_evicted for s in samples)} per layer and kv head"),
        (
            "peak pages",
            f"{sum(s.stats.peak_pages for s in samples)} (full KV: {full_pages}), {config.page_size} entries each",
        ),
    ):
        table.add_row(name, value)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
