"""Bad words for `lockstep serve` and `lockstep verify`: each is refused in one line, before vLLM is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from bad_input import Row, check, rows

SERVE = [
    Row("no model", [], "MODEL|model"),
    Row("a model that is not there", ["./nowhere"], "does not exist"),
    Row("a directory without a model", ["{home}"], "no config.json"),
    Row("an empty model", [""], "model"),
    Row("two models", ["{model}", "other"], "unexpected 'other'"),
    Row("a port of 0", ["{model}", "--port", "0"], "port"),
    Row("a port below 0", ["{model}", "--port", "-1"], "port"),
    Row("a port beyond 65535", ["{model}", "--port", "65536"], "port"),
    Row("a port that is text", ["{model}", "--port", "http"], "port"),
    Row("a port twice as large", ["{model}", "--port", "131072"], "port"),
    Row(
        "an address of another machine",
        ["{model}", "--host", "192.0.2.1", "--key_file", "{home}/k"],
        "cannot listen",
    ),
    Row(
        "a host that is not an address",
        ["{model}", "--host", "no such host", "--key_file", "{home}/k"],
        "host",
    ),
    Row("an empty host", ["{model}", "--host", "", "--key_file", "{home}/k"], "host"),
    Row("an open address without a key", ["{model}", "--host", "0.0.0.0"], "key of your own"),
    Row("an open IPv6 address without a key", ["{model}", "--host", "::"], "key of your own"),
    Row("a key file in no folder", ["{model}", "--key_file", "{home}/no/k"], "does not exist"),
    Row("a key file that is a directory", ["{model}", "--key_file", "{home}"], "key file"),
    Row("a key file with a short key", ["{model}", "--key_file", "{home}/short"], "at least 16"),
    Row("a key file that others read", ["{model}", "--key_file", "{home}/open"], "other users can read"),
    Row("no sequences", ["{model}", "--max_num_seqs", "0", "--dry_run"], "max_num_seqs"),
    Row("sequences below 0", ["{model}", "--max_num_seqs", "-4", "--dry_run"], "max_num_seqs"),
    Row("no length", ["{model}", "--max_model_len", "0", "--dry_run"], "max_model_len"),
    Row("a length below 0", ["{model}", "--max_model_len", "-1", "--dry_run"], "max_model_len"),
    Row("no workers", ["{model}", "--tensor_parallel_size", "0", "--dry_run"], "tensor_parallel_size"),
    Row("workers below 0", ["{model}", "--tensor_parallel_size", "-2", "--dry_run"], "tensor_parallel_size"),
    Row("several copies", ["{model}", "--data_parallel_size", "2", "--dry_run"], "start as many"),
    Row("copies per node", ["{model}", "--data-parallel-size-local", "2", "--dry_run"], "start as many"),
    Row(
        "memory of nothing",
        ["{model}", "--gpu_memory_utilization", "0", "--dry_run"],
        "gpu_memory_utilization",
    ),
    Row(
        "memory of NaN", ["{model}", "--gpu_memory_utilization", "nan", "--dry_run"], "gpu_memory_utilization"
    ),
    Row("memory of two", ["{model}", "--gpu_memory_utilization", "2", "--dry_run"], "gpu_memory_utilization"),
    Row("a dtype that is none", ["{model}", "--dtype", "int8", "--dry_run"], "dtype"),
    Row("a short argument", ["{model}", "-tp", "2", "--dry_run"], "whole names"),
    Row("a second key", ["{model}", "--api-key", "x", "--dry_run"], "leave it out"),
    Row("a middleware", ["{model}", "--middleware", "x", "--dry_run"], "leave it out"),
    Row("another model", ["{model}", "--model", "x", "--dry_run"], "leave it out"),
    Row("a socket in the place of a port", ["{model}", "--uds", "/tmp/x", "--dry_run"], "leave it out"),
    Row("raw log-probs", ["{model}", "--logprobs-mode", "raw_logprobs", "--dry_run"], "leave it out"),
    Row("events on a port", ["{model}", "--kv-events-config", "{}", "--dry_run"], "port without a key"),
    Row("grpc", ["{model}", "--grpc", "--dry_run"], "port without a key"),
    Row("speculation", ["{model}", "--speculative-config", "{}", "--dry_run"], "log-probs would differ"),
    Row("a quantised model", ["{model}", "--quantization=fp8", "--dry_run"], "it must be fp8_per_channel"),
    Row(
        "float32 in 8 bits",
        ["{model}", "--quantization=fp8_per_channel", "--dtype=float32", "--dry_run"],
        "--dtype bfloat16",
    ),
    Row(
        "a misspelt argument",
        ["{model}", "--max-num-batch-tokens", "9"],
        "did you mean 'max_num_batched_tokens'",
    ),
    Row("a misspelt argument of ours", ["{model}", "--key_fil=x"], "did you mean 'key_file'"),
    Row("a field of training", ["{model}", "--learning_rate", "1"], "unknown argument 'learning_rate'"),
    Row("a misspelt switch", ["{model}", "--no-enable-prefix-cachin"], "enable_prefix_caching"),
    Row("a port that is taken", ["{model}", "--port", "{taken}"], "choose another --port"),
]
VERIFY = [
    Row("nothing to verify", [], "which model"),
    Row("a model that is not there to verify", ["--model", "./nowhere"], "does not exist"),
    Row("an engine that nobody knows", ["--model", "{model}", "--engine", "tgi"], "engine"),
    Row("a dtype that nobody knows", ["--model", "{model}", "--dtype", "int4"], "dtype"),
    Row("a receipt that is not there", ["--receipt", "{home}/nowhere"], "nowhere"),
    Row("a receipt that is a directory", ["--receipt", "{home}"], "directory|receipt"),
    Row("a receipt that is binary", ["--receipt", "{home}/binary"], "not a text file", 1),
    Row("a receipt that is empty", ["--receipt", "{home}/empty"], "is empty", 1),
    Row("a receipt of other lines", ["--receipt", "{home}/short"], "not an entry", 1),
    Row("a run that is not there", ["--explain", "{home}/nowhere"], "nowhere"),
    Row("a run without a receipt", ["--explain", "{home}"], "receipt"),
    Row("a field of serve", ["--model", "{model}", "--port", "1"], "port"),
    Row("no value", ["--model"], "model"),
]


@pytest.fixture
def places(tmp_path: Path, untied_dir: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("LOCKSTEP_SERVER_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, content, mode in (
        ("short", b"abc", 0o600),
        ("open", b"a-key-for-tests-only", 0o644),
        ("empty", b"", 0o600),
    ):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
    (tmp_path / "binary").write_bytes(b"\x80\xff\xfe")
    return {"{home}": str(tmp_path), "{model}": untied_dir}


def filled(words: list[str], places: dict[str, str]) -> list[str]:
    for mark, value in places.items():
        words = [word.replace(mark, value) for word in words]
    return words


@rows(*SERVE)
def test_bad_words_for_serve_are_one_line(
    row: Row, places: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = filled(row.given, {**places, "{taken}": str(taken.getsockname()[1])})
        # What `serve` says before is about its progress.
        check(["serve", *words], row, capfd, aside="lockstep serve: loading")


@rows(*VERIFY)
def test_bad_words_for_verify_are_one_line(
    row: Row, places: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    check(["verify", *filled(row.given, places)], row, capfd)
