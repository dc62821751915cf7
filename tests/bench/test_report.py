from __future__ import annotations

import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from gemma4_flex.bench import measure, report, roofline, stats_file, workload
from gemma4_flex.params import EngineConfig, SamplingParams
from tests.bench.stub import AsyncDevice, StubEngine

PROMPTS = [workload.Prompt(text="capital?", answer="Paris."), workload.Prompt(text="symbol?", answer="Au."),
           workload.Prompt(text="anything")]


def make_result(*, n_rounds: int = 3, params: SamplingParams | None = None, logprobs=None, **engine_options) -> dict:
    device = AsyncDevice()
    engine = StubEngine(device, **engine_options)
    engine.logprobs = logprobs
    encoded = workload.encode_prompts(PROMPTS, engine.tokenizer)
    measurement = measure.measure_rounds(engine, [p.ids for p in encoded], params, n_rounds=n_rounds,
                                         synchronize=device.synchronize, clock=device.clock)
    result = report.build_result(
        benchmark="test", model_name="stub", engine=engine, measurement=measurement, prompts=encoded,
        chat_template="native", prompt_source="bundled", bandwidth=roofline.Bandwidth(1e9, 1 << 20, 3),
        matmul=roofline.MatmulRate(2e9, "float32", (64,), 3), peak_memory=12345,
        options={"n_rounds": n_rounds, "page_size": None}, notices=engine.notices,
        samples=params.n if params else 1)
    return result | {"commit": "0123456789abcdef"}


@pytest.fixture(scope="module")
def result() -> dict:
    return make_result()


@pytest.fixture
def copy(result) -> dict:
    return json.loads(json.dumps(result))


# ---- what a result holds


def test_a_result_has_every_key_that_others_read_and_survives_json(result, copy):
    assert copy == result
    for key in ("model_name", "device", "dtype", "rounds", "decode_tps_median", "prefill_tps_median", "ttft_ms_median",
                "floor_fraction", "steps_replayed", "steps_eager", "peak_memory_bytes", "kv_bytes_per_token",
                "completions", "versions", "config"):
        assert key in result
    assert {"decode_tokens", "prefill_tokens", "decode_s", "prefill_s"} <= set(result["rounds"][0])
    assert {"prompt", "text", "token_ids", "finish_reason"} <= set(result["completions"][0])


def test_samples_of_a_prompt_stand_after_each_other_and_their_prompt_counts_once(result):
    sampled = make_result(params=SamplingParams(n=3))
    assert [(c["question"], c["sample"]) for c in sampled["completions"]] == [(p.text, n) for p in PROMPTS for n in range(3)]
    assert sampled["workload"] | {"samples": 1, "output_tokens": None} == result["workload"] | {"output_tokens": None}
    assert sampled["workload"]["output_tokens"]["total"] == 3 * result["workload"]["output_tokens"]["total"]
    assert {row["prefix_hit_tokens"] for row in sampled["rounds"]} == {0}
    assert sampled["prefill_floor"] == result["prefill_floor"]
    assert "3 x 3 samples" in report.table(sampled) and " x " not in next(
        line for line in report.table(result).splitlines() if line.startswith("prompts "))


def test_the_other_samples_first_tokens_are_of_decode_steps_that_see_the_whole_prompt():
    """So the K/V that is read is that of prompts one token shorter which make one token more."""
    one, two = (make_result(params=SamplingParams(n=n))["floor"]["kv_bytes_per_step"] for n in (1, 2))
    device = AsyncDevice()
    engine = StubEngine(device)
    lengths = [len(p.ids) for p in workload.encode_prompts(PROMPTS, engine.tokenizer)]
    seen = [engine.geometry.kv_cache_bytes(length + step, 4) for length in lengths for step in range(engine.reply)]
    assert (two - one) * (engine.reply - 1) == pytest.approx(sum(seen))


def test_log_probabilities_are_in_the_result_where_they_were_asked_for(result):
    assert {c["logprobs"] for c in result["completions"]} == {None}
    given = SimpleNamespace(raw=[-1.0], processed=[0.0], top=[[(4, -1.0)]])
    [found, *_] = make_result(logprobs=given)["completions"]
    assert found["logprobs"] == {"raw": [-1.0], "processed": [0.0], "top": [[(4, -1.0)]]}


