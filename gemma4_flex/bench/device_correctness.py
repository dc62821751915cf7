"""The device check's proofs: captured decode against float64, and that neither pages, sidecar nor a refresh change a token."""
from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch
from torch import nn

from gemma4_flex.bench.device_bench import CONFIGS, Bench, CheckFailed
from gemma4_flex.bench.workload import bundled_prompts, encode_prompts, random_prompts
from gemma4_flex.checkpoints import LoadedModel
from gemma4_flex.engine import FlexEngine
from gemma4_flex.lora.adapters import ALL_LINEAR, Adapter, random_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.drift import verify_no_drift
from gemma4_flex.memory import LiveBytes
from gemma4_flex.params import DEFAULT_PAGE_SIZE, SamplingParams
from gemma4_flex.verify.numerics import consult, judge, make_prompts, run_engine

REPLAYS = 4      # of each captured step
SMALL_E2B = f"synthetic:{CONFIGS / 'e2b-small.json'}"


def logits_of_tiny(bench: Bench) -> str:
    """Captured decode of the bundled model against float64, shared layers paged and, where it is bf16's, by sidecar: in
    fp32 the two give the same tokens, which a part of its own holds."""
    return _hold_contracts(bench, "tiny", ("paged", "sidecar") if bench.scale.proof_dtype == "bfloat16" else ("paged",))


def logits_of_small_e2b(bench: Bench) -> str:
    """The same for E2B's layer pattern, scaled down."""
    return _hold_contracts(bench, SMALL_E2B, ("paged",))


