"""Servers started by vLLM's own command line: with all arguments that our errors name, and with one of them missing.

Servers that lack arguments or differ in several arguments are tested before a release, because each case starts a
server. `test_handshake_and_receipt.py` shows that one error names everything that differs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import VLLM
from forked import Program
from server_runs import equal, make_trainer, train
from servers import Server, free_port

from lockstep.engines.servers.calls import HOW_TO_START
from lockstep.errors import InputError, ProofError
from lockstep.server.keys import KEY_VARIABLE
from lockstep.watch.receipt import check_receipt

pytestmark = [*VLLM, pytest.mark.usefixtures("server_key")]

DEVELOPER = "VLLM_SERVER_DEV_MODE"
# The arguments that our errors name.
NAMED = shlex.split(HOW_TO_START.partition("and the arguments ")[2])


@contextmanager
def by_hand(
    model: str, folder: Path, arguments: Sequence[str], *, dtype: str = "float32", developer: bool = True
) -> Iterator[Server]:
    """vLLM's server as a user starts it; the added arguments only save time and memory."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", "512", *arguments]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    environment = {name: value for name, value in os.environ.items() if name not in (KEY_VARIABLE, DEVELOPER)}
    environment |= {DEVELOPER: "1"} if developer else {}
    with (folder / "server.log").open("w") as out:
        process = Program(command, stdout=out, stderr=out, env=environment)
    server = Server(f"http://127.0.0.1:{port}", process, folder / "server.log")
    try:
        server.await_health()
        # This server has no guard, so that a trainer with a key would not tell it anything.
        with patch.dict(os.environ):
            del os.environ[KEY_VARIABLE]
            yield server
    finally:
        process.terminate()
        process.wait(40)


def without(name: str) -> list[str]:
    """The named arguments without one of them and its value."""
    place = NAMED.index(name)
    values = place + 1 < len(NAMED) and not NAMED[place + 1].startswith("--")
    return NAMED[:place] + NAMED[place + 1 + values :]


@pytest.mark.long
def test_a_server_started_with_the_arguments_that_errors_name_trains_like_any_other(
    server: Server, untied_dir: str, tmp_path: Path
) -> None:
    expected = train(make_trainer(untied_dir, tmp_path / "served", server.url))
    with by_hand(untied_dir, tmp_path, NAMED) as hand:
        found = train(make_trainer(untied_dir, tmp_path / "hand", hand.url))
    assert equal(found, expected)
    check_receipt(tmp_path / "hand" / "receipt.jsonl")


# For each missing argument, the reason in the error. The arguments that the handshake compares are below.
LACKING = {
    DEVELOPER: "has no /collective_rpc",
    "--worker-extension-cls": "at /collective_rpc",
    "--weight-transfer-config": "receives weights by None",
    "--enable-scale-out": "has no /inference/v1/generate",
    "--no-enable-chunked-prefill": "computes prompts in parts",
}


@pytest.mark.release
@pytest.mark.parametrize("lacking", LACKING)
def test_a_server_that_lacks_one_of_them_is_refused_with_what_to_change(
    lacking: str, untied_dir: str, tmp_path: Path
) -> None:
    arguments = NAMED if lacking == DEVELOPER else without(lacking)
    with by_hand(untied_dir, tmp_path, arguments, developer=lacking != DEVELOPER) as hand:
        with pytest.raises(InputError) as refused:
            train(make_trainer(untied_dir, tmp_path / "run", hand.url, vllm_server_timeout=60.0))
        assert LACKING[lacking] in str(refused.value)
        assert HOW_TO_START in str(refused.value)
        assert hand.supervisor.poll() is None


@pytest.mark.release
def test_the_handshake_names_everything_that_differs_at_once(
    tied_dir: str, untied_dir: str, tmp_path: Path
) -> None:
    """A server with another model, dtype and log-probs mode than the run assumes."""
    arguments = [*NAMED[: NAMED.index("--logprobs-mode")], "--no-enable-chunked-prefill"]
    with (
        by_hand(tied_dir, tmp_path, arguments, dtype="bfloat16") as hand,
        pytest.raises(ProofError) as refused,
    ):
        make_trainer(untied_dir, tmp_path / "run", hand.url)
    assert refused.value.check == "handshake"
    for name in ("architecture", "dtype", "logprobs_mode", "tie_word_embeddings"):
        assert name in refused.value.found, name
    assert "lockstep serve" in refused.value.fix
