"""What an inference script does: load a model, generate in rounds, show completions and figures, write one result."""
from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from gemma4_flex.bench import stats_file, workload
from gemma4_flex.bench.inference_flags import Command, UsageError, check_flags, engine_config, is_4bit, parser, sampling_params
from gemma4_flex.bench.ranks import LostRankError, Ranks
from gemma4_flex.capabilities import CapabilityError, Setup, check
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError, SamplingParams
from gemma4_flex.scheduler import RequestRefusedError
from gemma4_flex.text import PromptError

RUNS = Path(__file__).resolve().parent.parent.parent / "results" / "runs"
SHOWN = 8          # completions that are printed
DRIFT_PROMPTS = 4  # prompts whose logits drift verification compares


def choose_model(args: argparse.Namespace, command: Command) -> str:
    """The model to run, having said which one and why."""
    import torch
    if args.model_name is not None or args.model_name_4bit:
        name, why = args.model_name_4bit or args.model_name, "as asked"
    elif torch.cuda.is_available() and args.device != "cpu":
        name, why = command.hub_model, "the default where CUDA is present"
    else:
        name = command.small_model
        why = f"{command.small_is}, the default without CUDA; --model_name {command.hub_model} is the real thing"
    print(f"model: {name} ({why})")
    return name


def stats_path(args: argparse.Namespace, command: Command) -> Path:
    """Where the result will go, tried out. Raises StatsPathError."""
    if args.stats_path:
        return stats_file.check_writable(args.stats_path)
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise stats_file.StatsPathError(f"can't make {RUNS}: {error.strerror}; give --stats_path FILE") from None
    return stats_file.check_writable(RUNS / f"{command.name}-{time.strftime('%Y%m%d-%H%M%S')}.json")


def setup_of(args: argparse.Namespace, config: EngineConfig, name: str) -> Setup:
    """Which cell of the table of capabilities the flags ask for."""
    import torch

    from gemma4_flex.checkpoints import format_of
    kept = "nf4" if args.load_in_4bit else "decoded" if args.gguf_weights == "dequantize" else "stored"
    device = config.resolved("cuda" if torch.cuda.is_available() else "cpu").device
    setup = Setup("bitsandbytes" if args.model_name_4bit else format_of(name), kept, device, config.capture_cudagraph, lora="none")
    if not args.lora_adapter:
        return setup
    unmerged = args.no_merge_lora or (setup.is_nf4 and args.lora_4bit != "requantize")
    lora = "unmerged" if unmerged else "requantized" if args.lora_4bit == "requantize" else "merged"
    return dataclasses.replace(setup, lora=lora)


def load(args: argparse.Namespace, config: EngineConfig, name: str):
    """The engine, its LoraSession or None, and the description of its 4-bit weights or None; says what was loaded."""
    from gemma4_flex.checkpoints import four_bit
    from gemma4_flex.engine import FlexEngine
    lora, packed = None, None
    check(setup := setup_of(args, config, name))
    if args.lora_adapter:
        from gemma4_flex.lora.session import LoraSession
        lora = LoraSession(args.lora_adapter, merge=setup.lora != "unmerged")
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

    engine = FlexEngine.from_pretrained(name, config, change, four_bit=bool(args.model_name_4bit),
                                        gguf_weights=args.gguf_weights or "packed")
    if lora:
        summary = lora.summary()
        print("adapter: {directory}, {modules} modules, {how}, {extra_bytes:,} bytes for the second copy".format(
            how="merged" if lora.merge else "unmerged", **summary))
        if summary["deviation"]:
            print(f"requantised: {summary['deviation']['text']}")
        if lora.adapter.inert:
            print(f"note: inert, since these layers share their K/V: {', '.join(lora.adapter.inert)}")
    return engine, lora, packed


def encode(args: argparse.Namespace, engine, prompts: list[workload.Prompt]) -> tuple[list[workload.EncodedPrompt], str, str]:
    """The prompts as token ids, where they come from, and the template they went through."""
    if engine.tokenizer is None and args.prompts is None:
        encoded = workload.encode_random(len(prompts), engine.geometry.vocab_size, args.seed,
                                         avoid=engine.geometry.placeholder_ids | engine.stop_ids)
        print(f"note: this model has no tokenizer: {len(encoded)} random prompts stand in for the bundled ones")
        return encoded, "random tokens", "none"
    template = workload.resolve_template(engine.tokenizer, args.chat_template)
    return workload.encode_prompts(prompts, engine.tokenizer, args.chat_template), str(args.prompts or "bundled"), template