def _hold_contracts(bench: Bench, name: str, kinds: Seq[str]) -> str:
    """Contracts of verify.numerics for each way to share K/V: prompts around the window, and some that cross pages."""
    dtype, loaded = getattr(torch, bench.scale.proof_dtype), bench.load(name, bench.scale.proof_dtype)
    num_rows, text = bench.scale.proof_tokens, []
    if loaded.tokenizer is not None:
        text = [i for prompt in encode_prompts(bundled_prompts(), loaded.tokenizer) for i in prompt.ids]
    prompts = [*make_prompts(loaded.geometry, max_new_tokens=num_rows, seed=bench.settings.seed, text_ids=text),
               *_prompts(bench, loaded, [_capacity(bench) // 2 + 5] * bench.scale.proof_prompts)]
    oracles = consult(loaded.model, loaded.geometry, prompts, num_rows)
    broken, ratios = [], []
    for shared_kv in kinds:
        engine = _engine(bench, loaded.model, dtype=bench.scale.proof_dtype, shared_kv=shared_kv)
        verdict = judge(oracles, run_engine(engine, oracles), dtype)
        ratios.append(verdict.levels[-1].ratio)
        bench.row(shared_kv=shared_kv, backends=engine.attention_backends, notices=list(engine.notices),
                  logits_ratio=ratios[-1], stream_ratio=verdict.stream_ratio, kl=verdict.kl, top1=verdict.top1,
                  replayed=engine.stats.steps_replayed, eager=engine.stats.steps_eager,
                  contracts={contract.name: [contract.passed, contract.detail] for contract in verdict.contracts})
        broken += [f"{shared_kv}: {contract.name}: {contract.detail}" for contract in verdict.broken]
        broken += _not_replayed(engine)
    if broken:
        raise CheckFailed("; ".join(broken))
    return (f"{bench.scale.proof_dtype} error of the logits against float64 over Hugging Face's: "
            + ", ".join(f"{ratio:.3f}" for ratio in ratios))


def paged_equals_sidecar(bench: Bench) -> str:
    """The same greedy tokens either way, in fp32: in bf16 flex and sdpa may round a tie apart."""
    loaded = bench.load(bench.scale.proof_model, "float32")
    prompts = _over_pages(bench, loaded)
    found = {}
    for shared_kv in ("paged", "sidecar"):
        engine = _engine(bench, loaded.model, dtype="float32", shared_kv=shared_kv)
        found[shared_kv] = _tokens(bench, engine, prompts)
        bench.row(shared_kv=shared_kv, backends=engine.attention_backends, notices=list(engine.notices), tokens=found[shared_kv])
        if left := _not_replayed(engine):
            raise CheckFailed(left[0])
    if found["paged"] != found["sidecar"]:
        raise CheckFailed(f"paged and sidecar part: {_first_parting(found['paged'], found['sidecar'])}")
    return f"{sum(map(len, found['paged']))} tokens of {len(prompts)} prompts are the same"


def page_placement(bench: Bench) -> str:
    """The same prompts on the same engine, before and after other requests left the pools in another order."""
    loaded, _, engine = _in_two_copies(bench)
    prompts = _over_pages(bench, loaded)
    before, pages_before = _run_and_place(bench, engine, prompts)
    _scatter(bench, engine, loaded)
    after, pages_after = _run_and_place(bench, engine, prompts)
    moved = [kind for kind in pages_before if pages_before[kind] != pages_after[kind]]
    bench.row(pages_before=pages_before, pages_after=pages_after, tokens_before=before, tokens_after=after)
    if len(moved) != len(pages_before):
        raise CheckFailed(f"the pages of {', '.join(set(pages_before) - set(moved))} did not move: nothing was shown")
    if before != after:
        raise CheckFailed(f"other pages, other tokens: {_first_parting(before, after)}")
    if left := _not_replayed(engine):
        raise CheckFailed(left[0])
    return f"{sum(map(len, before))} tokens are the same on other pages of {', '.join(moved)}"


def replay_after_refresh(bench: Bench) -> str:
    """Steps captured before an adapter came give what an engine made after it gives, bit for bit; and the base again."""
    loaded, double, engine = _in_two_copies(bench)
    prompts = _over_pages(bench, loaded)
    base = _traces(bench, engine, prompts)
    double.refresh(_adapter(bench, loaded))
    merged, fresh = (_traces(bench, e, prompts) for e in (engine, _engine(bench, double.inference)))
    double.refresh(None)
    restored = _traces(bench, engine, prompts)
    gaps = {name: max((a - b).abs().max().item() for a, b in zip(one, other))
            for name, one, other in (("fresh engine", merged, fresh), ("base restored", base, restored), ("base", base, merged))}
    bench.row(largest_logit_difference=gaps, replayed=engine.stats.steps_replayed, eager=engine.stats.steps_eager)
    if gaps["base"] == 0:
        raise CheckFailed("the adapter changed no logit: the captured steps read the old weights")
    if gaps["fresh engine"] or gaps["base restored"]:
        raise CheckFailed(f"replayed logits are off by up to {gaps['fresh engine']:.3g} from a fresh engine's and by "
                          f"{gaps['base restored']:.3g} from the base's after it was restored")
    if left := _not_replayed(engine):
        raise CheckFailed(left[0])
    return f"bit for bit a fresh engine's, the adapter moving logits by up to {gaps['base']:.3g}"


def replay_allocates_nothing(bench: Bench) -> str:
    """Replays take no memory: on CUDA nothing is allocated, since a graph has its own; on a CPU nothing is left afterwards."""
    loaded = bench.load(bench.scale.proof_model, "float32")
    engine = _engine(bench, loaded.model, dtype="float32")
    _tokens(bench, engine, _over_pages(bench, loaded))
    if left := _not_replayed(engine):
        raise CheckFailed(left[0])
    runner, on_gpu = engine.runner, bench.settings.device == "cuda"
    before = torch.cuda.memory_stats()["allocation.all.allocated"] if on_gpu else 0
    with LiveBytes(list(runner.static_tensors().values())) as counter:
        for graph in runner.graphs.values():
            for _ in range(REPLAYS):
                graph.replay()
    kept = torch.cuda.memory_stats()["allocation.all.allocated"] - before if on_gpu else counter.now
    count = REPLAYS * len(runner.graphs)
    bench.row(replays=count, allocations=kept if on_gpu else None, bytes_left=None if on_gpu else kept)
    if kept:
        raise CheckFailed(f"{count} replays {f'made {kept} allocations' if on_gpu else f'left {kept:,} B'}")
    return f"{count} replays {'made no allocation' if on_gpu else 'left nothing behind'}"


def drift(bench: Bench) -> str:
    """lora.drift on captured steps: perturb and refresh many times, check every tier, and commit the faults it looks for."""
    loaded, double, engine = _in_two_copies(bench)
    report = verify_no_drift(engine, double, _adapter(bench, loaded), lambda model: FlexEngine(model, None, engine.config),
                             _over_pages(bench, loaded), iterations=bench.scale.drift_cycles, forced=bench.scale.proof_tokens)
    for kind, tiers in (("tier", report.tiers), ("control", report.controls)):
        for tier in tiers:
            bench.row(kind=kind, name=tier.name, passed=tier.passed, detail=tier.detail)
    if not report.passed:
        raise CheckFailed("; ".join(f"{t.name}: {t.detail}" for t in (*report.tiers, *report.controls) if not t.passed))
    return f"{len(report.tiers)} tiers hold after {report.iterations} refreshes, {len(report.controls)} planted faults caught"


# ---- engines and prompts --------------------------------------------------------------------------------------------


def _page(bench: Bench) -> int:
    return bench.scale.page_size or DEFAULT_PAGE_SIZE[bench.device]


def _capacity(bench: Bench) -> int:
    """Most tokens of a sequence in a proof."""
    return bench.scale.proof_pages * _page(bench)


def _engine(bench: Bench, model: nn.Module, **fields) -> FlexEngine:
    """One shape for all proofs, so that what one of them compiled serves the others; pages to spare, so that they can lie
    elsewhere."""
    scale = bench.scale
    return FlexEngine(model, None, bench.config(
        max_batch_size=scale.proof_batch, max_seq_length=_capacity(bench), max_prefill_tokens=_capacity(bench) // 2,
        n_pages=1 + 4 * scale.proof_batch * scale.proof_pages, **fields))


def _in_two_copies(bench: Bench) -> tuple[LoadedModel, DoubleCopy, FlexEngine]:
    """A small model in bf16 as a double copy, and the engine on it that several proofs use one after another."""
    def make() -> tuple[LoadedModel, DoubleCopy, FlexEngine]:
        loaded = bench.load(bench.scale.proof_model)
        double = DoubleCopy(loaded.model)
        engine = _engine(bench, double.inference)
        double.attach(engine)
        return loaded, double, engine
    return bench.once("two copies", make)


def _prompts(bench: Bench, loaded: LoadedModel, lengths: Seq[int], seed: int = 1) -> list[list[int]]:
    avoid = loaded.geometry.placeholder_ids | loaded.stop_ids
    drawn = random_prompts(len(lengths), max(lengths), loaded.geometry.vocab_size, bench.settings.seed + seed, avoid=avoid)
    return [prompt[:length] for prompt, length in zip(drawn, lengths)]


def _over_pages(bench: Bench, loaded: LoadedModel) -> list[list[int]]:
    """As many prompts as run at once; the first crosses into a new page while it decodes."""
    page, half = _page(bench), _capacity(bench) // 2
    lengths = [half - 2, page + 3, half + 5, 2 * bench.scale.proof_tokens]
    return _prompts(bench, loaded, lengths[: bench.scale.proof_batch])


def _params(bench: Bench) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=bench.scale.proof_tokens, ignore_eos=True)


def _tokens(bench: Bench, engine: FlexEngine, prompts: Seq[Seq[int]]) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(list(prompts), _params(bench))]


def _traces(bench: Bench, engine: FlexEngine, prompts: Seq[Seq[int]]) -> list[torch.Tensor]:
    """Replayed logits [n, V] of each prompt along tokens that are forced, so that runs can be compared row by row."""
    return [engine.trace(prompt, prompt[: bench.scale.proof_tokens - 1]).logits.cpu() for prompt in prompts]


def _adapter(bench: Bench, loaded: LoadedModel) -> Adapter:
    return random_adapter(loaded.model, ALL_LINEAR, rank=4, alpha=8, strength=0.05, seed=bench.settings.seed)


def _run_and_place(bench: Bench, engine: FlexEngine, prompts: Seq[Seq[int]]) -> tuple[list[list[int]], dict]:
    """Tokens of the prompts, and the pages each held when all had begun, by attention type."""
    params = SamplingParams(temperature=0.0, max_new_tokens=4 * bench.scale.proof_tokens, ignore_eos=True)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    begun: set[int] = set()
    while len(begun) < len(ids):
        begun |= {event.request_id for event in engine.step()}
        held = {kind: [[page for _, page in table.held(s.slot)] for s in engine.scheduler.running]
                for kind, table in engine.runner.tables.items()}
    while engine.has_work:
        engine.step()
    return [engine.completion(i).token_ids for i in ids], held


def _scatter(bench: Bench, engine: FlexEngine, loaded: LoadedModel) -> None:
    """Run others of many lengths and end one halfway; then shuffle what is free, as a long life of that would."""
    most = _capacity(bench)
    lengths = [most // 8, most // 2 + 1, 3 * most // 4 - 1, most // 4 + 1, 3, most // 2]
    ids = [engine.submit(prompt, _params(bench)) for prompt in _prompts(bench, loaded, lengths, seed=2)]
    for _ in range(3):
        engine.step()
    engine.abort(ids[1])
    while engine.has_work:
        engine.step()
    for i in ids:
        engine.completion(i)
    for table in engine.runner.tables.values():
        random.Random(bench.settings.seed).shuffle(table.free_pages)


def _not_replayed(engine: FlexEngine) -> list[str]:
    stats = engine.stats
    return [] if stats.steps_replayed and not stats.steps_eager else [
        f"{stats.steps_replayed} steps were replayed and {stats.steps_eager} ran eagerly: captured decode was to be shown"]


def _first_parting(one: Seq[Seq[int]], other: Seq[Seq[int]]) -> str:
    n = next(n for n, (a, b) in enumerate(zip(one, other)) if a != b)
    return f"prompt {n} gives {list(one[n])} and {list(other[n])}"
