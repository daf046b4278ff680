"""transformers reads what we write, and says the same tokens and conversations.

In an environment of its own: ``python -m venv env && env/bin/pip install transformers``, then
``TRANSFORMERS=env/bin/python pytest tests/interop/test_transformers.py``. torch is not needed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roles.models.bundle import read_config
from roles.models.config import ModelConfig, read_config_untrusted
from roles.models.tokenizer import Tokenizer
from tests.model_folders import make_folder
from tests.support.models import FAMILIES
from tests.support.templates import TEMPLATES

PYTHON = os.environ.get("TRANSFORMERS", "")
PATIENCE = 120

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        not PYTHON,
        reason="transformers not installed: set TRANSFORMERS to a Python that has it",
    ),
]

THEIRS = """
import json, sys
from transformers import AutoConfig, AutoTokenizer
folder, = sys.argv[1:]
asked = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder)
said = {
    "config": json.loads(AutoConfig.from_pretrained(folder).to_json_string(use_diff=False)),
    "ids": [tokenizer(t, add_special_tokens=False)["input_ids"] for t in asked["texts"]],
    "chats": [],
}
said["texts"] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in said["ids"]]
for template in asked["templates"]:
    said["chats"].append(tokenizer.apply_chat_template(
        asked["messages"], chat_template=template, add_generation_prompt=True, tokenize=False))
json.dump(said, sys.stdout)
"""

TEXTS = ["", "hello world", "naïve 日本 🐟\t\n  x", "12 + 345 = 357", "<|im_end|>a<|im_start|>"]
MESSAGES = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "<b>'27' & \"82\"?</b>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n109"},
    {"role": "user", "content": "Sure?"},
]


def theirs(folder: Path, templates: list[str]) -> dict[str, Any]:
    asked = {"texts": TEXTS, "messages": MESSAGES, "templates": templates}
    done = subprocess.run(
        [PYTHON, "-c", THEIRS, str(folder)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def check_text(folder: Path, said: dict[str, Any], templates: list[str]) -> None:
    tokenizer = Tokenizer.open(folder)
    assert said["ids"] == [list(tokenizer.encode(text)) for text in TEXTS]
    assert said["texts"] == [tokenizer.decode(ids) for ids in said["ids"]]
    messages = [SimpleNamespace(**message) for message in MESSAGES]
    ours = []
    table = json.loads((folder / "tokenizer_config.json").read_text())
    for template in templates:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**table, "chat_template": template})
        )
        ours.append(Tokenizer.open(folder).render(messages))
    assert said["chats"] == ours


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_each_family(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path / family, FAMILIES[family])
    templates = list(TEMPLATES.values()) if family == "llama" else []
    said = theirs(folder, templates)
    assert said["config"]["model_type"] == family
    assert same(read_config_untrusted(json.dumps(said["config"]).encode()), read_config(folder))
    check_text(folder, said, templates)


def same(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """What transformers makes of our file, written again by transformers, is the same model."""
    return theirs == ours


def test_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    folder.mkdir()
    for path in smollm2.iterdir():
        (folder / path.name).symlink_to(path)
    said = theirs(folder, [])
    assert same(
        read_config_untrusted(json.dumps(said["config"]).encode()), read_config(smollm2)
    )
    check_text(folder, said, [])
