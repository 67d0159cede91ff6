"""Network namespaces as the machines of a cluster, each with an address of its own on one bridge.

They end with this process, as each is held by a `cat` that reads from it.
"""

import ctypes
import os
import subprocess

import pytest


class Cluster:
    """Nodes 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ... at the interface eth0."""

    def __init__(self, count: int):
        self.holders: list[subprocess.Popen] = []
        try:
            for _ in range(count + 1):
                cat = subprocess.Popen(
                    ["unshare", "--net", "cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                )
                self.holders.append(cat)
                cat.stdin.write(b"x")
                if not cat.stdout.read(1):
                    raise OSError("unshare --net fails")
            self.ip(count, "link add bridge up type bridge")  # the last one is the switch
            for node in range(count):
                peer = f"name eth0 netns {self.holders[node].pid}"
                self.ip(count, f"link add port{node} master bridge up type veth peer {peer}")
                self.ip(node, f"addr add 10.77.0.{node + 1}/24 dev eth0")
                self.ip(node, "link set eth0 up")
                self.ip(node, "link set lo up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.end()
            pytest.skip(f"network namespaces are not allowed here: {error}")

    def inside(self, node: int) -> list[str]:
        """Words before a command that let it run on a node."""
        return ["nsenter", f"--net=/proc/{self.holders[node].pid}/ns/net"]

    def ip(self, node: int, command: str) -> None:
        subprocess.run([*self.inside(node), "ip", *command.split()], check=True)

    def end(self) -> None:
        for cat in self.holders:
            cat.stdin.close()
            cat.wait(10)


def enter(process: int) -> None:
    """Move this process, which has one thread, to the network of another process."""
    namespace = f"/proc/{process}/ns/net"
    if not os.path.samefile(namespace, "/proc/self/ns/net"):
        with open(namespace) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
