"""The memory of a run is counted exactly before its models load, said in one line, and refused if it cannot fit."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from methods import FIELDS, lora, make
from tiny import make_model, save, save_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    TrainerCallback,
)

from benchmarks.plan import run as plan
from lockstep import GRPOConfig
from lockstep.config.run import OnlineConfig
from lockstep.contract.protocol import Engine
from lockstep.errors import InputError
from lockstep.learn import memory, scoring
from lockstep.learn.attention.tree import adopt_tree_attention
from lockstep.learn.memory import LargestForward, LayerShape, Room, RunMemory, RunModels
from lockstep.learn.pack import pack_sequences
from lockstep.learn.scoring import score_pack
from lockstep.learn.sequence import TrainingSequence
from lockstep.models.quantised import is_quantised
from lockstep.run.trainers import online

GIB = 2**30
CPU = Room(torch.device("cpu"), "this machine", 64 * GIB)


def gpu(size: float) -> Room:
    return Room(torch.device("cuda", 0), "cuda:0 (pretend GPU)", int(size))


@pytest.fixture(autouse=True)
def tiny_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORTH_COUNTING", 10**18)


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = Qwen3MoeConfig(
        vocab_size=384, hidden_size=64, moe_intermediate_size=32, intermediate_size=64, num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, eos_token_id=0,
    )  # fmt: skip
    return str(save(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("models") / "experts"))


def config_of(folder: Path, **fields: Any) -> GRPOConfig:
    given = {
        "use_vllm": False,
        "bf16": False,
        "report_to": "none",
        "max_completion_length": 8,
        "num_generations": 2,
    }
    return GRPOConfig(output_dir=str(folder), per_device_train_batch_size=2, **{**given, **fields})


def sizes(found: RunMemory) -> dict[str, int]:
    return {part.name: part.size for part in found.parts}


# ---- exact -------------------------------------------------------------------------------------------------------


def held(tensors: Any) -> int:
    """Bytes of storages. Each is counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None
    }
    return sum(storages.values())


