"""Network namespaces as the machines of a cluster: each has an address of its own on one bridge.

They end with this process: each is held by a `cat` that reads from it.
"""

import ctypes
import os
import subprocess

import pytest


class Cluster:
    """Nodes 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ... and the interface eth0."""

    def __init__(self, count: int):
        self.holders: list[subprocess.Popen] = []
        self.user: list[str] = []
        try:
            # Without root the namespaces are those of a user of their own.
            switch = self._hold(["--user", "--map-root-user"] if os.geteuid() else [])
            if os.geteuid():
                self.user = [f"--user=/proc/{switch}/ns/user", "--preserve-credentials"]
            self._ip(switch, "link add bridge type bridge", "link set bridge up")
            for number in range(count):
                node = self._hold([])
                self._ip(
                    switch,
                    f"link add port{number} type veth peer name eth0 netns {node}",
                    f"link set port{number} master bridge up",
                )
                self._ip(node, "link set lo up", "link set eth0 up")
                self.move(number, number)
        except (OSError, subprocess.CalledProcessError) as error:
            self.end()
            pytest.skip(f"network namespaces are not allowed here: {error}")

    def _hold(self, options: list[str]) -> int:
        """Make a network namespace, and return the process that holds it."""
        line = ["unshare", *options, "--net", "cat"]
        if self.user:
            line = ["nsenter", *self.user, *line]
        holder = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.holders.append(holder)
        holder.stdin.write(b"x")
        if holder.stdout.read(1) != b"x":
            raise OSError("unshare --net has failed")
        return holder.pid

    def inside(self, node: int) -> list[str]:
        """Words before a command that let it run on a node."""
        return self._inside(self.holders[1 + node].pid)

    def _inside(self, holder: int) -> list[str]:
        return ["nsenter", *self.user, f"--net=/proc/{holder}/ns/net"]

    def _ip(self, holder: int, *commands: str) -> None:
        for command in commands:
            subprocess.run([*self._inside(holder), "ip", *command.split()], check=True)

    def ip(self, node: int, command: str) -> None:
        self._ip(self.holders[1 + node].pid, command)

    def move(self, address: int, node: int) -> None:
        """Give a node the address that is by default the one of node `address`."""
        self.ip(node, f"addr add {self.address(address)}/24 dev eth0")

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def end(self) -> None:
        for holder in self.holders:
            holder.stdin.close()
            holder.wait(10)


def enter(process: int) -> None:
    """Move this process, which has one thread, to the network of another process."""
    for kind in ("user", "net"):
        path = f"ns/{kind}"
        if os.readlink(f"/proc/self/{path}") != os.readlink(f"/proc/{process}/{path}"):
            with open(f"/proc/{process}/{path}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns {kind}")
