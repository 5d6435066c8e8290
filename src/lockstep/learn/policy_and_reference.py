"""The models of a run: the policy with its tokenizer, opened for engine and trainer, and the reference model.

The reference model is a copy of the initial policy, which may follow the policy slowly, or the base model under an
adapter. Every generation is scored with it once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.run import OnlineConfig
from lockstep.config.sampling import check_end_of_thinking, check_leaves_tokens
from lockstep.errors import InputError
from lockstep.learn.attention.flex import ASKED, adopt_flex_attention
from lockstep.learn.attention.tree import adopt_tree_attention, is_flash
from lockstep.model_files import load_files
from lockstep.models.adapters import REFERENCE, causal_model, is_adapted, with_adapter, without_adapter
from lockstep.models.arithmetic import check_kernels
from lockstep.models.policy import (
    check_finite,
    check_held,
    load_policy,
    modules_with_dropout,
    switch_off_dropout,
    vision_parts,
)
from lockstep.models.quantised import check_quantization, prevent_packing
from lockstep.models.resolve import at_revision, resolve_model
from lockstep.tokens.chat import (
    directory_end_ids,
    embedding_rows,
    end_ids,
    fit_vocabulary,
    guard_tokenizer,
    load_tokenizer,
)
from lockstep.weights.push import weights_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """A policy, its tokenizer, and the directory or hub id from which an engine loads the same model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str


def open_policy(
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: Any,
    args: OnlineConfig,
    quantization_config: Any = None,
) -> OpenedPolicy:
    """Load a policy or use a loaded one, add its adapter, switch its dropout off, and let it attend within trees.

    Args:
        model: name, directory or hub id, or a loaded model with its source in `config.name_or_path`.
        tokenizer: None: the tokenizer of the model.
        peft_config: configuration of a new adapter on the model.
        quantization_config: loads the base weights in 4 bits (QLoRA). It may also be part of `args.model_init_kwargs`.

    Raises:
        InputError: model and tokenizer cannot be loaded or do not fit each other, the adapter cannot be sent to any
            engine, weights are NaN or infinite, or a setting of `args` does not fit the model.
        ProofError: FlexAttention is selected, and its results differ from SDPA's.
    """
    path = resolve_model(model if isinstance(model, str) else model.config.name_or_path)
    if isinstance(model, str):
        path = at_revision(path, (args.model_init_kwargs or {}).get("revision"))  # type: ignore[union-attr]
    elif args.model_init_kwargs and args.process_index == 0:
        _logger.warning("model_init_kwargs have no effect: the model is loaded already")
    guarded = guard_tokenizer(tokenizer) if tokenizer is not None else load_tokenizer(path)
    check_end_of_thinking(args, guarded)
    if isinstance(model, str):
        _check_leaves_tokens(path, guarded, args)
    else:
        own = causal_model(model)
        check_leaves_tokens(args, guarded, embedding_rows(own), end_ids(own, guarded))
    if isinstance(model, str):
        policy = load_policy(path, _init_kwargs(args, quantization_config, peft_config))
    elif quantization_config is not None:
        raise InputError(
            "quantization_config is for a model that is loaded here; give the model's name, or leave it out"
        )
    else:
        policy = model
    check_held(f"model {path}", causal_model(policy))
    check_finite(f"model {path}", policy.named_parameters())
    prevent_packing(policy)
    fit_vocabulary(policy, guarded)
    policy = with_adapter(policy, peft_config, seed=args.seed)
    if args.freeze_vision_tower:
        _freeze_vision_tower(policy)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise InputError(
            f"model {path}: all its parameters are frozen (requires_grad=False), so there is nothing to train: call "
            "model.requires_grad_(True), or give a peft_config"
        )
    if args.use_liger_kernel:
        check_kernels(causal_model(policy), args.liger_kernel_config or {})  # type: ignore[arg-type]
    if not args.disable_dropout and (found := modules_with_dropout(policy)):
        raise InputError(
            f"disable_dropout=False: {found[0]} has dropout, and the policy that is trained must be the one "
            "that sampled; leave disable_dropout out"
        )
    switch_off_dropout(policy)
    _adopt_attention(causal_model(policy), args)
    # This call refuses an adapter that cannot be sent to any engine, before an engine is started.
    weights_of(policy)
    return OpenedPolicy(policy, guarded, path)


