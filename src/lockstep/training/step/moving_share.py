"""The share of weights that one optimizer step can move, in the dtype that they are held in.

Comes from: the policy and its learning rate, before training. A weight has few digits in bf16: it stands still where a step is
below half the distance to its neighbours. Trainer and engine then still agree on every weight, so that no proof could tell.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.training.config.online_config import OnlineConfig

# Below this share training does nothing that anybody would wait for: it is refused.
REFUSED_BELOW = 0.01
# Below this share more is lost than rounding: it is said.
SAID_BELOW = 0.9
# Elements that are looked at, of each tensor; their share is known to within 0.4 % (one standard deviation of the worst case).
_SAMPLE = 16_384
# Beginnings of the names of optimizers whose first step moves an element by the learning rate at most (later ones by little more),
# and that keep no rest of what was rounded away.
_BOUNDED = ("adamw_torch", "adamw_bnb", "adamw_8bit", "lion", "paged_adamw", "paged_lion")


def moving_share(parameters: Iterable[torch.Tensor], step: float) -> float:
    """Share of elements that change when `step` is added to or taken from them, in their own dtype; 1 where there are none.

    Args:
        parameters: the trained tensors; of a large one, a sample of elements that is the same each time.
        step: how far an optimizer step would move each element.
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


def check_steps_move(policy: PreTrainedModel, args: OnlineConfig) -> None:
    """Refuse a run whose steps would be rounded away, and say where most of them would.

    Only for optimizers whose steps have a bound (AdamW, Lion); a learning rate of 0 is taken at its word.

    Raises:
        InputError: less than 1 % of the trained weights can move.
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
        f"one step at learning_rate={args.learning_rate:g} can move {share:.2%} of the trained weights: they are held in {dtypes}, "
        "and a change of less than half the distance to the next such number is rounded away"
    )
    cure = (
        "leave dtype out of model_init_kwargs, so that weights are float32 (bf16=True still computes in bfloat16), or raise "
        "learning_rate"
    )
    if share < REFUSED_BELOW:
        raise InputError(f"{found}. Nothing would be learned; {cure}")
    if args.process_index == 0:
        print(f"lockstep: {found}. The others stand still, though every proof passes; {cure}", flush=True)
