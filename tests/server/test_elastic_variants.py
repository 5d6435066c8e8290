"""Servers that join and leave, in runs of other kinds: generations ahead, changed elements over gloo, adapters alone.

`test_elastic_servers.py` has the runs that CI makes. Their loop and their proofs are the same as here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import pytest
from conftest import VLLM
from forked import Program
from long_schedule import newest
from server_runs import equal, make_trainer, train
from servers import free_port, serve
from test_elastic_servers import Steps, changes_of, server_counts
from test_long_schedule import curve, final_weights

from lockstep.run.trainers.methods import GRPOTrainer
from lockstep.watch.receipt import read_receipt

pytestmark = [*VLLM, pytest.mark.release, pytest.mark.usefixtures("server_key")]


def run(
    model: str, folder: Path, *arguments: str, dtype: str = "float32", **changes: Any
) -> tuple[GRPOTrainer, Any]:
    """A run of seven steps on one server; a second joins at step 1, the first leaves at 3, and joins at 5."""
    file = folder / "servers.txt"
    with (
        serve(model, folder, *arguments, dtype=dtype) as first,
        serve(model, folder, *arguments, dtype=dtype) as second,
    ):

        def named(*urls: str) -> Callable[[GRPOTrainer, ExitStack], object]:
            return lambda *_: file.write_text("\n".join(urls))

        file.write_text(first.url)
        steps = Steps(
            {1: named(first.url, second.url), 3: named(second.url), 5: named(first.url, second.url)}
        )
        settings = {"vllm_server_url_file": str(file), "max_steps": 7, "logging_steps": 1, **changes}
        trainer = make_trainer(model, folder / "run", None, **settings)
        train(trainer, steps)
    assert trainer.state.global_step == 7
    assert trainer.source.losses == 0
    assert server_counts(trainer) == [1, 2, 2, 1, 1, 2, 2]
    assert [(line["joined"], list(line["left"]), line["refused"]) for line in changes_of(folder / "run")] == [
        ([second.url], [], {}),
        ([], [first.url], {}),
        ([first.url], [], {}),
    ]
    return trainer, (steps, first.url, second.url)


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def test_a_server_that_leaves_finishes_what_it_samples_ahead(untied_dir: str, tmp_path: Path) -> None:
    trainer, (steps, _, second) = run(
        untied_dir, tmp_path, max_staleness=2, vllm_importance_sampling_correction=True
    )
    assert max(logged(trainer, "staleness/max")) >= 1
    assert steps.answered[-1] | steps.answered[-2] >= {second}
    lines = [line for line in read_receipt(tmp_path / "run" / "receipt.jsonl") if line["kind"] == "step"]
    assert all(
        line["sampled_tokens"] == line["checked_tokens"] + line["stale_tokens"] + line["aside_tokens"]
        for line in lines
    )


def test_the_push_after_a_join_sends_changed_elements_to_all_servers(untied_dir: str, tmp_path: Path) -> None:
    few = {"bf16": True, "learning_rate": 1e-6, "vllm_weight_transport": "gloo", "vllm_weight_deltas": True}
    trainer, (steps, first, second) = run(untied_dir, tmp_path, dtype="bfloat16", **few)
    assert steps.in_full == [""] * 7
    assert steps.answered == [
        {first},
        {first, second},
        {first, second},
        {second},
        {second},
        *[{first, second}] * 2,
    ]
    sent = logged(trainer, "push/bytes")
    whole = sum(p.numel() for p in trainer.trained_by_name()["policy"].parameters()) * 2
    # The first generation is pushed as the start's proof was: nothing has changed.
    assert sent[0] == 0
    assert 0 < max(sent) < whole / 2


def test_a_server_that_joins_gets_base_and_adapter_under_the_name_that_requests_use(
    untied_dir: str, tmp_path: Path
) -> None:
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    arguments = "--enable_lora", "--max_lora_rank", "8"
    trainer, (steps, first, second) = run(
        untied_dir, tmp_path, *arguments, peft_config=lora, vllm_enable_lora=True
    )
    assert steps.answered == [
        {first},
        {first, second},
        {first, second},
        {second},
        {second},
        *[{first, second}] * 2,
    ]
    assert max(logged(trainer, "parity/mean_abs_gap")) < 1e-5


REWARDS = """
def score(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def test_two_ranks_go_on_with_the_servers_that_the_first_one_has(untied_dir: str, tmp_path: Path) -> None:
    """A server joins while both ranks train, and the other one leaves, by the file that only rank 0 reads."""
    (rewards := tmp_path / "rewards.py").write_text(REWARDS)
    file, last = tmp_path / "servers.txt", 24

    def ranks(name: str) -> Program:
        fields = {
            "model_name_or_path": untied_dir, "dataset_name": "arithmetic", "train_size": "64", "bf16": "false",
            "reward_funcs": f"{rewards}:score", "output_dir": str(tmp_path / name), "vllm_server_url_file": str(file),
            "vllm_importance_sampling_correction": "false", "per_device_train_batch_size": "4", "num_generations": "4",
            "max_completion_length": "16", "max_steps": str(last), "learning_rate": "1e-3", "logging_steps": "1",
            "save_steps": "1", "save_total_limit": "2",
        }  # fmt: skip
        words = [word for key, value in fields.items() for word in (f"--{key}", value)]
        launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
        command = [sys.executable, "-m", *launcher, "-m", "lockstep.cli.main", "grpo", *words]
        with (tmp_path / f"{name}.log").open("w") as out:
            return Program(command, stdout=out, stderr=out, env=dict(os.environ))

    def await_step(name: str, step: int, program: Program) -> None:
        deadline = time.monotonic() + 300
        while newest(tmp_path / name) < step:
            assert program.poll() is None, (tmp_path / f"{name}.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with serve(untied_dir, tmp_path) as first, serve(untied_dir, tmp_path) as second:
        file.write_text(first.url)
        assert ranks("whole").wait(400) == 0
        program = ranks("changed")
        try:
            await_step("changed", 2, program)
            file.write_text(f"{first.url}\n{second.url}\n")
            await_step("changed", 8, program)
            file.write_text(second.url)
            assert program.wait(400) == 0, (tmp_path / "changed.log").read_text()[-3000:]
        finally:
            program.kill()
    joined, left = changes_of(tmp_path / "changed")
    assert (joined["joined"], list(left["left"])) == ([second.url], [first.url])
    assert joined["step"] < left["step"] < last
    assert equal(final_weights(tmp_path / "whole", last), final_weights(tmp_path / "changed", last))
    assert curve(tmp_path / "whole") == curve(tmp_path / "changed")