def states_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, and what bitsandbytes keeps beside its codes."""
    found = [p.data for p in module.parameters()] + list(module.buffers())
    for state in (p.quant_state for p in module.parameters() if is_quantised(p)):  # type: ignore[attr-defined]
        found += [state.absmax, state.code]
        found += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return found


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GRPO": ("untied", {"beta": 0.1}, {}),
    "GRPO, tied": ("tied", {"beta": 0.1, "optim": "adafactor"}, {}),
    "GRPO, weights in bf16": ("untied", {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": True}, {}),
    "GRPO, experts": ("experts", {"optim": "adamw_torch"}, {}),
    "GRPO, moments in 8 bits": ("untied", {"optim": "adamw_8bit"}, {}),
    "RLOO, no moments": ("untied", {"optim": "sgd", "beta": 0.0}, {}),
    "PPO": ("untied", {"beta": 0.1}, {}),
    "GRPO, LoRA": ("tied", {"beta": 0.1}, {"peft_config": lora()}),
    "GRPO, QLoRA": (
        "untied",
        {},
        {
            "peft_config": lora(),
            "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_the_bytes_that_the_run_allocates(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    kind, fields, arguments = CASES[case]
    method, model = case.split(",")[0], request.getfixturevalue(f"{kind}_dir")
    counted: list[RunMemory] = []
    count = memory.memory_of_run

    def counting(*given: Any) -> RunMemory:
        counted.append(count(*given))
        return counted[-1]

    monkeypatch.setattr(memory, "memory_of_run", counting)
    run = make(method, model, tmp_path, None, {**FIELDS[method], "use_vllm": False, **fields}, **arguments)  # type: ignore[arg-type]

    # What a step does to the memory, without the step.
    optimizer = run.create_optimizer()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    weights = held([*(p.data for p in run.model.parameters() if p.requires_grad), *run.model.buffers()])
    allocated = {
        "weights": weights,
        "frozen weights": held(states_of(run.model)) - weights,
        "value head": held(run.critic.parameters()) if run.critic is not None else 0,
        "gradients": held(p.grad for p in trained),
        "moments": sum(
            v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
        ),
        "reference": held(states_of(reference))
        if (reference := getattr(run.reference, "own", None)) is not None
        else 0,
        "engine": held(states_of(run.engine.model)),
    }
    run.close()
    (found,) = counted
    assert sizes(found) == {name: size for name, size in allocated.items() if size}
    assert "weights" in sizes(found)


def test_the_gradients_of_a_real_step_are_those_that_were_counted(
    untied_dir: str, tmp_path: Path, hf_engine: Engine
) -> None:
    seen: list[int] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            seen.append(held(p.grad for p in model.parameters()))

    run = make(
        "GRPO", untied_dir, tmp_path, hf_engine, {**FIELDS["GRPO"], "max_steps": 1}, callbacks=[Look()]
    )
    run.train()
    found = sizes(memory.memory_of_run(run.config, RunModels(untied_dir, own_engine=True), CPU))
    moments = [v for s in run.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert seen == [found["gradients"]]
    assert sum(v.nbytes for v in moments) == found["moments"]


def test_a_reward_model_and_the_engine_of_transformers_are_counted_as_they_are_loaded(
    untied_dir: str, tmp_path: Path, hf_engine: Any
) -> None:
    scorer = AutoModelForSequenceClassification.from_config(
        Qwen2Config(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, num_labels=1), dtype=torch.bfloat16
    )  # fmt: skip
    scorer.save_pretrained(tmp_path / "scorer")
    found = memory.memory_of_run(
        config_of(tmp_path),
        RunModels(untied_dir, rewards=[len, str(tmp_path / "scorer")]),
        gpu(64 * GIB) if torch.cuda.is_available() else CPU,
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer", dtype="auto")
    assert sizes(found)["reward models"] == held(states_of(loaded))
    assert sizes(found)["engine"] == held(states_of(hf_engine.model))


def test_the_plan_of_a_cluster_counts_the_same_bytes_per_parameter(untied_dir: str, tmp_path: Path) -> None:
    found = sizes(memory.memory_of_run(config_of(tmp_path), RunModels(untied_dir, own_engine=True), CPU))
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(untied_dir).parameters())
    assert sum(found.values()) / parameters == pytest.approx(plan._STATE_BYTES, rel=1e-2)


def test_shards_are_the_largest_that_a_rank_holds(tied_dir: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_dir)
    buffers = sum(b.nbytes for b in model.buffers())
    largest = sum(-(-p.shape[0] // 5) * p[0].nbytes for p in model.parameters())
    assert memory.weight_bytes(model, 5) == largest + buffers
    assert memory.weight_bytes(model) == sum(p.nbytes for p in model.parameters()) + buffers


# ---- on a GPU, by arithmetic
# ---------------------------------------------------------------------------------------------


def big_dir(folder: Path) -> str:
    """The config of a model of 0.5 billion parameters. There are no weights."""
    Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def test_vllm_takes_its_share_of_a_gpu_and_asleep_it_takes_nothing_while_the_trainer_learns(
    tmp_path: Path,
) -> None:
    def found(**fields: Any) -> RunMemory:
        config = config_of(tmp_path, use_vllm=True, bf16=True, vllm_gpu_memory_utilization=0.3, **fields)
        return memory.memory_of_run(config, RunModels(big_dir(tmp_path / "big")), gpu(40 * GIB))

    awake, asleep = found(), found(vllm_enable_sleep_mode=True)
    elsewhere = found(vllm_mode="server")
    weights = sizes(awake)["weights"]
    assert sizes(awake)["engine"] == 12 * GIB
    assert "engine" not in sizes(elsewhere)
    learning = elsewhere.exact()
    assert learning == sum(sizes(elsewhere).values()) > 4 * weights - 2**20
    assert awake.exact() == learning + 12 * GIB
    # Between two steps there are no gradients.
    assert asleep.exact() == max(learning, learning - sizes(elsewhere)["gradients"] + 12 * GIB)


def test_the_rank_of_a_sharded_run_needs_its_shards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, use_vllm=True, vllm_mode="server")
    models, room = RunModels(big_dir(tmp_path / "big")), gpu(80 * GIB)
    whole = memory.memory_of_run(config, models, room).exact()
    monkeypatch.setattr(OnlineConfig, "sharded_by", "FSDP")
    monkeypatch.setattr(GRPOConfig, "world_size", 4)
    assert memory.memory_of_run(config, models, room).exact() == pytest.approx(whole / 4, rel=1e-3)


# ---- activations
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "half"), [(Qwen2Config, False), (Qwen3Config, True)])
def test_the_estimate_of_a_layer_is_what_a_forward_keeps(
    monkeypatch: pytest.MonkeyPatch, kind: Any, half: bool
) -> None:
    """The slope over layers of everything that PyTorch keeps, without weights: within 3% of the formula's."""
    # A CPU computes a part of the layers again, a GPU does not.
    monkeypatch.setattr(scoring, "products_kept", lambda model: nullcontext())
    completions: list[Any] = [tuple(range(1, 41)), tuple(range(41, 81))]
    prompt: Any = (5, 6, 7)
    sequences = [TrainingSequence(f"#{i}", prompt, c, c) for i, c in enumerate(completions)]
    (pack,) = pack_sequences(sequences, 10**6)

    def kept(layers: int) -> tuple[int, LayerShape]:
        config = kind(vocab_size=384, hidden_size=64, intermediate_size=192, num_hidden_layers=layers,
                      num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        adopt_tree_attention(model)
        model.train()
        found: dict[int, int] = {}
        own = {p.data_ptr() for p in model.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in own:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=half),
        ):
            logps = score_pack(model, pack, 1.0, 512).logps
            total = sum(found.values())
        del logps
        shape = memory.layer_shape(model)
        assert shape is not None
        return total, shape

    (two, _), (three, shape) = kept(2), kept(3)
    work = LargestForward(pack.input_ids.numel(), 4, 2 if half else 4, 512)
    estimate = pack.input_ids.numel() * memory.kept_per_position(shape, work)
    if half:
        estimate += 2 * shape.products
    assert two < three
    # A CPU keeps queries, keys, values and the result of attention in float32.
    more = pack.input_ids.numel() * 2 * (2 * shape.queries + 2 * shape.keys) if half else 0
    assert three - two == pytest.approx(estimate + more, rel=0.03)


