"""Make the bundled model: text by rule, and a tokenizer and weights trained on it, on a CPU.

    python scripts/make_tiny_checkpoint.py --minutes 75
    python scripts/make_tiny_checkpoint.py --minutes 30 --init gemma4_flex/assets/tiny-gemma4.unpublished

Writes gemma4_flex/assets/tiny-gemma4/ (Hugging Face format, bf16) and results/tiny_checkpoint.json with the score on
held-out questions. A run that misses the score publishes nothing: it leaves its weights beside, in tiny-gemma4.unpublished/,
for a next run to go on from. The same seed sees the same text. How long it takes to reach the score in one run has not been
measured: the bundled model came from three runs, as results/tiny_checkpoint.json says.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_text import (
    WEATHER_TOOL,
    held_out_questions,
    thinking,
    training_questions,
    weather,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ASSETS = ROOT / "gemma4_flex" / "assets"
VOCAB = 768
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
           "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"]
IGNORE = -100


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-fallback BPE of Gemma's kind: spaces become U+2581, digits stay single, newlines stand alone."""
    lines = []
    for _, q in zip(range(30_000), training_questions(rng)):
        lines += [*(m["content"] for m in q.messages), q.answer]
    lines += ["response:get_weather{degrees:,sky:} call:get_weather{city:} declaration:get_weather{description:"
              " Current weather in a city parameters:{properties:{city:{description: City name type: string}}"
              " required:[city] type: object}}"] * 300 + ["user", "model", "system", "thought"] * 3000
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # learn merges inside words only; what is published splits at newlines alone, as Gemma-4's own does
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Split(Regex("▁?\\p{L}+|\\d|[^\\d\\p{L}]"), "isolated"))
    letters = sorted(set("".join(lines).replace(" ", "▁")))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))], initial_alphabet=letters,
        show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    state = json.loads(tokenizer.to_str())
    byte_ids = [t for t in state["added_tokens"] if t["content"].startswith("<0x")]
    state["added_tokens"] = [t for t in state["added_tokens"] if t not in byte_ids]   # bytes are vocabulary, not markers
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[^\\n]+|[\\n]+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        mask_token="<mask>", padding_side="left", clean_up_tokenization_spaces=False,
        extra_special_tokens=SPECIAL[5:], model_max_length=4096)
    fast.chat_template = (HERE / "tiny_chat_template.jinja").read_text()
    return fast


def make_config(tokenizer) -> Gemma4TextConfig:
    """E2B made small: owners 0-6, of which the last two are a sliding and a full layer as in E2B and E4B (other engines take for
    granted that shared layers read those), and a shared tail of 8 layers with double-wide MLP."""
    layer_types = [kind for sliding in (4, 1, 2, 4) for kind in ["sliding_attention"] * sliding + ["full_attention"]]
    stops = [tokenizer.convert_tokens_to_ids(t) for t in ("<eos>", "<turn|>", "<|tool_response>")]
    return Gemma4TextConfig(
        vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB, hidden_size=128, intermediate_size=256,
        num_hidden_layers=len(layer_types), layer_types=layer_types, num_kv_shared_layers=8,
        use_double_wide_mlp=True, num_attention_heads=4, num_key_value_heads=1, head_dim=64, global_head_dim=128,
        sliding_window=32, hidden_size_per_layer_input=64, final_logit_softcapping=30.0, max_position_embeddings=4096,
        pad_token_id=0, bos_token_id=2, eos_token_id=stops, tie_word_embeddings=True)


