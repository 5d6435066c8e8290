"""Train a tiny vision-language model on a question that only the picture answers: which half is red?

    make train-images                      (two cores, no download; ARGS="--steps 40" for a shorter run)
    make train-images ARGS=--server        (vLLM in a process of its own, which the script starts and stops)

The script makes an Idefics3 of two layers with random weights, its tokenizer and its image processor. Every prompt
has the same text. Every picture has one red half, left, right, top or bottom; the other half has a colour of its own,
and all pixels have noise. vLLM samples one word per completion, in this process or, with `--server`, in a server
(`lockstep serve`). The reward is 1 if the word names the red half. A policy that does not look at the picture is
right in one case of four at most. Prints the held-out reward before and after training, on pictures that no step has
seen. (docs/internals/images.md)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# The tensors are so small that a second thread would only wait for the first one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

import lockstep
from lockstep.cli.output import quiet_libraries

HALVES = {
    "left": np.s_[:, :8],
    "right": np.s_[:, 8:],
    "top": np.s_[:8, :],
    "bottom": np.s_[8:, :],
}
WORDS = ["<end>", "<?>", "which", "half", "is", "red", "?", *HALVES]
MARKS = ["<fake_token_around_image>", "<image>", "<global-img>"]
SIDE, PATCH, SCALE, CONTEXT = 16, 4, 2, 64
TRAINED, HELD_OUT = 512, 128


def main(given: list[str] | None = None) -> tuple[float, float]:
    """Train, print, and return the held-out reward before and after."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=150)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument(
        "--held-out", type=int, default=HELD_OUT, help="number of pictures that are not trained on"
    )
    engine = words.add_mutually_exclusive_group()
    engine.add_argument("--without-vllm", action="store_true", help="sample with the transformers engine")
    engine.add_argument("--server", action="store_true", help="sample with a server that the script starts")
    asked = words.parse_args(given)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        model = make_model(Path(folder) / "model", asked.seed)
        if asked.server:
            engine_fields = {
                "vllm_mode": "server",
                "vllm_server_base_url": running.enter_context(server_of(model)),
            }
        else:
            engine_fields = {
                "vllm_max_model_length": CONTEXT,
                "use_vllm": False if asked.without_vllm else None,
            }
        config = lockstep.GRPOConfig(
            output_dir=f"{folder}/run",
            max_steps=asked.steps,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            # Without it, the policy says one of the four words for every picture before it has learned to look.
            entropy_coef=0.1,
            **engine_fields,
            logging_steps=1,
            seed=asked.seed,
            bf16=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = lockstep.GRPOTrainer(
            model,
            reward_funcs=names_the_red_half,
            args=config,
            train_dataset=rows(TRAINED, asked.seed),
            eval_dataset=rows(asked.held_out, asked.seed + 1),
        )
        try:
            before = trainer.evaluate()
            print(f"held-out reward before: {shown(before)}", flush=True)
            trainer.train()
            after = trainer.evaluate()
        finally:
            trainer.close()
        gaps = [
            entry["parity/max_abs_gap"]
            for entry in trainer.state.log_history
            if "parity/max_abs_gap" in entry
        ]
        print(f"held-out reward after {asked.steps} steps: {shown(after)} (at most 0.25 without the picture)")
        print(f"largest gap between sampled and scored log-probs: {max(gaps):.1e} nats")
    return before["eval_reward"], after["eval_reward"]


@contextlib.contextmanager
def server_of(model: str) -> Iterator[str]:
    """The URL of a server of the model, which ends with the block. The trainer waits until it is ready."""
    # Both processes find the key in this variable.
    os.environ["LOCKSTEP_SERVER_KEY"] = secrets.token_urlsafe(32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        "--port",
        str(port),
        "--max_model_len",
        str(CONTEXT),
        "--max_num_seqs",
        "128",
        "--dtype",
        "float32",
    ]
    server = subprocess.Popen([sys.executable, "-m", "lockstep.cli.main", "serve", model, *arguments])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def shown(metrics: dict[str, float]) -> str:
    """A reward with the half-width of its 95 % interval."""
    return f"{metrics['eval_reward']:.3f} ± {metrics['eval_reward_ci95']:.3f}"


def names_the_red_half(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if a completion is the name of the red half, otherwise 0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def rows(count: int, seed: int) -> Dataset:
    """Questions with one picture each. Every half is red equally often."""
    draw = np.random.default_rng(seed)
    halves = [list(HALVES)[i % len(HALVES)] for i in draw.permutation(count)]
    prompt = "<image> which half is red ?"
    return Dataset.from_list(
        [{"prompt": prompt, "image": picture(half, draw), "answer": half} for half in halves]
    )


def picture(half: str, draw: np.random.Generator) -> Image.Image:
    """A picture of 16 × 16 pixels with one red half. The other half has a random colour that is not red."""
    pixels = np.empty((SIDE, SIDE, 3))
    pixels[:] = [draw.integers(0, 100), draw.integers(0, 256), draw.integers(0, 256)]
    pixels[HALVES[half]] = [220, 30, 30]
    pixels += draw.normal(0, 20, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_model(folder: Path, seed: int) -> str:
    """A directory with a tiny Idefics3 of random weights, its tokenizer and its processor.

    A picture has four tokens.
    """
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<?>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<?>")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    sides = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=sides, max_image_size=sides, do_image_splitting=False)
    tokens = (SIDE // PATCH // SCALE) ** 2
    Idefics3Processor(images, tokenizer, image_seq_len=tokens).save_pretrained(folder)
    images.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    # With smaller weights the picture hardly moves the first probabilities, and the policy learns slowly to look at it.
    sizes |= {"initializer_range": 0.1}
    text = {
        **sizes,
        "model_type": "llama",
        "vocab_size": 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config={**sizes, "image_size": SIDE, "patch_size": PATCH},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        pad_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
