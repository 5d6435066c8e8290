"""Tiny models in a folder that plays the hub's cache, for the models that TRL's tests name.

`scripts/trl_tests.py` calls `build_hub`. Names such as `trl-internal-testing/tiny-Qwen3MoeForCausalLM` carry an architecture; the
model is made of its config class with a few small sizes and random weights. Chat templates are read from the installed TRL.

All models share one vocabulary. TRL's tests write completions as ids of Qwen's vocabulary. Therefore the single bytes, the special
tokens and the few words of those completions have Qwen's ids. All other text is encoded byte by byte. The ids that are left decode
to made-up words of several lengths, because many rewards of the tests are the length of a completion that a random model sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trl_stand_ins.vision import IMAGE_MARKS, load_torchvision, save_seeing

ORGANISATION = "trl-internal-testing"
VOCABULARY = 151_936
SPECIAL = {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645}
MARKS = {
    "<tool_call>": 151_657,
    "</tool_call>": 151_658,
    "<tool_response>": 151_665,
    "</tool_response>": 151_666,
    "<think>": 151_667,
    "</think>": 151_668,
}
WORDS = {
    '{"': 4913, "name": 606, '":': 788, ' "': 330, "multiply": 64648, "_tool": 22785, '",': 497, "arguments": 16370,
    ' {"': 5212, "}}\n": 11248, "async": 7692, "_multiply": 93054, " don": 1513, "'t": 944, " know": 1414, " any": 894,
    " tool": 5392, "Done": 17453, "increment": 35744, "step": 9520, " won": 2765, " increment": 16252,
}  # fmt: skip
# One snapshot per model: the hub names it by a commit.
COMMIT = "0" * 40
# The chat templates of model families, as TRL names them; other families get the first one.
FAMILIES = {
    "Qwen2": "qwen2_5",
    "Qwen3": "qwen3",
    "Llama": "llama3",
    "Gemma": "gemma",
    "Gemma2": "gemma",
    "Phi3": "phi3",
    "Cohere": "cohere",
    "Cohere2": "cohere2",
}


def build_hub(folder: Path, files: Sequence[Path]) -> list[str]:
    """Write every model that the files name, those that read images only where torchvision can be imported.

    Returns:
        The names of the models that were made.
    """
    # First: the imports of transformers look for it.
    has_torchvision = load_torchvision()
    text = "".join(path.read_text() for path in files)
    names = sorted(set(re.findall(rf"{ORGANISATION}/(tiny-\w+For(?:CausalLM|SequenceClassification)[\w.-]*)", text)))
    tokenizer, made = make_tokenizer(), []
    for name in names:
        architecture = name.removeprefix("tiny-").split("-")[0]
        model = make_model(architecture)
        if model is None:
            continue
        snapshot = snapshot_of(folder, name)
        model.save_pretrained(snapshot)
        tokenizer.chat_template = chat_template(architecture)
        # Llama's template writes it.
        tokenizer.bos_token = "<|im_start|>" if architecture.startswith("Llama") else None
        tokenizer.save_pretrained(snapshot)
        made.append(name)
    seeing = sorted(set(re.findall(rf"{ORGANISATION}/(tiny-(\w+)ForConditionalGeneration[\w.-]*)", text)))
    if has_torchvision:
        made += [
            name
            for name, family in seeing
            if save_seeing(family, make_tokenizer(IMAGE_MARKS), snapshot_of(folder, name))
        ]
    return made


def snapshot_of(folder: Path, name: str) -> Path:
    """The folder of a model in the hub's cache."""
    root = folder / "hub-home" / "hub" / f"models--{ORGANISATION}--{name}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    return root / "snapshots" / COMMIT


def make_model(architecture: str) -> Any:
    """A model with random weights; None if transformers does not have the architecture, or cannot make it so small."""
    kind = getattr(transformers, architecture, None)
    if kind is None:
        return None
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "eos_token_id": SPECIAL["<|im_end|>"],
        "bos_token_id": None,
        "pad_token_id": SPECIAL["<|endoftext|>"],
    }
    config = kind.config_class()
    if hasattr(config, "num_experts_per_tok"):
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if architecture.endswith("ForSequenceClassification"):
        sizes |= {"num_labels": 1}
    if isinstance(getattr(config, "layer_types", None), list):
        sizes |= {"layer_types": None}
    torch.manual_seed(0)
    try:
        model = kind(kind.config_class(**sizes)).to(torch.float32)
    except (StrictDataclassClassValidationError, ValueError):
        return None
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = SPECIAL["<|im_end|>"]
        model.generation_config.pad_token_id = SPECIAL["<|endoftext|>"]
    return model


def make_tokenizer(further: Mapping[str, int] = MappingProxyType({})) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, in which some words have ids of Qwen's.

    Args:
        further: further special tokens and their ids.
    """
    pieces = [chr(byte) for byte in _printable()] + [chr(256 + place) for place in range(256 - len(_printable()))]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    written = dict(zip([*_printable(), *_others()], pieces, strict=True))
    for word, place in WORDS.items():
        vocabulary["".join(written[byte] for byte in word.encode())] = place
    vocabulary |= SPECIAL | MARKS | further
    taken = set(vocabulary.values())
    # No merge leads to these words, so no text is encoded as one of them. A test may add tokens behind them.
    vocabulary |= {"w" * (1 + place % 5) + str(place): place for place in range(VOCABULARY - 64) if place not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *further])
    tokenizer.add_tokens(list(MARKS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32_768
    )


def chat_template(architecture: str) -> str:
    """The template of the model's family, from the installed TRL."""
    import trl

    family = architecture.split("For")[0].removesuffix("Moe")
    return (Path(trl.__file__).parent / "chat_templates" / f"{FAMILIES.get(family, 'qwen2_5')}.jinja").read_text()


def _printable() -> list[int]:
    """Bytes that a byte-level vocabulary writes as they are; they come first in it."""
    return [*range(33, 127), *range(161, 173), *range(174, 256)]


def _others() -> list[int]:
    return [byte for byte in range(256) if byte not in _printable()]
