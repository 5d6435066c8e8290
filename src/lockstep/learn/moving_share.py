"""The share of weights that one optimizer step can change, in the dtype in which they are stored.

It is computed from the policy and its learning rate, before training. A bf16 weight has few digits. If a step is
smaller than half the distance to the next bf16 number, the weight does not change. Trainer and engine still agree on
every weight, so no proof can find this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from lockstep.config.run import OnlineConfig
from lockstep.errors import InputError
from lockstep.report.alarms import Alarms

# Below this share almost nothing is learned, and the run is refused.
REFUSED_BELOW = 0.01


# Below this share many weights do not change, and an alarm is raised.
SAID_BELOW = 0.9


# Number of elements sampled per tensor. The standard deviation of the estimated share is at most 0.4 percentage points.
_SAMPLE = 16_384


# Prefixes of names of optimizers. Their first step changes an element by at most the learning rate, and later steps
# by little more. They do not store what rounding removed.
_BOUNDED = ("adamw_torch", "adamw_bnb", "adamw_8bit", "lion", "paged_adamw", "paged_lion")


def moving_share(parameters: Iterable[torch.Tensor], step: float) -> float:
    """Share of elements that change if `step` is added or taken away in their own dtype; 1 if there are none.

    Of a large tensor a sample of elements is used, the same sample each time.
    """
    moved = total = 0.0
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        if flat.numel() > _SAMPLE:
            flat = flat[torch.randint(flat.numel(), (_SAMPLE,), generator=generator).to(flat.device)]
        exact = flat.double()
        moves = ((exact + step).to(flat.dtype) != flat) | ((exact - step).to(flat.dtype) != flat)
        moved += float(moves.double().mean()) * parameter.numel() if flat.numel() else 0.0
        total += parameter.numel()
    return moved / total if total else 1.0


def check_steps_move(policy: PreTrainedModel, args: OnlineConfig, alarms: Alarms) -> None:
    """Refuse a run if rounding removes almost all of its weight changes; raise an alarm if it removes many of them.

    Only optimizers with bounded steps (AdamW, Lion) are checked. A learning rate of 0 is accepted, because the user
    chose it.
    """
    optimizer = str(getattr(args.optim, "value", args.optim))
    if not args.learning_rate or not optimizer.startswith(_BOUNDED):
        return
    trained = [p for p in policy.parameters() if p.requires_grad and p.is_floating_point()]
    share = moving_share(trained, args.learning_rate)
    if share >= SAID_BELOW:
        return
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained}))
    found = (
        f"one step at learning_rate={args.learning_rate:g} can move {share:.2%} of the trained weights: "
        f"they are held in {dtypes}, and a change of less than half the distance to the next such number is "
        "rounded away"
    )
    cure = (
        "leave dtype out of model_init_kwargs, so that weights are float32 (bf16=True still computes in "
        "bfloat16), or raise learning_rate"
    )
    if share < REFUSED_BELOW:
        raise InputError(f"{found}. Nothing would be learned; {cure}")
    alarms.tell("rounded_away", f"{found}. The others stand still, though every proof passes; {cure}")