def test_activations_grow_with_the_budget_and_shrink_with_checkpointing() -> None:
    shape = LayerShape(24, 896, 896, 128, 4864, 0, 151_936, False, 15_000_000)

    def size(**fields: Any) -> int:
        return memory.activation_bytes(
            shape, LargestForward(**{"positions": 4096, "stream": 4, "computed": 2, "chunk": 512, **fields})
        )

    assert size(positions=8192) > 1.7 * size()
    assert size(checkpointing=True) < 0.4 * size()
    assert size(computed=4) > size()
    # On a CPU, layers without room keep their products only.
    assert size(room=0) < size(room=2**60) == size()


# ---- said and refused
# ----------------------------------------------------------------------------------------------------


def needed_by(folder: Path, model: str, room: Room, **fields: Any) -> int:
    return memory.memory_of_run(config_of(folder, **fields), RunModels(model), room).exact()


def test_a_run_that_does_not_fit_is_refused_before_its_model_is_loaded_and_one_that_just_fits_is_not(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Exception):
        pass

    def load(*_: Any) -> None:
        raise Loaded

    exact = memory.memory_of_run(
        config_of(tmp_path), RunModels(untied_dir, own_engine=True), gpu(GIB)
    ).exact()
    monkeypatch.setattr(online, "open_policy", load)
    for size, expected in ((exact, Loaded), (exact - 1, InputError)):
        monkeypatch.setattr(memory, "room_of", lambda device, size=size: gpu(size))
        with pytest.raises(expected) as error:
            make("GRPO", untied_dir, tmp_path, hf_engine, FIELDS["GRPO"])
    text = str(error.value)
    assert "does not fit into the memory of cuda:0 (pretend GPU)" in text
    assert all(word in text for word in ("weights", "gradients", "moments", "(adamw_torch_fused)"))
    changes = [text.index(word) for word in ("train an adapter", "cut the model over", "adamw_8bit")]
    assert changes == sorted(changes)


def test_what_saves_most_is_named_first_and_what_is_set_already_is_not_named(tmp_path: Path) -> None:
    def changes(room: Room, **fields: Any) -> list[str]:
        config = config_of(tmp_path, use_vllm=True, bf16=True, **fields)
        models = RunModels(big_dir(tmp_path / "big"), uses_reference=config.beta != 0)
        found = replace(memory.memory_of_run(config, models, room), activations=None)
        return memory.changes_of(config, models, found, room).split("; ")

    def saved(text: str) -> float:
        return float(re.findall(r"saves about ([\d.]+) GiB", text)[0])

    first = changes(gpu(80 * GIB), beta=0.1)
    assert "serve" in first[0]
    assert [saved(text) for text in first] == sorted(map(saved, first), reverse=True)
    small = changes(gpu(8 * GIB), beta=0.1)
    assert "use_peft" in small[0]
    asleep = changes(gpu(80 * GIB), vllm_enable_sleep_mode=True)
    assert not any(
        word in text for text in asleep for word in ("sleep", "gradient_checkpointing", "beta", "bf16")
    )


