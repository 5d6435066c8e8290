"""The fields of vLLM as a server: where servers are, with which key, and how weights reach them.

`OnlineConfig` inherits the fields. `run/engine.py` connects to the servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.engines.http.server_calls import check_urls, server_urls, urls_of_file
from lockstep.errors import InputError
from lockstep.sync.wire.transport import check_transport
from lockstep.training.config.option import PORT, SECONDS, Bookkeeping, Bounds, option


@dataclass
class ServerFields:
    """The fields of servers."""

    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "vLLM in this process, or running servers ('lockstep serve').", group="server", common=True
    )
    vllm_server_base_url: str | None = option(
        None,
        "URL of the server, or several separated by commas. Setting it implies server mode.",
        group="server",
        common=True,
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_url_file: str | None = option(
        None,
        "Text file with the base URL of a server per line, instead of vllm_server_base_url. It is read again before every "
        "generation, so that servers can join and leave.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_host: str = option(
        "0.0.0.0",
        "The server's host, if no URL is given; 0.0.0.0: this machine.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_port: int = option(
        8000,
        "The server's port, if no URL is given.",
        group="server",
        bounds=PORT,
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_key_file: str | None = option(
        None,
        "File with the server's key. Default: LOCKSTEP_SERVER_KEY, or the key that a server here saved.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_weight_transport: str = option(
        "auto",
        "shared_memory, gloo, cuda_ipc (on one GPU), nccl (GPU to GPU), or auto: the fastest that works, without nccl. "
        "cuda_ipc and nccl have not been run on a GPU yet.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_weight_deltas: bool = option(
        True,
        "Over gloo, send bf16 servers only the elements of the weights that changed. The trainer and each worker then keep "
        "a copy of the weights in main memory, if there is room.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_group_host: str = option(
        "127.0.0.1",
        "This machine's address as other machines' servers reach it; the trainer listens there.",
        group="server",
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_group_port: int = option(
        0,
        "Port on which workers meet the trainer. Default: a free one.",
        group="server",
        bounds=Bounds(0, 65535),
        bookkeeping=Bookkeeping.SERVERS,
    )
    vllm_server_timeout: float = option(
        240.0,
        "Seconds for one call or the wait for a server; a generation may take 2.5 times as long.",
        group="server",
        bounds=SECONDS,
        bookkeeping=Bookkeeping.WAITING,
    )

    @property
    def generation_timeout(self) -> float:
        """Seconds that the engine may take for one request, and that it waits for a request. With TRL's default of
        `vllm_server_timeout`, which is meant for a server's start, long completions on a CPU would be cut off."""
        return 2.5 * self.vllm_server_timeout

    @property
    def server_urls(self) -> list[str]:
        """Base URL of each server, in server mode. They are those that the file has now.

        Raises:
            InputError: the file cannot be read, or has something other than URLs.
        """
        if self.vllm_server_url_file is not None:
            return urls_of_file("vllm_server_url_file", self.vllm_server_url_file)
        return server_urls(self.vllm_server_base_url, self.vllm_server_host, self.vllm_server_port)

    def check_servers(self, *, owner: bool) -> None:
        """Check the fields.

        Args:
            owner: whether this process reads the file of URLs. The machines of other processes may not have it.

        Raises:
            InputError: a field has an unknown value, or the servers are not named by URLs.
        """
        if self.vllm_mode not in ("colocate", "server"):
            raise InputError(f"vllm_mode={self.vllm_mode!r}; it must be colocate or server")
        check_transport(self.vllm_weight_transport)
        if self.vllm_mode == "colocate":
            return
        if self.vllm_server_url_file is None:
            check_urls("vllm_server_base_url", self.server_urls)
        elif self.vllm_server_base_url is not None:
            raise InputError(
                "vllm_server_base_url and vllm_server_url_file both name the servers; leave one of the two out"
            )
        elif owner:
            urls_of_file("vllm_server_url_file", self.vllm_server_url_file)
