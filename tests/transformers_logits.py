"""Run by an interpreter that has transformers: ``python transformers_logits.py FOLDER IN OUT``.

IN is an array of tokens (rows, length), OUT gets the logits of all of them and what follows
greedily.
"""

import sys

import numpy as np
import torch

NEW = 24
"""Tokens drawn greedily."""


def main() -> None:
    from transformers import AutoModelForCausalLM

    folder, source, target = sys.argv[1:]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(np.load(source))
    with torch.inference_mode():
        logits = model(tokens).logits
        text = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    np.savez(target, logits=logits.numpy(), text=text[:, tokens.shape[1] :].numpy())


if __name__ == "__main__":
    main()