def test_an_engine_whose_weights_exceed_its_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RunModels(big_dir(tmp_path / "big"))
    room = gpu(80 * GIB)
    monkeypatch.setattr(memory, "room_of", lambda device: room)
    memory.check_memory(
        config_of(tmp_path, use_vllm=True, bf16=True, vllm_gpu_memory_utilization=0.02), model
    )
    with pytest.raises(
        InputError, match=r"does not fit into its share .* has 0.40 GiB.* 0.92 GiB\. Raise vllm_gpu"
    ):
        memory.check_memory(
            config_of(tmp_path, use_vllm=True, bf16=True, vllm_gpu_memory_utilization=0.005), model
        )


def test_a_cpu_is_not_refused_for_what_fits_into_swap_or_stays_in_the_files(
    untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen weights and a transformers engine may be views of the model's files, which the system can read again."""
    # On a machine with a GPU the engine takes that one.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def check(models: RunModels, size: int, swap: int | None) -> None:
        monkeypatch.setattr(memory, "room_of", lambda device: Room(device, "this machine", size, swap))
        memory.check_memory(config_of(tmp_path), models)

    whole, adapted = RunModels(untied_dir), RunModels(untied_dir, peft_config=lora())
    found = memory.memory_of_run(config_of(tmp_path), whole, CPU)
    engine = sizes(found)["engine"]
    with caplog.at_level(logging.INFO, "lockstep"):
        check(whole, found.exact() - engine - 100, 100)
        check(whole, 1, None)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"] * 2
    assert "may run out of memory" in caplog.text
    with pytest.raises(InputError, match="does not fit into the memory of this machine"):
        check(whole, found.exact() - engine - 101, 100)

    small = memory.memory_of_run(config_of(tmp_path), adapted, CPU)
    check(adapted, small.exact() - engine - sizes(small)["frozen weights"], 0)


def test_the_line_is_said_once_with_every_part_and_not_for_a_model_that_is_too_small_to_matter(
    untied_dir: str,
    tmp_path: Path,
    hf_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    built: list[object] = []
    build = memory.build_empty

    def building(*given: Any, **more: Any) -> Any:
        built.append(given)
        return build(*given, **more)

    monkeypatch.setattr(memory, "build_empty", building)
    with caplog.at_level(logging.INFO, "lockstep.learn.memory"):
        make("GRPO", untied_dir, tmp_path, hf_engine, {**FIELDS["GRPO"], "beta": 0.1})
    (record,) = caplog.records
    words = ("the run needs", "weights", "gradients", "moments", "reference", "activations need about")
    assert all(word in record.getMessage() for word in words)
    # The model without memory is made once.
    assert len(built) == 1
    caplog.clear()
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, "lockstep.learn.memory"):
        make("GRPO", untied_dir, tmp_path, hf_engine, FIELDS["GRPO"])
    assert not caplog.records


def test_an_optimizer_of_the_user_is_not_counted_and_that_is_said(
    untied_dir: str, tmp_path: Path, hf_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    model.config.name_or_path = untied_dir
    with caplog.at_level(logging.INFO, "lockstep.learn.memory"):
        make("GRPO", model, tmp_path, hf_engine, FIELDS["GRPO"], optimizers=(own, None))
    (record,) = caplog.records
    assert "not counted: the optimizer's state" in record.getMessage()
    assert "moments" not in record.getMessage()


def test_a_model_whose_files_are_damaged_is_left_to_the_loader(
    tmp_path: Path, hf_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="not a valid JSON"):
        make("GRPO", str(folder), tmp_path, hf_engine, FIELDS["GRPO"])


def test_the_limits_of_control_groups_are_found_up_to_their_root(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    inner = root / "jobs" / "7"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (root / "jobs" / "memory.max").write_text("1000\n")
    (root / "jobs" / "memory.swap.max").write_text("20\n")
    own.write_text("0::/jobs/7\n")
    infinite = float("inf")
    assert list(memory.group_limits(root, own)) == [(infinite, infinite), (1000, 20), (infinite, infinite)]

    first = root / "memory" / "job"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("500\n")
    own.write_text("4:cpu:/job\n3:memory:/job\n")
    assert list(memory.group_limits(root, own)) == [(500, infinite), (infinite, infinite)]
    assert list(memory.group_limits(root, tmp_path / "none")) == []


def test_this_machine_has_the_memory_that_it_reports() -> None:
    room = memory.room_of(torch.device("cpu"))
    total = (
        int(re.findall(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))[0]) * 1024
    )
    assert 0 < room.size <= 1.01 * total
    assert room.beyond is not None
    assert not room.on_gpu
