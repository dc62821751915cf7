"""Reference, Hugging Face and engine side by side, layer by layer, along the tokens Hugging Face picks greedily.

A *row* is a position whose next token is predicted: the last of the prompt, then one for every forced token. All three
are traced over the same rows: the scaled embedding, the stream after each layer, the logits after the softcap. The
float64 reference says how far each of the other two is from what the weights mean; `judge` holds the contracts.

Shapes: R rows of one prompt, L layers, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemma4_flex.engine import FlexEngine
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models.packed_modules import unpacked_state
from gemma4_flex.params import SamplingParams
from gemma4_flex.verify.reference64 import reference_forward

LOGITS_TOLERANCE = 1e-4  # fp32: largest difference of a logit between engine and Hugging Face
TIE_MARGIN = 1e-4  # fp32: greedy tokens may part where Hugging Face's two best logits are closer than this
ERROR_RATIO = 1.1  # bf16: the engine's mean error against float64 over Hugging Face's
# Largest error of Hugging Face itself against the reference, as a share of a level's mean size. Rounding stays far
# below; where this is passed, reference and model disagree and the contracts above would mean nothing.
SOUND_REFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
# Engine and reference share ModelGeometry. An engine far nearer to float64 than Hugging Face is not that much better:
# a field that geometry read wrongly made the two wrong together.
SUSPICIOUS_RATIO = 0.5


@dataclass(frozen=True)
class Trace:
    hidden: Tensor  # [L+1, R, H] float64: scaled embedding, then the stream after each layer
    logits: Tensor  # [R, V] float64, after the softcap


@dataclass(frozen=True)
class Oracle:
    """What one prompt should give: Hugging Face's greedy run, and the float64 reference over the same tokens."""

    prompt_ids: list[int]
    tokens: list[int]  # R greedy tokens; all but the last are the forced ones
    hf: Trace
    reference: Trace


@dataclass(frozen=True)
class EngineRun:
    """What the engine gave for one prompt: a trace along the forced tokens, and a generation of its own."""

    trace: Trace
    tokens: list[int]


@dataclass(frozen=True)
class Level:
    """Error statistics of one depth of the model, pooled over every prompt, row and element."""

    name: str
    size: float  # mean |reference|
    hf_mean: float  # mean |HF - reference|
    hf_max: float
    engine_mean: float  # mean |engine - reference|
    engine_max: float
    between_max: float  # max |engine - HF|

    @property
    def ratio(self) -> float:
        """The engine's mean error over Hugging Face's; 1 where both are nil."""
        if self.hf_mean == 0:
            return 1.0 if self.engine_mean == 0 else float("inf")
        return self.engine_mean / self.hf_mean


@dataclass(frozen=True)
class Parting:
    """A place where the engine's greedy token is not Hugging Face's."""

    run: str  # "forced" or "generated"
    prompt_length: int
    step: int
    hf_token: int
    engine_token: int
    margin: float  # Hugging Face's best logit less its second best

    def __str__(self) -> str:
        return (f"{self.run}, prompt of {self.prompt_length}, step {self.step}: HF {self.hf_token}, engine "
                f"{self.engine_token}, HF's top-two margin {self.margin:.2e}")


@dataclass(frozen=True)
class Contract:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    levels: list[Level]  # embedding, layers, logits last
    by_prompt: list[Level]  # the logits again, a prompt at a time
    stream_ratio: float  # bf16's measure over embedding and layers, see `pooled_ratio`
    kl: dict[str, float]  # mean KL divergence in nats by pair: "hf||engine", "reference||hf", "reference||engine"
    top1: dict[str, float]  # share of rows whose best token agrees, by pair
    partings: list[Parting]
    contracts: list[Contract]

    @property
    def broken(self) -> list[Contract]:
        return [contract for contract in self.contracts if not contract.passed]