def run(args: argparse.Namespace, command: Command, config: EngineConfig, params: SamplingParams,
        prompts: list[workload.Prompt], ranks: Ranks) -> dict | None:
    """Load, generate in rounds, and give the result; where torchrun runs several processes, each does so for its share of the
    prompts, and the first has the job's result and the others None."""
    from tqdm import tqdm

    from gemma4_flex.bench import measure, ranks_result, report, roofline

    ranks.join(config.device)
    name = choose_model(args, command)
    engine, lora, packed = load(args, config, name)
    if engine.sizing:
        print(f"K/V pools: {engine.sizing}")
    told = list(engine.notices)
    for notice in told:
        print(f"note: {notice}")
    everyones, source, template = encode(args, engine, prompts)
    encoded = ranks.share(everyones)
    quiet = not (ranks.first and sys.stderr.isatty())
    print("preparing: kernels compile and decode steps are captured, about a minute the first time", flush=True)
    with tqdm(total=1 + args.n_rounds, desc="warm-up, then rounds", unit="round", disable=quiet) as bar:
        try:
            measurement = measure.measure_rounds(
                engine, [list(p.ids) for p in encoded], ranks.params_for(len(everyones), params, args.seed),
                n_rounds=args.n_rounds, synchronize=measure.synchronizer(engine.config.device), before_round=ranks.meet,
                on_round=lambda done: bar.update())
        except PromptError as error:      # which counts from the first prompt of this rank's share
            if not (before := ranks.bounds(len(everyones))[0]):
                raise
            raise PromptError(f"of the prompts from number {before} on, {error}") from error
    for notice in engine.notices[len(told):]:      # what came out when steps were captured
        print(f"note: {notice}")
    peak = measure.peak_memory_bytes(engine.config.device)      # before the bandwidth's own buffers count
    ranks.meet()      # what the machine gives is measured by all ranks at once, since they share it
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result = report.build_result(
        benchmark=command.name, model_name=name, engine=engine, measurement=measurement, prompts=encoded,
        chat_template=template, prompt_source=source, bandwidth=roofline.copy_bandwidth(engine.config.device),
        matmul=roofline.matmul_rate(engine.config.device, engine.config.dtype), peak_memory=peak, options=options,
        notices=engine.notices, four_bit=packed, samples=params.n)
    result["lora"] = lora and lora.summary()
    if ranks.launched:
        results = ranks.gather(result)
        return results and ranks_result.merge_results(results, everyones)
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
    if isinstance(error, (UsageError, CapabilityError, UnsupportedModelError, InvalidParameterError, PromptError,
                          RequestRefusedError, stats_file.StatsPathError)):
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


def main(command: Command, argv: list[str] | None = None) -> int:
    """The script `command`, run with `argv`: exit code 2 with one sentence for a mistake of the user's, 1 where drift
    verification failed, else 0."""
    args = parser(command).parse_args(argv)
    ranks = Ranks.of_environment()
    with ranks.job():
        try:      # what needs no torch comes first: a slip is told in a moment, not after a model was loaded
            check_flags(args, command)
            config, params = engine_config(args), sampling_params(args)
            prompts = workload.first_prompts(workload.read_prompts(args.prompts or workload.BUNDLED), args.n_prompts)
            if ranks.launched and args.verify_no_drift:
                raise UsageError("--verify_no_drift proves something of one process: run it without torchrun")
            path = stats_path(args, command) if ranks.first else None
            if len(prompts) < ranks.size:
                print(f"note: {len(prompts)} prompt(s) for {ranks.size} ranks: those above have nothing to do")
                ranks = ranks.at_most(len(prompts))
            result = None if ranks.idle else run(args, command, config, params, prompts, ranks)
        except LostRankError as error:
            print(f"error: {ranks}: {error}", file=sys.stderr)
            return 1
        except ValueError as error:
            if not is_for_the_user(error):
                raise
            print(f"error: {f'{ranks}: ' if ranks.launched else ''}{error}", file=sys.stderr)
            return 2
        if result is None:      # the first rank has it
            return 0
        show(result)
        from gemma4_flex.bench import report
        report.write_result(result, path)
        print(f"result: {path}")
        return 1 if not result.get("drift", {"passed": True})["passed"] else 0
