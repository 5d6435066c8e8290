"""`lockstep COMMAND …`: finds and runs the command, and turns every expected error into one line and an exit code.

Exit codes: 0 done, 1 the run or a proof failed, 2 bad input, 130 interrupted (SIGINT), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Callable

import lockstep
from lockstep import extensions
from lockstep.cli.help import asks_for_help, help_text, underscored
from lockstep.cli.output import code_of, open_streams
from lockstep.cli.process import EndAtOnce, split_in_two, start_anew_with_tunables
from lockstep.errors import InputError, Interrupted, LockstepError, did_you_mean, one_line, shortened
from lockstep.extensions import load
from lockstep.safe_text import complain, say

TRAINING = ("grpo", "rloo", "online-dpo", "reinforce-pp", "ppo")
COMMANDS = {
    "demo": "train a 135M model on this machine, in minutes (grpo --recipe arithmetic)",
    "grpo": "train with GRPO",
    "rloo": "train with RLOO",
    "online-dpo": "train with Online DPO",
    "reinforce-pp": "train with REINFORCE++",
    "ppo": "train with PPO",
    "serve": "run vLLM's own server for training, behind a key (lockstep serve MODEL)",
    "gateway": "run an agent on a dataset and write its rollouts with their ids, without learning",
    "evaluate": "sample held-out problems with a model, and print its mean reward",
    "report": "make a run's report again, or put several runs side by side (lockstep report RUN [RUN ...])",
    "verify": "prove that trainer and engine agree on a model, before a long run",
    "audit": "judge the rollouts of another program: tokens, weights, log-probs and draws",
    "init": "write a commented config and a reward file to start from",
    "compare": "show two or more runs side by side",
    "rollouts": "page through the rollouts of a run",
    "merge": "add an adapter to its model, and write the whole model",
    "completion": "print a script with which bash or zsh completes commands and fields",
}
# Functions of commands that do not stand in `run` of a module of their own.
_WHERE = {
    "compare": "lockstep.cli.past_runs:compare_runs",
    "report": "lockstep.cli.past_runs:report_again",
    "rollouts": "lockstep.cli.past_runs:page_rollouts",
    "evaluate": "lockstep.cli.training:evaluate",
    "merge": "lockstep.cli.merge:run",
}
# What they make lies in files. The lines of the others are their result.
_MAKES_FILES = (*TRAINING, "demo", "serve", "gateway", "init", "report", "merge")
# They have few arguments and no fields.
_LIGHT = ("init", "report", "compare", "rollouts", "completion")
_WITH_OWN_HELP = ("serve", "merge", "audit", *_LIGHT)
_USAGE = """usage: lockstep COMMAND [--config FILE | --recipe NAME] [--field value …]

commands:
{commands}

lockstep COMMAND --help lists a command's fields; lockstep alone says what to do next.
"""
_DEMO = ("grpo", "--recipe", "arithmetic")
_DEMO_HELP = """usage: lockstep demo [--field value …]

Trains SmolLM2-135M-Instruct with GRPO to say which of two numbers is larger. It is the same as

    lockstep grpo --recipe arithmetic [--field value …]

and takes the same fields: lockstep grpo --help lists them. For a run of a minute: lockstep demo --max_steps 5 --eval_size 20
"""  # noqa: E501
_FIRST_PAGE = """Lockstep {version}: online RL for language models in which trainer and engine provably agree

what to do next
  see it learn, in minutes, on this machine
      lockstep demo
  prove that trainer and engine agree on your model
      lockstep verify --model DIRECTORY_OR_HUB_ID
  train on your own data with your own reward
      lockstep init mine              (writes mine/config.yaml and mine/rewards.py)
      lockstep grpo --config mine/config.yaml
  look at finished runs
      lockstep compare runs/one runs/two
      lockstep rollouts runs/one
  judge the rollouts of a run of another program
      lockstep audit rollouts.jsonl --model DIRECTORY
  see where a run's gap between trainer and engine comes from
      lockstep verify --explain runs/one

