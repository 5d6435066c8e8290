"""The keys, the guard and the command line of a server, tested without a server."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import stat
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk

from lockstep.cli.main import main
from lockstep.cli.serve import place_of_key
from lockstep.engines.servers.calls import HOW_TO_START
from lockstep.errors import InputError
from lockstep.images.files import LARGEST
from lockstep.server.command import ServeOptions, command_line, environment, shortened
from lockstep.server.guard import KeyGuard
from lockstep.server.keys import KEY_VARIABLE, default_key_file, key_for, make_key, read_key, write_key
from lockstep.server.launch import check_no_second_model, check_whole_names

KEY = "a-key-for-tests-only"


class TestKeys:
    def test_a_key_file_is_its_owners_alone(self, tmp_path: Path) -> None:
        key, path = make_key(), tmp_path / "keys" / "k"
        write_key(path, key)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_key(path) == key
        assert make_key() != key

    def test_a_full_disk_leaves_the_key_as_it_was_and_nothing_beside_it(self, tmp_path: Path) -> None:
        write_key(path := tmp_path / "keys" / "k", KEY)
        with full_disk(4), pytest.raises(OSError, match=r"(No space left|File too large).*keys/k"):
            write_key(path, make_key())
        assert read_key(path) == KEY
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("terminal", [True, False])
    def test_a_key_is_shown_on_a_terminal_and_never_in_a_log(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
    ) -> None:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        outer, inner = os.openpty()
        try:
            with open(inner if terminal else tmp_path / "log", "w", encoding="utf-8") as stream:
                monkeypatch.setattr("sys.stderr", stream)
                said = place_of_key("the-key-itself", tmp_path / "k", Namespace(key_file=None))
        finally:
            os.close(outer)
        assert str(tmp_path / "k") in said
        assert ("the-key-itself" in said) == terminal

    def test_a_key_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "k"
        write_key(path, KEY)
        path.chmod(0o640)
        with pytest.raises(InputError, match="other users can read"):
            read_key(path)

    def test_a_key_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "k"
        write_key(path, KEY)
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(InputError, match="belongs to another user"):
            read_key(path)

    def test_what_is_no_file_with_a_key_is_refused_and_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe", 0o600)
        (tmp_path / "long").write_text("x" * 5000)
        for path in (tmp_path, tmp_path / "pipe", tmp_path / "long"):
            path.chmod(0o700)
            with pytest.raises(InputError, match=r"not a file with one key|cannot be read"):
                read_key(path)

    @pytest.mark.parametrize("text", ["", "short", "has spaces in it, and is long", "näñ-ascii-characters"])
    def test_an_invalid_key_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "k"
        write_key(path, text)
        with pytest.raises(InputError, match="16 printable"):
            read_key(path)

    def test_a_trainer_finds_the_key_that_a_server_here_left_and_shows_it_to_nobody_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        write_key(default_key_file(8000), KEY)
        assert key_for("http://127.0.0.1:8000", None) == KEY
        assert key_for("http://127.0.0.1:8001", None) is None
        assert key_for("http://gpu-node:8000", None) is None
        assert key_for("http://127.0.0.1.evil.example:8000", None) is None
        # Another machine that has the same home directory.
        monkeypatch.setattr(socket, "gethostname", lambda: "another-node")
        assert key_for("http://127.0.0.1:8000", None) is None


class TestGuard:
    @staticmethod
    def ask(headers: list[tuple[bytes, bytes]], path: str = "/x", kind: str = "http") -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "passed"})

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {}

        asyncio.run(KeyGuard(app)({"type": kind, "path": path, "headers": headers}, receive, send))
        return sent

    @pytest.fixture(autouse=True)
    def key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(KEY_VARIABLE, KEY)

    def test_the_key_passes(self) -> None:
        assert self.ask([(b"authorization", f"Bearer {KEY}".encode())]) == [{"type": "passed"}]
        assert self.ask([], path="/health") == [{"type": "passed"}]

    @pytest.mark.parametrize(
        "shown", [[], [b"Bearer no"], [KEY.encode()], [b"Basic " + KEY.encode()], [b"Bearer "]]
    )
    def test_other_headers_do_not_pass(self, shown: list[bytes]) -> None:
        assert self.ask([(b"authorization", value) for value in shown])[0]["status"] == 401
        assert self.ask([(b"authorization", value) for value in shown], kind="websocket")[0]["code"] == 1008

    def test_two_headers_with_keys_do_not_pass(self) -> None:
        header = (b"authorization", f"Bearer {KEY}".encode())
        assert self.ask([header, header])[0]["status"] == 401

    def test_a_guard_without_a_key_does_not_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(KEY_VARIABLE)
        with pytest.raises(InputError, match="16 printable"):
            self.ask([])

    @pytest.mark.parametrize(
        "body",
        [
            b'{"method": "shutdown"}',
            b'{"method": "lockstep_state", "method": "shutdown"}',
            b'{"method": ["lockstep_state"]}',
            b'{"method": "Lockstep_state"}',
            b'{"method": " lockstep_state"}',
            b'{"method": null}',
            b'{"args": ["lockstep_state"]}',
            b'["lockstep_state"]',
            b'"lockstep_state"',
            b"lockstep_state",
            b"[" * 100_000,
            b"1" * 10_000,
            b"",
            b"\xff",
        ],
    )
    def test_only_methods_of_lockstep_are_called_in_the_workers(self, body: bytes) -> None:
        assert self.rpc(body)[0]["status"] == 403

    def test_a_call_of_our_method_arrives_whole_however_it_is_cut(self) -> None:
        asked = {"method": "lockstep_probe", "args": ['["aé😀"]', "1"], "timeout": 2.5}
        body = json.dumps(asked).encode()
        for cuts in (1, 2, 7):
            (passed,) = self.rpc(body, cuts)
            assert json.loads(passed["body"]) == asked

    def test_a_call_without_end_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lockstep.server.guard.LARGEST_RPC", 1000)
        assert self.rpc(b" " * 1001)[0]["status"] == 413

    @staticmethod
    def rpc(body: bytes, cuts: int = 1) -> list[dict[str, Any]]:
        size = -(-len(body) // cuts) or 1
        parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        waiting = [
            {"type": "http.request", "body": part, "more_body": at + 1 < len(parts)}
            for at, part in enumerate(parts)
        ]
        sent: list[dict[str, Any]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            found = await receive()
            assert not found.get("more_body")
            await send({"body": found["body"]})
            assert await receive() == {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return waiting.pop(0) if waiting else {"type": "http.disconnect"}

        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        asyncio.run(
            KeyGuard(app)(
                {"type": "http", "method": "POST", "path": "/collective_rpc", "headers": headers},
                receive,
                send,
            )
        )
        return sent


class Engine:
    """An engine that answers, or does not."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()

    async def collective_rpc(self, method: str) -> None:
        self.asked.append(method)
        await self.answers.wait()


