"""The kernel option table agrees with what was compiled, the chooser keeps to a card's memory, user options are checked."""
from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from gemma4_flex.bench.kernel_page import markdown
from gemma4_flex.kernel_options import KNOWN_OPTIONS, TABLE, check_options, choose, decode_layout, parse_options

ROOT = Path(__file__).resolve().parents[1]
REPORT = json.loads((ROOT / "results" / "kernel_report.json").read_text(encoding="utf-8"))
K = 1024
LIMITS = (64 * K, 99 * K, 163 * K, 227 * K)
CAPABILITIES = {(8, 0): "sm_80", (8, 6): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100",
                (12, 0): "sm_80"}
ROWS = [(key, fit) for key, fits in TABLE.items() for fit in fits]


def compiled(section: str, head_dim: int, phase: str, arch: str, options: dict) -> list[dict]:
    """The report's entries in `section` for exactly these options."""
    return [entry for entry in REPORT[section]
            if (entry["head_dim"], entry["phase"], entry["arch"]) == (head_dim, phase, arch)
            and all(entry[name] == value for name, value in options.items())]


# ---- the table ------------------------------------------------------------------------------------------------------

def test_the_table_covers_both_head_sizes_both_phases_and_three_architectures():
    assert set(TABLE) == {(d, p, a) for d in (256, 512) for p in ("decode", "prefill") for a in ("sm_80", "sm_90", "sm_100")}


@pytest.mark.parametrize(("key", "fit"), ROWS)
def test_a_rows_figures_are_those_of_the_report(key, fit):
    for sections, dtype in ((("candidates", "defaults"), "bfloat16"), (("table_float32",), "float32")):
        entries = [entry for section in sections for entry in compiled(section, *key, fit.options)]
        assert entries, f"{key} {fit.options} was never compiled in {dtype}: run scripts/kernel_report.py"
        assert {entry["shared_bytes"] for entry in entries} == {fit.shared_bytes[dtype]}


@pytest.mark.parametrize(("key", "fit"), ROWS)
def test_a_row_fits_its_own_card_and_spills_no_register(key, fit):
    for entry in compiled("candidates", *key, fit.options) + compiled("defaults", *key, fit.options):
        assert entry["fits"] and entry["spill_bytes"] == 0


def test_the_first_row_of_every_kernel_is_pipelined():
    assert all(fits[0].options["num_stages"] >= 2 for fits in TABLE.values())


def test_cards_that_borrow_rows_take_no_more_shared_memory_than_the_table_says():
    borrowers = {entry["arch"] for entry in REPORT["table_on_relatives"]}
    assert borrowers == {"sm_86", "sm_89", "sm_103", "sm_120"}
    assert all(entry["shared_bytes"] <= entry["shared_bytes_in_table"] for entry in REPORT["table_on_relatives"])


def test_torchs_own_options_overflow_at_head_dim_512_prefill_on_every_card():
    entries = compiled("defaults", 512, "prefill", "sm_90", {})
    assert [(e["BLOCK_M"], e["BLOCK_N"], e["num_stages"], e["fits"]) for e in entries] == [(64, 32, 3, False)]
    assert not any(e["fits"] for e in REPORT["defaults"] if (e["head_dim"], e["phase"]) == (512, "prefill"))


def test_the_figures_known_from_elsewhere_are_reproduced():
    assert len(REPORT["known_figures"]) == 4
    assert all(entry["shared_bytes"] == entry["known_shared_bytes"] for entry in REPORT["known_figures"])


def test_the_committed_page_is_made_from_the_committed_record():
    assert (ROOT / "results" / "kernel_report.md").read_text(encoding="utf-8") == markdown(REPORT)


# ---- the chooser ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_what_is_chosen_fits_and_none_means_that_nothing_does(head_dim, phase, capability, limit, dtype):
    fits = TABLE[head_dim, phase, CAPABILITIES[capability]]
    chosen = choose(head_dim, phase, capability, limit, dtype=dtype)
    if chosen is None:
        assert all(fit.shared_bytes[dtype] > limit for fit in fits)
    else:
        index = [fit.options for fit in fits].index(chosen)
        assert fits[index].shared_bytes[dtype] <= limit
        assert all(fit.shared_bytes[dtype] > limit for fit in fits[:index]), "a better row fits"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("head_dim", [256, 512])
def test_bf16_has_a_configuration_from_64k_up(head_dim, limit):
    assert all(choose(head_dim, phase, (8, 6), limit) for phase in ("decode", "prefill"))


def test_head_dim_512_decode_takes_a_smaller_tile_where_memory_is_short():
    tiles = [choose(512, "decode", (8, 6), limit)["BLOCK_N"] for limit in LIMITS]
    assert tiles == [16, 32, 64, 64]


