"""Every wait in the source says what it waits for (`progress.py`), or stands in this table with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
# Calls that may block, by their last name. `join` and `sleep` only of threads, processes and the clock.
BLOCKS = {
    "wait", "result", "wait_for", "collective_rpc", "all_reduce", "all_gather", "all_gather_coalesced", "allgather",
    "barrier",
    "new_group", "urlopen", "TCPStore", "readline", "flock", "create_connection",
}  # fmt: skip
OWNED = {
    "sleep": {"time"},
    "join": {"_thread", "watcher", "parent", "thread"},
    "gather": {"dist"},
    "scatter": {"dist"},
    "broadcast": {"dist"},
}
# By reason, the functions whose waits say nothing of their own.
SILENT = {
    "another block that says so is open meanwhile": """
        threads.py::CallLoop.run threads.py::Pending.result threads.py::Pending.wait
        engines/servers/set.py::Pauses.begin engines/servers/set.py::Pauses.wait engines/servers/set.py::Pauses.check
        engines/servers/set.py::_begin engines/servers/requests.py::ServerRequests._answer
        engines/servers/requests.py::ServerRequests._all engines/servers/calls.py::ServerCalls.update_weights
        weights/wire/stream.py::finish_all engines/servers/server.py::VLLMServer.score
        engines/servers/server.py::VLLMServer.load contract/inbox.py::Inbox._await
        extras/environments/verifiers.py::VerifiersAgent.__call__ extras/agents/agent_program.py::Agent._execute
        extras/agents/agent_program.py::AgentProgram._run
        bounded_http.py::run images/urls.py::ImageUrls.fetch rollouts/ranks.py::Ranks._gathered
        rollouts/ranks.py::Ranks._scattered rollouts/driver.py::Running.finish
        rollouts/driver.py::Running.await_begin rollouts/programs/environments.py::_exchange
        rollouts/programs/workers.py::_within threads.py::run_coroutine
        server/supervisor.py::Supervisor._run_once
        weights/wire/network.py::GlooTransport.send weights/wire/network.py::Receiver.receive
        weights/wire/groups.py::DeviceChannel._wait weights/wire/groups.py::in_background
        weights/wire/groups.py::SignedStore.get weights/wire/groups.py::SignedStore.wait
        weights/wire/groups.py::authenticate weights/wire/groups.py::prove
        weights/wire/shared_memory.py::SharedMemoryTransport._send weights/wire/shared_memory.py::_wait_for
        watch/ahead.py::ProofsAhead.check_answer contract/inbox.py::Errands.do_during
        rollouts/programs/tools.py::ToolCalls.finish rollouts/programs/workers.py::Worker.do
        extras/environments/own_process/openenv_session.py::make_session""",
    "a thread or loop that waits for its next work": """
        threads.py::_serve engines/vllm/environment.py::end_with_trainer.end
        extras/environments/verifiers.py::VerifiersAgent._read extras/agents/streamed_answers.py::Heard.begins
        extras/agents/streamed_answers.py::Heard.until
        extras/agents/web.py::_wait progress.py::Heartbeat._run
        progress.py::Waits._run threads.py::_limit.watch""",
    "it lasts at most a few seconds": """
        threads.py::CallLoop.__init__ engines/servers/set.py::ServerSet.healthy extras/agents/agent_program.py::Agent._execute
        extras/agents/web.py::Gateway.close progress.py::Heartbeat.stop
        cli/process.py::EndAtOnce.leave_threads
        rollouts/driver.py::Driver._settle rollouts/programs/tools.py::ToolCalls.settled
        rollouts/programs/workers.py::_gives_way threads.py::_limit
        server/supervisor.py::Supervisor._sleep weights/wire/groups.py::own_address""",  # noqa: E501
    "a process that has ended or was killed": """
        extras/environments/verifiers.py::VerifiersAgent._start_process rollouts/programs/environments.py::_kill
        processes.py::KillAtExit.release server/supervisor.py::Supervisor._end""",
    "it ends at once: the lock is refused, or the store is this process": """
        server/supervisor.py::reserved_port weights/wire/groups.py::open_store weights/wire/shared_memory.py::TrainerLock.__init__
        weights/wire/shared_memory.py::is_unlocked run/files/directory.py::_take engines/vllm/environment.py::owned
        engines/vllm/environment.py::remove_dead files.py::temporary_folder files.py::_remove_dead""",  # noqa: E501
    "the engine's answer is not awaited: the next question looks for it": "server/guard.py::KeyGuard._say_health",
    "it is the work of this process": """
        contract/inbox.py::answer_all engines/vllm/in_process.py::OwnWorker.__init__
        engines/vllm/in_process.py::OwnWorker.load
        engines/vllm/start.py::WorkerProcesses.__init__ extras/selftest/seams.py::vllm_worker""",
    "it ends a failed push in a thread of its own, or drops requests": """
        threads.py::CallLoop.close engines/servers/requests.py::ServerRequests.serve
        weights/wire/groups.py::GlooChannel._end""",
    "it is no wait: the result of a tool as ids": """
        rollouts/programs/tool_program.py::_answers tokens/extension.py::Extension.result
        tokens/extension.py::Extension.why_no_pictures tokens/extension.py::drawn""",
}


def waits_of(tree: ast.AST) -> Iterator[str]:
    """The functions with a call that may block outside of a block that says what it waits for."""

    def visit(node: ast.AST, name: str, said: bool) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, said = f"{name}.{node.name}".lstrip("."), False
        elif isinstance(node, ast.With | ast.AsyncWith):
            said = said or any(
                "waiting(" in (text := ast.unparse(item)) or "busy(" in text for item in node.items
            )
        elif isinstance(node, ast.Call) and not said and may_block(node.func):
            yield name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, name, said)

    yield from visit(tree, "", False)


def may_block(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in BLOCKS
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value).rpartition(".")[2]
    return function.attr in BLOCKS or owner in OWNED.get(function.attr, ())


def test_every_wait_says_what_it_waits_for_or_has_a_reason_not_to() -> None:
    found = {
        f"{path.relative_to(SOURCE)}::{name}"
        for path in SOURCE.rglob("*.py")
        for name in waits_of(ast.parse(path.read_text()))
    }
    excused = {place for places in SILENT.values() for place in places.split()}
    assert sorted(found - excused) == [], (
        "put the wait into `with waiting(…)`, or into the table with its reason"
    )
    assert sorted(excused - found) == [], "the table names what is gone or says what it waits for by now"


def test_a_wait_that_says_nothing_is_found() -> None:
    silent = "def f():\n    done.wait(3)\n"
    told = "def f():\n    with waiting('it', 3):\n        done.wait(3)\n"
    inner = "def f():\n    with waiting('it'):\n        def g():\n            time.sleep(1)\n"
    assert [list(waits_of(ast.parse(text))) for text in (silent, told, inner)] == [["f"], [], ["f.g"]]