class TestSilence:
    """The engine owes an answer for some seconds; the seconds are those of a clock of the test."""

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        now = [1000.0]
        monkeypatch.setattr("lockstep.server.guard.time", Namespace(monotonic=lambda: now[0]))
        return now

    def made(self, engine: Engine) -> Any:
        """A guard, and what asks it: `ask(path, limit)` gives the status, or the task of a call that stays open."""
        ends: dict[str, asyncio.Event] = {}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] != "/health":
                await ends.setdefault(scope["path"], asyncio.Event()).wait()
            await send({"type": "http.response.start", "status": 200})

        guard = KeyGuard(app)

        async def ask(path: str = "/health", limit: str | None = None) -> int:
            sent: list[dict[str, Any]] = []

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [(b"authorization", f"Bearer {KEY}".encode())]
            headers += [(b"x-lockstep-limit", limit.encode())] if limit is not None else []
            scope = {"type": "http", "path": path, "headers": headers}
            await guard({**scope, "app": Namespace(state=Namespace(engine_client=engine))}, None, send)  # type: ignore[arg-type]
            await asyncio.sleep(0)
            return int(sent[0]["status"])

        return ask, ends

    def test_an_engine_that_answers_nothing_is_not_healthy_after_two_minutes(
        self, clock: list[float]
    ) -> None:
        async def work() -> None:
            ask, _ = self.made(engine := Engine())
            for later, status in ((0, 200), (60, 200), (59.9, 200), (0.2, 504), (1000, 504)):
                clock[0] += later
                assert await ask() == status
            # Health checks ask it one question at a time, and all of its workers.
            assert engine.asked == ["lockstep_alive"]
            engine.answers.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert await ask() == 200

        asyncio.run(work())

    def test_strangers_who_ask_for_the_health_do_not_keep_the_engine_busy(self, clock: list[float]) -> None:
        async def work() -> None:
            ask, _ = self.made(engine := Engine())
            engine.answers.set()
            for _ in range(100):
                assert await ask() == 200
                clock[0] += 0.1
            assert len(engine.asked) == 2

        asyncio.run(work())

    @pytest.mark.parametrize(
        ("limit", "seconds"),
        [("1000", 1000), (None, 600), ("nan", 600), ("-1", 600), ("inf", 600), ("x", 600), ("0", 0)],
    )
    def test_a_long_push_is_waited_for_as_long_as_its_caller_waits(
        self, clock: list[float], limit: str | None, seconds: float
    ) -> None:
        async def work() -> None:
            ask, _ = self.made(Engine())
            push = asyncio.ensure_future(ask("/update_weights", limit))
            await asyncio.sleep(0)
            assert await ask() == 200
            clock[0] += seconds + 119
            assert await ask() == 200
            clock[0] += 2
            assert await ask() == 504
            push.cancel()

        asyncio.run(work())

    def test_a_call_that_came_after_the_question_is_no_excuse(self, clock: list[float]) -> None:
        async def work() -> None:
            ask, ends = self.made(Engine())
            before = asyncio.ensure_future(ask("/before", "1000"))
            await asyncio.sleep(0)
            await ask()
            after = asyncio.ensure_future(ask("/after", "1000"))
            await asyncio.sleep(0)
            clock[0] += 130
            assert await ask() == 200
            # The caller of the earlier one goes away.
            ends["/before"].set()
            await before
            clock[0] += 119
            assert await ask() == 200
            clock[0] += 2
            assert await ask() == 504
            after.cancel()

        asyncio.run(work())


