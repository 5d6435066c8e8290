"""`lockstep verify`: runs the proofs on the user's model, engine and settings; their self-test; explains receipts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.fields import (
    AdaptedRunArguments,
    build,
    check_effect,
    check_model,
    check_sizes,
    read,
    resolved,
    said_of,
    without_unused,
)
from lockstep.cli.help import underscored
from lockstep.cli.output import libraries_aside, quiet_libraries
from lockstep.config.effect import tell_no_effect
from lockstep.config.option import Part, option
from lockstep.errors import InputError, ProofError
from lockstep.extras.verify.sizes import SIZES
from lockstep.files import check_writable, what_is_at
from lockstep.progress import busy, watched_by
from lockstep.safe_text import complain, say
from lockstep.start_up import collector_off, import_peft

if TYPE_CHECKING:
    # It needs torch.
    from lockstep.extras.verify.stage import Stage


_option = partial(option, group="verify", common=True)


@dataclass
class VerifyArguments(AdaptedRunArguments):
    """The arguments of `lockstep verify`."""

    model: str | None = _option(None, "Name, directory or hub id; as model_name_or_path.")
    engine: str | None = _option(None, "vllm, transformers, or server. Default: as training would choose.")
    dtype: str | None = _option(None, "float32 or bfloat16 on both sides. Default: as training would choose.")
    json: str | None = _option(None, "File to write the table to, with every layer's figure.")
    self_test: bool = _option(False, "Inject the known faults and show which proof catches each.")
    receipt: str | None = _option(None, "Re-check the chain of a receipt file, and stop.")
    explain: str | None = _option(None, "Read a run directory's receipt and say where its gap comes from.")
    plain_prompts: bool = _option(False, "Verify with text instead of chat messages.")


def run(words: list[str]) -> int:
    """Run the command. Returns 0 if every proof passes (in the self-test: if every fault is caught), else 1."""
    given = replace(read(_with_dtype(words), "verify"), typed=tuple(map(underscored, words)))
    asked = said_of(given, VerifyArguments)
    if alone := next((name for name in ("receipt", "explain") if getattr(asked, name) is not None), None):
        if others := sorted(given.typed_names - {alone}):
            tell_no_effect(others, f"with {alone}")
    else:
        # Only the self-test steps.
        parts = (Part.LEARNING, *([Part.STEPS] if asked.self_test else []))
        given = without_unused(given, "verify", parts, SIZES)
        asked = said_of(given, VerifyArguments)
        check_effect(asked, given)
    check_sizes(asked)
    if not given.dry_run:
        if asked.dtype is not None and not any(word.startswith("--dtype") for word in words):
            raise InputError("give dtype on the command line; in a file it is bf16 and engine_dtype")
        if asked.receipt is not None:
            return _check_receipt(Path(asked.receipt))
        if asked.explain is not None:
            from lockstep.extras.verify.explain import explain_run

            say(explain_run(Path(asked.explain)))
            return 0
        _check_asked(asked, given.values)
    from lockstep.progress import StatusLine

    with watched_by(StatusLine()), busy("loading PyTorch and transformers"), collector_off():
        quiet_libraries()
        import_peft()
        from lockstep.learn.methods.grpo import GRPOConfig

        arguments, config = build(given, GRPOConfig, VerifyArguments)
    if given.dry_run:
        say(resolved(arguments, config), end="")
        return 0

    plain = copy.deepcopy(config)

    def config_with(changes: Mapping[str, int | float]) -> Any:
        if not changes:
            # What a config says is said once.
            made = copy.deepcopy(plain)
            return _for_faults(made) if arguments.self_test else made
        more = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
        made = build(replace(given, words=(*given.words, *more)), GRPOConfig, VerifyArguments)[1]
        return _for_faults(made) if arguments.self_test else made

    with libraries_aside():
        return _verify(arguments, _for_faults(config) if arguments.self_test else config, config_with)


def _for_faults(config: Any) -> Any:
    """The config, with which vLLM compiles nothing: a compiled program or a CUDA graph goes on without the faults."""
    if config.vllm_mode != "server":
        config.vllm_engine_kwargs = {**(config.vllm_engine_kwargs or {}), "enforce_eager": True}
    return config


def _check_asked(asked: VerifyArguments, values: dict[str, Any]) -> None:
    """Check the arguments before anything is loaded."""
    name = asked.model or asked.model_name_or_path
    if name is None:
        raise InputError("say which model to verify: --model NAME, DIRECTORY or hub id (or --config FILE)")
    if asked.engine not in (None, "vllm", "transformers", "server"):
        raise InputError(f"engine {asked.engine!r}: it must be vllm, transformers or server")
    for switch in ("use_peft", "use_liger_kernel", "vllm_enable_lora"):
        if values.get(switch):
            raise InputError(
                f"{switch} is not verified yet: give --{switch} False to verify the model without"
            )
    if asked.json:
        check_writable(Path(asked.json))
    check_model(name)


def _verify(
    arguments: VerifyArguments, config: Any, config_with: Callable[[Mapping[str, int | float]], Any]
) -> int:
    from lockstep.extras.fp8.quantised_faults import QUANTISED_FAULTS
    from lockstep.extras.lora_alone.adapter_faults import ADAPTER_FAULTS
    from lockstep.extras.selftest import self_test
    from lockstep.extras.selftest.picture_faults import PICTURE_FAULTS
    from lockstep.extras.selftest.self_test import FAULTS, WAYS, Verdict, rows_kept, run_self_test
    from lockstep.extras.verify.rows import Row, print_rows, write_json
    from lockstep.extras.verify.run_checks import CHECKS, PICTURE_CHECKS, failed_row, recover, run_checks
    from lockstep.extras.verify.stage import open_stage
    from lockstep.models.resolve import resolve_model
    from lockstep.terminal import Terminal

    name = arguments.model or arguments.model_name_or_path
    assert name is not None
    config.use_vllm = _use_vllm(arguments.engine, config)
    injects = "the self-test injects faults into"
    if arguments.self_test and config.vllm_mode == "server":
        raise InputError(f"{injects} an engine in this process; run it with --engine vllm")
    if arguments.self_test and config.vllm_tensor_parallel_size > 1:
        raise InputError(f"{injects} a model in this process; leave vllm_tensor_parallel_size out")
    resolve_model(name)
    console = Terminal()
    rows: list[Row] = []
    verdicts: list[Verdict] = []

    def keep(found: Iterable[Verdict]) -> None:
        for verdict in found:
            verdicts.append(verdict)
            self_test.write_verdicts(verdicts, arguments.json, ended=False)

    special = len(PICTURE_FAULTS) + len(ADAPTER_FAULTS) + len(QUANTISED_FAULTS)
    injected = 1 + len(FAULTS) + special + len(WAYS) * (1 + len(self_test.faults_of_runs()))
    steps = 1 + (injected if arguments.self_test else len(CHECKS) + len(PICTURE_CHECKS))
    opened = partial(open_stage, name, dataset=_prompts(arguments), plain=arguments.plain_prompts)
    with _progress(steps) as progress, ExitStack() as stack:
        progress("loading both sides")
        try:
            # First, because its prompts are the longest, and the engine gets room for them.
            seeing = _picture_stage(arguments, config_with({}), stack)
            engine = None if seeing is None else seeing.engine
            with opened(config, engine=engine) as stage:
                settings = {"model": stage.trainer.model_path, "engine": stage.engine.settings()}
                if arguments.self_test:
                    keep(run_self_test(stage, progress))
                    if config.vllm_quantization is not None:
                        keep(run_self_test(stage, progress, QUANTISED_FAULTS))
                    if seeing is not None:
                        with rows_kept(verdicts, "prompts with pictures"):
                            keep(run_self_test(seeing, progress, PICTURE_FAULTS))

                    def open_with(changes: Mapping[str, int | float]) -> AbstractContextManager[Stage]:
                        other = config_with(changes)
                        other.use_vllm = config.use_vllm
                        return opened(other, engine=stage.engine)

                    for way in WAYS:
                        with rows_kept(verdicts, way.name):
                            keep(self_test.run_in_runs(open_with, way, progress))
                else:
                    rows = run_checks(stage, progress)
                    if seeing is not None:
                        recover(seeing)
                        rows += run_checks(seeing, progress, PICTURE_CHECKS)
                uses_vllm = stage.engine.settings().engine == "vllm"
            if arguments.self_test and uses_vllm and config.vllm_quantization is None:
                # The engine before is closed, unless it is that of the stage with pictures.
                stack.close()
                with (
                    rows_kept(verdicts, "adapters alone"),
                    adapter_stage(name, arguments, config_with({})) as adapted,
                ):
                    if adapted is not None:
                        keep(run_self_test(adapted, progress, ADAPTER_FAULTS))
        except ProofError as error:
            # Trainer and engine could not start together. This error is the only row of the report.
            rows, settings = [failed_row("start", error)], {"model": name}
    if verdicts:
        return self_test.print_verdicts(verdicts, console, arguments.json)
    print_rows(rows, console)
    if arguments.json:
        write_json(Path(arguments.json), rows, settings)
    return 0 if all(row.passed for row in rows) else 1


def _picture_stage(arguments: VerifyArguments, config: Any, stack: ExitStack) -> Stage | None:
    """A stage whose prompts show pictures, open until the end of `stack`; None: the model cannot be shown any."""
    from transformers import AutoConfig

    from lockstep.extras.verify.stage import open_stage
    from lockstep.model_files import load_files
    from lockstep.models.policy import BAD_FILES, reads_pictures
    from lockstep.models.resolve import resolve_model

    name = arguments.model or arguments.model_name_or_path
    assert name is not None
    try:
        if not reads_pictures(load_files(AutoConfig, resolve_model(name))):
            return None
    except BAD_FILES:
        # Loading the model says what is wrong with it.
        return None
    config.use_vllm = _use_vllm(arguments.engine, config)
    try:
        return stack.enter_context(open_stage(name, config, plain=arguments.plain_prompts, pictures=True))
    except InputError as error:
        complain(f"lockstep: pictures are not verified: {error}")
        return None


@contextmanager
def adapter_stage(name: str, arguments: VerifyArguments, config: Any) -> Iterator[Stage | None]:
    """A stage whose engine gets an adapter alone; None: the model cannot have one."""
    import peft
    import torch

    from lockstep.extras.verify.stage import open_stage

    config.use_vllm, config.vllm_enable_lora = True, True
    if torch.cuda.is_available() and config.engine_torch_dtype == torch.float32:
        why = "because vLLM has them in half precision on a GPU"
        complain(f"lockstep: adapters alone: the engine computes in bfloat16, {why}")
        config.engine_dtype = "bfloat16"
    # With a new adapter's B of zeros, no fault would have an effect.
    adapter = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    prompts, plain = _prompts(arguments), arguments.plain_prompts
    with ExitStack() as opened:
        try:
            stage = opened.enter_context(open_stage(name, config, prompts, plain=plain, peft_config=adapter))
        except InputError as error:
            complain(f"lockstep: adapters are not verified: {error}")
            yield None
        else:
            yield stage


def _check_receipt(path: Path) -> int:
    from lockstep.watch.receipt import check_receipt

    if (there := what_is_at(path)) != "is a file":
        raise InputError(f"receipt {path} {there}")
    try:
        lines = check_receipt(path)
    except InputError as error:
        say(f"FAIL  {path}: {error}")
        return 1
    say(f"PASS  {path}: {lines} lines, the chain is whole")
    return 0


def _use_vllm(engine: str | None, config: Any) -> bool | None:
    if engine is None:
        return config.use_vllm
    if engine == "server":
        config.vllm_mode = "server"
        return None
    return engine == "vllm"


def _with_dtype(words: list[str]) -> list[str]:
    """Add the two fields that `--dtype X` stands for."""
    for i, word in enumerate(words):
        name, _, value = underscored(word).partition("=")
        if name == "--dtype":
            value = value or "".join(words[i + 1 : i + 2])
            if value not in ("float32", "bfloat16"):
                raise InputError(f"dtype {value!r}: it must be float32 or bfloat16")
            return [*words, "--bf16", str(value == "bfloat16"), "--engine_dtype", value]
    return words


def _prompts(arguments: VerifyArguments) -> Any | None:
    """The user's own training prompts; None if no data set is named."""
    if arguments.dataset_name is None:
        return None
    from lockstep.cli.fields import data_of

    data = data_of(arguments)
    if len(data.train) == 0:
        raise InputError(f"dataset {arguments.dataset_name} is empty")
    return data.train


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar if standard error is a terminal, else plain lines, also while one check takes long."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lockstep.progress import StatusLine
    from lockstep.terminal import Terminal

    console = Terminal(stderr=True)
    if not console.is_terminal:
        with watched_by(StatusLine(console)), ExitStack() as work:

            def begin_line(name: str) -> None:
                work.close()
                work.enter_context(busy(f"verify: {name}"))

            yield begin_line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def begin(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield begin
