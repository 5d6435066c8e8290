"""What a method keeps from one step to the next beside the policy, and how a checkpoint holds it.

Comes from: the trainer's checkpoints. Goes to: the run that is resumed, which must go on to the bit. A file that a method needs and
a checkpoint lacks is an error: without it the run would go on as another one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import InputError
from lockstep.training.data.prompt_order import PromptOrder
from lockstep.training.forward.reference import FILE as REFERENCE
from lockstep.training.forward.reference import Reference
from lockstep.training.methods.objective import Objective

CRITIC, OBJECTIVE, PROMPTS = "value_head.safetensors", "objective.json", "prompts.json"


@dataclass(frozen=True, slots=True)
class MethodState:
    """The parts that the base class does not know of.

    Attributes:
        moving_reference: the reference, where it follows the policy; one that stands still is made anew.
        critic: the value head, where there is one.
    """

    objective: Objective
    moving_reference: Reference | None
    critic: torch.nn.Module | None
    order: PromptOrder

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint, before the base class does: the base class's state makes a checkpoint whole."""
        folder.mkdir(parents=True, exist_ok=True)
        if state := self.objective.state():
            (folder / OBJECTIVE).write_text(json.dumps(state))
        if solved := self.order.state():
            (folder / PROMPTS).write_text(json.dumps(solved))
        if self.critic is not None:
            save_file(self.critic.state_dict(), folder / CRITIC)
        if self.moving_reference is not None:
            self.moving_reference.save(folder)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            InputError: it lacks a file.
        """
        if self.objective.state():
            self.objective.load_state(json.loads(_there(folder / OBJECTIVE, "the method's state").read_text()))
        if self.order.state():
            self.order.load_state(json.loads(_there(folder / PROMPTS, "the prompts that are solved").read_text()))
        if self.critic is not None:
            self.critic.load_state_dict(load_file(_there(folder / CRITIC, "the value head")))
        if self.moving_reference is not None:
            _there(folder / REFERENCE, "the reference model, which follows the policy")
            self.moving_reference.load(folder)


def _there(path: Path, what: str) -> Path:
    if not path.is_file():
        raise InputError(
            f"checkpoint {path.parent} has no {path.name} ({what}): it is of a run with another method or other settings, or was "
            "copied in part; resume from one that has the file, or start anew"
        )
    return path
