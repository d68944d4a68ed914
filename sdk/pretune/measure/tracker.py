"""A client of TVM's RPC tracker that never waits: it asks what is free, and takes it."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from dataclasses import dataclass
from typing import Any

from pretune.errors import MeasureError, OptionError

TIMEOUT_S = 5.0
"""Seconds that the tracker may take to answer."""


@dataclass(frozen=True)
class RPCAddress:
    """Where a farm is: its RPC tracker, and the key under which the servers with the devices are registered.

    Attributes
    ----------
    host : str
    port : int
    key : str
        All devices under one key are taken to be alike.
    """

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, tracker: str | None, key: str | None) -> RPCAddress | None:
        """The address that ``--rpc-tracker HOST:PORT --rpc-key KEY`` give; None if neither is given.

        Raises
        ------
        OptionError
            If one is missing, or it is no address.
        """
        if tracker is None and key is None:
            return None
        if not tracker or not key:
            raise OptionError("a farm is given by both --rpc-tracker HOST:PORT and --rpc-key KEY")
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):(\d{1,5})", tracker)
        if found is None or not 0 < int(found[2]) < 1 << 16:
            raise OptionError(
                f"--rpc-tracker {tracker} is no HOST:PORT; give it as in --rpc-tracker 192.168.1.2:9190"
            )
        return cls(found[1].strip("[]"), int(found[2]), key)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Server:
    """A server that the tracker has handed out: it accepts one connection with this match key, and soon."""

    host: str
    port: int
    matchkey: str

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"{self.host}:{self.port}"


class Tracker:
    """Asks the tracker of a farm, over a new connection each time: it may go and come back.

    Every method raises `MeasureError` if the tracker cannot be reached.
    """

    def __init__(self, address: RPCAddress) -> None:
        self.address = address

    def summary(self) -> tuple[int, list[str]]:
        """How many servers are free, and the addresses of all that are connected."""
        from tvm.rpc.base import TrackerCode

        found = self._ask([TrackerCode.SUMMARY])
        key = self.address.key
        free = found["queue_info"].get(key, {}).get("free", 0)
        servers = [server["addr"] for server in found["server_info"] if server["key"] == f"server:{key}"]
        return free, [f"{host}:{port}" for host, port in servers]

    def keys(self) -> list[str]:
        """The keys that servers are registered under."""
        from tvm.rpc.base import TrackerCode

        servers = self._ask([TrackerCode.SUMMARY])["server_info"]
        return sorted({server["key"].removeprefix("server:") for server in servers})

    def take(self) -> Server | None:
        """Take a free server, which no other client gets then; None if another client was faster."""
        from tvm.rpc.base import TrackerCode

        low_priority = 1
        with contextlib.suppress(TimeoutError):
            host, port, matchkey = self._ask([TrackerCode.REQUEST, self.address.key, "", low_priority])
            return Server(host, port, matchkey)
        return None

    def _ask(self, message: list[Any]) -> Any:
        from tvm.rpc import base

        try:
            with socket.create_connection((self.address.host, self.address.port), TIMEOUT_S) as connection:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if base.recvall(connection, 4) != struct.pack("<i", base.RPC_TRACKER_MAGIC):
                    raise MeasureError(f"what listens at {self.address} is no RPC tracker; see --rpc-tracker")
                base.sendjson(connection, message)
                code, answer = base.recvjson(connection)
        except TimeoutError:
            if message[0] == base.TrackerCode.REQUEST:
                raise
            raise MeasureError(f"the RPC tracker at {self.address} does not answer; is it stopped?") from None
        except (OSError, ValueError) as error:
            host, port = self.address.host, self.address.port
            raise MeasureError(
                f"no RPC tracker at {self.address} ({error}); run there: "
                f"python -m tvm.exec.rpc_tracker --host {host} --port {port} --port-end {port + 1}"
            ) from None
        if code != base.TrackerCode.SUCCESS:
            raise MeasureError(f"the RPC tracker at {self.address} refuses: {answer}")
        return answer
