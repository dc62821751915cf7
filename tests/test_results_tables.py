"""The READMEs' tables and the plots against results/: they agree, and a figure changed on either side is caught."""
from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from gemma4_flex.bench import growth_page
from gemma4_flex.bench.result_tables import KINDS
from gemma4_flex.bench.results_page import PAGES, PageError, blocks, disagreements, draw, read_results, rewrite, table
from tests.bench.growth_record import record, summary

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "benchmarks" / "report.py"
spec = importlib.util.spec_from_file_location("report_script", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_the_tables_and_plots_are_those_of_the_results():
    assert disagreements(ROOT) == [], "run scripts/benchmarks/report.py"


def test_every_kind_of_result_has_its_table_on_some_page():
    shown = {match["name"] for page in PAGES for match in blocks(ROOT / page)}
    assert shown == set(KINDS)


# ---- on copies ------------------------------------------------------------------------------------------------------

COMPARE = {
    "model_name": "tiny", "dtype": "float32", "device": "cpu", "device_name": "A CPU", "threads": 1,
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "wanted": [{"work": "decode, batch 1", "against": "best of transformers", "at_least": 5.0, "reached": 6.25,
                "verdict": "passed", "reason": ""}],
    "jobs": [{"name": "decode, batch 1", "kind": "decode", "batch": 1, "floor": {"tokens_per_s": 4000.0}, "engines": [
        {"engine": "flex", "status": "ran", "reason": "", "tokens_per_s": summary(1000.0), "floor_fraction": 0.25,
         "flex_over": None, "agreement": {"same": 1, "requests": 1}},
        {"engine": "transformers", "status": "ran", "reason": "", "tokens_per_s": summary(160.0), "floor_fraction": 0.04,
         "flex_over": summary(6.25), "agreement": None},
        {"engine": "vllm", "status": "absent", "reason": "vllm is not installed", "tokens_per_s": None, "floor_fraction": None,
         "flex_over": None, "agreement": None}]}]}
DEVICE = {
    "kind": "device_check", "device": "cuda", "device_name": "A GPU",
    "versions": {"torch": "2.11.0", "transformers": "5.17.0"},
    "parts": [
        {"name": "decode", "status": "ok", "detail": "2 rows\nand more", "rows": [
            {"what": "synthetic:E2B", "batch": 1, "context": 4096, "ms_per_step": summary(1.5), "tok_s": 666.7,
             "floor_fraction": 0.71},
            {"batch": 8, "length": 4096, "with_tok_s": 98765.0, "without_tok_s": 25000.0, "ratio": 3.95, "floor_fraction": 0.41},
            {"what": "synthetic:E2B", "batch": 256, "context": 4096, "skipped": "it does not fit in memory"}]},
        {"name": "kernel options sweep", "status": "failed", "detail": "RuntimeError: no", "rows": [
            {"head_dim": 512, "requests": 64, "tokens": 4096, "options": {"BLOCK_N": 64, "num_warps": 8}, "us": summary(40.0),
             "of_floor": 0.5, "floor_us": 20.0},
            {"head_dim": 512, "requests": 64, "tokens": 4096, "options": {"BLOCK_N": 32}, "error": "it does not run"}]}]}


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory) -> Path:
    """This checkout's pages and results, but made-up records of the kinds that others may not have measured yet."""
    root = tmp_path_factory.mktemp("checkout")
    for page in PAGES:
        (root / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, root / page)
    for path in (ROOT / "results").glob("*.json"):
        if not path.name.startswith(("compare_", "device_", "growth_")):
            shutil.copy(path, root / "results")
    for name, made_up in (("compare_x", COMPARE), ("device_x", DEVICE), ("growth_x", record())):
        (root / "results" / f"{name}.json").write_text(json.dumps(made_up))
    rewrite(root)
    return root


@pytest.fixture
def copy(rewritten, tmp_path) -> Path:
    """A checkout to change, whose tables and plots agree with its results."""
    return Path(shutil.copytree(rewritten, tmp_path / "copy"))


def change(path: Path, edit) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_what_was_rewritten_agrees_and_stays_as_it_is(copy):
    written = [copy / name for name in (*PAGES, "results/growth_x.png", "results/compare_x.png")]
    before = [path.read_bytes() for path in written]
    assert disagreements(copy) == rewrite(copy) == []
    assert [path.read_bytes() for path in written] == before


