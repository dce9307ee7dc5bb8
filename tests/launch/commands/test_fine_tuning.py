"""The commands of docs/fine-tuning.md lead from a folder of a model to a better one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.chat_model import save_model, sums, write_lines
from tests.support.launch.live import ENVIRONMENT

SMALLER = {
    "sequence_length=4096": "sequence_length=64",
    "partition=22-14": "partition=2-1",
    "lr=2e-4": "lr=1e-2",
    "epochs=2": "epochs=8",
}
"""What a model of three layers needs otherwise."""
QUESTION = {"role": "user", "content": "3+4?"}
"""The page's prompt."""


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_a_better_model(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_model(tmp_path / "Qwen3-8B")
    write_lines(tmp_path / "chats.jsonl", [{"messages": one} for one in sums()])
    page = (ROOT / "docs" / "fine-tuning.md").read_text()
    script = re.search(r"```sh\n(tdpp data chats.*?)```", page, re.S)
    assert script is not None
    commands = script[1]
    for usual, smaller in SMALLER.items():
        assert usual in commands
        commands = commands.replace(usual, smaller)
    shell = f'set -e; tdpp() {{ "{sys.executable}" -m launch.cli "$@"; }}\n{commands}'
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tmp_path.glob("runs/mine/*/metrics.jsonl")
    losses = [line["loss"] for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "Qwen3-8B-mine")
    held: list[float] = []
    for folder in ("Qwen3-8B", "Qwen3-8B-mine"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        tokens = torch.tensor([tokenizer.apply_chat_template(one, return_dict=False) for one in sums(3)])
        with torch.no_grad():
            held.append(model(input_ids=tokens, labels=tokens).loss.item())
    assert held[1] < held[0]
    prompt = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    known = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**known, max_new_tokens=8, do_sample=False)[0, known.input_ids.shape[1] :]
    assert prompt + tokenizer.decode(answer).removesuffix("<|im_end|>") + "\n" in done.stdout, "as transformers says it"