def options(model: str, *rest: str, **changes: Any) -> ServeOptions:
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 8000,
        "dtype": torch.float32,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
    }
    return ServeOptions(model, **{**settings, **changes}, rest=rest)


def values(command: list[str], *names: str) -> list[str]:
    """What follows each of these arguments, each of which is there once."""
    assert [command.count(f"--{name}") for name in names] == [1] * len(names)
    return [command[command.index(f"--{name}") + 1] for name in names]


class TestCommand:
    def test_a_further_node_has_the_url_of_the_first(self, untied_dir: str) -> None:
        nodes = ["--nnodes", "2", "--master_addr", "10.0.0.1", "--node_rank"]
        first, further = (options(untied_dir, *nodes, number) for number in "01")
        assert (first.is_later_node, further.is_later_node) == (False, True)
        assert further.url == f"http://10.0.0.1:{further.port}"
        assert first.url == f"http://127.0.0.1:{first.port}"

    def test_what_the_user_adds_goes_to_vllm_and_wins(self, untied_dir: str) -> None:
        command = command_line(options(untied_dir, "--max_num_batched_tokens", "8192", "--seed=3"))
        assert command.count("--max-num-batched-tokens") == 1
        assert command[command.index("--max-num-batched-tokens") + 1] == "8192"
        assert "--seed=3" in command
        assert "--logprobs-mode" in command

    def test_a_server_on_a_cpu_has_the_defaults_of_a_cpu(
        self, untied_dir: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        shown = command_line(unbounded := options(untied_dir, max_model_len=None, max_num_seqs=None))
        assert {"--no-enable-chunked-prefill", "--no-async-scheduling", "--enforce-eager"} <= set(shown)
        assert values(shown, "max-num-seqs", "max-model-len", "max-num-batched-tokens") == [
            "64",
            "512",
            "4096",
        ]
        assert shortened(unbounded) == ""

    def test_a_server_on_a_gpu_has_the_defaults_of_a_gpu(
        self, untied_dir: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        shown = command_line(options(untied_dir, max_model_len=None, max_num_seqs=None))
        assert {"--enable-chunked-prefill", "--no-enforce-eager"} <= set(shown)
        assert not [word for word in shown if "async-scheduling" in word or "block-size" in word]
        assert values(shown, "max-num-seqs", "max-model-len", "max-num-batched-tokens") == [
            "256",
            "512",
            "8192",
        ]
        own = ("--no-async-scheduling", "--no-enable-chunked-prefill", "--enforce-eager")
        kept = command_line(options(untied_dir, *own, max_model_len=20_000, max_num_seqs=4))
        assert set(own) <= set(kept)
        assert values(kept, "max-num-seqs", "max-model-len", "max-num-batched-tokens") == [
            "4",
            "20000",
            "20000",
        ]
        assert not {"--enable-chunked-prefill", "--no-enforce-eager"} & set(kept)

    def test_a_server_on_a_gpu_bounds_what_a_long_model_would_take_and_says_so(
        self, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        long = shutil.copytree(untied_dir, tmp_path / "long")
        config = json.loads((long / "config.json").read_text(encoding="utf-8"))
        changed = json.dumps({**config, "max_position_embeddings": 131072})
        (long / "config.json").write_text(changed, encoding="utf-8")
        unbounded = options(str(long), max_model_len=None)
        assert values(command_line(unbounded), "max-model-len", "max-num-batched-tokens") == ["32768", "8192"]
        assert "at most 32768 of the model's 131072 tokens" in shortened(unbounded)
        asked = options(str(long), max_model_len=131072)
        assert values(command_line(asked), "max-model-len", "max-num-batched-tokens") == ["131072", "8192"]
        assert shortened(asked) == ""

    def test_a_server_for_adapters_has_room_and_no_lora_layers_that_nobody_uses(
        self, untied_dir: str
    ) -> None:
        # On a GPU vLLM computes adapters in half precision only.
        half = torch.bfloat16
        plain, asked = (
            options(untied_dir),
            options(untied_dir, "--enable_lora", "--max_lora_rank", "8", dtype=half),
        )
        command = command_line(asked)
        assert command[command.index("--max-cpu-loras") + 1] == "16"
        layers = command[command.index("--lora-target-modules") + 1 :][:7]
        assert layers == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert not [word for word in command_line(plain) if "lora" in word]
        opened = [environment(KEY, one, {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") for one in (plain, asked)]
        assert opened == [None, "1"]
        words = ("--enable_lora", "--max_loras", "40", "--lora_target_modules", "q_proj")
        own = command_line(options(untied_dir, *words, dtype=half))
        assert own.count("--max-loras") == own.count("--lora-target-modules") == 1
        assert "--max-cpu-loras" not in own

    @pytest.mark.parametrize(
        "word",
        [
            "--lora-modules",
            "--default-mm-loras",
            "--api-key=x",
            "--quantization",
            "-q",
            "--middleware",
            "--logprobs_mode=raw_logprobs",
            "--no-enable-scale-out",
            "--config=x.yaml",
            "--speculative-config.method=ngram",
            "--spec-model=x",
            "--hf-overrides.rope_theta=1",
            "--worker-cls=x",
            "--kv-events-config.enable_kv_cache_events=true",
            "--kv_transfer_config",
            "--grpc",
            "--otlp-traces-endpoint=http://x",
            "--data-parallel-size-local=2",
            "--data_parallel_rank=0",
            "--dp-supervisor-probe-interval-s=1",
            "--api-server-count=2",
            "--headless",
            "-dp",
            "-dpa",
        ],
    )
    def test_what_would_open_the_server_or_change_log_probs_is_refused(
        self, untied_dir: str, word: str
    ) -> None:
        with pytest.raises(InputError, match=r"leave it out|may not set|whole names"):
            command_line(options(untied_dir, word))

    @pytest.mark.parametrize("word", ["--hos=0.0.0.0", "--logprobs-mod", "--root-pat", "--nonsense"])
    def test_abbreviations_are_refused_where_vllms_own_names_are_known(self, word: str) -> None:
        known = {"--host", "--logprobs-mode", "--root-path", "--compilation-config", "--no-async-scheduling"}
        check_whole_names(["--compilation-config.mode=0", "--no-async-scheduling", "-1"], known)
        with pytest.raises(InputError, match="whole name"):
            check_whole_names([word], known)
        with pytest.raises(InputError, match=r"did you mean --logprobs-mode\?"):
            check_whole_names(["--logprob-mode=x"], known)

    def test_a_second_model_is_refused_where_vllms_own_names_are_known(self) -> None:
        check_no_second_model(None)
        with pytest.raises(InputError, match="there is one MODEL"):
            check_no_second_model("other")

    def test_keys_of_json_arguments_keep_their_spelling(self, untied_dir: str) -> None:
        command = command_line(options(untied_dir, "--compilation_config.cudagraph_mode", "NONE"))
        assert command[-2:] == ["--compilation-config.cudagraph_mode", "NONE"]

    def test_addresses_of_every_kind_make_urls(self, untied_dir: str) -> None:
        assert options(untied_dir, host="::1").url == "http://[::1]:8000"
        assert options(untied_dir, "--ssl-certfile=c", host="0.0.0.0").url == "https://127.0.0.1:8000"

    def test_pictures_of_a_servers_calls_are_limited_as_those_of_a_run(self, untied_dir: str) -> None:
        name = "VLLM_MAX_IMAGE_PIXELS"
        assert environment(KEY, options(untied_dir), {})[name] == str(LARGEST)
        assert environment(KEY, options(untied_dir), {name: "7"})[name] == "7"
        spec = find_spec("vllm")
        assert spec is not None
        (folder,) = spec.submodule_search_locations or ()
        formats = (Path(folder) / "multimodal" / "image.py").read_text().partition("ALLOWED_IMAGE_FORMATS")[2]
        assert '"PNG"' in formats
        assert not {'"EPS"', '"WMF"'} & set(formats.partition(")")[0].replace(",", "").split())

    def test_the_environment_accepts_no_pickles_and_no_second_key(self, untied_dir: str) -> None:
        given = {
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_API_KEY": "x",
            "OMP_NUM_THREADS": "7",
            "HOME": "/h",
        }
        made = environment(KEY, options(untied_dir), given)
        assert made.keys().isdisjoint({"VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_API_KEY"})
        assert (made[KEY_VARIABLE], made["OMP_NUM_THREADS"], made["HOME"]) == (KEY, "7", "/h")

    @pytest.mark.parametrize("rest", [(), ("--distributed-executor-backend", "mp"), ("--seed=1",)])
    @pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
    def test_vllms_own_sockets_stay_on_this_machine_whatever_address_the_server_has(
        self, untied_dir: str, host: str, rest: tuple[str, ...]
    ) -> None:
        given = {"VLLM_HOST_IP": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        made = environment(KEY, options(untied_dir, *rest, host=host), given)
        assert (made["VLLM_HOST_IP"], made["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")

    @pytest.mark.parametrize(
        "rest",
        [
            ("--nnodes", "2"),
            ("--distributed-executor-backend=ray",),
            ("--distributed_executor_backend", "ray"),
        ],
    )
    def test_several_nodes_keep_the_users_addresses(self, untied_dir: str, rest: tuple[str, ...]) -> None:
        made = environment(KEY, options(untied_dir, *rest), {"VLLM_HOST_IP": "10.0.0.1"})
        assert made["VLLM_HOST_IP"] == "10.0.0.1"
        assert "GLOO_SOCKET_IFNAME" not in made

    def test_the_server_imports_nothing_from_the_current_directory(self, untied_dir: str) -> None:
        made = environment(KEY, options(untied_dir), {"PYTHONPATH": ":/a::/b:"})
        assert (made["PYTHONSAFEPATH"], made["PYTHONPATH"]) == ("1", "/a:/b")

    def test_triton_rounds_no_float32_unless_the_user_says_so(self, untied_dir: str) -> None:
        name, half = "TRITON_F32_DEFAULT", options(untied_dir, dtype=torch.bfloat16)
        single = options(untied_dir, dtype=torch.float32)
        assert [environment(KEY, o, {}).get(name) for o in (single, half)] == ["ieee", None]
        assert environment(KEY, options(untied_dir, dtype=torch.bfloat16, fp32_head=True), {})[name] == "ieee"
        assert environment(KEY, single, {name: "tf32"})[name] == "tf32"

    def test_memory_on_a_cpu_does_not_grow_with_the_shapes_seen_unless_the_user_says_so(
        self, untied_dir: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
        assert int(environment(KEY, options(untied_dir), {})[name]) <= 128
        assert environment(KEY, options(untied_dir), {name: "1024"})[name] == "1024"

    def test_threads_that_wait_leave_a_cpu_to_the_trainer_unless_the_user_says_how_to_wait(
        self, untied_dir: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        name = "GOMP_SPINCOUNT"
        assert 0 < int(environment(KEY, options(untied_dir), {})[name]) <= 10_000
        assert environment(KEY, options(untied_dir), {name: "7"})[name] == "7"
        assert name not in environment(KEY, options(untied_dir), {"OMP_WAIT_POLICY": "ACTIVE"})


def test_what_a_server_started_by_hand_needs_is_the_same_on_the_page_and_in_errors() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "internals" / "server.md").read_text().split())
    needed = [word for word in shlex.split(HOW_TO_START) if word.startswith(("--", "VLLM_"))]
    assert len(needed) > 5
    assert [word for word in needed if word.rstrip(",") not in page] == []


class TestRefusals:
    def refused(self, words: list[str], capsys: pytest.CaptureFixture[str], reason: str) -> None:
        assert main(["serve", *words]) == 2
        assert reason in " ".join(capsys.readouterr().err.split())

    def test_an_address_for_other_machines_needs_a_key(
        self, untied_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        self.refused([untied_dir, "--host", "0.0.0.0"], capsys, "give the server a key of your own")

    def test_a_model_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["./nowhere", "--dry_run"], capsys, "does not exist")

    def test_several_copies_in_one_server(self, untied_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(
            [untied_dir, "--data_parallel_size", "2", "--dry_run"],
            capsys,
            "start as many servers, each on a port",
        )

    def test_a_key_file_that_others_can_read(
        self, untied_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "k"
        write_key(path, KEY)
        path.chmod(0o644)
        self.refused([untied_dir, "--key_file", str(path)], capsys, "other users can read")

    def test_a_port_that_is_taken(self, untied_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
        import socket

        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            self.refused([untied_dir, "--port", str(other.getsockname()[1])], capsys, "choose another --port")

    def test_a_second_server_by_mistake_leaves_the_keys_file_alone(
        self,
        untied_dir: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        import socket

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            write_key(default_key_file(port), KEY)
            self.refused([untied_dir, "--port", str(port)], capsys, "choose another --port")
        assert read_key(default_key_file(port)) == KEY

    def test_a_dry_run_prints_the_command_without_a_key(
        self, untied_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        assert main(["serve", untied_dir, "--dry_run"]) == 0
        out = capsys.readouterr().out
        assert "lockstep.server.guard.KeyGuard" in out
        assert KEY not in out
