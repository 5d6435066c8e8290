"""Show that every method learns: a tiny random model learns a task that it cannot do at first.

There is one curve per method.

    make learning      (two cores, no download; about five minutes; ARGS="--methods ppo" for one)

The task: the prompt names a letter, and the completion should repeat this letter. The reward of a completion is the
share of its tokens that are the letter. Writes `runs/bench/learning.json` and draws `runs/bench/learning.svg`.
(docs/internals/methods-measured.md)

    make learning ARGS="--runs runs/rloo runs/online_dpo runs/scalerl runs/lora"

draws the curves of runs that `lockstep` has made, from their directories, and writes `runs/bench/runs.json` and
`runs.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LETTERS = "abcdefgh"
TOKENS = 8
STEPS = 60
_WIDTH, _HEIGHT, _COLUMNS = 260, 120, 4

GROUPS = {"num_generations": 8, "per_device_train_batch_size": 64, "max_completion_length": TOKENS}
SINGLES = {"num_generations": 1, "per_device_train_batch_size": 64, "max_completion_length": TOKENS}
# For each method: the name of its trainer, and the fields of its config.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("GRPO", GROUPS | {"loss_type": name})
        for name in ("grpo", "dr_grpo", "dapo", "bnpo", "sapo", "vespo")
    },
    "cispo": ("GRPO", GROUPS | {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch"}),
    "scalerl": (
        "GRPO",
        GROUPS
        | {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch"}
        | {"average_by_prompt": True, "filter_zero_variance": True},
    ),
    "gspo": (
        "GRPO",
        GROUPS | {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4},
    ),
    "luspo": ("GRPO", GROUPS | {"importance_sampling_level": "sequence", "loss_type": "luspo"}),
    "rloo": ("RLOO", GROUPS | {"beta": 0.01}),
    "online_dpo": (
        "OnlineDPO",
        {"per_device_train_batch_size": 32, "max_new_tokens": TOKENS, "temperature": 1.0},
    ),
    "reinforce_pp": ("ReinforcePP", SINGLES),
    "reinforce_pp_baseline": ("ReinforcePP", GROUPS | {"baseline": "group"}),
    "ppo": ("PPO", SINGLES | {"num_iterations": 2, "steps_per_generation": 1, "beta": 0.01}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--runs", nargs="+", type=Path, help="draw the curves of these runs instead of training"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    curves = (
        {run.name: rewards_of(run) for run in args.runs} if args.runs else train(args.methods, args.steps)
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    name = "runs" if args.runs else "learning"
    (args.folder / f"{name}.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    (args.folder / f"{name}.svg").write_text(drawing(curves), encoding="utf-8")


def train(methods: Sequence[str], steps: int) -> dict[str, list[float]]:
    """Run each method and draw its curve."""
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        for name in methods:
            curves[name] = curve(name, model, Path(folder) / name, steps)
            first, last = ends(curves[name])
            print(f"{name:22} reward of the first tenth {first:.3f}, of the last {last:.3f}", flush=True)
    return curves


def rewards_of(run: Path) -> list[float]:
    """Mean reward of each log entry of a run, read from its last checkpoint."""
    from lockstep.run.files.checkpoints import TRAINER_STATE, last_checkpoint

    last = last_checkpoint(run)
    if last is None:
        raise SystemExit(f"{run} holds no checkpoint; give the output_dir of a run")
    history = json.loads((last / TRAINER_STATE).read_text(encoding="utf-8"))["log_history"]
    return [entry["reward"] for entry in history if "reward" in entry]


def make_model(folder: Path) -> str:
    """Save a Llama with two layers and random weights, whose vocabulary is the letters. Returns its directory."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<end>", "<?>", *LETTERS])}
    word_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<?>"))
    word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=None,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer, eos_token="<end>", unk_token="<?>"
    ).save_pretrained(folder)
    return str(folder)


def repeats(
    prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Any], **_: Any
) -> list[float]:
    """Share of a completion's tokens that are the letter its prompt names."""
    return [
        text.split().count(prompt) / len(ids)
        for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True)
    ]


def curve(name: str, model: str, folder: Path, steps: int) -> list[float]:
    """Mean reward of each generation of a run."""
    method, fields = METHODS[name]
    return [entry["reward"] for entry in logs(method, model, folder, steps, fields)]


def logs(
    method: str, model: str, folder: Path, steps: int, fields: Mapping[str, Any]
) -> list[Mapping[str, float]]:
    """Train, and return the log entries of the run, one per generation.

    Args:
        method: name of the trainer class without "Trainer".
        fields: fields of its config, in addition to the fields of all runs.
    """
    from datasets import Dataset

    import lockstep
    from lockstep.report.live import LogLines

    draw = random.Random(0)
    data = Dataset.from_dict({"prompt": [draw.choice(LETTERS) for _ in range(256)]})
    shared = {
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    shared |= {"report_to": [], "bf16": False, "use_vllm": False, "disable_tqdm": True}
    config = getattr(lockstep, f"{method}Config")(
        output_dir=str(folder), max_steps=steps, **{**shared, **fields}
    )
    trainer = getattr(lockstep, f"{method}Trainer")(
        model=model, reward_funcs=repeats, args=config, train_dataset=data
    )
    # No log lines of the run: this program prints one line per method.
    trainer.remove_callback(LogLines)
    trainer.train()
    trainer.close()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth."""
    tenth = max(len(rewards) // 10, 1)
    return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth


def drawing(curves: dict[str, list[float]]) -> str:
    """The curves as small pictures side by side: reward from 0 to 1 over generations."""
    rows = -(-len(curves) // _COLUMNS)
    size = f'width="{_COLUMNS * _WIDTH}" height="{rows * _HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    for place, (name, rewards) in enumerate(curves.items()):
        x, y = place % _COLUMNS * _WIDTH + 12, place // _COLUMNS * _HEIGHT + 22
        width, height = _WIDTH - 24, _HEIGHT - 36
        points = " ".join(
            f"{x + width * i / max(len(rewards) - 1, 1):.1f},{y + height * (1 - reward):.1f}"
            for i, reward in enumerate(rewards)
        )
        parts.append(
            f'<text x="{x}" y="{y - 6}">{name}: {ends(rewards)[0]:.2f} → {ends(rewards)[1]:.2f}</text>'
        )
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>')
        parts.append(f'<polyline points="{points}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
