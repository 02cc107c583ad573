"""What rsync starts in the place of ssh: gives its pipes to the rigbook that started rsync, and waits for the end.

python -I -S rsync_bridge.py SOCKET HOST rsync --server …
"""

import json
import socket
import sys


def main() -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.connect(sys.argv[1])
        socket.send_fds(door, [json.dumps(sys.argv[2:]).encode()], [0, 1, 2])
        return int(door.recv(16) or b"255")


if __name__ == "__main__":
    sys.exit(main())
