"""The real model, where it is: its folder, its tokens and its chat template."""

from pathlib import Path
from types import SimpleNamespace

from roles.contract.core.shape import Family
from roles.models.bundle import check_weights, read_config
from roles.models.fetch import MODELS, is_whole
from roles.models.tokenizer import Tokenizer

ASK = SimpleNamespace(role="user", content="What is 27 + 82?")
PROMPT = (
    1, 4093, 198, 1780, 314, 216, 34, 39, 1232, 216, 40, 34, 47, 2, 198,
    1, 520, 9531, 198, 34, 39, 1232, 216, 40, 34, 446,
)  # fmt: skip
"""Hugging Face's tokenizer of the GGUF file gives the same 26."""


def test_the_folder_has_its_pins_and_its_weights_are_numbers(smollm2: Path) -> None:
    assert is_whole(MODELS["smollm2"], smollm2)
    config = read_config(smollm2)
    assert (config.shape.family, config.shape.parameters) == (Family.LLAMA, 134_515_008)
    check_weights(smollm2, config)


def test_a_question_is_these_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer.open(smollm2)
    assert tokenizer.render([ASK], "27 + 82 =") == (
        "<|im_start|>user\nWhat is 27 + 82?<|im_end|>\n<|im_start|>assistant\n27 + 82 ="
    )
    assert tokenizer.chat([ASK], "27 + 82 =") == PROMPT
    system = SimpleNamespace(role="system", content="Be brief.")
    told = tokenizer.chat([system, ASK], "27 + 82 =")
    assert told[-26:] == PROMPT
    assert tokenizer.decode(told[:-26]) == "system\nBe brief.\n"


def test_text_is_these_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer.open(smollm2)
    assert tokenizer.vocabulary == 49_152
    assert tokenizer.encode(" 109\n") == (216, 33, 32, 41, 198)
    assert (tokenizer.token("<|im_end|>"), tokenizer.token("\n")) == (2, None)
    for text in ("naïve 日本 🐟\t\n\n  x", "def f(x):\n    return x ** 2"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    tokenizer.require([2, 198])
