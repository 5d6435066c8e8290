"""A model that calls a tool in every turn, made here, in the size of the packaged 135M model or tiny.

`sampling/tools.py` and `run.py` make it, and the programs of `play.py` load it. It computes as much as any model of
this size. Its next token depends on its last one, so that it samples a walk over a few tokens. A turn is always
`TURN` tokens long, most of them drawn from two, and ends with a call of the tool `look`. After the token `LINE` it
never ends, so that a rollout of one turn can have any length.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

LINE = "<|line|>"
_NAME = '{"name": "look", "arguments": {"n": '
_STAGES = 58
# Sampled tokens of a turn: the words, then the six tokens from the opening of the call to the end of the turn.
TURN = _STAGES + 6
# What the tool answers.
RESULT = "what is 12 + 34"
# One token of the tokenizer, also many times in a row.
FILLER = " fox"
CONTEXT = 512
# Tokens that the template puts around a result, up to the next turn.
AROUND = 3

# The shape of SmolLM2-135M.
SHAPE_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "135m": {**SHAPE_135M, "max_position_embeddings": 2048, "scale": 0.004},
    "tiny": {"vocab_size": 512},
}


def make_tool_model(folder: Path, size: str) -> str:
    """The directory of the model and its tokenizer."""
    from caller import CLOSE, DIGITS, LAST, OPEN, make_caller_tokenizer, make_walker
    from tokenizers import AddedToken

    words = [[f" {place}{which}" for which in "ab"] for place in range(_STAGES)]
    lines = [" to", " fro"]
    tokenizer = make_caller_tokenizer(tool="look")
    tokenizer.add_tokens([AddedToken(LINE, special=True)])
    texts = [*(word for stage in words for word in stage), *lines, _NAME]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    # So much more probable than all other tokens of the vocabulary together that a turn practically never leaves its
    # walk.
    weight = math.exp(16.0)

    def one_of(after: list[str]) -> dict[str, float]:
        return dict.fromkeys(after, weight / len(after))

    steps = {"<|assistant|>": one_of(words[0]), OPEN: one_of([_NAME]), _NAME: one_of(list(DIGITS))}
    steps |= {
        word: one_of(after)
        for stage, after in zip(words, [*words[1:], [OPEN]], strict=True)
        for word in stage
    }
    steps |= {digit: one_of([LAST]) for digit in DIGITS} | {LAST: one_of([CLOSE]), CLOSE: one_of(["<|end|>"])}
    steps |= {text: one_of(lines) for text in (LINE, *lines)}
    make_walker(tokenizer, steps, **SIZES[size]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def question(number: int, filler: int = 0) -> list[dict[str, str]]:
    """The prompt of a row, of about the same number of tokens for every row, and `filler` more."""
    text = f"{number:04d} the quick brown fox jumps over the lazy dog,{FILLER * filler} what is 12 + 34"
    return [{"role": "user", "content": text}]