def make_prompts(
    geometry: ModelGeometry, *, max_new_tokens: int, seed: int = 0, text_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Prompts of 1, 2, W-1, W, W+1 and 3W+5 tokens, W the sliding window (32 for a model without one).

    Each is random ids (placeholders left out); a text of enough `text_ids` gives a second prompt of the longest length.
    Lengths that would pass the model's last position are dropped.
    """
    window = next((layer.window for layer in geometry.layers if layer.window), 32)
    lengths = sorted({1, 2, max(window - 1, 1), window, window + 1, 3 * window + 5})
    lengths = [n for n in lengths if n + max_new_tokens <= geometry.max_positions]
    vocabulary = min(geometry.vocab_size, geometry.ple_vocab_size)
    allowed = torch.tensor([i for i in range(vocabulary) if i not in geometry.placeholder_ids])
    generator = torch.Generator().manual_seed(seed)
    prompts = [allowed[torch.randint(len(allowed), (n,), generator=generator)].tolist() for n in lengths]
    if len(text_ids) >= lengths[-1]:
        prompts.append(list(text_ids[: lengths[-1]]))
    return prompts


# --- Hugging Face and the reference ------------------------------------------------------------------------------


@contextmanager
def last_row_of_each_level(model: nn.Module):
    """Yields a list that every forward of `model` refills with the last position's [L+1, H].

    By hooks: `output_hidden_states` replaces the last layer's stream by its normed form. A layer gives a tensor in some
    transformers versions and a tuple in others.
    """
    layers = getattr(model.model, "language_model", model.model).layers
    rows: list[Tensor] = []

    def hook(layer, args, kwargs, output):
        if layer is layers[0]:
            rows.clear()
            rows.append(widened(args[0] if args else kwargs["hidden_states"])[0, -1])
        rows.append(widened(output[0] if isinstance(output, tuple) else output)[0, -1])

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def widened(x: Tensor) -> Tensor:
    return x.detach().to("cpu").to(torch.float64)


@torch.no_grad()
def trace_hf(model: nn.Module, prompt_ids: Sequence[int], num_rows: int) -> tuple[Trace, list[int]]:
    """Hugging Face's own greedy run with its own cache: the trace over `num_rows` rows, and its `num_rows` tokens.

    `model` must not have been given to an engine yet: an engine patches its attention. End tokens do not end the run.
    The cache is always on: without it transformers before 5.5.2 computed the shared layers' K/V from meaningless weights.
    """
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    device, ids, state = next(model.parameters()).device, list(prompt_ids), {}
    hidden, logits, tokens = [], [], []
    with last_row_of_each_level(model) as rows:
        while len(tokens) < num_rows:
            # the wanted logits by index: an int would let transformers 5.23 and later drop rows before the shared layers
            keep = torch.tensor([len(ids) - 1], device=device)
            output = model(
                input_ids=torch.tensor([ids], device=device), use_cache=True, logits_to_keep=keep, **state)
            assert output.logits.shape[1] == 1, "transformers did not take logits_to_keep as an index"
            state = {cache_name: getattr(output, cache_name)}
            hidden.append(torch.stack(rows))
            logits.append(widened(output.logits)[0, -1])
            tokens.append(int(output.logits[0, -1].float().argmax()))
            ids = tokens[-1:]
    return Trace(torch.stack(hidden, dim=1), torch.stack(logits)), tokens


def consult(
    model: nn.Module, geometry: ModelGeometry, prompts: Sequence[Sequence[int]], max_new_tokens: int,
) -> list[Oracle]:
    """Hugging Face and the reference on every prompt, `max_new_tokens` rows each. Before an engine takes the model."""
    state_dict, oracles = unpacked_state(model), []
    for prompt_ids in prompts:
        hf, tokens = trace_hf(model, prompt_ids, max_new_tokens)
        ids = [*prompt_ids, *tokens[:-1]]
        reference = reference_forward(state_dict, geometry, ids, rows=range(len(prompt_ids) - 1, len(ids)))
        oracles.append(Oracle(list(prompt_ids), tokens, hf, Trace(reference.hidden, reference.logits)))
    return oracles


# --- the engine --------------------------------------------------------------------------------------------------


def trace_engine(engine: FlexEngine, prompt_ids: list[int], forced_ids: list[int]) -> Trace:
    """The engine's prefill of the prompt, then one paged decode step a forced token."""
    trace = engine.trace(prompt_ids, forced_ids)
    return Trace(widened(trace.hidden), widened(trace.logits))


def run_engine(engine: FlexEngine, oracles: Sequence[Oracle]) -> list[EngineRun]:
    """Trace every prompt along its forced tokens; then generate for all of them in one batch, greedily."""
    traces = [trace_engine(engine, oracle.prompt_ids, oracle.tokens[:-1]) for oracle in oracles]
    params = SamplingParams(temperature=0.0, max_new_tokens=len(oracles[0].tokens), ignore_eos=True)
    completions = engine.generate([oracle.prompt_ids for oracle in oracles], params)
    return [EngineRun(trace, list(completion.token_ids)) for trace, completion in zip(traces, completions)]


# --- comparison --------------------------------------------------------------------------------------------------


def judge(oracles: Sequence[Oracle], runs: Sequence[EngineRun], dtype: torch.dtype) -> Verdict:
    """Compare, and hold the contracts of `dtype`: float32's against Hugging Face, bfloat16's against float64."""
    hf = [oracle.hf for oracle in oracles]
    reference = [oracle.reference for oracle in oracles]
    engine = [run.trace for run in runs]
    num_levels = len(reference[0].hidden)
    levels = [
        level("embedding" if i == 0 else f"layer {i - 1}",
              *(torch.cat([trace.hidden[i] for trace in traces]) for traces in (reference, hf, engine)))
        for i in range(num_levels)
    ]
    logits = {"reference": torch.cat([t.logits for t in reference]), "hf": torch.cat([t.logits for t in hf]),
              "engine": torch.cat([t.logits for t in engine])}
    levels.append(level("logits", *logits.values()))
    pairs = [("hf", "engine"), ("reference", "hf"), ("reference", "engine")]
    partings = find_partings(oracles, runs)
    held = hold_float32(levels, partings) if dtype == torch.float32 else hold_bfloat16(levels, partings)
    return Verdict(
        levels=levels,
        by_prompt=[level(f"prompt of {len(oracle.prompt_ids)}", oracle.reference.logits, oracle.hf.logits, run.trace.logits)
                   for oracle, run in zip(oracles, runs)],
        stream_ratio=pooled_ratio(levels[:-1]),
        kl={f"{a}||{b}": kl_divergence(logits[a], logits[b]) for a, b in pairs},
        top1={f"{a}={b}": float((logits[a].argmax(-1) == logits[b].argmax(-1)).double().mean()) for a, b in pairs},
        partings=partings,
        contracts=[*held, hold_reference(levels, dtype)],
    )


def level(name: str, reference: Tensor, hf: Tensor, engine: Tensor) -> Level:
    hf_error, engine_error = (hf - reference).abs(), (engine - reference).abs()
    return Level(
        name=name, size=reference.abs().mean().item(), hf_mean=hf_error.mean().item(), hf_max=hf_error.max().item(),
        engine_mean=engine_error.mean().item(), engine_max=engine_error.max().item(),
        between_max=(engine - hf).abs().max().item())


def pooled_ratio(levels: Sequence[Level]) -> float:
    """The engine's error over Hugging Face's, each level's error counted as a share of that level's size.

    Plain means would let the layers with the largest stream decide alone, and hide a fault in the others.
    """
    return sum(at.engine_mean / at.size for at in levels) / sum(at.hf_mean / at.size for at in levels)


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> float:
    """Mean over rows of KL(p || q), in nats."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def find_partings(oracles: Sequence[Oracle], runs: Sequence[EngineRun]) -> list[Parting]:
    """Every forced row whose best token differs, and the first token at which each generation leaves HF's."""
    partings = []
    for oracle, run in zip(oracles, runs):
        best = oracle.hf.logits.topk(2, dim=-1).values
        forced = run.trace.logits.argmax(-1).tolist()
        differing = [step for step, token in enumerate(oracle.tokens) if forced[step] != token]
        generated = [*run.tokens, *[-1] * (len(oracle.tokens) - len(run.tokens))]  # -1: the engine stopped early
        first = [step for step, token in enumerate(oracle.tokens) if generated[step] != token][:1]
        for name, steps, tokens in (("forced", differing, forced), ("generated", first, generated)):
            partings += [
                Parting(name, len(oracle.prompt_ids), step, oracle.tokens[step], tokens[step],
                        (best[step, 0] - best[step, 1]).item())
                for step in steps
            ]
    return partings


def hold_float32(levels: Sequence[Level], partings: Sequence[Parting]) -> list[Contract]:
    gap = levels[-1].between_max
    kept = [parting for parting in partings if not parting.margin < TIE_MARGIN]
    said = f"{len(partings)} parted, {len(kept)} of them where HF's top-two margin is not under {TIE_MARGIN:g}"
    return [
        Contract("logits equal HF's", gap <= LOGITS_TOLERANCE,
                 f"max |engine - HF| is {gap:.2e}, allowed {LOGITS_TOLERANCE:g}"),
        Contract("greedy tokens equal HF's", not kept, said + (f"; first: {kept[0]}" if kept else "")),
    ]


def hold_bfloat16(levels: Sequence[Level], partings: Sequence[Parting]) -> list[Contract]:
    ratios = {"stream": pooled_ratio(levels[:-1]), "logits": levels[-1].ratio}
    # One token overtakes another only where their two differences from HF close the margin. What is held here is the
    # batched generation: it has no error statistics of its own.
    reach = 2 * levels[-1].between_max
    worst = max((parting.margin for parting in partings), default=0.0)
    return [
        *(Contract(f"{name} error within 1.1 of HF's", ratio <= ERROR_RATIO,
                   f"the engine's mean error against float64 is {ratio:.3f} of HF's, allowed {ERROR_RATIO:g}")
          for name, ratio in ratios.items()),
        Contract("tokens part from HF's by rounding only", worst <= reach,
                 f"{len(partings)} parted, the widest top-two margin of HF's among them is {worst:.2e}, allowed {reach:.2e}, "
                 "twice the largest |engine - HF| of a logit"),
    ]


def hold_reference(levels: Sequence[Level], dtype: torch.dtype) -> Contract:
    share, name = max((at.hf_mean / at.size, at.name) for at in levels)
    bound, ratio = SOUND_REFERENCE[dtype], levels[-1].ratio
    return Contract(
        "reference agrees with HF", share <= bound and ratio >= SUSPICIOUS_RATIO,
        f"HF's mean error against float64 is {share:.1e} of the size of {name}, allowed {bound:g}; the engine's error of "
        f"the logits is {ratio:.3f} of HF's, at least {SUSPICIOUS_RATIO:g}")