def test_a_card_too_small_for_every_tile_gets_none():
    assert choose(512, "prefill", (9, 0), 16 * K) is None


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (11, 0), (13, 0)])
def test_architectures_that_were_not_compiled_for_get_none(capability):
    assert choose(256, "decode", capability, 227 * K) is None


def test_head_sizes_over_the_tables_get_none_and_smaller_ones_the_next_ones_up():
    assert choose(576, "decode", (9, 0), 227 * K) is None
    assert choose(64, "prefill", (9, 0), 227 * K) == choose(256, "prefill", (9, 0), 227 * K)
    assert choose(320, "prefill", (9, 0), 227 * K) == choose(512, "prefill", (9, 0), 227 * K)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_a_tile_never_reaches_over_a_page(page_size):
    for head_dim, phase, capability in [(d, p, c) for d in (256, 512) for p in ("decode", "prefill") for c in CAPABILITIES]:
        assert page_size % choose(head_dim, phase, capability, 227 * K, page_size=page_size)["BLOCK_N"] == 0


def test_pages_shorter_than_the_smallest_tile_get_none():
    assert choose(256, "decode", (9, 0), 227 * K, page_size=8) is None


def test_what_is_chosen_may_be_changed_without_changing_the_table():
    chosen = choose(256, "decode", (9, 0), 227 * K)
    chosen["num_stages"] = 99
    assert choose(256, "decode", (9, 0), 227 * K)["num_stages"] != 99


# ---- options from the user ------------------------------------------------------------------------------------------

def test_every_row_of_the_table_passes_the_check_for_user_options():
    for _, fit in ROWS:
        check_options(fit.options)


def test_valid_json_is_returned_as_given():
    text = '{"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2, "num_warps": 8, "SPLIT_KV": 3, "USE_TMA": false, "BACKEND": "TRITON"}'
    assert parse_options(text) == json.loads(text)
    assert parse_options("{}") == {}


@pytest.mark.parametrize("text", ["", "{", "BLOCK_N=32", "{'BLOCK_N': 32}", '{"BLOCK_N": 32,}', "[1]", "3", "null", '"BLOCK_N"',
                                  '{"BLOCK_N": ' + "1" * 5000 + "}", "[" * 100_000], ids=lambda text: text[:20])
def test_what_is_not_a_json_object_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r'write them like \'\{"BLOCK_N": 32, "num_stages": 2\}\''):
        parse_options(text)


def test_an_unknown_name_is_refused_with_the_names_that_are_known():
    with pytest.raises(ValueError, match="'num_stage' is unknown") as error:
        parse_options('{"num_stage": 2}')
    assert all(name in str(error.value) for name in KNOWN_OPTIONS)


@pytest.mark.parametrize("name", ["BLOCKS_ARE_CONTIGUOUS", "ROWS_GUARANTEED_SAFE", "PRESCALE_QK"])
def test_options_that_would_change_results_over_pages_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"{name} cannot be used over paged K/V: .+ Leave it out"):
        parse_options(json.dumps({name: True}))


@pytest.mark.parametrize(("name", "value"), [
    ("BLOCK_M", 8), ("BLOCK_N", 48), ("BLOCK_N", "32"), ("BLOCK_N", 32.0), ("BLOCK_N", True), ("BLOCK_N", None), ("num_stages", 0),
    ("num_stages", -1), ("num_stages", 1.5), ("num_warps", 3), ("num_warps", 32), ("num_warps", True), ("SPLIT_KV", 0),
    ("USE_TMA", 1), ("USE_TMA", "true"), ("FORCE_USE_FLEX_ATTENTION", 0), ("BACKEND", "FLASH"), ("BACKEND", [])])
def test_a_value_an_option_cannot_take_is_refused_with_those_it_can(name, value):
    with pytest.raises(ValueError, match=f"kernel option {name}=") as error:
        parse_options(json.dumps({name: value}))
    assert KNOWN_OPTIONS[name][0] in str(error.value)


# ---- the script -----------------------------------------------------------------------------------------------------

def test_the_report_says_in_one_line_what_to_install_where_triton_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "argv", ["kernel_report.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / "kernel_report.py"), run_name="__main__")
    assert "\n" not in stop.value.code and "pip install -r requirements-kernels.txt" in stop.value.code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rows", "windowed", "queries_a_key", "folded"), [
    (1, True, 8, True), (1, False, 8, False), (63, False, 2, False), (64, False, 8, True), (1, False, 3, True), (1, False, 5, True),
    (1, False, 1, False)])
def test_decode_is_one_kernel_where_little_is_read_sequences_are_many_or_the_heads_are_no_power_of_two(
        rows, windowed, queries_a_key, folded):
    layout = decode_layout(rows, windowed=windowed, queries_a_key=queries_a_key)
    assert layout.get("FORCE_USE_FLEX_ATTENTION", False) == folded
    check_options(layout)
