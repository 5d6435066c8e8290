"""The models and data sets that TRL's tests name, in a folder that plays the hub's cache.

`scripts/trl_tests.py` calls `build_hub`. TRL's repository has the programs that made these models
(`scripts/generate_tiny_models`) and data sets (`scripts/generate_zen…`). They are run as they are: the models have
TRL's sizes and dtypes, and random weights; the data sets have TRL's rows. What the programs would read from a hub is
given to them here:

- The tokenizer of every family is Qwen's. Its vocabulary is the file `qwen.tiktoken` of the package `dashscope`, of
  which nothing else is used. Its further tokens are listed here.
- The configurations of text models are the defaults of transformers. Those of models for images are in
  `scripts/trl_stand_ins/vision.py`.
- Chat templates are those of the installed TRL.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy
import torch
import transformers
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trl_stand_ins.vision import load_torchvision, processor_of, published_config

ORGANISATION = "trl-internal-testing"
GENERATORS = "scripts/generate_tiny_models"
# Qwen3's tokens behind its vocabulary, in the order of their ids. Some models of Qwen call the last four ordinary text.
FIRST_TOKEN = 151_643
TOKENS = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|object_ref_start|>",
        "<|object_ref_end|>",
        "<|box_start|>",
    ),
    *(
        "<|box_end|>",
        "<|quad_start|>",
        "<|quad_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
    ),
    *("<|image_pad|>", "<|video_pad|>"),
)
MARKS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
END, PAD = 151_645, 151_643
# How Qwen2.5 and Qwen3 say that they are sampled, in their published generation_config.json.
SAMPLED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "Qwen/Qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}
# One snapshot per model: the hub names it by a commit.
COMMIT = "0" * 40
# The chat templates of model families, as TRL names them; other families get the first one.
TEMPLATES = {
    "Qwen2": "qwen2_5",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3",
    "Llama": "llama3",
    "Gemma": "gemma",
    "Gemma2": "gemma",
    "Phi3": "phi3",
    "Cohere": "cohere",
    "Cohere2": "cohere2",
    "GptOss": "gptoss",
    "Glm4Moe": "glm4moe",
    "NemotronH": "nemotron_3_nano",
}


def build_hub(folder: Path, checkout: Path, files: list[str]) -> tuple[list[str], dict[str, str]]:
    """Write every model that the files name, those for images only where torchvision can be imported.

    Returns:
        The names of the models that were made, and for each of the others why it was not.
    """
    # First: the imports of transformers look for it.
    has_torchvision = load_torchvision()
    text = "".join((checkout / name.split("::")[0]).read_text(encoding="utf-8") for name in files)
    asked = set(re.findall(rf"{ORGANISATION}/((?:tiny|small)-[\w.-]+)", text))
    programs = _programs(checkout, folder)
    tokenizer = qwen_tokenizer()
    made, missing = (
        [],
        dict.fromkeys(sorted(asked - programs.keys()), "TRL's repository has no program for it"),
    )
    for name in sorted(asked & programs.keys()):
        if "ForConditionalGeneration" in name and not has_torchvision:
            missing[name] = "it needs torchvision"
            continue
        try:
            _run(programs[name], name, tokenizer, snapshot_of(folder, name))
            made.append(name)
        except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            # A program for another version of transformers, or a family without a stand-in.
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                :200
            ]
            shutil.rmtree(snapshot_of(folder, name).parent.parent)
    return made, missing


def build_data(folder: Path, checkout: Path) -> None:
    """Write every data set of the checkout's programs, where `data_of` finds it."""
    for program in sorted((checkout / "scripts").glob("generate_zen*.py")):
        known = importlib.util.spec_from_file_location(program.stem, program)
        assert known is not None
        assert known.loader is not None
        module = importlib.util.module_from_spec(known)
        sys.modules[program.stem] = module
        known.loader.exec_module(module)

        def write(rows: Any, repository: str, config_name: str) -> None:
            rows.save_to_disk(data_of(folder, repository, config_name))

        # The images are noise.
        numpy.random.seed(0)
        with patch.object(datasets.DatasetDict, "push_to_hub", write):
            module.main(test_size=0.1, push_to_hub=True, repo_id=module.ScriptArguments().repo_id)


def data_of(folder: Path, repository: str, part: str) -> Path:
    """The folder of one part of a data set."""
    return folder / "data" / repository.rpartition("/")[2] / part


def snapshot_of(folder: Path, name: str) -> Path:
    """The folder of a model in the hub's cache."""
    root = folder / "hub-home" / "hub" / f"models--{ORGANISATION}--{name}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return root / "snapshots" / COMMIT


