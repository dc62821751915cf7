"""The flags that all inference scripts share, what contradicts what among them, and what they ask of the engine.

Needs no torch, so that a slip is told in a moment.
"""
from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from gemma4_flex.kernel_options import parse_options
from gemma4_flex.params import EngineConfig, SamplingParams

DEFAULTS, SAMPLING = EngineConfig(), SamplingParams()
SAMPLED_AS_NAMED = ("max_new_tokens", "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                    "frequency_penalty", "logprobs")      # flags that are fields of SamplingParams


@dataclass(frozen=True)
class Command:
    """One inference script: its name and text, the models it runs where none is named, and what it refuses.

    hub_model: the default with CUDA. small_model, small_is: the default without, and what that is, in words. model_names: what
    --model_name takes, in words. no_fa4: why FlashAttention-4 cannot be forced, or None where the engine decides.
    """

    name: str
    about: str
    hub_model: str
    small_model: str
    small_is: str
    model_names: str
    no_fa4: str | None = None


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


def parser(command: Command) -> Parser:
    flags = Parser(prog=f"{command.name}.py", description=command.about, allow_abbrev=False,
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add, on_off = flags.add_argument, argparse.BooleanOptionalAction
    add("--model_name", help=f"{command.model_names} (default: {command.hub_model} with CUDA, else {command.small_model})")
    add("--n_prompts", type=int, help="prompts used (default: all there are)")
    add("--n_rounds", type=int, default=3, help="measured rounds, after one warm-up round (default 3)")
    add("--max_new_tokens", type=int, default=SAMPLING.max_new_tokens)
    _add_sampling(add)
    add("--max_batch_size", type=int, default=DEFAULTS.max_batch_size)
    add("--max_seq_length", type=int, default=DEFAULTS.max_seq_length)
    add("--n_pages", type=int, help="pages of the full-attention group (default: what a full batch needs)")
    add("--gpu_memory_utilization", type=float, metavar="SHARE",
        help="size the K/V pools by what is left of this share of the device's memory, instead of --n_pages")
    add("--page_size", type=int, help="tokens a page, a power of two")
    add("--prefix_cache", action="store_true", help="keep the pages of prompts for prompts that begin alike")
    add("--capture_cudagraph", action="store_true", help="replay captured decode graphs (a traced graph on a CPU)")
    add("--compile", action=on_off, default=DEFAULTS.compile, help="compile steps with Inductor (default)")
    add("--decode_steps_per_sync", type=int, default=DEFAULTS.decode_steps_per_sync, metavar="K",
        help=f"decode steps between two looks of the host (default {DEFAULTS.decode_steps_per_sync}); tokens are the same")
    add("--mixed_prefill", action="store_true", help="prompts and running sequences in one pass where both are due")
    add("--deterministic", action="store_true", help="the same bits for a request alone and in any batch, at a price")
    add("--decode_kernel_options", type=kernel_options, metavar="JSON", help="flex_attention kernel options for decode")
    add("--prefill_kernel_options", type=kernel_options, metavar="JSON", help="the same for prefill")
    add("--fa4_prefill", action=on_off, help=f"refused: {command.no_fa4}" if command.no_fa4 else
        "FlashAttention-4 for prefill (default: on Hopper and Blackwell where flash_attn.cute is installed)")
    add("--chat_template", choices=("auto", "grpo", "native"), default="auto")
    add("--stats_path", type=Path, help="where the result goes as JSON (default: a new file in results/runs/)")
    add("--device", default=DEFAULTS.device, help="auto, cpu or cuda")
    add("--dtype", default=DEFAULTS.dtype, help="auto, float32 or bfloat16")
    add("--attention", default=DEFAULTS.attention, help="auto, flex or sdpa (auto: flex with CUDA, sdpa on a CPU)")
    add("--shared_kv", default=DEFAULTS.shared_kv, help="paged or sidecar")
    add("--ple", default=DEFAULTS.ple, help="device or host: where the table of per-layer embeddings is kept")
    add("--gguf_weights", choices=("packed", "dequantize"), help="keep a GGUF file's quantised weights as they are (the default), "
                                                                 "or decode them as they are read")
    add("--prompts", type=Path, metavar="FILE",
        help="JSONL, one {\"messages\": [...]} or {\"text\": \"...\"} a line (default: the bundled prompts)")
    add("--seed", type=int, default=DEFAULTS.seed, help="for the weights of synthetic models, and draws without --sampling_seed")
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


def _add_sampling(add) -> None:
    checkpoint = "(default: the checkpoint's generation config, else off)"
    add("--temperature", type=float, default=0.0, help="0.0 is greedy, the default here whatever the checkpoint says: figures of "
                                                        "greedy runs compare")
    add("--top_k", type=int, help=f"draw from the K likeliest tokens, 0: all {checkpoint}")
    add("--top_p", type=float, help=f"draw from the likeliest tokens that make up this share {checkpoint}")
    add("--min_p", type=float, help=f"drop tokens below this share of the likeliest's probability {checkpoint}")
    add("--repetition_penalty", type=float, help=f"a factor on tokens of prompt and output {checkpoint}")
    add("--presence_penalty", type=float, default=SAMPLING.presence_penalty, help="taken from the logits of generated tokens")
    add("--frequency_penalty", type=float, default=SAMPLING.frequency_penalty, help="the same, by how often they were generated")
    add("--sampling_seed", type=int, help="decides every draw; a prompt's samples differ (default: from --seed and the request)")
    add("--n", "--n_samples", dest="n", type=int, default=SAMPLING.n,
        help="samples of each prompt, which is prefilled once (default 1); by its second name under torchrun, which has an --n")
    add("--logprobs", type=int, metavar="K", help="record each token's log-probability, and K alternatives (0: none)")


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


def check_flags(args: argparse.Namespace, command: Command) -> None:
    """Refuse what no model could change. Raises UsageError."""
    if not args.lora_adapter and (args.verify_no_drift or args.no_merge_lora):
        raise UsageError("--verify_no_drift and --no_merge_lora need an adapter: give --lora_adapter DIR")
    if args.no_merge_lora and args.verify_no_drift:
        raise UsageError("--verify_no_drift proves that merging leaves no trace: leave out --no_merge_lora")
    if args.verify_iterations < 1:
        raise UsageError(f"--verify_iterations must be at least 1, not {args.verify_iterations}")
    check_4bit_flags(args)
    if args.fa4_prefill and command.no_fa4:
        raise UsageError(f"--fa4_prefill: {command.no_fa4}; leave it out")
    if args.n_rounds < 1:
        raise UsageError(f"--n_rounds must be at least 1, not {args.n_rounds}")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The flags named as fields of EngineConfig, as one. Raises ValueError with the fix."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in fields}
    return EngineConfig(**given | ({"dtype": "bfloat16"} if is_4bit(args) else {}))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The flags that say how tokens are drawn. Raises ValueError with the fix."""
    return SamplingParams(**{name: getattr(args, name) for name in SAMPLED_AS_NAMED}, seed=args.sampling_seed)
