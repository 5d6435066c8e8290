"""`lockstep gateway`: runs an agent on every prompt of a dataset, and writes the rollouts with their ids.

Nothing is learned. It tries an agent before training, or makes rollouts for inspection. The engine, its weights and
every id are proven as in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
from lockstep.cli.fields import (
    AdaptedRunArguments,
    check_effect,
    check_inputs,
    check_sizes,
    decides_learning,
    read,
    said_of,
)
from lockstep.cli.help import fields_of
from lockstep.cli.training import load_config, refuse_adapter
from lockstep.config.option import option
from lockstep.errors import InputError
from lockstep.files import append_line, check_writable, temporary_folder
from lockstep.progress import busy, watched_by
from lockstep.safe_text import say

_EVALUATION = ("eval_size", "dataset_test_split", "num_generations_eval")


@dataclass
class GatewayArguments(AdaptedRunArguments):
    """The arguments of `lockstep gateway`."""

    rollouts_file: str = option(
        "rollouts.jsonl",
        "File to write the rollouts to, one JSON object per line.",
        group="tools",
        common=True,
    )


def run(words: list[str]) -> int:
    """Run the command.

    Raises:
        InputError: bad arguments, or no agent is named.
        LockstepError: the rollouts could not be made or proven.
    """
    given = read(words, "gateway")
    about = said_of(given, GatewayArguments)
    unused = [name for name, field in fields_of("gateway").items() if decides_learning(name, field)]
    where = "in lockstep gateway, which learns, saves and evaluates nothing"
    check_effect(about, given, [*unused, *_EVALUATION], where)
    check_sizes(about)
    if not given.dry_run:
        check_inputs(about)
        refuse_adapter(about)
        if about.agent is None and about.agent_command is None:
            raise InputError("agent is not set; give --agent file.py:name or --agent_command 'COMMAND …'")
        if Path(about.rollouts_file).exists():
            raise InputError(f"{about.rollouts_file} exists; give another --rollouts_file")
        check_writable(Path(about.rollouts_file))
    from lockstep.progress import StatusLine

    with watched_by(StatusLine()):
        loaded = load_config(given, lambda: lockstep.GRPOConfig, GatewayArguments)
        return 0 if loaded is None else _record(*loaded)


def _record(arguments: GatewayArguments, config: Any) -> int:
    from lockstep import GRPOTrainer
    from lockstep.cli.fields import data_of
    from lockstep.cli.training import acting_arguments
    from lockstep.run.files.rollouts import kind_in_json
    from lockstep.tasks.rewards import load_reward

    if config.world_size > 1:
        raise InputError("lockstep gateway runs in one process; start it without torchrun")
    # An agent may change the working directory.
    path = Path(arguments.rollouts_file).absolute()
    data, modules = data_of(arguments), {}  # type: ignore[var-annotated]
    rewards = [load_reward(name, modules) for name in arguments.reward_funcs or ()] or list(data.rewards)
    acting = acting_arguments(arguments, modules)
    assert arguments.model_name_or_path is not None
    groups = count = 0
    # A trainer makes its output directory. Nothing else is written there.
    with temporary_folder("lockstep-gateway-") as folder:
        config.output_dir, config.push_to_hub = str(folder), False
        with busy(f"loading {arguments.model_name_or_path}"):
            trainer = GRPOTrainer(
                arguments.model_name_or_path, rewards or None, args=config, train_dataset=data.train, **acting
            )
        try:
            with busy(f"making rollouts of {len(data.train)} rows", trainer.clock.progress):
                for group in trainer.each_rollout():
                    for line in lines_of(group):
                        # Nothing that was sampled is lost to a column that is not JSON, such as a picture.
                        append_line(path, json.dumps(line, ensure_ascii=False, default=kind_in_json))
                    groups, count = groups + 1, count + len(group.rollouts)
        finally:
            trainer.close()
    say(
        f"lockstep gateway: {count} rollouts of {groups} prompts are in {arguments.rollouts_file}", flush=True
    )
    return 0


def lines_of(group: Any) -> Iterator[dict[str, Any]]:
    """Each rollout of a group in JSON types: the ids of every branch, which of them were sampled, and log-probs."""
    for rollout in group.rollouts:
        yield {
            "prompt_id": rollout.key.prompt_id,
            "sample": rollout.key.sample,
            "row": {"prompt": group.prompt.source, **group.prompt.columns},
            "reward": rollout.reward if rollout.scored else None,
            "scores": dict(rollout.scores),
            "notes": dict(rollout.notes),
            "branches": [_branch(branch) for branch in rollout.branches],
        }


def _branch(branch: Any) -> dict[str, Any]:
    count = len(branch.token_ids)
    return {
        "prompt_ids": branch.prompt_ids.tolist(),
        "token_ids": branch.token_ids.tolist(),
        "sampled": [True] * count if branch.sampled is None else branch.sampled.tolist(),
        "logprobs": branch.logprobs.tolist(),
        "finish_reason": branch.finish_reason,
    }