def _check_leaves_tokens(path: str, tokenizer: PreTrainedTokenizerBase, args: OnlineConfig) -> None:
    """Check what may be sampled before a model is loaded, from its config."""
    try:
        vocabulary = load_files(AutoConfig, path).get_text_config().vocab_size
    except (OSError, ValueError):
        # Who loads the model says what is wrong with it.
        return
    ends = [i for i in directory_end_ids(path, tokenizer) if i < vocabulary]
    check_leaves_tokens(args, tokenizer, vocabulary, ends)


def _freeze_vision_tower(policy: PreTrainedModel) -> None:
    """Train nothing of the vision tower and its projector, also no adapter in them."""
    parts = vision_parts(causal_model(policy))
    if not parts:
        raise InputError(
            "freeze_vision_tower: the model has no vision tower that Lockstep knows; leave it out"
        )
    for part in parts:
        part.requires_grad_(False)
    if not any(p.requires_grad for p in policy.parameters()):
        raise InputError(
            "freeze_vision_tower leaves nothing to train: the adapter is in the vision tower alone; leave "
            "it out, or give peft_config modules of the language part"
        )


def _adopt_attention(model: PreTrainedModel, args: OnlineConfig) -> None:
    asked = model.config._attn_implementation
    if is_flash(asked):
        _tell_of_flash(asked, args)
    if asked == ASKED:
        adopt_flex_attention(model, args.device, torch.bfloat16 if args.bf16 else model.dtype)
    else:
        adopt_tree_attention(model)


def _tell_of_flash(asked: str, args: OnlineConfig) -> None:
    if args.process_index == 0:
        advice = "" if args.device.type == "cpu" else "; flex_attention is the fast one for them on a GPU"
        _logger.warning(
            f"attn_implementation={asked} becomes sdpa, which computes the same attention: completions "
            f"share their prompt in a pack, and FlashAttention has no mask for that{advice}"
        )


def _init_kwargs(args: OnlineConfig, quantization_config: Any, peft_config: Any) -> dict[str, Any]:
    given: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    # The path is already that of the revision.
    given.pop("revision", None)
    if is_flash(asked := given.get("attn_implementation")):
        _tell_of_flash(asked, args)
        given["attn_implementation"] = "sdpa"
    if quantization_config is not None:
        if "quantization_config" in given:
            raise InputError(
                "quantization_config is given twice: to the trainer, and in model_init_kwargs; leave one out"
            )
        given["quantization_config"] = quantization_config
    check_quantization(given.get("quantization_config"), peft_config)
    return given


FILE = "reference.safetensors"
# Before the names of the weights of a separate reference model.
OF_REFERENCE = "reference."


class Reference:
    """The reference model. The KL divergence of the policy is measured against it.

    Args:
        policy: the model to train. If it has an adapter, the reference is the model without the adapter and needs no
            memory.
        given: another model to use, already checked.

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
        """The weights of a separate reference model, by name; empty if there is none."""
        return (
            {f"{OF_REFERENCE}{n}": p for n, p in self._own.named_parameters()}
            if self._own is not None
            else {}
        )

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
    """Check that the model without its adapter is the initial policy, and that training does not change it."""
    inner = causal_model(policy)
    base = [
        name
        for name, p in policy.named_parameters()
        if p.requires_grad and ".lora_" not in name and ".modules_to_save." not in name
    ]
    if base:
        raise InputError(
            f"{base[0]} is trained beside the adapter, so that the model without its adapter would not stay "
            "the reference; use bias='none', or give ref_model"
        )
    probe = torch.arange(8, device=inner.device)[None] % inner.get_input_embeddings().weight.shape[0]
    with without_adapter(policy):
        before = inner(input_ids=probe, use_cache=False).logits
    now = inner(input_ids=probe, use_cache=False).logits
    if REFERENCE not in policy.peft_config and not torch.allclose(before, now, rtol=1e-3, atol=1e-3):
        raise InputError(
            "the adapter is not at its start (it has been trained, or init_lora_weights moves the base), so "
            "that the model without it is not the policy that training begins from; give ref_model, or a "
            f"frozen copy of the adapter named {REFERENCE!r}"
        )