def test_the_figures_are_medians_over_the_measured_rounds(result):
    assert len(result["rounds"]) == 3 and len(result["warmup_rounds"]) == 1
    assert result["decode_tps_median"] == pytest.approx(300)          # 3 requests, a step of 10 ms
    assert result["prefill_tps_median"] == pytest.approx(1000)
    assert result["spread"]["decode_tps"]["n"] == 3
    assert (result["steps_replayed"], result["steps_eager"]) == (12, 0)
    assert (result["compile_s"], result["capture_s"]) == (0.5, 0.25)


def test_the_floor_fraction_is_the_floors_time_over_the_measured_time(result):
    assert result["floor_fraction"] == pytest.approx(result["floor"]["ms_per_step"] / result["ms_per_step_median"])


def test_prefill_has_a_floor_of_its_own_that_its_seconds_are_held_against(result):
    lengths, floor = [1 + len(p.text) for p in PROMPTS], result["prefill_floor"]
    assert floor["flops"] == roofline.prefill_flops(StubEngine(AsyncDevice()).geometry, lengths) and floor["bound"] == "arithmetic"
    assert floor["ms_per_round"] == pytest.approx(1e3 * floor["flops"] / 2e9)
    assert result["prefill_floor_fraction"] == pytest.approx(floor["ms_per_round"] / sum(lengths))      # the stub's 1 ms a token


def test_lengths_are_counted_in_real_tokens(result):
    counts = [1 + len(p.text) for p in PROMPTS]          # the stub's tokenizer: BOS and a token a character
    assert result["workload"]["prompt_tokens"] == {"total": sum(counts), "min": 8, "median": 9, "max": 9}
    assert result["workload"]["output_tokens"] == {"total": 15, "min": 5, "median": 5, "max": 5}


def test_the_whole_config_is_told_resolved(result):
    assert result["config"]["n_rounds"] == 3
    assert result["config"]["page_size"] == 32 and result["config"]["dtype"] == "float32"


def test_how_steps_are_run_is_told_in_the_config(result):
    config = result["config"]
    assert config["compile"] is True and config["decode_steps_per_sync"] == 8 and config["mixed_prefill"] is False
    assert config["attention_backends"] == {"sliding_attention": "flex", "full_attention": "sdpa"}
    assert config["batch_buckets"] == [1, 2, 4, 8] and config["column_buckets"] == [1, 2, 64]


def test_kv_bytes_are_told_by_group(result):
    # owners of the stub's geometry: two layers a type, K and V of 16 and of 32 floats
    assert result["kv_bytes_per_token"] == {"sliding_attention": 2 * 2 * 16 * 4, "full_attention": 2 * 2 * 32 * 4}


def test_how_many_sequences_fit_is_told_by_length(result, monkeypatch):
    # the stub's config: 8 sequences of 2,048 tokens, in pages of 32, all of which a full batch needs
    assert result["fits"] == [{"tokens": 512, "sequences": 8}, {"tokens": 2048, "sequences": 8}]
    assert "8 x 512 tokens, 8 x 2,048 tokens" in report.table(result)
    made = StubEngine.__init__

    def tight(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.config = EngineConfig(device="cpu", n_pages=101).resolved("cpu")

    monkeypatch.setattr(StubEngine, "__init__", tight)
    assert make_result()["fits"] == [{"tokens": 512, "sequences": 6}, {"tokens": 2048, "sequences": 1}]


def test_answers_are_counted_only_where_the_prompt_has_one(result):
    assert result["answers"] == {"asked": 2, "exact": 1}


def test_prompt_tokens_that_were_never_computed_show_as_prefix_hits(monkeypatch):
    assert make_result()["rounds"][0]["prefix_hit_tokens"] == 0
    whole = StubEngine.generate

    def cached(self, prompts, params):
        done = whole(self, prompts, params)
        self.stats.prefill_tokens -= 7
        return done

    monkeypatch.setattr(StubEngine, "generate", cached)
    found = make_result()
    assert found["rounds"][0]["prefix_hit_tokens"] == 7
    assert found["prefill_floor_fraction"] is None and "not all of the prompts was computed" in report.table(found)


def test_a_run_without_a_decode_step_is_told_without_decode_figures():
    result = make_result(reply=1)
    assert result["decode_tps_median"] is None and result["floor_fraction"] is None
    assert "no decode step was run" in report.table(result)


# ---- the schema


@pytest.mark.parametrize("name", report.REQUIRED)
def test_a_result_that_lacks_a_required_field_is_neither_shown_nor_ranked_nor_written(copy, tmp_path, name):
    *parents, last = name.split(".")
    place = copy
    for parent in parents:
        place = place[parent]
    del place[last]
    for tell in (report.table, lambda r: report.ranking([r]), lambda r: report.write_result(r, tmp_path / "r.json")):
        with pytest.raises(report.IncompleteResult, match=name.replace(".", r"\.")):
            tell(copy)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("key", "name"), [("rounds", "decode_s"), ("completions", "finish_reason")])