def qwen_tokenizer() -> Any:
    """Qwen's tokenizer, from the vocabulary that the package `dashscope` carries.

    Raises:
        SystemExit: the package is not installed.
    """
    found = importlib.util.find_spec("dashscope")
    if found is None or found.origin is None:
        sys.exit(
            "Qwen's vocabulary is missing. Run `pip install --no-deps dashscope`: the package has its file."
        )
    ranks = load_tiktoken_bpe(str(Path(found.origin).parent / "resources" / "qwen.tiktoken"))
    letters = bytes_to_unicode()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [tuple(written[half] for half in halves(token, ranks)) for token in ranks if len(token) > 1]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, bos_token=None, model_max_length=32_768
    )
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.add_tokens(list(MARKS))
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    ids = tokenizer.convert_tokens_to_ids([*TOKENS, *MARKS])
    assert ids == list(range(FIRST_TOKEN, FIRST_TOKEN + len(ids))), "this is not Qwen's vocabulary"
    return tokenizer


def halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens whose merge makes this one.

    A file of tiktoken has tokens in the order of their merges, and no merges.
    """
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        first = min(
            range(len(parts) - 1), key=lambda place: ranks.get(parts[place] + parts[place + 1], len(ranks))
        )
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def _programs(checkout: Path, folder: Path) -> dict[str, str]:
    """The module that makes a model, by the model's name.

    They are copied: beside them in the checkout lies TRL itself.
    """
    shutil.copytree(checkout / GENERATORS, folder / "programs" / "generate_tiny_models", dirs_exist_ok=True)
    sys.path.append(str(folder / "programs"))
    modules = {}
    for path in sorted((folder / "programs").rglob("for_*/*.py")):
        text = path.read_text(encoding="utf-8")
        kind = re.search(r"^model = (\w+)\(config\)", text, re.MULTILINE)
        pushed = re.search(r'^push_to_hub\(model, \w+, \w+, "(\w+)"(?:, "([^"]+)")?\)', text, re.MULTILINE)
        if kind and pushed:
            name = "-".join(filter(None, [pushed[1], kind[1], pushed[2]]))
            modules[name] = ".".join(path.relative_to(folder / "programs").with_suffix("").parts)
    return modules


def _run(module: str, name: str, tokenizer: Any, snapshot: Path) -> None:
    """Run TRL's program for one model, with what it would read from a hub, and write the model and its tokenizer."""
    family = re.sub(r"For[A-Z]\w*$", "", name.split("-")[1])
    kind = getattr(transformers, name.split("-")[1], None)
    common = importlib.import_module("generate_tiny_models._common")

    def own_tokenizer(_: str, **__: Any) -> Any:
        tokenizer.chat_template = chat_template(TEMPLATES.get(family, "qwen2_5"))
        # Llama's template writes it.
        tokenizer.bos_token = "<|im_start|>" if family in ("Llama", "Remote") else None
        return tokenizer

    def own_processor(_: str, **__: Any) -> Any:
        return processor_of(family, own_tokenizer(_), chat_template)

    def generation(model: str, **_: Any) -> Any:
        sampled = next((fields for start, fields in SAMPLED.items() if model.startswith(start)), {})
        return transformers.GenerationConfig(
            eos_token_id=[END, PAD], pad_token_id=PAD, do_sample=True, **sampled
        )

    def config(_: str, **fields: Any) -> Any:
        return published_config(kind, family, fields)

    def write(model: Any, reader: Any, generation_config: Any, *_: Any) -> None:
        if model.get_input_embeddings().num_embeddings < len(tokenizer):
            model.resize_token_embeddings(len(tokenizer))
        text_config = model.config.get_text_config()
        for part in {id(part): part for part in (model.config, text_config)}.values():
            part.eos_token_id, part.pad_token_id, part.bos_token_id = END, PAD, None
        model.save_pretrained(snapshot)
        reader.save_pretrained(snapshot)
        if generation_config is not None:
            generation_config.save_pretrained(snapshot)

    def nothing(*_: Any, **__: Any) -> None:
        """The reference on the hub, with which the programs compare, is not here."""

    # Both trainers' tests see the same weights in every run.
    torch.manual_seed(0)
    with ExitStack() as replaced:
        for check in ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test"):
            replaced.enter_context(patch.object(common, check, nothing))
        replaced.enter_context(patch.object(common, "push_to_hub", write))
        for reads, given in (
            (transformers.AutoTokenizer, own_tokenizer),
            (transformers.AutoProcessor, own_processor),
            (transformers.AutoConfig, config),
            (transformers.GenerationConfig, generation),
        ):
            replaced.enter_context(patch.object(reads, "from_pretrained", given))
        importlib.import_module(module)


def chat_template(name: str) -> str:
    """A template of the installed TRL."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
