"""`lockstep completion SHELL`: prints a script with which bash or zsh completes commands, fields, choices and recipes.

The script holds all words, so that the shell starts no Python while somebody types. After an update of Lockstep it
must be printed again: `source <(lockstep completion bash)` in the start file of a shell does that.
"""

from __future__ import annotations

import shlex

from lockstep.cli.help import WordParser, fields_of, is_shown, recipe_names
from lockstep.safe_text import say

# Commands without fields, with their options.
_OWN = {
    "serve": "--host --port --key_file --dtype --cast_lm_head_to_fp32 --max_model_len --max_num_seqs "
    "--tensor_parallel_size "
    "--gpu_memory_utilization --dry_run",
    "audit": "--model --temperature --top_k --top_p --min_p --repetition_penalty --dtype --earlier --url "
    "--max_tokens --json",
    "init": "",
    "compare": "",
    "report": "--output",
    "rollouts": "--step --best --worst --text --all",
    "merge": "",
    "completion": "bash zsh",
}
_SCRIPT = """\
_lockstep() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={commands}
  else
    case "$before" in
{choices}
      --*) case "$word" in --*) ;; *) return ;; esac ;;
    esac
    [ -n "$words" ] || case "${{COMP_WORDS[1]}}" in
{fields}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _lockstep lockstep
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def run(words: list[str]) -> int:
    """Print the script.

    Raises:
        InputError: another shell.
    """
    parser = WordParser(prog="lockstep completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(words).shell
    say((_ZSH if shell == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """The script for bash."""
    from lockstep.cli.main import COMMANDS

    fields, choices = [], {"recipe": recipe_names()}
    for command in COMMANDS:
        if command in _OWN:
            options = _OWN[command]
        else:
            fields_there = fields_of("grpo" if command == "demo" else command)
            known = {name: field for name, field in fields_there.items() if is_shown(field)}
            options = " ".join(
                f"--{name}" for name in ("config", "recipe", "dry_run", "help", "help-all", *known)
            )
            choices |= {name: field["choices"] for name, field in known.items() if "choices" in field}
        fields.append(f"      {command}) words={shlex.quote(options)} ;;")
    return _SCRIPT.format(
        commands=shlex.quote(" ".join(COMMANDS)),
        choices="\n".join(
            f"      --{name}) words={shlex.quote(' '.join(said))} ;;" for name, said in choices.items()
        ),
        fields="\n".join(fields),
    )
