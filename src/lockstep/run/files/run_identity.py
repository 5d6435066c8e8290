"""Which configuration fields must stay the same when a run continues, and which may change.

The fields come from the config of a training command. They are stored in `run.json` in the run's directory. A later
command that continues the run compares its own config with `run.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.models.adapters import causal_model, is_adapted
from lockstep.models.base_digest import base_digest, weights_digest
from lockstep.models.reward_model import RewardModel
from lockstep.rollouts.group import Prompt
from lockstep.secret import is_secret_name, without_secrets
from lockstep.training.config.contradictions import BY_METRIC
from lockstep.training.config.online_config import OnlineConfig
from lockstep.training.config.options import INHERITED, with_key
from lockstep.watch.code_digest import code_digest
from lockstep.watch.inputs import data_digest
from lockstep.watch.model_inputs import config_meaning, model_meaning, tokenizer_meaning
from lockstep.watch.surroundings import surroundings

# What the receipt calls the weights under an adapter.
BASE = "weights of the base model"
# Sizes that users of other libraries change when memory is short.
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
# A run may become longer. Its steps so far equal those of the longer run, unless the learning rate depends on the length.
_MAY_GROW = ("max_steps", "num_train_epochs")


def bookkeeping(kind: type = OnlineConfig) -> set[str]:
    """The fields of a config, and of the configs that extend it, that do not decide what a run learns.

    All other fields are part of the run's identity.
    """
    own = {*with_key(kind, "bookkeeping"), *(name for name, said in INHERITED.items() if "bookkeeping" in said)}
    return own.union(*map(bookkeeping, kind.__subclasses__()))


def is_bookkeeping(name: str) -> bool:
    """Whether a field may change when a run continues. This includes fields that hold a secret: they are never stored."""
    return name in bookkeeping() or is_secret_name(name)


def curve_settings(config: OnlineConfig) -> dict[str, Any]:
    """The fields that decide what a run learns, without secrets. A run can continue only with the same values, or with more steps
    or epochs. A token is not one of them: a run may go on with another one, or with none."""
    kept = without_secrets({name: value for name, value in asdict(config).items() if not is_bookkeeping(name)})
    return kept | ({"processes": config.world_size} if config.world_size > 1 else {})


def model_inputs(
    policy: Any, tokenizer: Any, end_ids: tuple[int, ...], images: Any, reference: Any, *, own: bool
) -> dict[str, dict[str, Any]]:
    """What a run takes of models that its checkpoints do not bring back: the meaning of their files, and digests of weights.

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
    data: Mapping[str, Sequence[Prompt]], code: Mapping[str, Any], config: OnlineConfig, model: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What a run learns from, for its receipt: digests of its data and of the user's code, its settings, model and surroundings.

    Args:
        data: the prompts of each part of the data.
        code: functions and other objects of the user's that take part, by kind: one, several, or a mapping of them.
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
                found[f"{kind} {name}" + (f" ({place + 1})" if f"{kind} {name}" in found else "")] = digest.objects
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
    """Whether an adapter lies on another base than when its checkpoint was written.

    Args:
        starts: the inputs of the starts up to the checkpoint.
        now: those of this run.
    """
    (before, after) = ((inputs.get("model", {}).get("weights", {}).get(BASE)) for inputs in (starts[-1], now))
    return before is not None and before != after


def changed_fields(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields that must be equal in two runs and are not. `method` is first, because methods differ in their fields.

    Args:
        earlier: the content of `run.json`. An older version of Lockstep may have stored more fields in it, and secrets.
    """
    earlier, now = _comparable(earlier), _comparable(now)
    names = {name for name in earlier.keys() | now.keys() if not is_bookkeeping(name)}
    changed = [name for name in names if earlier.get(name) != now.get(name) and not _grew(name, earlier, now)]
    return sorted(changed, key=lambda name: (name != "method", name))


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without secrets. A mapping that held nothing else is as one that was not given."""
    return {name: None if value == {} else value for name, value in without_secrets(settings).items()}


def memory_advice(changed: Iterable[str]) -> str:
    """What to do if a run was to need less memory; empty, or a sentence with a space at its end.

    Args:
        changed: names of what has changed.
    """
    sizes = [name for name in changed if name in _SIZES]
    return (
        f"If it was to need less memory: keep {sizes[0]}, and lower token_budget, which a run may change. "
        if sizes
        else ""
    )


def device_advice(changed: Iterable[str], earlier: Mapping[str, Any]) -> str:
    """What to do if a run goes on on another device; empty, or a sentence with a space at its end.

    Args:
        changed: names of what has changed.
        earlier: the run's settings until now.
    """
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
