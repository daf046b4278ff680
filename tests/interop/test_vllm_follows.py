"""An unmodified vLLM takes five versions of a folder without a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p.cast.weight_v import write_version
from roles.contract.core.shape import Family
from roles.engines.torch.files import save_folder
from roles.engines.torch.model import TransformerModel
from tests.conformance.test_engines import SHAPES, VLLM

pytestmark = pytest.mark.deep
FOLLOWS = """
import sys
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
root, first = sys.argv[1:3]
def answers(llm):
    asked = [{"prompt_token_ids": [5, 9, 2, 7]}]
    return llm.generate(asked, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True,
        detokenize=False), use_tqdm=False)[0].outputs[0].token_ids
def opened(folder, **more):
    return LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=1 << 26, **more)
if __name__ == "__main__":
    llm = opened(first, weight_transfer_config=WeightTransferConfig(backend="shoal"))
    llm.init_weight_transfer_engine({"init_info": {"folder": root}})
    for version in range(1, 6):
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        print("followed", version, *answers(llm), flush=True)
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": {"version": 9}})
    except Exception as error:
        print("refused", error, flush=True)
"""
FRESH = (
    FOLLOWS.partition("    llm = opened(first")[0]
    + """
    print("fresh", *answers(opened(first)), flush=True)
"""
)


def said(script: str, *arguments: object) -> list[list[str]]:
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
           "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
           "HF_HUB_OFFLINE": "1"}  # fmt: skip
    command = [VLLM, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr[-3000:])
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    return [row for row in rows if row and row[0] in ("followed", "fresh", "refused")]


@pytest.mark.skipif(not VLLM, reason="SHOAL_VLLM does not name a Python that has vllm")
def test_vllm_follows_five_versions_without_a_restart(tmp_path: Path) -> None:
    shape, old, folders = SHAPES[Family.LLAMA], None, []
    for version in range(1, 6):
        model = TransformerModel(shape)
        model.initialise(version)
        folders.append(tmp_path / f"step-{version}")
        folders[-1].mkdir()
        save_folder(model, folders[-1], context=64, end_tokens=(0,))
        kind = write_version(tmp_path / "root", version, folders[-1], old, "x")
        assert kind == ("full" if version == 1 else "delta")
        old = folders[-1]
    *followed, refused = said(FOLLOWS, tmp_path / "root", folders[0])
    assert "has no version 9" in " ".join(refused)
    assert len({tuple(row[2:]) for row in followed}) > 1
    for version in (1, 5):
        [fresh] = said(FRESH, tmp_path / "root", folders[version - 1])
        assert followed[version - 1][2:] == fresh[1:]
