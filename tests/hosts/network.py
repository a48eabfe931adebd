"""Makes hosts on one machine: network namespaces with their own addresses, joined by a switch. Needs root."""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.slow_path import SlowPath

SUBNET, SUBNET_6 = "10.77.0", "fd77:"
FILES = Path("/etc/netns")  # what `ip netns exec` puts over /etc


def obstacle() -> str | None:
    """Return why this machine cannot make them; None: it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command here"
    name = f"stx{os.getpid()}-try"
    tried = subprocess.run(
        f"ip netns add {name} && ip -n {name} link add br0 type bridge && "
        f"ip -n {name} link add eth0 type veth peer name eth1",
        shell=True,
        capture_output=True,
        text=True,
    )
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None if tried.returncode == 0 else f"the kernel refuses network namespaces: {tried.stderr.strip()}"


class Network:
    """Holds hosts 0, 1, ..., each with a cable to one switch."""

    def __init__(self, hosts: int) -> None:
        prefix = f"stx{os.getpid()}-"
        self._switch = prefix + "switch"
        self._hosts = [f"{prefix}{number}" for number in range(hosts)]
        self._paths: dict[int, SlowPath] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"{SUBNET}.{host + 1}"

    def address_6(self, host: int) -> str:
        return f"{SUBNET_6}:{host + 1}"

    def name(self, host: int, name: str, *addresses: str) -> None:
        """Let a name stand for addresses, as a host sees it, and for nothing else."""
        file = FILES / self._hosts[host] / "hosts"
        others = [line for line in file.read_text().splitlines() if not line.endswith(f" {name}")]
        file.write_text("".join(f"{line}\n" for line in [*others, *(f"{each} {name}" for each in addresses)]))

    def command(self, host: int, command: Sequence[object]) -> list[str]:
        """Wrap a command to run on a host."""
        return ["ip", "netns", "exec", self._hosts[host], *map(str, command)]

    def unplug(self, host: int) -> None:
        """Take a host's link down, which it sees."""
        _ip("-n", self._hosts[host], "link", "set", "eth0", "down")

    def plug_in(self, host: int) -> None:
        _ip("-n", self._hosts[host], "link", "set", "eth0", "up")

    def isolate(self, host: int) -> None:
        """Drop all packets from and to a host silently."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def join(self, host: int) -> None:
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "br0")

    def delay(self, host: int, seconds: float) -> None:
        """Delay every packet from and to a host."""
        path = self._paths[host] = SlowPath(f"stx{os.getpid()}-{host}", seconds)
        for name, bridge in zip(path.interfaces, ("br0", "br1"), strict=True):
            _ip("link", "set", name, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", name, "master", bridge)
            _ip("-n", self._switch, "link", "set", name, "up")
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "br1")

    def hurry(self, host: int) -> None:
        """End the delay."""
        self.join(host)
        self._paths.pop(host).close()

    def close(self) -> None:
        """Remove everything."""
        for path in self._paths.values():
            path.close()
        for name in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(FILES / name, ignore_errors=True)

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        for bridge in ("br0", "br1"):
            _ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._switch, "link", "set", bridge, "up")
        for number, name in enumerate(self._hosts):
            # Programs find the host's own address under its name, as on a host of its own.
            (FILES / name).mkdir(parents=True)
            hosts = f"127.0.0.1 localhost\n{self.address(number)} {socket.gethostname()}\n"
            (FILES / name / "hosts").write_text(hosts)
            _ip("netns", "add", name)
            veth = ("type", "veth", "peer", "name", f"port{number}", "netns", self._switch)
            _ip("-n", name, "link", "add", "eth0", *veth)
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", name, "addr", "add", f"{self.address_6(number)}/64", "dev", "eth0", "nodad")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", self._switch, "link", "set", f"port{number}", "master", "br0")
            _ip("-n", self._switch, "link", "set", f"port{number}", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
