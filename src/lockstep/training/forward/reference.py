"""The reference model: a copy of the initial policy, which may follow the policy slowly, or the base model under an adapter.

It is made from the policy before training. Every generation is scored with it once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.models.adapters import REFERENCE, causal_model, is_adapted, without_adapter
from lockstep.training.forward.attention.tree_attention import adopt_tree_attention

FILE = "reference.safetensors"


class Reference:
    """The reference model. The KL divergence of the policy is measured against it.

    Args:
        policy: the model to train. If it has an adapter, the reference is the model without the adapter and needs no memory.
        given: another model to use (`run/trainers/setup/arguments.py` has checked it).

    Raises:
        InputError: the policy's adapter cannot be switched off, or the base model is not the initial policy.
    """

    def __init__(self, policy: PreTrainedModel, given: PreTrainedModel | None = None) -> None:
        self._policy = policy
        self._own: PreTrainedModel | None = given
        if given is None and not is_adapted(policy):
            self._own = copy.deepcopy(policy)
        if self._own is not None:
            self._own.requires_grad_(False).eval()
            adopt_tree_attention(causal_model(self._own))
        else:
            # The check runs here, before the first rollouts cost time.
            _check_base_is_reference(policy)

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """A context that gives the reference as a model for scoring."""
        if self._own is not None:
            yield self._own
            return
        with without_adapter(self._policy):
            yield causal_model(self._policy)

    @property
    def own(self) -> PreTrainedModel | None:
        """The separate reference model; None if the reference is the policy without its adapter."""
        return self._own

    @property
    def own_weights(self) -> dict[str, torch.Tensor]:
        """The weights of a separate reference model, by name; empty if the reference is the policy without its adapter."""
        return {f"reference.{n}": p for n, p in self._own.named_parameters()} if self._own is not None else {}

    def to(self, device: torch.device) -> None:
        """Move the reference to the trainer's device if it is a separate model."""
        if self._own is not None:
            self._own.to(device)

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Set the reference to `share` × policy + (1 − share) × reference (TR-DPO, arXiv 2404.09656)."""
        assert self._own is not None
        trained = dict(self._policy.named_parameters())
        for name, mine in self._own.named_parameters():
            mine.lerp_(trained[name].detach().to(mine.device, mine.dtype), share)

    def save(self, folder: Path) -> None:
        """Save the reference in the folder of a checkpoint, if it is a separate model."""
        if self._own is not None:
            save_model(self._own, str(folder / FILE))

    def load(self, folder: Path) -> None:
        """Load the reference that `save` has written."""
        if self._own is not None:
            load_model(self._own, str(folder / FILE))


@torch.no_grad()
def _check_base_is_reference(policy: PreTrainedModel) -> None:
    """Check that the model without its adapter is the initial policy, and that training does not change it.

    Raises:
        InputError: the adapter has been trained already, its output is not zero, or base weights are trained too.
    """
    inner = causal_model(policy)
    base = [
        name
        for name, p in policy.named_parameters()
        if p.requires_grad and ".lora_" not in name and ".modules_to_save." not in name
    ]
    if base:
        raise InputError(
            f"{base[0]} is trained beside the adapter, so that the model without its adapter would not stay the reference; use "
            "bias='none', or give ref_model"
        )
    probe = torch.arange(8, device=inner.device)[None] % inner.get_input_embeddings().weight.shape[0]
    with without_adapter(policy):
        before = inner(input_ids=probe, use_cache=False).logits
    now = inner(input_ids=probe, use_cache=False).logits
    if REFERENCE not in policy.peft_config and not torch.allclose(before, now, rtol=1e-3, atol=1e-3):
        raise InputError(
            "the adapter is not at its start (it has been trained, or init_lora_weights moves the base), so that the model without "
            f"it is not the policy that training begins from; give ref_model, or a frozen copy of the adapter named {REFERENCE!r}"
        )
