"""Generate with a Gemma-4 E-series model and measure it: prefill, decode, memory, and how near the hardware's floor.

    python scripts/benchmarks/gemma4_flex_inference.py --capture_cudagraph

Every flag, table row and JSON key is explained in scripts/benchmarks/README.md.
"""
from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from gemma4_flex.bench import stats_file, workload
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.kernel_options import parse_options
from gemma4_flex.params import EngineConfig, InvalidParameterError, SamplingParams
from gemma4_flex.scheduler import RequestRefusedError
from gemma4_flex.text import PromptError

BENCHMARK = "gemma4_flex_inference"
HUB_MODEL = "unsloth/gemma-4-E2B-it"
RUNS = Path(__file__).resolve().parent.parent.parent / "results" / "runs"
SHOWN = 8          # completions that are printed
DRIFT_PROMPTS = 4  # prompts whose logits drift verification compares
DEFAULTS, SAMPLING = EngineConfig(), SamplingParams()


class UsageError(ValueError):
    """Flags that can't be obeyed; the message says what to do instead."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One sentence and exit code 2, without the page of usage that argparse puts before it."""
        self.exit(2, f"error: {message}\n")


def kernel_options(text: str) -> dict:
    """The value of a flag that takes flex_attention kernel options as a JSON object."""
    try:
        return parse_options(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> Parser:
    flags = Parser(prog=f"{BENCHMARK}.py", description=__doc__, allow_abbrev=False,
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--model_name", help=f"local directory, hub id, tiny, or synthetic:E2B (default: {HUB_MODEL} with CUDA, "
                             "else tiny)")
    add("--n_prompts", type=int, help="prompts used (default: all there are)")
    add("--n_rounds", type=int, default=3, help="measured rounds, after one warm-up round (default 3)")
    add("--max_new_tokens", type=int, default=SAMPLING.max_new_tokens)
    add("--max_batch_size", type=int, default=DEFAULTS.max_batch_size)
    add("--max_seq_length", type=int, default=DEFAULTS.max_seq_length)
    add("--n_pages", type=int, help="pages of the full-attention group (default: what a full batch needs)")
    add("--gpu_memory_utilization", type=float, metavar="SHARE",
        help="size the K/V pools by what is left of this share of the device's memory, instead of --n_pages")
    add("--page_size", type=int, help="tokens a page, a power of two")
    add("--capture_cudagraph", action="store_true", help="replay captured decode graphs (a traced graph on a CPU)")
    add("--compile", action=argparse.BooleanOptionalAction, default=DEFAULTS.compile, help="compile steps with Inductor (default)")
    add("--decode_steps_per_sync", type=int, default=DEFAULTS.decode_steps_per_sync, metavar="K",
        help=f"decode steps between two looks of the host (default {DEFAULTS.decode_steps_per_sync}); tokens are the same")
    add("--mixed_prefill", action="store_true", help="prompts and running sequences in one pass where both are due")
    add("--decode_kernel_options", type=kernel_options, metavar="JSON", help="flex_attention kernel options for decode")
    add("--prefill_kernel_options", type=kernel_options, metavar="JSON", help="the same for prefill")
    add("--fa4_prefill", action=argparse.BooleanOptionalAction, help="refused: FlashAttention-4 stops at head_dim 128")
    add("--chat_template", choices=("auto", "grpo", "native"), default="auto")
    add("--stats_path", type=Path, help="where the result goes as JSON (default: a new file in results/runs/)")
    add("--device", default=DEFAULTS.device, help="auto, cpu or cuda")
    add("--dtype", default=DEFAULTS.dtype, help="auto, float32 or bfloat16")
    add("--attention", default=DEFAULTS.attention, help="auto, flex or sdpa (auto: flex with CUDA, sdpa on a CPU)")
    add("--shared_kv", default=DEFAULTS.shared_kv, help="paged or sidecar")
    add("--prompts", type=Path, metavar="FILE",
        help="JSONL, one {\"messages\": [...]} or {\"text\": \"...\"} a line (default: the bundled prompts)")
    add("--seed", type=int, default=DEFAULTS.seed, help="for the weights of synthetic models")
    add("--lora_adapter", type=Path, metavar="DIR", help="a PEFT LoRA directory, merged into a second copy of its targets")
    add("--no_merge_lora", action="store_true", help="run the adapter unmerged, beside the weights, for comparison")
    add("--verify_no_drift", action="store_true", help="afterwards refresh the adapter many times and prove nothing drifted")
    add("--verify_iterations", type=int, default=100, help="perturb-and-refresh cycles of --verify_no_drift (default 100)")
    add("--load_in_4bit", action="store_true", help="quantise the linears of a bf16 checkpoint to NF4 as it loads (bitsandbytes)")
    add("--double_quant_4bit", action="store_true", help="with --load_in_4bit, quantise the scales too")
    add("--model_name_4bit", metavar="NAME", help="a directory or hub id that bitsandbytes quantised to 4 bits already")
    add("--lora_4bit", choices=("unmerged", "requantize"), help="an adapter over 4-bit weights: beside them (the default), or "
                                                                "merged into them and quantised anew")
    return flags


def is_4bit(args: argparse.Namespace) -> bool:
    return bool(args.load_in_4bit or args.model_name_4bit)


def check_4bit_flags(args: argparse.Namespace) -> None:
    """Refuse combinations of the 4-bit flags that contradict each other. Raises UsageError."""
    if args.model_name_4bit and (args.load_in_4bit or args.model_name):
        raise UsageError("--model_name_4bit names a model that is quantised already: leave out --load_in_4bit and --model_name")
    if args.double_quant_4bit and not args.load_in_4bit:
        raise UsageError("--double_quant_4bit says how --load_in_4bit quantises: give both")
    if is_4bit(args) and args.dtype not in ("auto", "bfloat16"):
        raise UsageError(f"--dtype {args.dtype}: 4-bit weights compute in bfloat16; leave --dtype out")
    if args.lora_4bit and not (is_4bit(args) and args.lora_adapter):
        raise UsageError("--lora_4bit is for an adapter over 4-bit weights: give --lora_adapter and --load_in_4bit or "
                         "--model_name_4bit")
    if args.lora_4bit == "requantize" and args.no_merge_lora:
        raise UsageError("--lora_4bit requantize merges and --no_merge_lora does not: leave out one of them")
    if is_4bit(args) and args.verify_no_drift and args.lora_4bit != "requantize":
        raise UsageError("--verify_no_drift over 4-bit weights needs a merged adapter: give --lora_4bit requantize")


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what no model could change. Raises UsageError."""
    if not args.lora_adapter and (args.verify_no_drift or args.no_merge_lora):
        raise UsageError("--verify_no_drift and --no_merge_lora need an adapter: give --lora_adapter DIR")
    if args.no_merge_lora and args.verify_no_drift:
        raise UsageError("--verify_no_drift proves that merging leaves no trace: leave out --no_merge_lora")
    if args.verify_iterations < 1:
        raise UsageError(f"--verify_iterations must be at least 1, not {args.verify_iterations}")
    check_4bit_flags(args)
    if args.fa4_prefill:
        raise UsageError("--fa4_prefill: FlashAttention-4 stops at head_dim 128 and Gemma-4's heads are 256 and 512 "
                         "wide; leave it out")
    if args.n_rounds < 1:
        raise UsageError(f"--n_rounds must be at least 1, not {args.n_rounds}")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The flags named as fields of EngineConfig, as one. Raises ValueError with the fix."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    return EngineConfig(**given | ({"dtype": "bfloat16"} if is_4bit(args) else {}))


def choose_model(args: argparse.Namespace) -> str:
    """The model to run, having said which one and why."""
    import torch
    if args.model_name is not None or args.model_name_4bit:
        name, why = args.model_name_4bit or args.model_name, "as asked"
    elif torch.cuda.is_available() and args.device != "cpu":
        name, why = HUB_MODEL, "the default where CUDA is present"
    else:
        name, why = "tiny", f"the bundled model, the default without CUDA; --model_name {HUB_MODEL} is the real thing"
    print(f"model: {name} ({why})")
    return name


def stats_path(args: argparse.Namespace) -> Path:
    """Where the result will go, tried out. Raises StatsPathError."""
    if args.stats_path:
        return stats_file.check_writable(args.stats_path)
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise stats_file.StatsPathError(f"can't make {RUNS}: {error.strerror}; give --stats_path FILE") from None
    return stats_file.check_writable(RUNS / f"{BENCHMARK}-{time.strftime('%Y%m%d-%H%M%S')}.json")


def load(args: argparse.Namespace, config: EngineConfig, name: str):
    """The engine, its LoraSession or None, and the description of its 4-bit weights or None; says what was loaded."""
    from gemma4_flex.checkpoints import four_bit
    from gemma4_flex.engine import FlexEngine
    lora, packed = None, None
    if args.lora_adapter:
        from gemma4_flex.lora.session import LoraSession
        merge = args.lora_4bit == "requantize" if is_4bit(args) else not args.no_merge_lora
        lora = LoraSession(args.lora_adapter, merge=merge)
    if args.load_in_4bit:
        four_bit.require_bitsandbytes()      # before any weight is read

    def change(model):
        nonlocal packed
        if args.load_in_4bit:
            four_bit.quantize_4bit(model, double_quant=args.double_quant_4bit)
        if is_4bit(args):
            print(four_bit.layout_4bit(model))
            packed = four_bit.describe_4bit(model)
        return lora.put_on(model) if lora else model

    engine = FlexEngine.from_pretrained(name, config, change, four_bit=bool(args.model_name_4bit))
    if lora:
        summary = lora.summary()
        print("adapter: {directory}, {modules} modules, {how}, {extra_bytes:,} bytes for the second copy".format(
            how="merged" if lora.merge else "unmerged", **summary))
        if summary["deviation"]:
            print(f"requantised: {summary['deviation']['text']}")
        if lora.adapter.inert:
            print(f"note: inert, since these layers share their K/V: {', '.join(lora.adapter.inert)}")
    return engine, lora, packed


def run(args: argparse.Namespace, config: EngineConfig, params: SamplingParams, prompts: list[workload.Prompt]) -> dict:
    """Load, generate in rounds, and give the result."""
    from tqdm import tqdm

    from gemma4_flex.bench import measure, report, roofline

    name = choose_model(args)
    engine, lora, packed = load(args, config, name)
    if engine.sizing:
        print(f"K/V pools: {engine.sizing}")
    told = list(engine.notices)
    for notice in told:
        print(f"note: {notice}")
    if engine.tokenizer is None and args.prompts is None:
        source, template = "random tokens", "none"
        encoded = workload.encode_random(len(prompts), engine.geometry.vocab_size, args.seed,
                                         avoid=engine.geometry.placeholder_ids | engine.stop_ids)
        print(f"note: this model has no tokenizer: {len(encoded)} random prompts stand in for the bundled ones")
    else:
        source = str(args.prompts or "bundled")
        template = workload.resolve_template(engine.tokenizer, args.chat_template)
        encoded = workload.encode_prompts(prompts, engine.tokenizer, args.chat_template)
    quiet = not sys.stderr.isatty()
    print("preparing: kernels compile and decode steps are captured, about a minute the first time", flush=True)
    with tqdm(total=1 + args.n_rounds, desc="warm-up, then rounds", unit="round", disable=quiet) as bar:
        measurement = measure.measure_rounds(
            engine, [list(p.ids) for p in encoded], params, n_rounds=args.n_rounds,
            synchronize=measure.synchronizer(engine.config.device), on_round=lambda done: bar.update())
    for notice in engine.notices[len(told):]:      # what came out when steps were captured
        print(f"note: {notice}")
    peak = measure.peak_memory_bytes(engine.config.device)      # before the bandwidth's own buffers count
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result = report.build_result(
        benchmark=BENCHMARK, model_name=name, engine=engine, measurement=measurement, prompts=encoded,
        chat_template=template, prompt_source=source, bandwidth=roofline.copy_bandwidth(engine.config.device),
        matmul=roofline.matmul_rate(engine.config.device, engine.config.dtype), peak_memory=peak, options=options,
        notices=engine.notices, four_bit=packed)
    result["lora"] = lora and lora.summary()
    if args.verify_no_drift:
        from gemma4_flex.engine import FlexEngine
        from gemma4_flex.lora.session import drift_result, drift_table
        with tqdm(total=args.verify_iterations, desc="perturb and refresh", disable=quiet) as bar:
            drift = lora.verify(engine, lambda model: FlexEngine(model, engine.tokenizer, engine.config),
                                [list(p.ids) for p in encoded[:DRIFT_PROMPTS]], iterations=args.verify_iterations,
                                on_cycle=lambda n: bar.update())
        print(f"\n{drift_table(drift)}")
        result["drift"] = drift_result(drift)
    return result


def is_for_the_user(error: ValueError) -> bool:
    """Whether the message is meant for whoever typed the command; any other error is a bug and shows its trace."""
    if isinstance(error, (UsageError, UnsupportedModelError, InvalidParameterError, PromptError, RequestRefusedError,
                          stats_file.StatsPathError)):
        return True
    from gemma4_flex.checkpoints import CheckpointError
    from gemma4_flex.lora.adapters import AdapterError
    return isinstance(error, (CheckpointError, AdapterError))


def show(result: dict) -> None:
    """The first completions, and the table."""
    from gemma4_flex.bench import report
    for completion in result["completions"][:SHOWN]:
        if completion["question"]:      # random tokens have no text to show
            print(f"\n> {completion['question']}\n{completion['text']}")
    print(f"\n{report.table(result)}")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:      # what needs no torch comes first: a slip is told in a moment, not after a model was loaded
        check_flags(args)
        config, params = engine_config(args), SamplingParams(max_new_tokens=args.max_new_tokens)
        prompts = workload.first_prompts(workload.read_prompts(args.prompts or workload.BUNDLED), args.n_prompts)
        path = stats_path(args)
        result = run(args, config, params, prompts)
    except ValueError as error:
        if not is_for_the_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    from gemma4_flex.bench import report
    report.write_result(result, path)
    print(f"result: {path}")
    return 1 if not result.get("drift", {"passed": True})["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
