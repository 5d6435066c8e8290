"""The state that a method keeps between steps in addition to the policy, and its files in a checkpoint.

The trainer saves this state in its checkpoints. A resumed run loads it, and must then give bitwise the same results as a run
without a break. If a checkpoint lacks a file that the method needs, loading raises an error, because the results would differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import InputError
from lockstep.files import replace_text
from lockstep.run.files.changes import Changes
from lockstep.training.data.prompt_order import PromptOrder
from lockstep.training.forward.reference import FILE as REFERENCE
from lockstep.training.forward.reference import Reference
from lockstep.training.methods.objective import Objective

CRITIC, OBJECTIVE, PROMPTS = "value_head.safetensors", "objective.json", "prompts.json"
CHANGES = "changes.json"


@dataclass(frozen=True, slots=True)
class MethodState:
    """The parts of the state that the base class does not save.

    Attributes:
        moving_reference: the reference model, if it follows the policy; else None. A fixed reference model is not saved, because
            a resumed run creates it again.
        critic: the value head; None if there is none.
        changes: what the user has changed at the trainer.
    """

    objective: Objective
    moving_reference: Reference | None
    critic: torch.nn.Module | None
    order: PromptOrder
    changes: Changes

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint, before the base class saves: its last file marks the checkpoint as complete."""
        folder.mkdir(parents=True, exist_ok=True)
        if state := self.objective.state():
            replace_text(folder / OBJECTIVE, json.dumps(state))
        if solved := self.order.state():
            replace_text(folder / PROMPTS, json.dumps(solved))
        if changed := self.changes.state():
            replace_text(folder / CHANGES, json.dumps(changed))
        if self.critic is not None:
            save_file(self.critic.state_dict(), folder / CRITIC)
        if self.moving_reference is not None:
            self.moving_reference.save(folder)

    def load(self, folder: Path) -> None:
        """Load the state from a checkpoint.

        Raises:
            InputError: the checkpoint lacks a file.
        """
        if self.objective.state():
            self.objective.load_state(
                json.loads(_there(folder / OBJECTIVE, "the method's state").read_text(encoding="utf-8"))
            )
        if self.order.state():
            self.order.load_state(
                json.loads(_there(folder / PROMPTS, "the prompts that are solved").read_text(encoding="utf-8"))
            )
        if (changed := folder / CHANGES).is_file():
            self.changes.load_state(json.loads(changed.read_text(encoding="utf-8")))
        if self.critic is not None:
            self.critic.load_state_dict(load_file(_there(folder / CRITIC, "the value head")))
        if self.moving_reference is not None:
            _there(folder / REFERENCE, "the reference model, which follows the policy")
            self.moving_reference.load(folder)


def _there(path: Path, what: str) -> Path:
    if not path.is_file():
        raise InputError(
            f"checkpoint {path.parent} has no {path.name} ({what}): it is of a run with another method or other settings, or was "
            "copied in part; resume from one that has the file, or start from the beginning"
        )
    return path
