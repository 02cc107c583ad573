"""What the error ids of this room mean and what to do: `rigbook explain ID`."""

from __future__ import annotations

EXPLAIN: dict[str, str] = {
    "action.unknown": "The [actions] table of rigbook.toml has no action of that name; `rigbook do` lists them.",
    "clean.foreign": "A plan that would end other people's work is carried out only when every such process is named "
    "again on the command line: --foreign HOST:PID, once for each.",
    "clean.no-plan": "Plans lie under .rigbook/plans/. `rigbook clean` makes one and prints its id.",
    "clean.bad-plan": "The file is not a plan of rigbook's, or of another version. Make a new one: rigbook clean.",
    "clean.other-host": "A plan names processes of one host and is never carried out on another.",
    "demo.host-not-started": "A played host of the demo ended at once. Its host.log in the demo's folder says why; a "
    "full disk and a folder on a file system without locks are the usual reasons.",
    "exec.given-up": "With --first-failure the hosts that had not ended were sent TERM when another one failed. Nobody "
    "waited for their end, so it is not known.",
    "exec.no-interpreter": "The script begins with #! and nothing behind it.",
    "exec.no-script": "The file given with --script cannot be read here.",
    "exec.sudo-refused": "sudo -n never asks: it refuses when it would want a password or the command is not allowed. "
    "A line in sudoers with NOPASSWD for that command lets it run.",
    "file.denied": "The far side refused the file. Nothing was changed. Look at the owner and mode of its directory.",
    "file.is-directory": "The name is a directory on the far side; name the file in it.",
    "file.no-space": "The far disk is full. The file keeps what it held before; nothing half-written has its name.",
    "file.not-directory": "A part of the path is a file.",
    "file.not-found": "There is no such file, or its directory is missing.",
    "file.link-loop": "The name is a symbolic link that leads back to itself.",
    "file.too-big": "The file system there, or a limit of the user's, allows no file of that size.",
    "file.io": "The disk there reported an error; its kernel log (dmesg) says more. The file keeps what it held.",
    "file.mismatch": "What arrived is not what was sent: the digests of the two ends differ, or the file changed while "
    "it was copied. Nothing was put in place.",
    "file.no-rsync": "Deleting what the other side does not have is left to rsync, which both ends must have.",
    "file.noexec": "The file system is mounted noexec: it keeps files, but no program starts from there. Name the "
    "interpreter (python3 FILE, sh FILE), or put it elsewhere. rigbook's own jobs and probes do not mind.",
    "file.special": "The name is a device, a socket or a pipe. Replacing one by a file would break what uses it.",
    "file.failed": "The far side could not do it; its own words are quoted.",
    "file.quota": "The user's disk quota on the far side is used up. The file keeps what it held before.",
    "file.read-only": "The file system is mounted read-only; after an I/O error kernels do that by themselves.",
    "file.short": "The copy ended early. Nothing was put in place; try again.",
    "file.bad-name": "A name in an archive would lead out of the directory it is for. Nothing was sent.",
    "gpu.bad-time": "--since takes 90s, 15m, 2h or 1d.",
    "gpu.which": "A GPU is named by its UUID, its PCI address, or its index where only one host is looked at.",
    "host.bad-address": "`ssh` of a host is an alias from the ssh config, user@host, or user@host:port.",
    "guest.absent": "The Proxmox host has no guest of that number. After a migration it is on another node.",
    "guest.input-too-large": "`qm guest exec` takes 1 MiB of input. Larger files need ssh into the VM.",
    "guest.list-failed": "Neither pvesh nor pct and qm gave a list. Their own words are quoted; `pveversion` and the "
    "state of pve-cluster (`systemctl status pve-cluster`) say more.",
    "guest.locked": "Proxmox holds a lock on the guest while it backs it up, moves it or takes a snapshot. Nothing was "
    "done. A lock that a crash left behind is taken away by `pct unlock ID` or `qm unlock ID`.",
    "guest.no-agent": "qemu-guest-agent does not run in the VM, or is not enabled for it in Proxmox.",
    "guest.no-host": 'Guests belong to hosts of kind "proxmox", and the project declares none.',
    "guest.no-proxmox": "Guests without ssh are reached by `pct` and `qm`, which belong to root on a Proxmox host.",
    "guest.not-running": "The guest is stopped. `rigbook guests start NAME` starts it.",
    "guest.old-pct": "pct before Proxmox VE 8.1 cannot leave the host's environment behind; rigbook then does it.",
    "guest.several": "More than one guest has that name or number; each node of a cluster counts its own.",
    "host.bootstrap-only": "The guest agent runs one command and gives its output at the end. That is enough to set up "
    "ssh, and for nothing that streams.",
    "host.key-changed": "The machine shows another host key than the one on file. After a reinstallation that is "
    "expected: compare the fingerprint on the machine's console (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), "
    "then remove the old one with the ssh-keygen -R line that the error gives. Otherwise somebody may be in between.",
    "host.key-locked": "The only keys that could be shown are locked by a passphrase. rigbook never asks for one: "
    "`ssh-add FILE` unlocks it for the agent, once a session.",
    "host.key-revoked": "known_hosts marks this key with @revoked, or the file that RevokedHostKeys names lists it (or "
    "cannot be read: then nothing is trusted). rigbook does not talk to it.",
    "host.key-unknown": "No known_hosts file holds a key for this machine. rigbook never trusts a key because it is "
    "the first: compare the fingerprint on the console, then `rigbook hosts trust HOST`. A guest with `on` and `vmid` "
    "needs no such question: its key is asked for through its Proxmox host.",
    "host.login-refused": "The machine answers but does not let this user in: wrong user, or no key of yours is in "
    "its authorized_keys, or the key is locked and no agent holds it. `ssh HOST true` shows the same.",
    "host.no-config": "The file that project.ssh_config names is not there. Paths are relative to rigbook.toml.",
    "host.no-key": "Containers by `pct exec` and VMs by their agent are reached through their host, whose key counts.",
    "host.no-python": "Jobs and probes need Python 3.9 or newer on the host, with its standard library only.",
    "host.no-route": "The host has no `ssh`. Give it an address or an alias; a guest can do with `on` and `vmid`.",
    "host.no-tar": "Directories travel as a tar archive, and the host has no tar.",
    "host.path": "A command over ssh gets the PATH of a non-login shell; what ~/.profile, conda or CUDA packages add "
    "is not in it. Give the absolute name, or set PATH in an env of rigbook.toml. `rigbook doctor HOST` lists both.",
    "host.no-session": "sshd accepts the connection but opens no session on it: look at MaxSessions and its log.",
    "host.no-shell": "The login shell ended before our command began. Often an account without a shell, or a start-up "
    "file that calls exit or exec.",
    "host.not-declared": "The command names a host that rigbook.toml does not have.",
    "host.ssh-config": "The ssh config that applies to this host has a line that cannot be read, or names a key "
    "file that is gone or is no key. Mend the line; `ssh -G HOST` shows what applies.",
    "host.unknown": "The link was lost while a command ran, so nobody here knows how it ended. It was not repeated.",
    "host.unreachable": "No connection came about: machine off, wrong address, firewall, or a broken jump host. "
    "Unreachable says nothing about the jobs there: they go on.",
    "job.absent": "No host of this project has a job of that id. `rigbook jobs list` shows all.",
    "job.several": "Several hosts have a job of that id: say which with --host.",
    "job.unknown": "The job was not found on the hosts that answered, and at least one did not answer.",
    "job.other-command": "Two starts with one --id are one job, so the second must ask for the same as the first. "
    "Nothing was started.",
    "job.bad-id": "A job's id is a directory's name on its host: letters, digits, dot, underscore, dash.",
    "job.copy-cut": "The local copy of a job's file became shorter while it was written. The next try goes on "
    "from its size.",
    "job.copy-failed": "The local copy of a job's file could not be written: this machine's disk is full, or the "
    "project's .rigbook folder is not yours. The job goes on; what was copied is whole, and the next command goes on.",
    "job.file-reset": "Job files only grow. This one was replaced, cut or rewritten on its host while it was read.",
    "job.log-quota": "A job's log grew past its quota (8 GiB, or what the job was given). The job went on; of "
    "the log the head and the newest half are kept and whole lines of the middle were dropped, where the file system "
    "can do that (it cannot on old NFS and old ZFS: there the log goes on growing, and this says so).",
    "job.log-reset": "The log on the host was replaced, cut or rewritten by somebody. What was copied before is kept "
    "beside the new copy, under the name that the warning gives.",
    "job.no-package": "A source directory that was to travel with the job is not there.",
    "job.session-bound": "systemd-logind on the host ends every process of a login when it closes "
    "(KillUserProcesses=yes), and this user's own manager ends then, too. `loginctl enable-linger USER` keeps the "
    "manager, and jobs run under it; or log in as root, whose jobs are system units.",
    "job.reserved-name": "spec.json and supervisor.pyz in a job directory are rigbook's own.",
    "probe.failed": "The probe answered that it could not do what was asked; its reason is quoted.",
    "probe.lost": "The link to the probe is gone. What runs on the host goes on.",
    "probe.not-started": "The probe (a Python program sent over the link, run from memory) did not come up.",
    "remote.failed": "A command on the host failed; its last line of error output is quoted.",
    "remote.timeout": "A command ran past its deadline and was stopped on the far side too.",
    "shell.bad-variable": "Names of environment variables are letters, digits and underscores.",
    "shell.no-command": "Nothing to run was given: rigbook exec HOST -- COMMAND ARGUMENTS.",
    "shell.no-terminal": "`rigbook shell` joins your terminal to one there; in a script use `rigbook exec`.",
    "shell.nul-byte": "No program can receive a NUL byte in an argument. Send it on stdin.",
}
