"""`lockstep init FOLDER`: writes a commented config and a reward file, which run at once and wait to be changed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from shlex import quote

from lockstep.cli.help import WordParser
from lockstep.errors import InputError
from lockstep.files import replace_text
from lockstep.safe_text import say

CONFIG, REWARDS = "config.yaml", "rewards.py"

_CONFIG = """\
# A run of GRPO. Start it with:   lockstep grpo --config {config}
# Every line can be overridden, for example with --max_steps 10. `lockstep grpo --help` lists the common fields, and
# `lockstep grpo --config {config} --dry_run` prints the value of every field.

# The policy: smollm2-135m-instruct (small enough for a CPU), a directory of a saved model, or a hub id such as Qwen/Qwen3-0.6B.
model_name_or_path: smollm2-135m-instruct

# The data: a .jsonl, .csv or .parquet file, a directory of `datasets`, or a hub id. It needs a column `prompt`, which holds text or
# a list of messages. The reward functions get the other columns. `arithmetic` is built in, with the columns `prompt` and `answer`.
dataset_name: arithmetic
train_size: 1000          # of your own data: the largest number of rows; 0 takes all
eval_size: 100            # rows that are held out for the evaluation before and after training

# The reward: a function in a file, as FILE:FUNCTION. Several functions are added up.
reward_funcs: [{reward}]

# Per step: per_device_train_batch_size completions, which is num_generations for each prompt. Here, 16 prompts with 8 completions.
num_generations: 8
per_device_train_batch_size: 128
max_completion_length: 8  # tokens; answers of your own task may need hundreds
max_steps: 40

learning_rate: 5.0e-6
lr_scheduler_type: constant_with_warmup
warmup_steps: 8

# What is written, and where. An interrupted run goes on from its last checkpoint if the same command is started again.
output_dir: {output}
logging_steps: 1
save_steps: 20
save_total_limit: 2
seed: 1
"""  # noqa: E501

_REWARDS = '''\
"""The reward of {config}. Try it alone first:  python {rewards}"""

import re


def right_answer(completions, answer, **columns):
    """One number per completion: 1 for the right number and nothing else, 0.5 if more text stands around it, 0 otherwise.

    `completions` holds one conversation per completion, a list with the message of the model; with prompts that are plain text it
    holds texts. `answer` is a column of the data, with one entry per completion. A reward of None leaves a completion out.
    """
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [score(text.strip(), right) for text, right in zip(texts, answer, strict=True)]


def score(text, right):
    if text == right:
        return 1.0
    return 0.5 if re.findall(r"-?\\d+", text) == [right] else 0.0


if __name__ == "__main__":
    print(right_answer(["58", "It is 58.", "31"], ["58", "58", "58"]))
'''  # noqa: E501


def run(words: list[str]) -> int:
    """Write the two files and print the commands that use them.

    Raises:
        InputError: a file is there already, or the folder cannot be written to.
    """
    parser = WordParser(prog="lockstep init", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="where to write; default: here"
    )
    folder = Path(parser.parse_args(words).folder)
    config, rewards = folder / CONFIG, folder / REWARDS
    for path in (config, rewards):
        if path.exists():
            raise InputError(f"{path} exists; give another folder")
    if not str(folder).isprintable():
        raise InputError(f"folder {str(folder)!r} has characters that cannot be printed")
    typed = quote(str(config))
    output = Path("runs") / (folder.resolve().name or "first")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # JSON strings are YAML strings too.
        reward = json.dumps(f"{rewards}:right_answer", ensure_ascii=False)
        replace_text(
            config,
            _CONFIG.format(config=typed, reward=reward, output=json.dumps(str(output), ensure_ascii=False)),
        )
        replace_text(rewards, _REWARDS.format(config=config, rewards=quote(str(rewards))))
    except OSError as error:
        # With one of the two files, the same command would refuse the folder.
        with suppress(OSError):
            for path in (config, rewards):
                path.unlink(missing_ok=True)
            if is_new:
                folder.rmdir()
        raise InputError(f"folder {folder} cannot be used: {error}") from error
    say(f"wrote {config} and {rewards}. They run as they are:")
    say(f"  lockstep grpo --config {typed} --dry_run      every field with its value")
    say(
        f"  lockstep verify --config {typed}              does the trainer agree with the engine on this model?"
    )
    say(f"  lockstep grpo --config {typed}                train")
    return 0