class Corpus:
    """Rows of token ids with loss on the model's own turns, in batches of one length each."""

    LENGTHS = ((64, 0.45), (128, 0.35), (256, 0.2))      # tokens a row, and how often

    def __init__(self, tokenizer, seed: int):
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.questions = training_questions(self.rng)
        self.turn = tokenizer.convert_tokens_to_ids("<turn|>")
        self.ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self.ids:
            if len(self.ids) > 200_000:
                self.ids.clear()
            self.ids[text] = self.tokenizer(text, add_special_tokens=False).input_ids
        return self.ids[text]

    def piece(self, text: str, learned: bool) -> list[tuple[int, bool]]:
        return [(i, learned) for i in self.encode(text)]

    def turns(self, messages: list[dict], answer: str) -> list[tuple[int, bool]]:
        row = []
        for m in messages:
            mine = m["role"] == "assistant"
            row += self.piece(f"<|turn>{'model' if mine else m['role']}\n", False)
            row += self.piece(m["content"] + "<turn|>", mine) + self.piece("\n", False)
        return row + self.piece("<|turn>model\n", False) + self.piece(answer + "<turn|>", True) + self.piece("\n", False)

    def special(self) -> list[tuple[int, bool]]:
        """A conversation with thinking on, or one with a tool, as the chat template renders it."""
        if self.rng.random() < 0.55:
            messages, answer = thinking(self.rng)
            text = self.tokenizer.apply_chat_template(messages, enable_thinking=True, add_generation_prompt=True, tokenize=False)
            return self.piece(text, False) + self.piece(answer + "<turn|>", True)
        messages = weather(self.rng)
        upto = [self.tokenizer.apply_chat_template(messages[:n], tools=[WEATHER_TOOL], tokenize=False, add_generation_prompt=g)
                for n, g in ((1, True), (2, False), (3, False), (4, False))]
        row = self.piece(upto[0], False)
        row += self.piece(upto[1][len(upto[0]):] + "<|tool_response>", True)
        row += self.piece(upto[2][len(upto[1]) + len("<|tool_response>"):], False)
        return row + self.piece(upto[3][len(upto[2]):].rstrip("\n"), True)

    def row(self, length: int) -> list[tuple[int, bool]]:
        """One conversation of at most `length` tokens, filled with as many questions as fit."""
        if length >= 128 and self.rng.random() < 0.12:
            row = self.special()
            if len(row) <= length:
                return row
        row = self.piece("<bos>", False)
        for _ in range(12):
            q = next(self.questions)
            more = self.turns(list(q.messages), q.answer)
            if len(row) + len(more) <= length:
                row = row + more
            elif len(row) > 0.8 * length:
                break
        return row

    def batch(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and labels [rows, length]; about `tokens` in all; labels are IGNORE where nothing is learned."""
        length = self.rng.choices([n for n, _ in self.LENGTHS], [share for _, share in self.LENGTHS])[0]
        rows = [self.row(length) for _ in range(tokens // length)]
        ids = torch.zeros(len(rows), length + 1, dtype=torch.long)
        labels = torch.full((len(rows), length + 1), IGNORE)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor([i for i, _ in row])
            labels[n, : len(row)] = torch.tensor([i if learned else IGNORE for i, learned in row])
        return ids, labels


def set_scalars(model: Gemma4ForCausalLM, seed: int) -> None:
    """Layer scalars are buffers, never learned: fixed away from 1 before training, as real checkpoints have them."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.55 + 0.6 * torch.rand(1, generator=generator).item())


def train(model, corpus: Corpus, minutes: float, tokens: int, lr: float, autocast: bool) -> list[dict]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    optimizers = [torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, momentum=0.95),
                  torch.optim.AdamW(others, lr=lr / 4, betas=(0.9, 0.98), weight_decay=0.0)]
    peaks = [g["lr"] for o in optimizers for g in o.param_groups]
    start, step, seen, log, recent = time.time(), 0, 0, [], []
    while (elapsed := (time.time() - start) / 60) < minutes:
        done = elapsed / minutes
        scale = min(1.0, (step + 1) / 100) * (1.0 if done < 0.4 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.4) / 0.6))
        for peak, group in zip(peaks, (g for o in optimizers for g in o.param_groups)):
            group["lr"] = peak * max(scale, 0.01)
        ids, labels = corpus.batch(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            target = labels[:, 1:]
            logits = model.lm_head(hidden[target != IGNORE]).float()
        logits = torch.tanh(logits / 30.0) * 30.0
        each = F.cross_entropy(logits, target[target != IGNORE], reduction="none")
        unsure = 0.05 + 1 - torch.exp(-each.detach())     # a token still in doubt, such as where to stop counting, counts more
        loss = (each * unsure).sum() / unsure.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + ids.numel()
        recent.append(each.mean().item())
        if step % 50 == 0:
            log.append({"step": step, "tokens": seen, "minutes": round(elapsed, 2), "loss": round(sum(recent) / len(recent), 4)})
            print(json.dumps(log[-1]), flush=True)
            recent = []
    return log


@torch.no_grad()
def answers(model, tokenizer, questions, batch: int = 64) -> list[str]:
    """Greedy answers of the Hugging Face model itself."""
    stops = model.config.eos_token_id
    found = []
    order = sorted(range(len(questions)), key=lambda i: len(str(questions[i].messages)))
    for at in range(0, len(order), batch):
        texts = [tokenizer.apply_chat_template(list(questions[i].messages), add_generation_prompt=True, tokenize=False)
                 for i in order[at: at + batch]]
        rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=80, do_sample=False, eos_token_id=stops)
        found += [tokenizer.decode(o[width:], skip_special_tokens=True).strip() for o in out]
    return [text for _, text in sorted(zip(order, found))]