lockstep --help lists the commands, lockstep grpo --help the fields of one.
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line, by default the one of this process; returns the exit code."""
    # Libraries read these variables at import. Their progress bars would hide the run's own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # PEFT imports bitsandbytes if it is installed. On a CPU with AVX-512 it then warns about missing inference kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if argv is not None:
        _print_anything()
        return _main(argv, is_process=False)
    words = sys.argv[1:]
    given = [underscored(word) for word in words[1:]]
    ending = None
    if words and words[0] in COMMANDS and words[0] not in _LIGHT and not asks_for_help(given):
        start_anew_with_tunables()
        ending = EndAtOnce()
    trains = bool(words) and words[0] in (*TRAINING, "demo") and "--dry_run" not in given
    open_streams("the run goes on, and its figures are in metrics.jsonl of its directory" if trains else "")
    try:
        code = _main(words, is_process=True)
    except SystemExit as stop:
        # argparse ends the program after it has printed a help text.
        if not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    code = code_of(code, is_result=not words or words[0] not in _MAKES_FILES or "--dry_run" in given)
    if ending is not None:
        ending.code = code
        ending.leave_threads()
    return code


def _print_anything() -> None:
    """Let both streams replace characters that they cannot encode, such as ± on a terminal that is set to ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _main(words: list[str], *, is_process: bool) -> int:
    if not words:
        say(_FIRST_PAGE.format(version=lockstep.__version__), end="")
        return 0
    if words[0] in ("-h", "--help", "help"):
        say(
            _USAGE.format(commands="\n".join(f"  {name:<14}{about}" for name, about in COMMANDS.items())),
            end="",
        )
        return 0
    if words[0] in ("-V", "--version", "version"):
        say(f"lockstep {lockstep.__version__}")
        return 0
    if words[0] not in COMMANDS:
        complain(f"lockstep: {_no_command(words[0])}")
        return 2
    given = [underscored(word) for word in words[1:]]
    if words[0] == "demo":
        if asks_for_help(given):
            say(_DEMO_HELP, end="")
            return 0
        words = [*_DEMO, *words[1:]]
    if words[0] not in _WITH_OWN_HELP and asks_for_help(given):
        say(help_text(words[0], COMMANDS[words[0]], given), end="")
        return 0
    if is_process and words[0] in TRAINING:
        split_in_two()
    return _guarded(lambda: _run(words[0], words[1:]))


def _run(command: str, words: list[str]) -> int:
    if command not in _LIGHT:
        from lockstep.private_caches import use_private_caches

        use_private_caches()
    if command in TRAINING:
        from lockstep.cli.training import train

        return train(command, words)
    return load(extensions.COMMANDS.get(command, _WHERE.get(command, f"lockstep.cli.{command}:run")))(words)


_TRAINS = f"'lockstep {TRAINING[0]}' trains, and so do {', '.join(TRAINING[1:])}"
# What other programs call a command, or have and Lockstep has not.
_OTHER_COMMANDS = {
    **dict.fromkeys(("train", "run", "fit", "rl", "trainer", "finetune", "launch"), _TRAINS),
    **dict.fromkeys(
        ("sft", "dpo", "kto", "reward", "orpo"),
        f"Lockstep trains with rollouts of the model itself: {_TRAINS}",
    ),
    **dict.fromkeys(("eval", "test", "benchmark"), "'lockstep evaluate' samples held-out problems"),
    **dict.fromkeys(("check", "doctor", "env", "info"), "'lockstep verify' checks a model on this machine"),
    **dict.fromkeys(
        ("resume", "continue"), "the command of the run ('lockstep grpo …') goes on from its last checkpoint"
    ),
    **dict.fromkeys(("generate", "chat", "rollout"), "'lockstep serve' answers requests"),
}


def _no_command(word: str) -> str:
    if word.startswith("--"):
        return f"there is no command before {word}, as in lockstep grpo {word} …; there is: {', '.join(COMMANDS)}"
    if word in _OTHER_COMMANDS:
        return f"no command {word!r}; {_OTHER_COMMANDS[word]}"
    return f"no command {word!r}; {did_you_mean(word, COMMANDS) or 'there is: ' + ', '.join(COMMANDS)}"


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except Interrupted as error:
        complain(f"lockstep: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        complain("lockstep: stopped at once")
        return 130
    except InputError as error:
        # Messages of other libraries may have several lines.
        complain(f"lockstep: {shortened(one_line(error) + _NOWHERE * _is_nowhere())}")
        return 2
    except LockstepError as error:
        complain(f"lockstep: {error}")
        return 1
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:
            # Python says so of the working directory and of `tempfile`.
            complain(f"lockstep: {_missing_folder()}")
            return 2
        complain(f"lockstep: {shortened(one_line(error))}")
        return 2 if error.errno == errno.ENAMETOOLONG else 1


_NOWHERE = "; the working directory has been deleted: go to another one"


def _missing_folder() -> str:
    if _is_nowhere():
        return _NOWHERE.removeprefix("; ")
    return (
        "no folder for temporary files can be written to: make room, or set TMPDIR to a folder that has some"
    )


def _is_nowhere() -> bool:
    try:
        return not os.getcwd()
    except FileNotFoundError:
        return True


if __name__ == "__main__":
    sys.exit(main())
