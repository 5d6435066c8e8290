"""What must stay the same when a run continues, and what a user may change meanwhile.

A command that continues a run compares its config with `run.json`. Numbers of the loss may be changed at the trainer
(`trainer.beta = 0.02`): the receipt has a line of each change, and a checkpoint keeps it. The loss and its proofs read
them from the config at every step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config.checks import check_number
from lockstep.config.contradictions import BY_METRIC
from lockstep.config.run import OnlineConfig
from lockstep.config.table import INHERITED, with_key
from lockstep.errors import InputError
from lockstep.learn.methods.objective import Objective
from lockstep.models.adapters import base_digest, causal_model, is_adapted, weights_digest
from lockstep.models.reward_model import RewardModel
from lockstep.rollouts.group import Prompt
from lockstep.rollouts.rewards import RewardScorer, Scorer
from lockstep.safe_text import is_secret_name, without_secrets
from lockstep.watch.code_digest import code_digest
from lockstep.watch.inputs import config_meaning, data_digest, model_meaning, surroundings, tokenizer_meaning
from lockstep.watch.settings import SettingsProof

# What the receipt calls the weights under an adapter.
BASE = "weights of the base model"
# Sizes that users of other libraries change when memory is short.
_SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
# A run may become longer. Its steps so far equal those of the longer run, unless the learning rate depends on the
# length.
_MAY_GROW = ("max_steps", "num_train_epochs")


def bookkeeping(kind: type = OnlineConfig) -> set[str]:
    """The fields of a config, and of the configs that extend it, that do not decide what a run learns."""
    own = {
        *with_key(kind, "bookkeeping"),
        *(name for name, said in INHERITED.items() if "bookkeeping" in said),
    }
    return own.union(*map(bookkeeping, kind.__subclasses__()))


def is_bookkeeping(name: str) -> bool:
    """Whether a field may change when a run continues. Fields with a secret may: they are never stored."""
    return name in bookkeeping() or is_secret_name(name)


def curve_settings(config: OnlineConfig) -> dict[str, Any]:
    """The fields that decide what a run learns, without secrets: a run may go on with another token, or with none."""
    kept = without_secrets(
        {name: value for name, value in asdict(config).items() if not is_bookkeeping(name)}
    )
    return kept | ({"processes": config.world_size} if config.world_size > 1 else {})


def model_inputs(
    policy: Any, tokenizer: Any, end_ids: tuple[int, ...], images: Any, reference: Any, *, own: bool
) -> dict[str, dict[str, Any]]:
    """What a run takes of models that its checkpoints do not have: the meaning of files, and digests of weights.

    Args:
        policy: the model that will be trained, as it was loaded.
        end_ids: the tokens that end a completion.
        images: the image processor; None: there is none.
        reference: a reference model of its own that stays as it is; None: there is none.
        own: whether the user has given it.
    """
    weights = {BASE: base_digest(policy)} if is_adapted(policy) else {}
    files = model_meaning(causal_model(policy), tokenizer, end_ids, images)
    if reference is not None:
        weights["weights of the reference model"] = weights_digest(reference)
        if own:
            files["config.json of the reference model"] = config_meaning(reference.config)
    return {"weights": weights, "files": files}


def run_inputs(
    data: Mapping[str, Sequence[Prompt]],
    code: Mapping[str, Any],
    config: OnlineConfig,
    model: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """What a run learns from, for its receipt: its data, the user's code, its settings, model and surroundings.

    Args:
        data: the prompts of each part of the data.
        code: objects of the user's that take part, by kind: one, several, or a mapping of them.
        model: from `model_inputs`.
    """
    found: dict[str, str] = {}
    files: dict[Path, str] = {}
    own = dict(model["files"])
    for kind, given in code.items():
        several = given.values() if isinstance(given, Mapping) else given
        alone = isinstance(given, str) or not isinstance(several, Iterable)
        for place, one in enumerate([given] if alone else several):
            if one is not None:
                name = getattr(one, "__name__", type(one).__name__)
                digest = code_digest(one)
                found[f"{kind} {name}" + (f" ({place + 1})" if f"{kind} {name}" in found else "")] = (
                    digest.objects
                )
                files |= digest.files
                if isinstance(one, RewardModel):
                    own |= {
                        f"config.json of reward model {name}": config_meaning(one.model.config),
                        f"tokenizer of reward model {name}": tokenizer_meaning(one.tokenizer),
                    }
    by_title: dict[str, list[str]] = {}
    for path, text in files.items():
        # Two files may have one name. Where they lie does not count.
        title = f"{path.parent.name}/{path.name}" if path.stem == "__init__" else path.name
        by_title.setdefault(title, []).append(text)
    found |= {f"your file {title}": " ".join(sorted(texts)) for title, texts in by_title.items()}
    settings = json.loads(json.dumps(curve_settings(config), default=str))
    return {
        "data": {f"{part} data": data_digest(prompts) for part, prompts in data.items()},
        "code": found,
        # The text of an object without one of its own has its address, which differs between processes.
        "settings": {name: value for name, value in settings.items() if " object at 0x" not in str(value)},
        "model": {**model, "files": own},
        "surroundings": surroundings(use_cpu=config.use_cpu),
    }


def has_other_base(starts: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> bool:
    """Whether an adapter lies on another base now than at the last of the starts up to its checkpoint."""
    (before, after) = ((inputs.get("model", {}).get("weights", {}).get(BASE)) for inputs in (starts[-1], now))
    return before is not None and before != after


def changed_fields(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields that must be equal in two runs and are not; `method` first, because methods differ in fields.

    `earlier` is the content of `run.json`. An older Lockstep may have stored more fields in it, and secrets.
    """
    earlier, now = _comparable(earlier), _comparable(now)
    names = {name for name in earlier.keys() | now.keys() if not is_bookkeeping(name)}
    changed = [name for name in names if earlier.get(name) != now.get(name) and not _grew(name, earlier, now)]
    return sorted(changed, key=lambda name: (name != "method", name))


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without secrets. A mapping that held nothing else is as one that was not given."""
    return {name: None if value == {} else value for name, value in without_secrets(settings).items()}


def memory_advice(changed: Iterable[str]) -> str:
    """What to do if a run was to need less memory; empty, or a sentence with a space at its end."""
    sizes = [name for name in changed if name in _SIZES]
    return (
        f"If it was to need less memory: keep {sizes[0]}, and lower token_budget, which a run may change. "
        if sizes
        else ""
    )


def device_advice(changed: Iterable[str], earlier: Mapping[str, Any]) -> str:
    """What to do if a run goes on on another device; empty, or a sentence with a space at its end."""
    if "bf16" not in changed:
        return ""
    return f"If the device has changed: bf16 follows the device where it is not set; set it to {earlier.get('bf16')}. "


def longer(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields whose new values make a run longer."""
    # If max_steps is set, the number of epochs has no effect.
    names = _MAY_GROW[:1] if now.get("max_steps", -1) > 0 else _MAY_GROW
    return [name for name in names if _grew(name, earlier, now)]


