"""``shoal eval`` measures what lm-eval measures: the same model, the same questions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from roles.chat import evaluate
from roles.envs.base import make_environment

pytestmark = [pytest.mark.interop, pytest.mark.deep]
PYTHON = os.environ.get("SHOAL_LM_EVAL", "")
TASK = {
    "task": "additions", "dataset_path": "json", "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 24, "do_sample": False},
    "filter_list": [{"name": "last", "filter": [
        {"function": "regex", "regex_pattern": "([0-9]+)", "group_select": -1},
        {"function": "take_first"},
    ]}],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
"""Additions, judged by the last number of an answer."""
CHOICE = TASK | {
    "task": "choice", "output_type": "multiple_choice", "doc_to_target": 0,
    "doc_to_choice": ["{{answer}}", "{{answer|int + 10}}", "{{answer|int + 1}}"],
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
THEIRS = """
import json, sys
from lm_eval import simple_evaluate
folder, *files = sys.argv[1:]
tasks = [json.load(open(file)) for file in files]
found = simple_evaluate(
    model="hf", model_args={"pretrained": folder, "dtype": "float32", "device": "cpu"},
    tasks=tasks, apply_chat_template=True, log_samples=False,
)
print(json.dumps(found["results"], default=str))
"""
OURS = "import sys; from roles.chat import evaluate; sys.exit(evaluate(sys.argv[1:]))"


def run(code: str, *arguments: object) -> dict[str, dict[str, float]]:
    """The last line that a program of the other Python prints."""
    root = str(Path(__file__).parent.parent.parent)
    done = subprocess.run(
        [PYTHON, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not PYTHON, reason="SHOAL_LM_EVAL names no Python that has lm_eval")
def test_ours_and_theirs_agree(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their decoder and judge, our decoder and their judge, our decoder and judge: on one local
    task each figure lies in our interval, and choices by log-probability are the same."""
    rows = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        for a in range(2, 14) for b in range(2, 14)
    ]  # fmt: skip
    questions = tmp_path / "additions.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)))
    line = [str(smollm2), "--env", f"math={questions}", "--k", "1", "--tokens", "24", "--json"]
    assert evaluate(line) == 0
    ours = json.loads(capsys.readouterr().out)

    held_out = make_environment("math", data=questions.read_bytes()).evaluation()
    asked = tmp_path / "asked.jsonl"
    asked.write_text(
        "\n".join(
            json.dumps({"question": task.messages[-1].content, "answer": task.answer})
            for task in held_out
        )
    )
    files = []
    for task in (TASK, CHOICE):
        files.append(tmp_path / f"{task['task']}.yaml")  # JSON is YAML
        table = task | {"dataset_kwargs": {"data_files": {"test": str(asked)}}}
        if task is CHOICE:
            del table["filter_list"], table["generation_kwargs"]
        files[-1].write_text(json.dumps(table))
    theirs = run(THEIRS, smollm2, *files)
    asks = [word for file in files for word in ("--lm-eval", file)]
    both = run(OURS, smollm2, *asks, "--chat", "--json")
    assert both["lm_eval"]["additions"]["exact_match,last"] == pytest.approx(
        theirs["additions"]["exact_match,last"], abs=1 / len(held_out)
    )
    assert both["lm_eval"]["choice"]["acc"] == theirs["choice"]["acc,none"]
    assert len(held_out) == ours["tasks"] > 12
    low, high = ours["greedy"]["low"], ours["greedy"]["high"]
    their = theirs["additions"]["exact_match,last"]
    error = 1.96 * theirs["additions"]["exact_match_stderr,last"]
    assert 0 < low <= their <= high
    assert their - error <= ours["greedy"]["mean"] <= their + error
