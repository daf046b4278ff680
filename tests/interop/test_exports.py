"""What ``shoal run export`` writes, transformers and vLLM open: the same chat, the same answer.

``TRANSFORMERS`` and ``SHOAL_VLLM`` name Pythons that have them, both with torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from roles.chat.command import Turn
from roles.chat.find import find_models
from roles.chat.voice import Manner, Voice
from roles.own.__main__ import main as run
from tests.model_folders import LLAMA, make_folder

pytestmark = [pytest.mark.interop, pytest.mark.deep]
TRANSFORMERS = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, asked = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
asked = tokenizer.apply_chat_template(json.loads(asked), add_generation_prompt=True,
    return_tensors="pt", return_dict=True)
made = model.generate(**asked, max_new_tokens=12, do_sample=False)
print(json.dumps(made[0, asked["input_ids"].shape[1]:].tolist()))
"""
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, asked = sys.argv[1:]
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_num_seqs=2,
        kv_cache_memory_bytes=1 << 26)
    made = llm.chat(json.loads(asked), SamplingParams(temperature=0, max_tokens=12),
        use_tqdm=False)
    print(json.dumps(list(made[0].outputs[0].token_ids)))
"""
QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello world"}]


@pytest.mark.parametrize(
    ("variable", "code"), [("TRANSFORMERS", TRANSFORMERS), ("SHOAL_VLLM", VLLM)]
)
def test_an_export_of_a_run_is_opened_and_answers_alike(
    variable: str, code: str, tmp_path: Path
) -> None:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python that has it")
    shape = replace(LLAMA, width=64, head_width=32, query_heads=2, key_heads=1)
    base, mine, out = make_folder(tmp_path / "base", shape), tmp_path / "mine", tmp_path / "out"
    assert run(["init", str(mine), "--model", str(base), "--env", "arithmetic"]) == 0
    shutil.copytree(base, mine / "trainer" / "trainer" / "weights" / f"{7:08d}")
    assert run(["export", str(mine), "-o", str(out)]) == 0
    assert {"README.md", "config.json", "tokenizer.json"} <= set(os.listdir(out))

    voice = Voice(find_models(out).newest)
    prompt = voice.prompt([Turn(**message) for message in MESSAGES])
    *_, ours = voice.tokens(prompt, Manner(temperature=0.0, most_tokens=12))
    done = subprocess.run(
        [python, "-c", code, str(out), json.dumps(MESSAGES)],
        env=os.environ | QUIET, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == list(ours)
