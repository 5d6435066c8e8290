"""Writes and reads checkpoints whole: what is missing, cut, edited, or of another run is one error that names the file.

If the file of an optimizer, a schedule or random numbers is missing, `transformers.Trainer` silently starts with new
ones. It also keeps its own values of weights that a file lacks. `watch/resume.py` has the proof.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, rotate_checkpoints

from lockstep.errors import InputError, LockstepError, writing
from lockstep.files import replacing, what_is_at
from lockstep.models.adapters import is_adapted, write_base
from lockstep.models.policy import BAD_FILES, first_line, load_renamed
from lockstep.progress import busy
from lockstep.rollouts.ranks import Ranks
from lockstep.run.files import checkpoints
from lockstep.run.files.checkpoints import MethodState
from lockstep.run.files.directory import other_time
from lockstep.run.files.identity import BASE, changed_fields, device_advice, has_other_base, memory_advice
from lockstep.run.source import RolloutSource
from lockstep.shards.files import SHARDS, read_optimizer, read_weights, write_shards
from lockstep.watch.inputs import changed_inputs, changed_surroundings, check_inputs, check_surroundings
from lockstep.watch.optimizer_settings import Taken, taken_of
from lockstep.watch.ranks import check_shards
from lockstep.watch.receipt import DIGESTS, RECEIPT
from lockstep.watch.resume import (
    TRAINER_STATE,
    check_best,
    check_loaded,
    check_written,
    memory_digests,
    seal,
    weight_digests,
)
from lockstep.weights.source import PlainSource

_logger = logging.getLogger(__name__)

_WHAT_NOW = (
    "Nothing was changed. Put a good copy back, or rename this checkpoint to go on from the one before"
)


class WholeCheckpoints(Trainer):
    """Checks each file of a checkpoint when the base class reads it, and writes digests when the base class writes it.

    Attributes:
        inputs: the run's data, code and settings (`run/files/identity.py`), for the receipt; empty on ranks without
            the engine.
        resumed_from: the checkpoint from which this call of `train` goes on; None: it starts from the beginning.
        checked: a checkpoint that was compared with its digests just now, and the `start` line of its receipt. The
            next `train` goes on from it; without it, `train` compares the checkpoint itself.
    """

    ranks: Ranks
    source: RolloutSource
    inputs: dict[str, Any]
    resumed_from: Path | None = None
    checked: tuple[Path, dict[str, Any]] | None = None
    # What the receipt says about the optimizer of a resumed run, and the fields of the config that have changed since.
    _resumed_with: tuple[Taken, Sequence[str]] = (Taken(None, []), ())
    # Whether the base under the adapter is another one than that of the checkpoint.
    _has_other_base: bool = False
    _digests: Mapping[str, str] = {}
    # The folder in the output directory in which a checkpoint is being written; empty at other times.
    _staging = ""
    _method_state: MethodState

    def trained_by_name(self) -> dict[str, Any]:
        """The modules that a checkpoint must bring back, each under a name."""
        raise NotImplementedError

    def check_resume(self, asked: Any) -> None:
        """Check the checkpoint that `resume_from_checkpoint` names, and that the run's inputs are those of then."""
        self._resumed_with, self._has_other_base, self.resumed_from = (Taken(None, []), ()), False, None
        if not asked:
            if (clock := self.args.template_clock).is_earlier and clock.was_read and self.ranks.owner:
                _logger.warning(
                    "the chat template contains the time, and the prompts have that of the earlier run in "
                    f"{self.args.output_dir} ({clock.moment:%Y-%m-%d %H:%M:%S}): give another output_dir "
                    "for a new run of today"
                )
            return
        if asked is True and self.args.output_dir is not None:
            self.ranks.on_owner("damaged checkpoints", lambda: _without_damaged(Path(self.args.output_dir)))
        folder = _named(asked, self.args.output_dir)

        def check() -> tuple[list[dict[str, Any]], list[str], bool]:
            receipt = folder.parent / RECEIPT
            if not receipt.exists():
                # The checkpoint was copied, for example from the hub.
                receipt = folder / RECEIPT
            known, self.checked = self.checked, None
            start = (
                known[1]
                if known and known[0] == folder
                else checkpoints.check_checkpoint(folder, checkpoints.checkpoint_step(folder), receipt)
            )
            earlier = start["inputs"]
            changed = [
                *changed_inputs(earlier, self.inputs),
                *changed_fields(earlier["settings"], self.inputs["settings"]),
            ]
            hint = (
                other_time(earlier, self.args.template_clock, folder)
                if earlier["data"] != self.inputs["data"]
                else ""
            )
            hint += memory_advice(changed) + device_advice(changed, earlier["settings"])
            check_inputs(changed, accept=self.args.resume_with_changes, hint=hint)
            check_surroundings(
                changed_surroundings(earlier.get("surroundings", {}), self.inputs["surroundings"]),
                bitwise=self.args.full_determinism or torch.are_deterministic_algorithms_enabled(),
                accept=self.args.resume_with_changes,
            )
            if changed:
                self.inputs["changed"] = changed
            if folder.parent.resolve() == Path(self.args.output_dir or ".").resolve():
                checkpoints.keep_logs_of_lost(folder.parent, checkpoints.checkpoint_step(folder))
            here = Path(self.args.output_dir or ".") / RECEIPT
            if not here.exists():
                # The run goes on in another directory. Its chain goes on there too.
                here.parent.mkdir(parents=True, exist_ok=True)
                with replacing(here) as file:
                    file.write(receipt.read_bytes())
            lines = checkpoints.optimizer_lines(receipt, checkpoints.checkpoint_step(folder))
            return (
                lines,
                changed,
                has_other_base([entry["inputs"] for entry in lines if "inputs" in entry], self.inputs),
            )

        entries, changed, self._has_other_base = self.ranks.from_owner("checkpoint", check, list, tuple)
        self._resumed_with, self.resumed_from = (taken_of(entries, changed), changed), folder

    # ---- write ------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = Path(self.args.output_dir or ".") / f"checkpoint-{self.state.global_step}"
        folder = checkpoints.staging_place(checkpoint)

        def guarded(save: Callable[[], None]) -> None:
            with checkpoints.guarded_save(checkpoint.parent, self.state.global_step):
                save()

        def save_state() -> None:
            if not self.ranks.owner:
                self._save_rng_state(str(folder))

        # The owner writes last, and gives the checkpoint its name when everything is on the disk.
        with ExitStack() as held:
            held.enter_context(busy(f"saving {folder.name}"))
            self.ranks.on_owner(
                "staging", lambda: held.enter_context(checkpoints.staged_checkpoint(checkpoint))
            )
            if self.ranks.passes is not None:
                self._write_shards(folder, guarded)
            if self.ranks.count > 1:
                self.ranks.share("checkpoint", lambda: guarded(save_state))
            self.ranks.on_owner("save", lambda: guarded(lambda: self._save_whole(model, trial, checkpoint)))

    def _write_shards(self, folder: Path, guarded: Callable[[Callable[[], None]], None]) -> None:
        """Write the parts of all ranks, and digest the whole tensors. Every rank calls."""
        passes = self.ranks.passes
        assert passes is not None
        check_shards(self.ranks, [*self.trained_by_name().values()], self.state.global_step)
        self.ranks.share(
            "shards",
            lambda: guarded(lambda: write_shards(folder / SHARDS, self._named(), self._inner(), passes)),
        )
        (self._digests, *_) = self.ranks.share("digests", lambda: dict(self._memory()))

    def _named(self) -> dict[str, Any]:
        named = {
            f"{title}.{n}": p for title, m in self.trained_by_name().items() for n, p in m.named_parameters()
        }
        # The base of an adapter is not in a checkpoint.
        adapted = is_adapted(self.trained_by_name()["policy"])
        return {name: p for name, p in named.items() if p.requires_grad or not adapted}

    def _inner(self) -> Any:
        # accelerate wraps the optimizer.
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for `from_pretrained`. If it is sharded, every rank calls, and the owner collects it."""
        if self.ranks.passes is None:
            # A save of a checkpoint has more to say (`guarded_save`).
            folder = Path(output_dir or self.args.output_dir or ".")
            with nullcontext() if _internal_call else writing("the model", folder):
                super().save_model(output_dir, _internal_call)
        elif not _internal_call:
            self.ranks.on_owner("export", lambda: super(WholeCheckpoints, self).save_model(output_dir))
        elif self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            # The last checkpoint of a run is also a model that others can load.
            super().save_model(output_dir, _internal_call)
        else:
            for part in (self.trained_by_name()["policy"].config, self.processing_class):
                part.save_pretrained(output_dir)

    def _load_best_model(self) -> None:
        if self.ranks.passes is not None:
            raise InputError("load_best_model_at_end is not supported with FSDP yet; leave it out")
        best = Path(self.state.best_model_checkpoint)
        self._check_best()
        if not load_renamed(self.model, best):
            super()._load_best_model()
        if (best / DIGESTS).is_file():
            check_loaded(best, weight_digests(self.trained_by_name()), only="policy.")

    def _check_best(self) -> None:
        """Compare the best checkpoint so far with the scheduled evaluations in the log."""
        args, state = self.args, self.state
        metric = args.best_metric
        if metric is None or state.best_global_step is None:
            return
        by_step = args.eval_strategy == IntervalStrategy.STEPS
        scheduled = [
            entry
            for entry in state.log_history
            if entry["step"]
            and (entry["step"] % state.eval_steps == 0 if by_step else entry["epoch"] % 1 == 0)
        ]
        better = bool(args.greater_is_better)
        check_best(scheduled, metric, state.best_metric, state.best_global_step, greater_is_better=better)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.ranks.passes is not None:
            # The owner, inside a call of `Ranks`: the other ranks play along.
            policy = self.trained_by_name()["policy"]
            source, named = PlainSource(policy), dict(policy.named_parameters())
            kept = [name for name, p in named.items() if p.requires_grad or not is_adapted(policy)]
            state_dict = {name: source.tensor(name).cpu() for name in kept}
        super()._save(output_dir, state_dict)
        if is_adapted(policy := self.trained_by_name()["policy"]):
            digest = self.inputs["model"]["weights"][BASE]
            write_base(Path(output_dir or self.args.output_dir or "."), policy, digest)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.ranks.passes is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            # The optimizer's state is in the shards.
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_whole(self, model: Any, trial: Any, checkpoint: Path) -> None:
        folder, args = checkpoints.staging_place(checkpoint), self.args
        self._method_state.save(folder)
        self._staging = checkpoints.UNFINISHED
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = ""
        if self._name_best():
            self.state.save_to_json(str(folder / TRAINER_STATE))
        checkpoints.publish(checkpoint)
        if args.push_to_hub:
            super()._push_from_checkpoint(str(checkpoint))
        rotate_checkpoints(
            str(checkpoint.parent), args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
        )

    def _get_output_dir(self, trial: Any) -> str:
        # The base class asks where a checkpoint's folder goes.
        found: str = super()._get_output_dir(trial)
        return str(Path(found) / self._staging) if self._staging else found

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # A checkpoint that is being written is uploaded after it is complete.
        if not self._staging:
            super()._push_from_checkpoint(checkpoint_folder)

    def _name_best(self) -> bool:
        """Let the trainer's state name the best checkpoint by its final place; returns whether it has changed."""
        best = self.state.best_model_checkpoint
        if best is None or Path(best).parent.name != checkpoints.UNFINISHED:
            return False
        self.state.best_model_checkpoint = str(Path(best).parents[1] / Path(best).name)
        return True

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.ranks.owner:
            # After this file the base class writes only the trainer's state.
            self._name_best()
            memory = self._memory() if self.ranks.passes is None else self._digests
            check_written(Path(output_dir), memory, (self.args.seed, self.state.global_step, 7))
            self._check_best()
            digests = seal(Path(output_dir), memory, asdict(self.state))
            self.source.proofs.note_checkpoint(self.state.global_step, digests)
            shutil.copyfile(Path(self.args.output_dir or ".") / RECEIPT, Path(output_dir) / RECEIPT)

    # ---- read -------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder, is_sharded = Path(resume_from_checkpoint), self.ranks.passes is not None
        if (folder / SHARDS).is_dir() != is_sharded:
            raise InputError(
                f"checkpoint {folder} is of a run {'without' if is_sharded else 'with'} FSDP, and this run "
                f"is one {'with' if is_sharded else 'without'} it; resume with the same setting"
            )
        with whole(folder, "the weights"):
            if is_sharded:
                read_weights(folder / SHARDS, self._named())
            elif not load_renamed(model or self.model, folder):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        with whole(folder, "the method's state"):
            self._method_state.load(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with whole(checkpoint, "optimizer.pt or scheduler.pt"):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None and self.ranks.passes is not None:
                read_optimizer(Path(checkpoint) / SHARDS, self._named(), self._inner())
                self.lr_scheduler.load_state_dict(
                    torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
                )
        if checkpoint is not None:
            (memory, *_) = (
                self.ranks.share("loaded", lambda: dict(self._memory()))
                if self.ranks.passes
                else (self._memory(),)
            )
            check_loaded(Path(checkpoint), memory, self._taken_anew(memory))

    def _taken_anew(self, memory: Mapping[str, str]) -> list[str]:
        """Names of the tensors of another base under the adapter (`resume_with_changes`)."""
        if not self._has_other_base:
            return []
        saved = self._named()
        return [name for name in memory if name.startswith("policy.") and name not in saved]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with whole(checkpoint, "the state of random numbers"):
            super()._load_rng_state(checkpoint)

    def _memory(self) -> Mapping[str, str]:
        return memory_digests(self.trained_by_name(), self.optimizer, self.lr_scheduler)


def _without_damaged(output_dir: Path) -> None:
    checkpoints.finish_replacement(output_dir)
    checkpoints.set_damaged_aside(output_dir)


def _named(asked: Any, output_dir: str | None) -> Path:
    """The checkpoint that `train(resume_from_checkpoint=…)` names."""
    if asked is True:
        found = None if output_dir is None else checkpoints.last_checkpoint(output_dir)
        if found is None:
            raise InputError(
                f"resume_from_checkpoint: there is no checkpoint in {output_dir}; leave it out to start "
                "from the beginning"
            )
        return found
    if not isinstance(asked, str | Path):
        raise InputError(
            f"resume_from_checkpoint is {asked!r:.80}; it must be True or the directory of a checkpoint"
        )
    if what_is_at(Path(asked) / TRAINER_STATE) != "is a file":
        raise InputError(f"resume_from_checkpoint: {asked} is not a checkpoint (it has no {TRAINER_STATE})")
    return Path(asked)


@contextmanager
def whole(checkpoint: str | Path | None, what: str) -> Iterator[None]:
    """Turn the errors of libraries that read a checkpoint into one that names it."""
    try:
        yield
    except LockstepError:
        raise
    except BAD_FILES as error:
        raise InputError(
            f"{what} of checkpoint {checkpoint} cannot be read: {first_line(error)}. {_WHAT_NOW}"
        ) from error
