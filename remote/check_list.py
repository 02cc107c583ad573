"""The checks of a host by id: what each means and wants done. How they are looked at is in checks.py."""

from __future__ import annotations

from state.checks import Check, table

CHECKS = table(
    [
        Check("host.no-python", "error", "No Python 3.9 or newer on the host",
              "Jobs, probes and checked copies are Python programs of the standard library. Without one, commands and "
              "plain copies still work.", "Install python3; no packages are needed."),
        Check("host.max-sessions", "warning", "sshd allows few sessions on one connection",
              "rigbook uses up to eight at once on a connection (a probe, followers, commands). With fewer it "
              "makes more connections, and with one it waits.", "In sshd_config there: MaxSessions 20."),
        Check("host.no-linger", "warning", "No linger: systemd ends this user's services at logout",
              "A job that runs as a user unit would end with the last session of the user. rigbook's jobs then run "
              "under its own supervisor instead.", "On the host: loginctl enable-linger USER."),
        Check("host.kill-user-processes", "error", "logind kills a user's processes at logout (KillUserProcesses=yes)",
              "setsid and nohup do not help: what the session started is killed with it, jobs included.",
              "Log in as root, or enable linger (loginctl enable-linger USER), or set KillUserProcesses=no in "
              "/etc/systemd/logind.conf."),
        Check("host.state-noexec", "info", "The state directory lies on a noexec file system",
              "rigbook's own jobs run by an interpreter and do not mind. A program that is put there does not start.",
              "Nothing, or set hosts.NAME.state_dir to another place."),
        Check("host.state-unwritable", "error", "The state directory cannot be written",
              "No job can be started and no log kept: the disk is full, read-only, or belongs to somebody else.",
              "Make room or mend the mount; or set hosts.NAME.state_dir to another place."),
        Check("host.state-space", "warning", "Little room where jobs and logs live",
              "A job whose log meets a full disk loses output, and its exit record may not be written.",
              "Make room, or set hosts.NAME.state_dir to a larger disk."),
        Check("host.state-volatile", "warning", "The state directory lies in memory",
              "A reboot takes every job's record and log with it.", "Set hosts.NAME.state_dir to a disk."),
        Check("host.state-network", "warning", "The state directory lies on a network file system",
              "Locks and renames are not what they are on a disk: two controllers could start one job twice.",
              "Set hosts.NAME.state_dir to a local disk."),
        Check("host.clock-skew", "warning", "The clocks differ",
              "rigbook orders events by their numbers and takes each host's own times for its own things, but logs of "
              "two machines will not line up.", "Let both keep time: timedatectl set-ntp true (in a container, on its "
              "host)."),
        Check("host.no-sftp", "info", "sshd has no working sftp subsystem",
              "rigbook does not use it. scp and other tools do, and login files that print break it as well.",
              "In sshd_config: Subsystem sftp internal-sftp."),
        Check("host.locale", "info", "The locale of a command there does not exist",
              "Every perl, bash or python that starts warns on stderr, and sorts and prints in another way than "
              "expected. rigbook's own commands set C.UTF-8.", "locale-gen NAME there, or no SendEnv LANG LC_* in your "
              "ssh config."),
        Check("host.login-noise", "info", "Login files print something",
              "It breaks scp, sftp, rsync and git over ssh. rigbook finds its own output behind a mark.",
              "In ~/.bashrc or ~/.zshenv, print only when interactive: case $- in *i*) …;; esac."),
        Check("host.sudo", "info", "sudo wants a password",
              "`rigbook exec --sudo` never types one, so it is refused.",
              "A NOPASSWD line in sudoers for the commands it is for, or another login."),
        Check("host.path", "warning", "A tool is there, but not in the PATH of a command",
              "A command over ssh gets the PATH of a shell that is neither interactive nor a login shell; what "
              "~/.profile, conda or CUDA packages add is not in it.",
              "Give the absolute name, or set PATH in an env of rigbook.toml."),
        Check("host.no-tar", "warning", "No tar on the host", "Directories travel as tar archives.", "Install tar."),
        Check("host.no-rsync", "info", "No rsync on the host",
              "A directory that is there already is then sent whole instead of only what differs.", "Install rsync."),
        Check("host.small-shm", "warning", "/dev/shm is small",
              "Data loaders and NCCL put their buffers there; a container gets 64 MB by default, and they die with a "
              "bus error when it is full.", "Mount it larger: for LXC lxc.mount.entry = tmpfs dev/shm tmpfs "
              "rw,size=N,create=dir; for Docker --shm-size."),
        Check("host.ssh-config-differs", "info", "ssh reads its configuration otherwise than libraries do",
              "rigbook follows ssh. Other programs that read the same files may go elsewhere.",
              "Nothing for rigbook; sort your Include files if something else goes wrong."),
        Check("host.unreachable", "error", "The host does not answer",
              "Unreachable says nothing about what runs there: it goes on.", "Is it up? Try ssh by hand."),
        Check("host.key", "error", "Its host key is not trusted",
              "Unknown, changed and revoked keys are told apart; none is ever accepted by itself.",
              "Compare the fingerprint on the machine's console, then `rigbook hosts trust HOST`."),
        Check("host.login", "error", "The host does not let us in",
              "Wrong user, or no key of yours is in its authorized_keys, or the key is locked.", "Try ssh by hand."),
        Check("host.failed", "error", "The host could not be looked at", "Its error says why.", "See the error."),
    ]
)  # fmt: skip