def test_a_round_or_completion_that_lacks_a_field_is_named(copy, key, name):
    del copy[key][1][name]
    with pytest.raises(report.IncompleteResult, match=rf"{key}\[1\]\.{name}"):
        report.check_result(copy)


@pytest.mark.parametrize("key", ["rounds", "completions"])
def test_a_result_without_rounds_or_completions_is_incomplete(copy, key):
    copy[key] = []
    with pytest.raises(report.IncompleteResult, match=key):
        report.check_result(copy)


def test_a_figure_that_is_not_finite_is_refused(copy):
    copy["decode_tps_median"] = float("nan")
    with pytest.raises(report.IncompleteResult, match="decode_tps_median"):
        report.check_result(copy)


# ---- ranking


def test_a_ranking_sets_the_fastest_decode_first(copy, result):
    copy["model_name"], copy["decode_tps_median"] = "faster", 1e6
    lines = report.ranking([result, copy]).splitlines()
    assert "faster" in lines[2] and "stub" in lines[3]


def test_fewer_than_three_rounds_are_shown_but_never_ranked():
    result = make_result(n_rounds=2)
    assert "Not to be ranked: it has 2 measured round(s)" in report.table(result)
    with pytest.raises(report.IncompleteResult, match="at least 3"):
        report.ranking([result])


@pytest.mark.parametrize("name", report.NEEDED_TO_RANK)
def test_a_result_that_does_not_know_a_needed_field_is_not_ranked(copy, name):
    *parents, last = name.split(".")
    place = copy
    for parent in parents:
        place = place[parent]
    place[last] = None
    with pytest.raises(report.IncompleteResult, match=rf"no ranking: result 1 .*{name}"):
        report.ranking([copy])


# ---- the table


def test_the_table_has_every_row_the_readme_explains(result):
    table = report.table(result)
    for row in ("prefill tok/s", "decode tok/s", "time to first token, ms", "ms per decode step",
                "floor of a decode step", "floor of prefill", "measured matmul rate",
                "peak memory", "KV per token, sliding_attention",
                "KV per token, full_attention", "12 replayed, 0 eager", "full_attention sdpa, sliding_attention flex",
                "1 of 2 right"):
        assert row in table
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "0.50 s" in rows["compile"] and "0.25 s" in rows["capture"]
    assert "by memory" in rows["floor of a decode step"] and "by arithmetic" in rows["floor of prefill"]
    assert "Not to be ranked" not in table


# ---- where it came from


def test_the_commit_is_that_of_the_packages_own_checkout_and_says_when_it_is_dirty(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert report.commit(tmp_path) is None
    git("init")
    assert report.commit(tmp_path) is None       # a checkout without a commit
    (tmp_path / "file").write_text("one")
    (tmp_path / "inside").mkdir()
    git("add", "file")
    git("commit", "-m", "first")
    clean = report.commit(tmp_path)
    assert len(clean) == 40
    assert report.commit(tmp_path / "inside") is None      # installed somewhere inside another project's checkout
    (tmp_path / "file").write_text("two")
    assert report.commit(tmp_path) == f"{clean}-dirty"


# ---- the file


def test_a_written_result_reads_back_and_leaves_nothing_beside_it(result, tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    report.write_result(result, path)
    assert json.loads(path.read_text()) == result
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_half_written(result, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(stats_file.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        report.write_result(result, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_refused_with_the_fix_and_trying_leaves_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path / "absent" / "r.json", file / "r.json", tmp_path, "/proc/r.json"):
        with pytest.raises(stats_file.StatsPathError, match="name a file in"):
            stats_file.check_writable(path)
    with pytest.raises(stats_file.StatsPathError, match="name a file in"):      # the name itself is tried, not its directory alone
        stats_file.check_writable(tmp_path / ("a" * 250))
    stats_file.check_writable(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == [file]


def test_a_result_never_takes_the_place_of_a_device_or_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(stats_file.StatsPathError, match="name an ordinary file"):
            stats_file.check_writable(path)