@pytest.mark.parametrize("name, pattern, edit", [
    ("lora", "bench_lora_tiny.json", lambda r: r["merged_over"]["unmerged"].update(median=1.99)),
    ("deterministic", "deterministic_tiny_cpu.json", lambda r: r["proof"]["off"]["in order"].update(same_logprobs=99)),
    ("deterministic", "deterministic_tiny_cpu.json",
     lambda r: r["cost"]["one prompt"]["deterministic_over_off"]["wall_s"].update(median=99.0)),
    ("verify", "verify_tiny_float32_flex*.json", lambda r: r["levels"][-1].update(engine_mean=9.9e-6)),
    ("verify", "verify_tiny_bfloat16_flex*.json", lambda r: r["contracts"][0].update(passed=False)),
    ("synthetic", "synthetic_e2b_cpu.json", lambda r: r["spread"]["decode_tps"].update(median=99.0)),
    ("kernels", "kernel_report.json", lambda r: r["defaults"][0].update(spill_bytes=12345)),
    ("speed", "compare_x.json", lambda r: r["jobs"][0]["engines"][1]["flex_over"].update(median=7.5)),
    ("compare", "compare_x.json", lambda r: r["wanted"][0].update(verdict="missed")),
    ("device", "device_x.json", lambda r: r["parts"][0]["rows"][0].update(tok_s=667.9)),
    ("device", "device_x.json", lambda r: r["parts"][0]["rows"][1].update(floor_fraction=0.42)),
    ("device-parts", "device_x.json", lambda r: r["parts"][1].update(status="ok")),
    ("timed-kernels", "device_x.json", lambda r: r["parts"][1]["rows"][0]["us"].update(median=41.0)),
    ("growth", "growth_x.json", lambda r: r["batch"][1]["ms_per_step"].update(median=4.2)),
])
def test_a_figure_changed_in_a_result_is_caught(copy, name, pattern, edit):
    [path] = (copy / "results").glob(pattern)
    change(path, edit)
    assert any(repr(name) in line for line in disagreements(copy))


@pytest.mark.parametrize("name", KINDS)
def test_a_figure_changed_in_a_readme_is_caught(copy, name):
    page = next(copy / page for page in PAGES if any(match["name"] == name for match in blocks(copy / page)))
    text = page.read_text()
    [match] = [match for match in blocks(page) if match["name"] == name]
    at = next(i for i in range(match.end() - 1, match.start(), -1) if text[i].isdigit())
    page.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1:])
    assert disagreements(copy) == [f"{page.relative_to(copy)}: the table {name!r} is not what results/ give"]
    rewrite(copy)
    assert page.read_text() == text


def test_a_new_result_is_missed_until_the_pages_tell_it(copy):
    shutil.copy(copy / "results" / "bench_lora_tiny.json", copy / "results" / "bench_lora_other.json")
    assert [line for line in disagreements(copy) if "'lora'" in line]


def test_a_kind_without_a_file_has_no_table(copy):
    (copy / "results" / "device_x.json").unlink()
    for name in ("device", "device-parts", "timed-kernels"):
        assert table(name, copy / "results", copy / "README.md") == ""


def test_a_plot_of_other_figures_is_caught_and_drawn_anew(copy):
    path = copy / "results" / "growth_x.json"
    change(path, lambda r: r.update(threads=2))
    assert "results/growth_x.png is not the plot of growth_x.json" in disagreements(copy)
    draw(growth_page.plot, path)
    assert not [line for line in disagreements(copy) if "plot" in line]
    path.with_suffix(".png").unlink()
    assert "results/growth_x.png is not the plot of growth_x.json" in disagreements(copy)


def test_rows_and_parts_that_failed_are_told_or_left_out(copy):
    page, results = copy / "README.md", copy / "results"
    assert "| kernel options sweep | failed | RuntimeError: no |" in table("device-parts", results, page)
    assert table("device", results, page).count("synthetic:E2B") == 1
    assert table("timed-kernels", results, page).count("BLOCK_N") == 1
    assert "- vllm: vllm is not installed" in table("compare", results, page)


def test_links_lead_from_each_page_to_the_result(copy):
    for page in PAGES:
        for match in blocks(copy / page):
            for target in match["body"].split("](")[1:]:
                assert ((copy / page).parent / target.split(")")[0]).exists(), target


@pytest.mark.parametrize("text, says", [
    ("<!-- results:lora -->\n", "after it"),
    ("<!-- results:lora -->\n<!-- results:verify -->\n<!-- /results -->\n", "after it"),
    ("<!-- results:lora --> <!-- /results -->\n", "after it"),
    ("<!-- results:laura -->\n<!-- /results -->\n", "no table 'laura'"),
])
def test_markers_that_do_not_pair_up_or_name_nothing_are_errors(copy, text, says):
    (copy / "README.md").write_text(text)
    with pytest.raises(PageError, match=says):
        disagreements(copy)


def test_a_record_without_a_figure_is_named(copy):
    change(copy / "results" / "growth_x.json", lambda r: r.pop("scheduler"))
    with pytest.raises(PageError, match=r"growth_x.json lacks 'scheduler'"):
        disagreements(copy)


def test_the_script_writes_or_checks(copy, capsys):
    assert script.main(["--check", "--root", str(copy)]) == 0
    change(copy / "results" / "device_x.json", lambda r: r["parts"][0]["rows"][0].update(tok_s=1.0))
    before = (copy / "README.md").read_text()
    assert script.main(["--check", "--root", str(copy)]) == 1
    assert "README.md: the table 'device' is not what results/ give: run scripts/benchmarks/report.py" in capsys.readouterr().out
    assert (copy / "README.md").read_text() == before
    assert script.main(["--root", str(copy)]) == 0 and (copy / "README.md").read_text() != before
    assert script.main(["--check", "--root", str(copy)]) == 0
    (copy / "README.md").write_text("<!-- results:lora -->\n")
    assert script.main(["--check", "--root", str(copy)]) == 2 and "error: " in capsys.readouterr().err


def test_results_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"x_{name}.json").write_text("{}")
    assert list(read_results(tmp_path, "x_*.json")) == ["x_a.json", "x_b.json", "x_c.json"]
