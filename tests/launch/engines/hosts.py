"""Hosts for tests: namespaces of this machine with an address, a name and a real sshd each.

Three machines on one Ethernet bridge that exists nowhere else: ``head``, where the launcher runs, and the
hosts. All files of a host (keys, configuration, the list of host names) lie in a folder of the test; nothing
of the machine's or its user's is read or written. Everything is gone when the process that made it is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[3] / "src"
NETWORK = "10.213.77."
_DAEMONS = ("sshd", "/usr/sbin/sshd", "cat", "unshare", "nsenter", "slurmd ", "slurmctld ", ": slurmscriptd")
PROGRAMS = ("unshare", "nsenter", "ip", "ssh", "ssh-keygen", "/usr/sbin/sshd")
# A host's own name must not come from the machine's /etc/hosts, nor a login run what is in its user's home;
# sshd wants /run/sshd.
_BECOME_A_MACHINE = """
set -e
mount --make-rprivate /
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/passwd /etc/passwd
mount -t tmpfs none /run
mkdir /run/sshd
ip link set lo up
echo up
read go
{then}
echo ready
exec cat
"""
# sshd goes to the background before it listens. 0A: listens; 0016 and 08AE: ports 22 and 2222.
_SSHD = """
ip link set net0 up
/usr/sbin/sshd -f {folder}/sshd_config -E {folder}/sshd-{name}.log && timeout 120 sh -c '
    until grep -q ":0016 .* 0A " /proc/net/tcp && grep -q ":08AE .* 0A " /proc/net/tcp; do sleep 0.01; done
' || {{ echo "its sshd does not listen: $(tail -n 1 {folder}/sshd-{name}.log)"; exit 1; }}
"""


def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (.ci/install-packages)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    asked = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-p", "-f", "ip", "link", "add", "b0", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return f"the kernel refuses: {asked.stderr.strip()}" if asked.returncode else None


class Machine:
    """One of the machines; its first process ends when the test's process does."""

    def __init__(self, name: str, address: str, folder: Path, *, own_processes: bool, then: str = "") -> None:
        self.name, self.address = name, address
        self._network: int | None = None
        script = _BECOME_A_MACHINE.format(
            name=name, folder=folder, then=then.format(name=name, folder=folder)
        )
        own = ["--pid", "--mount-proc"] if own_processes else []
        self._first = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--fork", "--kill-child", *own, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it complains when it is killed
            text=True,
        )
        self._wait_for("up")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self.pid = int(children.read_text())
        self._enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts"]
        if own_processes:
            self._enter.append("--pid")

    def _wait_for(self, word: str) -> None:
        assert self._first.stdout is not None
        line = self._first.stdout.readline().strip()
        assert line == word, f"{self.name} did not come up: {line or 'its first process ended'}"

    def start(self) -> None:
        """Goes on after the cables are in."""
        assert self._first.stdin is not None
        self._first.stdin.write("\n")
        self._first.stdin.flush()
        self._wait_for("ready")

    def popen(self, command: Sequence[str], directory: Path, **options: Any) -> subprocess.Popen[str]:
        """Starts a program there."""
        command = [*self._enter, f"--wdns={directory}", *command]
        return subprocess.Popen(command, encoding="utf-8", errors="surrogateescape", **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program there to its end."""
        return subprocess.run(
            [*self._enter, *command], capture_output=True, text=True, timeout=600, **options
        )

    def processes(self) -> dict[int, str]:
        """Command lines of what runs there, by process id here, but for what makes it a machine."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/uts")
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/uts") != namespace:
                    continue
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # just ended
            if command and not command.startswith(_DAEMONS):
                found[int(folder.name)] = command
        return found

    def pull_the_plug(self) -> None:
        """All of its processes end at once, and the others are told that their connections are."""
        self._network = os.open(
            f"/proc/{self.pid}/ns/net", os.O_RDONLY
        )  # it would vanish before it could tell
        os.kill(self.pid, signal.SIGKILL)
        self._first.wait()

    def close(self) -> None:
        """Ends it; all its processes end with its first."""
        if self._first.poll() is None:
            self._first.kill()
            self._first.wait()
        if self._network is not None:
            os.close(self._network)
        for stream in (self._first.stdin, self._first.stdout):
            if stream is not None:
                stream.close()


class Hosts:
    """The machines, their cables and what ssh has to know of them."""

    def __init__(self, folder: Path, names: Sequence[str] = ("alpha", "beta")) -> None:
        self.folder = folder
        addresses = {name: f"{NETWORK}{number}" for number, name in enumerate(("head", *names), 1)}
        self._write_files(addresses)
        self.head = Machine("head", addresses["head"], folder, own_processes=False)
        self.hosts = [
            Machine(name, addresses[name], folder, own_processes=True, then=_SSHD) for name in names
        ]
        self._cable()
        for machine in (self.head, *self.hosts):
            machine.start()
        self.ssh_args = ["-F", str(folder / "ssh_config")]

    def _write_files(self, addresses: Mapping[str, str]) -> None:
        folder = self.folder
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
        )
        home = folder / "home"
        home.mkdir()
        users = Path("/etc/passwd").read_text().splitlines()
        root = f"root:x:0:0:root:{home}:/bin/sh"
        (folder / "passwd").write_text(
            "".join(f"{root if user.startswith('root:') else user}\n" for user in users)
        )
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"* {host_key}[*]:2222 {host_key}")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nPidFile none\n"
            "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPort 22\nPort 2222\n"
        )
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known_hosts\n"
            "GlobalKnownHostsFile none\nCheckHostIP no\n"
        )

    def _cable(self) -> None:
        script = ["set -e", "ip link add bridge type bridge", "ip link set bridge up"]
        script.append(f"ip address add {self.head.address}/24 dev bridge")
        for number, host in enumerate(self.hosts):
            script += [
                f"ip link add port{number} type veth peer name net0 netns {host.pid}",
                f"ip link set port{number} master bridge up",
                f"nsenter --target={host.pid} --net ip address add {host.address}/24 dev net0",
                f"nsenter --target={host.pid} --net ip link set net0 up",
            ]
        ended = self.head.run(["sh", "-c", "\n".join(script)])
        assert ended.returncode == 0, ended.stderr

    def cut_the_cable(self, name: str) -> None:
        """The host is still there, and nobody hears of it any more."""
        number = [host.name for host in self.hosts].index(name)
        assert self.head.run(["ip", "link", "set", f"port{number}", "down"]).returncode == 0

    def swallow_packets(self) -> str:
        """An address of this network from which nothing ever comes back."""
        address = f"{NETWORK}99"
        neighbour = ["ip", "neighbour", "add", address, "lladdr", "02:00:00:00:00:09", "dev", "bridge"]
        assert self.head.run(neighbour).returncode == 0
        return address

    def close(self) -> None:
        """Ends all machines."""
        for machine in (*self.hosts, self.head):
            machine.close()