def follows_length(settings: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a step depends on the number of steps of the run."""
    name = str(settings.get("lr_scheduler_type", ""))
    return not name.startswith("constant") and name not in (*BY_METRIC, "inverse_sqrt")


def _grew(name: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    before, after = earlier.get(name), now.get(name)
    # max_steps is -1 if the number of epochs decides the length.
    return name in _MAY_GROW and None not in (before, after) and 0 < before < after  # type: ignore[operator]


class Changes:
    """Numbers of the loss that the user has changed during the run.

    Attributes:
        made: the changes that a resumed run must make again, by field of the config.
        weights: (K,) weights of the K rewards, which a user may write into; empty with a judge.
    """

    def __init__(self, objective: Objective, scorer: Scorer, settings: SettingsProof) -> None:
        self._objective, self._scorer, self._settings = objective, scorer, settings
        self.made: dict[str, Any] = {}
        self.weights = torch.tensor(self._used_weights, dtype=torch.float32)

    @property
    def _used_weights(self) -> list[float]:
        return list(self._scorer.weights) if isinstance(self._scorer, RewardScorer) else []

    @property
    def weights_differ(self) -> bool:
        """Whether a user has written into the weights since they were taken."""
        return self.weights.tolist() != torch.tensor(self._used_weights, dtype=torch.float32).tolist()

    def make(self, field: str, value: Any) -> Any:
        """Change a field. Returns its earlier value."""
        before: Any
        made: Any
        if field == "reward_weights":
            before, made = self._used_weights, self._reweigh(value)
        else:
            made = _number(type(self._objective.config), field, value)
            before = self._entropy_coef(made) if field == "entropy_coef" else self._set(field, made)
        if made != before:
            self.made[field] = made
        return before

    def state(self) -> dict[str, Any]:
        """The changes, in JSON types."""
        return self.made

    def load_state(self, state: dict[str, Any]) -> None:
        """Make the changes of a checkpoint again."""
        for field, value in state.items():
            # The adaptive coefficient is a part of the objective's own state.
            if field != "entropy_coef" or not self._objective.config.use_adaptive_entropy:
                self.make(field, value)
        self.made = dict(state)

    def _set(self, field: str, value: float) -> Any:
        objective, config = self._objective, self._objective.config
        before = getattr(config, field)
        if field == "beta":
            if isinstance(before, list):
                raise InputError(
                    "trainer.beta cannot be changed: Online DPO has one beta per epoch; set beta in the config"
                )
            if not objective.uses_reference or value == 0.0:
                raise InputError(
                    f"trainer.beta={value:g}: whether there is a reference model is decided when the "
                    f"trainer is made, and beta was {before:g} then; set beta in the config"
                )
        setattr(config, field, value)
        return before

    def _entropy_coef(self, value: float) -> float:
        if not self._objective.entropy_gradient:
            raise InputError(
                f"trainer.entropy_coef={value:g}: the run was made without an entropy bonus; set "
                "entropy_coef or use_adaptive_entropy in the config"
            )
        return self._objective.set_entropy_coef(value)  # type: ignore[attr-defined]

    def _reweigh(self, value: Any) -> list[float]:
        try:
            weights = [float(weight) for weight in value]
        except (TypeError, ValueError) as error:
            raise InputError(f"reward_weights={value!r:.80}; it must be a list of numbers") from error
        count = len(self._used_weights)
        if not weights or len(weights) != count or not all(map(math.isfinite, weights)):
            raise InputError(
                f"reward_weights={weights}; this run takes one finite number for each of its {count} rewards"
            )
        assert isinstance(self._scorer, RewardScorer)
        self._scorer.weights[:] = weights
        self._objective.config.reward_weights = weights
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self._settings.wanted = replace(self._settings.wanted, reward_weights=tuple(weights))
        return weights


def _number(kind: type, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{field}={value!r:.80}; it must be a number")
    check_number(kind, field, value)
    return float(value)