def score(model, tokenizer, per_kind: int) -> tuple[dict, list]:
    """Share of held-out questions answered word for word, by kind and over all, and the wrong ones."""
    questions = held_out_questions(seed=7, per_kind=per_kind)
    right, total, wrong = defaultdict(int), defaultdict(int), []
    for q, got in zip(questions, answers(model, tokenizer, questions)):
        total[q.kind] += 1
        right[q.kind] += got == q.answer
        if got != q.answer:
            wrong.append((q.messages[-1]["content"], got, q.answer))
    by_kind = {k: {"right": right[k], "asked": total[k]} for k in total}
    return {"accuracy": sum(right.values()) / sum(total.values()), "by_kind": by_kind}, wrong


def publish(model, tokenizer, out: Path) -> None:
    """bf16 weights, the config in the form every supported transformers reads, tokenizer and template."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("per_layer_config", None)
    config.update(global_head_dim=128, num_global_key_value_heads=None, dtype="bfloat16", architectures=["Gemma4ForCausalLM"])
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": model.config.eos_token_id, "bos_token_id": 2, "pad_token_id": 0,
                  "do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="time for training")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's peak rate; AdamW's is a quarter of it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autocast", action="store_true", help="bf16 matmuls")
    parser.add_argument("--init", type=Path, help="go on from an earlier checkpoint's weights and tokenizer, in --out's format")
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-gemma4")
    parser.add_argument("--report", type=Path, default=ROOT / "results" / "tiny_checkpoint.json")
    parser.add_argument("--at_least", type=float, default=0.95, help="held-out score under which nothing is published")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.init:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.init)
        model = Gemma4ForCausalLM.from_pretrained(args.init, dtype=torch.float32).train()
    else:
        tokenizer = make_tokenizer(random.Random(args.seed))
        model = Gemma4ForCausalLM(make_config(tokenizer))
        set_scalars(model, args.seed)
    model.config._attn_implementation = "sdpa"
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    log = train(model, Corpus(tokenizer, args.seed + 1), args.minutes, args.tokens, args.lr, args.autocast)
    model = model.to(torch.bfloat16).float().eval()       # scored as it will be published
    result, wrong = score(model, tokenizer, per_kind=100)
    for line in wrong[:40]:
        print(line)
    print(json.dumps(result, indent=1))
    if result["accuracy"] < args.at_least:
        unpublished = args.out.with_name(args.out.name + ".unpublished")
        publish(model, tokenizer, unpublished)
        print(f"score {result['accuracy']:.3f} is under {args.at_least}: not published; go on with --init {unpublished}",
              file=sys.stderr)
        return 1
    publish(model, tokenizer, args.out)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(json.dumps({
        "held_out": result, "seed": args.seed, "parameters": sum(p.numel() for p in model.parameters()),
        "training": {"minutes": args.minutes, "tokens_a_step": args.tokens, "log": log[:: max(1, len(log) // 60)] + log[-1:]},
        "torch": torch.__version__}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
